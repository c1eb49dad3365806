"""Once for real: with a compiler, on a CPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import CompileConfig, generate

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler"),
]
PROMPTS = [[5, 9, 33, 60, 8, 17, 42], [23, 4, 61], [9]]
KEYS: dict[str, Any] = {"max_new_tokens": 40, "pad_token_id": 0, "eos_token_id": None}


def llama() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=71, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_the_same_tokens(make: Callable[..., Any], kind: str) -> None:
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = make() if kind == "native" else llama()
    counters.clear()
    for inputs in ([PROMPTS[0]], PROMPTS):
        want = generate(model, inputs, **KEYS)
        config = CompileConfig(fullgraph=True)
        for _ in range(2):
            assert torch.equal(generate(model, inputs, compile_config=config, strict=True, **KEYS), want)
    assert counters["stats"]["unique_graphs"] == 2
    keys = {**KEYS, "prepare": "compiled", "num_beams": 3}
    assert torch.equal(generate(model, PROMPTS, **keys), generate(model, PROMPTS, **{**keys, "prepare": None}))
    assert not counters["graph_break"]


def test_frozen_weights_are_an_option(make: Callable[..., Any]) -> None:
    model, options = make(), {"freezing": True}
    got = generate(model, PROMPTS, compile_config={"options": options}, **KEYS)
    assert torch.equal(got, generate(model, PROMPTS, **KEYS))
