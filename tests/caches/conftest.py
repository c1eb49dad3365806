"""Tiny random models of several kinds of layers, the same weights for the same name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

WINDOW = 6
SHAPE: dict[str, Any] = {
    "vocab_size": 71, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.3,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]


def _decoder(name: str, **more: Any) -> Any:
    config = getattr(transformers, f"{name}Config" if name != "Gemma3" else "Gemma3TextConfig")(**{**SHAPE, **more})
    return _lively(getattr(transformers, f"{name}ForCausalLM")(config))


def _native() -> Any:
    from decodekit_plugins.models.native.module import NativeConfig, NativeLM

    shape = {name: value for name, value in SHAPE.items() if name in {f.name for f in NativeConfig.__attrs_attrs__}}
    model = NativeLM(NativeConfig(**shape, sliding_window=WINDOW, layer_types=tuple(KINDS)))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    return model


def _gpt2() -> Any:
    shape = {"vocab_size": 71, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256}
    special = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **special, initializer_range=0.3))


def _t5() -> Any:
    config = transformers.T5Config(
        vocab_size=71, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_decoder_layers=3, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=None, tie_word_embeddings=False, initializer_factor=2.0,
    )  # fmt: skip
    return _lively(transformers.T5ForConditionalGeneration(config))


def _lively(model: Any) -> Any:
    """Random models like to repeat themselves: with these embeddings the next token hangs on all before it."""
    torch.nn.init.normal_(model.get_input_embeddings().weight)
    torch.nn.init.normal_(model.get_output_embeddings().weight)
    return model


def _bart() -> Any:
    config = transformers.BartConfig(
        vocab_size=71, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, max_position_embeddings=128, init_std=0.5,
        forced_eos_token_id=None, eos_token_id=None, tie_word_embeddings=False, decoder_start_token_id=2,
        pad_token_id=1, bos_token_id=0,
    )  # fmt: skip
    return _lively(transformers.BartForConditionalGeneration(config))


MAKERS: dict[str, Callable[[], Any]] = {
    "llama": lambda: _decoder("Llama"),
    "qwen3": lambda: _decoder("Qwen3"),
    "gpt2": _gpt2,
    "mistral": lambda: _decoder("Mistral", sliding_window=WINDOW),
    "gemma2": lambda: _decoder("Gemma2", sliding_window=WINDOW, layer_types=KINDS),
    "gemma3": lambda: _decoder("Gemma3", sliding_window=WINDOW, layer_types=KINDS),
    "native": _native,
    "t5": _t5,
    "bart": _bart,
}


@functools.cache
def _build(name: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return MAKERS[name]().eval()


@pytest.fixture(scope="session")
def small() -> Callable[[str], Any]:
    """``small("gemma3")``: the model of that name, shared between tests."""
    return _build
