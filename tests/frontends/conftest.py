"""A tiny model of transformers, and one of nobody."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()


@pytest.fixture
def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=83,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.25,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


class Counter(nn.Module):
    """After token t it likes t + 1."""

    def __init__(self) -> None:
        super().__init__()
        self.likes = nn.Parameter(torch.eye(16).roll(1, 1) * 4, requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.likes[tokens]


@pytest.fixture
def counter() -> Any:
    return Counter()


@pytest.fixture
def padded() -> dict[str, Tensor]:
    """Two prompts, the first of them padded."""
    ids = torch.tensor([[0, 5, 6, 7], [9, 8, 7, 6]])
    return {"inputs": ids, "attention_mask": (ids != 0).long()}
