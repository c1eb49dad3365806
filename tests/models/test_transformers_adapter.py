"""The `transformers` plugin: what it opens, what it refuses, and what its adapter gives."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decodekit import InputError, MissingExtra, PipelineError, generate, load
from decodekit.models import adapter_for
from decodekit_plugins.models.transformers import Transformers, TransformersAdapter

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "vocab_size": 47,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
TOKENS = torch.tensor([[5, 17, 33, 8], [9, 4, 41, 26]])


def llama(attention: str = "sdpa", **extra: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SHAPE, **extra})
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation=attention).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model that only transformers can open (Gemma)."""
    torch.manual_seed(0)
    model = transformers.GemmaForCausalLM(transformers.GemmaConfig(**SHAPE, head_dim=8))
    model.generation_config.max_new_tokens = 5
    model.save_pretrained(tmp_path / "gemma")
    return tmp_path / "gemma"


# -- opening ---------------------------------------------------------------------------------------


def test_opens(folder: Path, tmp_path: Path) -> None:
    plugin = Transformers()
    (tmp_path / "one.gguf").write_bytes(b"GGUF")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({"window_size": 3}))
    assert plugin.opens(str(folder))
    assert plugin.opens(str(tmp_path))
    assert plugin.opens(str(tmp_path / "one.gguf"))
    assert plugin.opens("someone/some-model")
    assert not plugin.opens(str(tmp_path / "other"))
    assert not plugin.opens(str(folder / "config.json"))
    for name in ("bundeld", "./no/such/folder", "/no/such/folder", "a/b/c", ""):
        assert not plugin.opens(name)


def test_folder_round_trip(folder: Path) -> None:
    lm = load(folder)
    assert isinstance(lm.adapter, TransformersAdapter)
    assert lm.adapter.defaults["max_new_tokens"] == 5
    assert lm.adapter.spec.dtype == torch.float32
    same = transformers.GemmaForCausalLM.from_pretrained(folder)
    want = same.generate(TOKENS, do_sample=False)
    assert torch.equal(generate(lm, TOKENS), want)
    with pytest.raises(InputError, match="tokenizer"):
        lm.generate("no tokenizer here")


def test_open_options(folder: Path) -> None:
    lm = load(folder, dtype="bfloat16", attn_implementation="eager")
    assert lm.adapter.spec.dtype == torch.bfloat16
    assert lm.model.config._attn_implementation == "eager"
    with pytest.raises(InputError, match="transformers has no option attention; there are: dtype, device, revision"):
        load(folder, attention="eager")


def test_what_cannot_be_opened(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = Transformers()
    with pytest.raises(InputError, match=r"neither a config\.json nor a GGUF file"):
        plugin.open(str(tmp_path))
    (tmp_path / "a.gguf").touch()
    (tmp_path / "b.gguf").touch()
    with pytest.raises(InputError, match=r"several GGUF files; name one: .*a\.gguf, .*b\.gguf"):
        plugin.open(str(tmp_path))
    with pytest.raises(InputError, match="neither a folder nor a GGUF file"):
        plugin.open(str(folder / "config.json"))
    with pytest.raises(InputError, match="transformers cannot load"):
        plugin.open("someone/no-such-model", local_files_only=True)
    for name in ("bundled", "gpt2", "a/b/c", "./none"):
        with pytest.raises(InputError, match=f"there is no folder {name}; on the Hub, models are called owner/name"):
            plugin.open(name)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"there are no \.safetensors files"):
        plugin.open(str(folder))
    monkeypatch.setattr("decodekit_plugins.models.transformers.plugin.find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'decodekit\[transformers\]'"):
        plugin.open(str(folder))


def test_code_of_a_checkpoint_is_not_run_unasked(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "something_own"
    config["auto_map"] = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text("raise SystemExit('this must not run')")
    assert Transformers().opens(str(folder))
    with pytest.raises(InputError, match="trust_remote_code"):
        Transformers().open(str(folder))


def test_models_without_a_head_are_refused() -> None:
    with pytest.raises(PipelineError, match=r"LlamaModel has no language-model head.*AutoModelForCausalLM"):
        generate(llama().model, TOKENS)


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertLMHeadModel", "ElectraForMaskedLM"])
def test_models_that_look_ahead_are_refused(name: str) -> None:
    family = name.removesuffix("ForMaskedLM").removesuffix("LMHeadModel")
    sizes = {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}
    config = getattr(transformers, f"{family}Config")(**sizes)
    with pytest.raises(PipelineError, match=rf"{name} is no causal language model.*AutoModelForCausalLM"):
        generate(getattr(transformers, name)(config), TOKENS, max_new_tokens=1)


def test_decoders_are_not_taken_for_encoders() -> None:
    sizes = {k: v for k, v in SHAPE.items() if k != "num_key_value_heads"}
    bert = transformers.BertLMHeadModel(transformers.BertConfig(**sizes, is_decoder=True)).eval()
    neox = transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**sizes)).eval()  # its is_decoder says False
    for model in (bert, neox):
        keys: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": None, "do_sample": False}
        assert torch.equal(generate(model, TOKENS, **keys), model.generate(TOKENS, **keys))


# -- the adapter -----------------------------------------------------------------------------------


def test_facts() -> None:
    adapter = adapter_for(llama())
    assert adapter.offers() >= {"cache", "mask", "positions", "last", "hidden"}
    spec = adapter.spec
    assert (spec.vocab_size, spec.num_embeddings, spec.num_layers, spec.num_heads) == (47, 47, 2, 4)
    assert (spec.num_kv_heads, spec.head_dim, spec.max_positions) == (2, 6, 64)
    assert adapter.defaults.items() >= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}.items()
    assert None not in adapter.defaults.values()


