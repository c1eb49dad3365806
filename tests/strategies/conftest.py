"""Small models whose layers can be looked at, and what they give for a whole text, computed anew."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

SHAPE: dict[str, Any] = {
    "vocab_size": 43,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
GPT2: dict[str, Any] = {"vocab_size": 43, "n_embd": 16, "n_layer": 5, "n_head": 2, "n_positions": 128}


@attrs.frozen
class Small:
    """A model, and what it gives for int64 tokens [T] without cache or neighbours."""

    model: Any
    whole: Callable[[list[int]], tuple[Tensor, list[Tensor]]]
    """Logits [V] after the last token, and hidden states [T, H]: embeddings, then each layer, the last one normed."""
    head: Callable[[Tensor], Tensor]


def _theirs(prefix: str, ending: str, **more: Any) -> Small:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{prefix}Config")(**{**(GPT2 if prefix == "GPT2" else SHAPE), **more})
    model = getattr(transformers, prefix + ending)._from_config(config, attn_implementation="sdpa").eval()

    def whole(tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
        out = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        return out.logits[0, -1], [state[0] for state in out.hidden_states]

    return Small(model, whole, model.get_output_embeddings())


def _native(**more: Any) -> Small:
    from decodekit_plugins.models.native.module import NativeConfig, NativeLM

    model = NativeLM(NativeConfig.from_hf({"model_type": "llama", **SHAPE, **more})).eval()
    layers = range(SHAPE["num_hidden_layers"] + 1)

    def whole(tokens: list[int]) -> tuple[Tensor, list[Tensor]]:
        out = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], hidden=layers)
        states = [out.hidden[layer][0] for layer in layers]
        return out.logits[0, -1], [*states[:-1], model.model.norm(states[-1])]

    return Small(model, whole, model.lm_head)


KINDS: dict[str, Callable[[], Small]] = {
    "native": _native,
    "native, tied": lambda: _native(tie_word_embeddings=True),
    "gpt2": lambda: _theirs("GPT2", "LMHeadModel"),
    "llama": lambda: _theirs("Llama", "ForCausalLM", tie_word_embeddings=False),
}


@functools.cache
def _build(kind: str) -> Small:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        small = KINDS[kind]()
        for weight in small.model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.4)
            else:  # norms that do something
                weight.add_(torch.randn_like(weight) * 0.3)
    return small


@pytest.fixture(scope="session")
def small() -> Callable[[str], Small]:
    """``small("gpt2")``: a model of that kind, shared between tests."""
    return _build


@pytest.fixture(scope="session")
def exact_caches() -> list[str]:
    """Names of the caches that hold what every model gave them: none that rounds, or forgets what is far."""
    from decodekit.registry import registry

    return [name for name in registry.names("caches") if name not in ("quantized", "sliding_window")]
