"""Broken checkpoints through the `transformers` plugin: none is opened with random weights, none ends in a riddle."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decodekit import InputError, load

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "vocab_size": 47,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A saved model that only transformers can open (Gemma); its head is tied."""
    transformers.GemmaForCausalLM(transformers.GemmaConfig(**SHAPE)).save_pretrained(tmp_path / "gemma")
    return tmp_path / "gemma"


def config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def weights(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    from safetensors.torch import load_file, save_file

    found = load_file(folder / "model.safetensors")
    change(found)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})


def shards(folder: Path) -> Path:
    model = transformers.GemmaForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="10KB")
    return folder / "model.safetensors.index.json"


DOWN = "model.layers.1.mlp.down_proj.weight"
BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "weight missing": (lambda f: weights(f, lambda w: w.pop(DOWN)), rf"lacks {DOWN}, which its config\.json asks for"),
    "layer missing": (lambda f: config(f, num_hidden_layers=3), r"lacks model\.layers\.2\..* and 5 more"),
    "shape": (lambda f: weights(f, lambda w: w.update({DOWN: torch.ones(3, 4)})), f"has in another shape {DOWN}"),
    "fewer heads": (lambda f: config(f, num_attention_heads=3), r"has in another shape .*q_proj"),
    "weights empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "SafetensorError"),
    "weights are text": (lambda f: (f / "model.safetensors").write_bytes(b"404: not found"), "SafetensorError"),
    "index cut": (lambda f: shards(f).write_text('{"weight'), "cannot load"),
    "index a list": (lambda f: shards(f).write_text("[]"), "cannot load"),
    "vocabulary below 0": (lambda f: config(f, vocab_size=-1), "negative dimension -1"),
    "vocabulary text": (lambda f: config(f, vocab_size="x"), "'vocab_size' expected int, got str"),
    "no heads": (lambda f: config(f, num_attention_heads=0), "ZeroDivisionError"),
    "rope": (lambda f: config(f, rope_parameters={"rope_type": "default", "rope_theta": "x"}), "TypeError"),
    "activation": (lambda f: config(f, hidden_act="foo"), "KeyError: 'foo'"),
    "config cut": (lambda f: (f / "config.json").write_text("{"), r"config\.json is not valid JSON"),
    "config a list": (lambda f: (f / "config.json").write_text("[1]"), r"config\.json must hold a JSON object"),
    "config without end": (lambda f: (f / "config.json").write_text("[" * 200000), r"config\.json is not valid JSON"),
    "config of something else": (lambda f: (f / "config.json").write_text("{}"), r"config\.json names no model"),
    "tokenizer cut": (
        lambda f: (f / "tokenizer.json").write_text('{"version"'),
        "the tokenizer in .* cannot be loaded",
    ),
    "tokenizer empty": (lambda f: (f / "tokenizer.json").write_text(""), "the tokenizer in .* cannot be loaded"),
    "tokenizer config cut": (
        lambda f: (f / "tokenizer_config.json").write_text("{"),
        r"tokenizer_config\.json is not valid JSON",
    ),
    "tokenizer config a list": (
        lambda f: (f / "tokenizer_config.json").write_text("[]"),
        r"tokenizer_config\.json must hold a JSON object",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_checkpoints(case: str, folder: Path) -> None:
    spoil, words = BROKEN[case]
    spoil(folder)
    with pytest.raises(InputError, match=words) as caught:
        load(folder, adapter="transformers")
    assert str(folder) in str(caught.value)


def test_weights_that_may_be_missing(folder: Path) -> None:
    """Not tied ones, and not those that the class knows how to make."""
    weights(folder, lambda w: w.pop("lm_head.weight", None))
    weights(folder, lambda w: w.update(unused=torch.ones(2)))
    assert load(folder).adapter.spec.vocab_size == 47


def test_pickles_are_not_opened(folder: Path) -> None:
    model = transformers.GemmaForCausalLM.from_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    for adapter in (None, "transformers"):
        with pytest.raises(InputError, match=r"pytorch_model\.bin is a pickle, which may run code.*safetensors"):
            load(folder, adapter=adapter)
    (folder / "adapter.safetensors").write_bytes(b"of something else")
    with pytest.raises(InputError, match="transformers cannot load"):
        load(folder, adapter="transformers")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda:77"}, "device 'cuda:77' cannot be used here"),
        ({"device": "nonsense"}, "device 'nonsense' cannot be used here"),
        ({"device": 5.5}, "device '5.5' cannot be used here"),
        ({"dtype": 5}, "dtype 5 is not a floating-point type"),
        ({"dtype": torch.int8}, r"dtype torch\.int8 is not a floating-point type"),
        ({"dtype": "float33"}, "dtype 'float33' is not a floating-point type"),
        ({"foo": 1, "bar": 2}, "has no option foo, bar; there are: dtype, device"),
    ],
)
@pytest.mark.parametrize("adapter", ["native", "transformers"])
def test_options_that_cannot_be_used(options: dict[str, Any], words: str, adapter: str, tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=words):
        load(tmp_path, adapter=adapter, **options)


@pytest.mark.parametrize("adapter", ["native", "transformers"])
def test_a_tokenizer_of_another_model(adapter: str, tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(tmp_path)
    for size, warned in ((30, 0), (47, 0), (48, 1)):
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, "w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
        recwarn.clear()
        load(tmp_path, adapter=adapter)
        told = [w for w in recwarn if "has 48 tokens, its model embeddings for 47" in str(w.message)]
        assert len(told) == warned
