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
SEQ2SEQ: dict[str, Any] = {
    "vocab_size": 83,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 56,
    "decoder_ffn_dim": 56,
    "max_position_embeddings": 128,
    "init_std": 0.4,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5: dict[str, Any] = {
    "vocab_size": 83,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 56,
    "num_layers": 2,
    "num_heads": 4,
    "initializer_factor": 2.0,
    "pad_token_id": 1,
    "decoder_start_token_id": 2,
}
OWN = {"GPT2": "LMHeadModel", "T5": "ForConditionalGeneration", "Bart": "ForConditionalGeneration", "Marian": "MTModel"}
"""Class prefixes whose settings have names of their own -> what their class ends with."""
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
    "t5": ("T5", T5, "eager"),
    "bart": ("Bart", SEQ2SEQ, "sdpa"),
    "marian": ("Marian", SEQ2SEQ, "sdpa"),
}


@functools.cache
def _build(family: str) -> Any:
    prefix, extra, attention = FAMILIES[family]
    config = getattr(transformers, f"{prefix}Config")(**(extra if prefix in OWN else {**SHAPE, **extra}))
    ending = OWN.get(prefix, "ForCausalLM")
    cls = getattr(transformers, prefix.removesuffix("Text") + ending)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return cls._from_config(config, attn_implementation=attention).eval()


@pytest.fixture(scope="session")
def tiny() -> Callable[[str], Any]:
    """``tiny("gpt2")``: the model of that family, shared between tests."""
    return _build
