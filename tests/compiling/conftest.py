"""Small models, a backend that counts its graphs, and no graphs left over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from decodekit_plugins.models.native.module import NativeConfig, NativeLM

SHAPE: dict[str, Any] = {
    "vocab_size": 71, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
}  # fmt: skip


class Counting:
    """A backend that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward

    def __repr__(self) -> str:
        return "Counting()"


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    torch.compiler.reset()


def native(seed: int = 0, **more: Any) -> NativeLM:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NativeLM(NativeConfig(**{**SHAPE, **more}))
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.3)
    return model.eval()


@pytest.fixture
def make() -> Callable[..., NativeLM]:
    """``make(seed, **shape)``: a native model of one's own."""
    return native


@pytest.fixture
def model() -> NativeLM:
    return native()
