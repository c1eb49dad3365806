"""The `native` plugin on folders that transformers wrote: the same tokens, and what it refuses to open."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decodekit import InputError, generate, load
from decodekit_plugins.models.native.adapter import NativeAdapter
from decodekit_plugins.models.native.plugin import Native
from decodekit_plugins.models.transformers import TransformersAdapter

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOKENS = torch.tensor([[5, 17, 33, 8, 61], [9, 4, 41, 26, 40]])
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
# Name -> (family, settings, how it is saved).
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}, {}),
    "llama biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, {}),
    "llama rope": ("Llama", {"rope_parameters": LLAMA3}, {}),
    "llama shards": ("Llama", {}, {"max_shard_size": "20KB"}),
    "mistral": ("Mistral", {"sliding_window": None}, {}),
    "mistral window": ("Mistral", {"sliding_window": 4}, {}),
    "mistral tied shards": ("Mistral", {"tie_word_embeddings": True}, {"max_shard_size": "20KB"}),
    "qwen2": ("Qwen2", {}, {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}, {}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, {}),
    "qwen3": ("Qwen3", {}, {}),
    "qwen3 tied shards": ("Qwen3", {"tie_word_embeddings": True}, {"max_shard_size": "20KB"}),
}


def save(folder: Path, family: str = "Llama", dtype: Any = None, how: Any = None, **extra: Any) -> Path:
    """A tiny random model, written by transformers."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **extra})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for name, value in model.named_parameters():  # biases and norms start at 0 and 1: make them matter
        if value.dim() == 1:
            torch.nn.init.normal_(value, float("norm" in name), 0.2)
    model.to(dtype or torch.float32).save_pretrained(folder, **(how or {}))
    return folder


def greedy(lm: Any, **keys: Any) -> list[list[int]]:
    found: Any = generate(lm, TOKENS, max_new_tokens=24, do_sample=False, **keys)
    return found.tolist()


