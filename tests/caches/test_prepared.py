"""The matrix with prepared models: what comes out is what comes out unprepared and without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import generate
from decodekit.registry import registry

CACHES = [name for name in registry.names("caches") if registry.find("caches", name).distribution == "decodekit"]
MODELS = ("llama", "gemma3", "native", "t5", "gpt2")
PROMPTS = [[5, 9, 33, 60, 8, 17, 42, 29, 11, 50, 12, 7], [23, 4, 61, 13, 37], [9, 9, 30]]
PREPARED: list[dict[str, Any]] = [{"preparers": {"packed": {"layout": "blocks"}}}, {"prepare": "kernels"}]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sample": {"do_sample": True, "seed": 3, "num_return_sequences": 2},
    "beam": {"num_beams": 3, "num_return_sequences": 2, "do_sample": False},
    "group_beam": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.4, "do_sample": False},
    "constrained_beam": {"num_beams": 3, "force_words_ids": [[11, 12]], "do_sample": False},
    "contrastive": {"penalty_alpha": 0.5, "top_k": 3, "do_sample": False},
    "dola": {"dola_layers": "low", "do_sample": False},
}
UNFIT = {"t5": ("dola", "contrastive"), "gpt2": ("dola",)}
ONLY_WINDOWS = ("sliding_window",)


def ask(model: Any, **keys: Any) -> torch.Tensor:
    keys = {"max_new_tokens": 10, "eos_token_id": None, "pad_token_id": 0, **keys}
    return torch.as_tensor(generate(model, PROMPTS if keys.pop("padded", True) else [PROMPTS[0]] * 2, **keys))


@pytest.mark.parametrize("prepared", PREPARED, ids=["packed", "kernels"])
@pytest.mark.parametrize("cache", [name for name in CACHES if name not in ONLY_WINDOWS])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_with_every_cache(small: Callable[[str], Any], name: str, cache: str, prepared: dict[str, Any]) -> None:
    keys = {"cache_implementation": cache, "do_sample": False, "padded": name != "gpt2"}
    assert torch.equal(ask(small(name), **keys, **prepared), ask(small(name), **keys))


@pytest.mark.parametrize("prepared", PREPARED, ids=["packed", "kernels"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_every_strategy(small: Callable[[str], Any], name: str, way: str, prepared: dict[str, Any]) -> None:
    if way in UNFIT.get(name, ()):
        return
    for cache in ("dynamic", "static") if way != "contrastive" else ("dynamic",):
        keys = {"cache_implementation": cache, "padded": name != "gpt2", **WAYS[way]}
        assert torch.equal(ask(small(name), **keys, **prepared), ask(small(name), **keys)), cache
