"""Compiled steps over static caches with every kind of model: one graph, the tokens of a run without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from decodekit import CompileConfig, generate

MODELS = ("llama", "mistral", "gemma3", "gemma2", "qwen3", "gpt2", "native", "t5", "bart")
PROMPTS = [[5, 9, 33, 60, 8, 17, 42, 29, 11, 50, 12, 7], [23, 4, 61, 13, 37], [9, 9, 30]]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "seed": 3, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
}


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_tokens(small: Callable[[str], Any], name: str, way: str) -> None:
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model, keys = small(name), {"max_new_tokens": 14, "eos_token_id": None, "pad_token_id": 0, **WAYS[way]}
    inputs = [PROMPTS[0]] * 2 if name == "gpt2" else PROMPTS
    config = CompileConfig(backend=counting, fullgraph=True)
    for more in (0, 5):
        keys["max_new_tokens"] += more
        got = generate(model, inputs, compile_config=config, strict=True, **keys)
        assert torch.equal(got, generate(model, inputs, use_cache=False, **keys))
    assert len(graphs) == 1