def theirs(folder: Path, **keys: Any) -> list[list[int]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    mask = torch.ones_like(TOKENS)
    return model.generate(TOKENS, attention_mask=mask, max_new_tokens=24, do_sample=False, **keys).tolist()


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None takes a key out."""
    data = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(tmp_path / "model")


# -- the same tokens ---------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_folders_of_transformers(case: str, tmp_path: Path) -> None:
    family, extra, how = CASES[case]
    folder = save(tmp_path / "model", family, how=how, **extra)
    assert (folder / "model.safetensors.index.json").is_file() == ("shards" in case)
    lm = load(folder)
    assert isinstance(lm.adapter, NativeAdapter)
    want = theirs(folder)
    assert len(want[0]) > 8
    assert greedy(lm) == want
    through = load(folder, adapter="transformers")
    assert isinstance(through.adapter, TransformersAdapter)
    assert greedy(through) == want
    assert greedy(lm, eos_token_id=None) == theirs(folder, eos_token_id=-1)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_dtypes(family: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "model", family, torch.bfloat16)
    lm = load(folder)
    assert lm.adapter.spec.dtype == torch.float32
    assert {weight.dtype for weight in lm.model.parameters()} == {torch.float32}
    assert greedy(lm) == theirs(folder)
    for dtype in ("bfloat16", torch.bfloat16):
        small = load(folder, dtype=dtype)
        assert {weight.dtype for weight in small.model.parameters()} == {torch.bfloat16}
        assert len(greedy(small)[0]) > 5
    assert load(folder, dtype="auto").adapter.spec.dtype == torch.float32
    for wrong in ("float33", "int64", "load", torch.int64):
        with pytest.raises(InputError, match="not a floating-point type"):
            load(folder, dtype=wrong)
    for device in ("nowhere", "cuda:77"):
        with pytest.raises(InputError, match=f"device '{device}' cannot be used"):
            load(folder, device=device)


def test_the_checkpoint_says_how_to_generate(folder: Path) -> None:
    edit(folder / "generation_config.json", max_new_tokens=3, eos_token_id=[70, 2])
    lm = load(folder)
    assert lm.adapter.defaults["eos_token_id"] == [70, 2]
    assert generate(lm, TOKENS).shape == (2, 8)
    (folder / "generation_config.json").unlink()
    lm = load(folder)
    assert lm.adapter.defaults["eos_token_id"] == 2
    assert greedy(lm) == theirs(folder)
    edit(folder / "config.json", eos_token_id=None)  # an end nobody names: the length ends every row
    lm = load(folder)
    assert "eos_token_id" not in lm.adapter.defaults
    out = generate(lm, TOKENS, max_new_tokens=24, return_dict_in_generate=True)
    assert out.stop_reasons == ("max_length", "max_length")


def test_the_module_remembers_its_checkpoint(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"w{i}": i for i in range(71)}, "w0")).save(str(folder / "tokenizer.json"))
    lm = load(folder)
    names = set(lm.model.state_dict())
    assert not any("tokenizer" in name or "defaults" in name for name in names)
    edit(folder / "generation_config.json", eos_token_id=greedy(lm)[0][7], max_new_tokens=20)
    lm = load(folder)
    want = generate(lm, [[5, 17, 33, 8, 61]])
    assert want.shape[1] <= 8
    assert torch.equal(generate(lm.model, [[5, 17, 33, 8, 61]]), want)
    assert torch.equal(generate(lm.model, "w5"), generate(lm, [[5]]))


def test_unknown_generation_keys_are_kept_and_told_once(folder: Path, recwarn: pytest.WarningsRecorder) -> None:
    edit(folder / "generation_config.json", our_own_magic=[1, 2])
    lm = load(folder)
    assert lm.adapter.defaults["our_own_magic"] == [1, 2]
    for _ in range(2):
        generate(lm, TOKENS, max_new_tokens=1)
    assert len([w for w in recwarn if "our_own_magic" in str(w.message)]) == 1


def test_old_spelling_of_a_config(folder: Path) -> None:
    want = theirs(folder)
    edit(folder / "config.json", rope_parameters=None, rope_theta=10000.0, rope_scaling=None, torch_dtype="float32")
    lm = load(folder)
    assert isinstance(lm.adapter, NativeAdapter)
    assert greedy(lm) == want


# -- what it leaves to others ------------------------------------------------------------------------


def test_gpt2_goes_to_transformers(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=71, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    assert not Native().opens(str(tmp_path))
    lm = load(tmp_path)
    assert isinstance(lm.adapter, TransformersAdapter)
    assert greedy(lm) == theirs(tmp_path)
    with pytest.raises(
        InputError, match=r"config\.json: model_type 'gpt2' is not one of llama, .*transformers adapter"
    ):
        load(tmp_path, adapter="native")


def test_other_rope_goes_to_transformers(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    folder = save(tmp_path / "model", rope_parameters=rope)
    assert not Native().opens(str(folder))
    lm = load(folder)
    assert isinstance(lm.adapter, TransformersAdapter)
    assert greedy(lm) == theirs(folder)
    with pytest.raises(InputError, match=r"config\.json: rope type 'yarn' is not one of default, linear, llama3"):
        load(folder, adapter="native")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope parameters"),
        ({"vocab_size": None}, "lacks vocab_size"),
    ],
)
def test_other_layouts_are_refused(changes: dict[str, Any], words: str, folder: Path) -> None:
    edit(folder / "config.json", **changes)
    assert not Native().opens(str(folder))
    with pytest.raises(InputError, match=rf"config\.json: .*{words}"):
        Native().open(str(folder))


def test_what_it_opens(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = Native()
    assert plugin.opens(str(folder))
    (folder / "tokenizer_config.json").write_text("{}")
    assert not plugin.opens(str(folder)), "a tokenizer that only transformers can open"
    for ref in (tmp_path, tmp_path / "none", folder / "config.json", "bundled", "someone/some-model", ""):
        assert not plugin.opens(str(ref))
    monkeypatch.setattr("decodekit_plugins.models.native.plugin.find_spec", lambda name: None)
    assert plugin.opens("someone/some-model"), "without transformers nobody else would"
    assert not plugin.opens("a/b/c")


# -- broken checkpoints ------------------------------------------------------------------------------


def shards(folder: Path) -> Path:
    """Save again in several files; returns the index."""
    for file in folder.iterdir():
        file.unlink()
    return save(folder, how={"max_shard_size": "20KB"}) / "model.safetensors.index.json"


def weights(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    from safetensors.torch import load_file, save_file

    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors")


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def first(index: Path, name: Any) -> None:
    places = json.loads(index.read_text())["weight_map"]
    edit(index, weight_map={**places, "model.norm.weight": name})


DOWN = "model.layers.1.mlp.down_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weights cut": (lambda f: cut(f / "model.safetensors", 9000), r"model\.safetensors cannot be read .*download it"),
    "weights cut in the header": (lambda f: cut(f / "model.safetensors", 30), r"model\.safetensors cannot be read"),
    "weights empty": (lambda f: cut(f / "model.safetensors", 0), r"model\.safetensors cannot be read .*download"),
    "weights are text": (lambda f: (f / "model.safetensors").write_text("404: Not Found"), r"model\.safetensors cann"),
    "weight missing": (lambda f: weights(f, lambda w: w.pop(DOWN)), rf"lack {DOWN}; download"),
    "head missing": (lambda f: weights(f, lambda w: w.pop("lm_head.weight")), r"lack lm_head\.weight"),
    "all missing": (lambda f: weights(f, lambda w: w.clear()), r"lack model\.layers\.2.* asks for 3 layers"),
    "weight extra": (lambda f: weights(f, lambda w: w.update(more=torch.ones(2))), r"unknown more; .*transformers"),
    "weight shape": (
        lambda f: weights(f, lambda w: w.update({DOWN: torch.ones(3, 4)})),
        rf"{DOWN} is \(3, 4\).*32, 48",
    ),
    "weight scalar": (lambda f: weights(f, lambda w: w.update({DOWN: torch.tensor(1.0)})), rf"{DOWN} is \(\)"),
    "weight whole numbers": (lambda f: weights(f, lambda w: w.update({DOWN: w[DOWN].byte()})), "uint8; quantized"),
    "config cut": (lambda f: cut(f / "config.json", 40), r"config\.json is not valid JSON .*download"),
    "config empty": (lambda f: cut(f / "config.json", 0), r"config\.json is not valid JSON"),
    "config bytes": (lambda f: (f / "config.json").write_bytes(b"\xff\xfe{"), r"config\.json is not valid JSON"),
    "config a list": (
        lambda f: (f / "config.json").write_text("[1]"),
        r"config\.json must hold a JSON object, not list",
    ),
    "config text for number": (
        lambda f: edit(f / "config.json", hidden_size="32"),
        "hidden_size must be a whole .*'32'",
    ),
    "config no heads": (
        lambda f: edit(f / "config.json", num_attention_heads=0),
        "num_attention_heads must be a whole",
    ),
    "config list for number": (lambda f: edit(f / "config.json", num_hidden_layers=[3]), "num_hidden_layers must be"),
    "config yes": (lambda f: edit(f / "config.json", tie_word_embeddings="no"), "tie_word_embeddings must be true or"),
    "config odd head": (lambda f: edit(f / "config.json", head_dim=7), "head_dim must be even"),
    "config epsilon": (lambda f: edit(f / "config.json", rms_norm_eps="tiny"), "rms_norm_eps must be a number above 0"),
    "config heads": (lambda f: edit(f / "config.json", num_key_value_heads=3), "must be a multiple of num_key_value"),
    "config other size": (lambda f: edit(f / "config.json", vocab_size=70), r"\(71, 32\).* asks for \(70, 32\)"),
    "config fewer layers": (lambda f: edit(f / "config.json", num_hidden_layers=2), r"unknown model\.layers\.2"),
    "config more layers": (lambda f: edit(f / "config.json", num_hidden_layers=10**9), "asks for 1000000000 layers"),
    "config rope": (
        lambda f: edit(f / "config.json", rope_parameters={"rope_type": "linear", "rope_theta": 1e4}),
        r"config\.json: factor must be a number above 0, not None",
    ),
    "config window": (
        lambda f: edit(f / "config.json", model_type="mistral", sliding_window="all"),
        "sliding_window must be a whole number",
    ),
    "config layer types": (
        lambda f: edit(f / "config.json", model_type="mistral", sliding_window=4, layer_types=["sliding_attention"]),
        "layer_types must name full_attention or sliding_attention for each layer",
    ),
    "tokenizer cut": (
        lambda f: (f / "tokenizer.json").write_text('{"version": "1.0", '),
        r"tokenizer\.json cannot be read as a tokenizer .*download",
    ),
    "tokenizer a list": (lambda f: (f / "tokenizer.json").write_text("[]"), r"tokenizer\.json cannot be read as"),
    "generation config cut": (
        lambda f: cut(f / "generation_config.json", 20),
        r"generation_config\.json is not a valid JSON file.*repair or delete",
    ),
    "generation config a list": (
        lambda f: (f / "generation_config.json").write_text("[]"),
        r"generation_config\.json must hold a JSON object",
    ),
    "shard missing": (
        lambda f: next(shards(f).parent.glob("*-00002-*")).unlink(),
        r"lacks model-00002-of-.*safetensors, which its index names; download",
    ),
    "shard outside": (lambda f: first(shards(f), "../outside.safetensors"), "names files outside its folder"),
    "shard elsewhere": (lambda f: first(shards(f), "/etc/passwd"), "names files outside its folder"),
    "shard up": (lambda f: first(shards(f), ".."), "names files outside its folder"),
    "shard a number": (lambda f: first(shards(f), 5), r"index\.json must have a weight_map"),
    "shard a pickle": (lambda f: first(shards(f), "pytorch_model.bin"), r"pytorch_model\.bin, which is no safetensors"),
    "shard cut": (lambda f: cut(next(shards(f).parent.glob("*-00002-*")), 900), "model-00002-of-.* cannot be read"),
    "index cut": (lambda f: cut(shards(f), 60), r"index\.json is not valid JSON .*download"),
    "index a list": (lambda f: shards(f).write_text("[]"), r"index\.json must hold a JSON object"),
    "index without map": (lambda f: edit(shards(f), weight_map=None), r"index\.json must have a weight_map"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints(case: str, folder: Path) -> None:
    spoil, words = BROKEN[case]
    spoil(folder)
    with pytest.raises(InputError, match=words) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    assert type(caught.value).__module__.startswith("decodekit")


def test_settings_of_a_broken_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 5}, "a")).save(str(folder / "tokenizer.json"))
    assert load(folder).tokens("a") == [5]
    for text in ("{", "[]", '{"bos_token": 3}', '{"chat_template": [3]}'):
        (folder / "tokenizer_config.json").write_text(text)
        with pytest.raises(InputError, match=r"tokenizer_config\.json"):
            load(folder)


def test_a_config_without_end(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 200000)
    with pytest.raises(InputError, match=r"config\.json is not valid JSON .*recursion"):
        load(folder, adapter="native")


def test_shards_without_an_index(folder: Path) -> None:
    shards(folder).unlink()
    assert greedy(load(folder)), "all are there: that is enough"
    whole = next(folder.glob("*-00002-*"))
    (folder / "copy.safetensors").write_bytes(whole.read_bytes())
    with pytest.raises(InputError, match=r"which another file in its folder holds, too"):
        load(folder)


def test_one_whole_file_wins_over_others(folder: Path) -> None:
    (folder / "consolidated.safetensors").write_bytes(b"another form of the same")
    (folder / "model.safetensors.index.json").write_text("left over")
    assert greedy(load(folder)) == greedy(load(folder, adapter="transformers"))
