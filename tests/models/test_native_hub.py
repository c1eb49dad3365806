"""Where the `native` plugin takes files from, the Hub included, and that it unpickles none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from decodekit import InputError, generate, load
from decodekit_plugins.models.native.plugin import FILES

transformers = pytest.importorskip("transformers")

SHAPE: dict[str, Any] = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "initializer_range": 0.25,
}


def greedy(lm: Any) -> list[list[int]]:
    found: Any = generate(lm, [[5, 17, 33, 8, 61]], max_new_tokens=8, do_sample=False, eos_token_id=None)
    return found.tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def no_pickles(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_one(*_: Any, **__: Any) -> None:
        raise AssertionError("a pickle was opened")

    for target in ("torch.load", "pickle.load", "pickle.loads", "pickle.Unpickler"):
        monkeypatch.setattr(target, load_one)


def test_pickles_are_not_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_pickles(monkeypatch)
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    assert greedy(load(folder)), "weights in both forms: the safe one is taken"
    (folder / "model.safetensors").unlink()
    for adapter in (None, "native"):
        with pytest.raises(InputError, match=r"pytorch_model\.bin is a pickle, which may run code.*safetensors"):
            load(folder, adapter=adapter)


@pytest.fixture
def hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """What is asked of the Hub, which has one repository."""
    import huggingface_hub

    asked: list[tuple[str, dict[str, Any]]] = []

    def download(repo: str, **options: Any) -> str:
        asked.append((repo, options))
        if repo != "someone/tiny":
            raise OSError("404: no such repository")
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_hub_id(hub: list[Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import filter_repo_objects

    no_pickles(monkeypatch)
    lm = load("someone/tiny", adapter="native", revision="abc", token="secret")
    assert greedy(lm) == greedy(load(folder))
    [(repo, options)] = hub
    assert (repo, options.pop("revision"), options.pop("token")) == ("someone/tiny", "abc", "secret")
    there = [
        "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "chat_template.jinja",
        "pytorch_model.bin", "model.py", "original/consolidated.00.pth", "original/params.json", "model.gguf",
        "consolidated.safetensors", "onnx/model.onnx", "tokenizer.model", "x.pt", "README.md", "sub/model.safetensors",
    ]  # fmt: skip
    assert list(filter_repo_objects(there, **options)) == there[:4]
    assert options["allow_patterns"] == list(FILES)
    with pytest.raises(InputError, match=r"someone/else .* cannot be fetched from the Hub: 404"):
        load("someone/else", adapter="native")
    for ref in ("./no/folder", "/no/folder", "a/b/c"):
        with pytest.raises(InputError, match=f"there is no folder {ref}"):
            load(ref, adapter="native")
    with pytest.raises(InputError, match="is a file: give the folder"):
        load(folder / "config.json", adapter="native")
    assert len(hub) == 2
