"""Tiny random transformers models, the same weights for the same name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

SHAPE: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2: dict[str, Any] = {
    "vocab_size": 83,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 128,
    "initializer_range": 0.25,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WINDOW = 5
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
# Name -> (class prefix, further settings, attention).
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", {}, "sdpa"),
    "llama-eager": ("Llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}, "eager"),
    "gpt2": ("GPT2", GPT2, "sdpa"),
    "gpt2-eager": ("GPT2", GPT2, "eager"),
    "qwen3": ("Qwen3", {}, "sdpa"),
    "mistral": ("Mistral", {"sliding_window": WINDOW}, "sdpa"),
    "gemma2": ("Gemma2", {"sliding_window": WINDOW, "layer_types": MIXED}, "eager"),
    "gemma3": ("Gemma3Text", {"sliding_window": WINDOW, "layer_types": MIXED}, "sdpa"),
}


@functools.cache
def _build(family: str) -> Any:
    prefix, extra, attention = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**(extra if prefix == "GPT2" else {**SHAPE, **extra}))
    ending = "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
    cls = getattr(transformers, prefix.removesuffix("Text") + ending)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return cls._from_config(config, attn_implementation=attention).eval()


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Any]:
    """``tiny("gpt2")``: the model of that family, shared between tests."""
    return _build