def test_facts_follow_the_model() -> None:
    model = llama()
    assert adapter_for(model).spec.vocab_size == 47
    model.resize_token_embeddings(60)
    assert adapter_for(model).spec.vocab_size == 60
    model.to(torch.bfloat16)
    assert adapter_for(model).spec.dtype == torch.bfloat16
    model.generation_config.max_new_tokens = 3
    assert generate(model, TOKENS, eos_token_id=None).shape == (2, 7)


def test_default_caches() -> None:
    def chosen(name: str, **extra: Any) -> str:
        config = getattr(transformers, f"{name}Config")(**{**SHAPE, **extra})
        return adapter_for(getattr(transformers, f"{name}ForCausalLM")(config)).default_cache

    assert chosen("Llama") == "dynamic"
    assert chosen("Mistral", sliding_window=64) == "dynamic"
    assert chosen("Mistral", sliding_window=16) == "hybrid"
    assert chosen("Gemma2", sliding_window=16) == "hybrid"


def test_the_models_own_cache_speaks_our_protocol() -> None:
    adapter = adapter_for(llama())
    cache = adapter.make_cache("model")
    assert isinstance(cache, transformers.DynamicCache)
    assert cache.offers() == {"reorder", "select", "fork", "crop"}
    assert cache
    places = torch.arange(4).expand(2, 4)
    with torch.no_grad():
        want = adapter.forward(TOKENS, places, cache, last=4).logits
        copied = cache.fork()
        for length, left in ((3, 3), (-1, 2), (9, 2), (0, 0)):
            cache.crop(length)
            assert cache.get_seq_length() == left
        assert copied.get_seq_length() == 4
        copied.crop(2)
        got = adapter.forward(TOKENS[:, 2:], places[:, 2:], copied, last=2).logits
        again = adapter.forward(TOKENS, places, cache, last=4).logits
    torch.testing.assert_close(got, want[:, 2:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(PipelineError, match="takes no options"):
        adapter.make_cache("model", max_cache_len=4)


def test_a_plain_transformers_cache_may_be_passed() -> None:
    model = llama()
    cache = transformers.DynamicCache(config=model.config)
    out = generate(model, TOKENS, past_key_values=cache, max_new_tokens=5, return_dict_in_generate=True)
    assert out.cache is cache
    assert torch.equal(out.sequences, model.generate(TOKENS, max_new_tokens=5, do_sample=False))


@pytest.mark.parametrize("family", ["MiniMax", "Mamba", "Qwen3Next"])
def test_models_with_state_of_their_own_kind(family: str) -> None:
    """Recurrent and linear-attention layers: the model's own cache, or none, and the same tokens."""
    small: dict[str, Any] = {
        "MiniMax": {"num_local_experts": 2, "block_size": 4},
        "Mamba": {"state_size": 4, "time_step_rank": 4},
        "Qwen3Next": {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "head_dim": 8},
    }
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, "num_hidden_layers": 4, **small[family]})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    assert adapter_for(model).default_cache == "model"
    keys: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None}
    want = model.generate(TOKENS, do_sample=False, **keys)
    assert torch.equal(generate(model, TOKENS, **keys), want)


def test_hidden_states_and_attentions_equal_transformers() -> None:
    model = llama("eager")
    keys: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": None, "return_dict_in_generate": True}
    keys |= {"output_hidden_states": True, "output_attentions": True}
    want = model.generate(TOKENS, do_sample=False, **keys)
    got = generate(model, TOKENS, **keys)
    for mine, other in ((got.hidden_states, want.hidden_states), (got.attentions, want.attentions)):
        assert len(mine) == len(other) == 3
        for step, known in zip(mine, other, strict=True):
            assert len(step) == len(known)
            for a, b in zip(step, known, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_fused_attention_gives_no_weights() -> None:
    with pytest.raises(PipelineError, match=r"sdpa attention computes no weights.*attn_implementation='eager'"):
        generate(llama(), TOKENS, max_new_tokens=2, output_attentions=True)


def test_token_types_grow_with_the_text() -> None:
    """Arguments with one value a token are stretched over the new tokens, cached or not."""
    seen: list[list[list[int]]] = []

    class Typed(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, token_type_ids: Any = None, cache: Any = None, **rest: Any) -> Any:
            seen.append(token_type_ids.tolist())
            return super().forward(input_ids=input_ids, cache=cache, **rest)

    model = Typed(transformers.LlamaConfig(**SHAPE)).eval()
    types = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 0]])
    keys: dict[str, Any] = {"max_new_tokens": 2, "eos_token_id": None, "token_type_ids": types}
    generate(model, TOKENS, **keys)
    assert seen == [types.tolist(), [[1], [0]]]
    seen.clear()
    generate(model, TOKENS, use_cache=False, **keys)
    assert seen == [types.tolist(), [[0, 1, 1, 1, 1], [0, 0, 0, 0, 0]]]


def test_generating_changes_nothing_about_the_model() -> None:
    model = llama()
    before = copy.deepcopy((model.config.to_dict(), vars(model.generation_config), set(vars(model))))
    generate(model, TOKENS, max_new_tokens=3, do_sample=True, temperature=0.5)
    assert (model.config.to_dict(), vars(model.generation_config), set(vars(model))) == before


def test_older_hybrid_setting_is_understood() -> None:
    model = llama()
    model.generation_config.cache_implementation = "hybrid"
    assert generate(model, TOKENS, max_new_tokens=2).shape[1] <= 6
