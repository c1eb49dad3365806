"""Every cache with every kind of model and every way of decoding: what comes out is what comes out without a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import ConfigError, generate
from decodekit.models import adapter_for
from decodekit.registry import registry
from torch import Tensor

MODELS = ("llama", "mistral", "gemma3", "native", "t5", "qwen3", "gpt2", "gemma2", "bart")
WHOLE = ("llama", "mistral", "gemma3", "native", "t5")
"""The models that every way of decoding is tried with; the others are decoded greedily."""
CACHES = [
    name
    for name in registry.names("caches")
    if registry.find("caches", name).distribution == "decodekit" and name != "quantized"  # not exact by design
]
SEES_ALL = {"sliding_window": ("llama", "gemma3", "native", "t5", "qwen3", "gpt2", "gemma2", "bart")}
"""Caches that do not fit every model, and the models that they refuse."""
PROMPTS = [[5, 9, 33, 60, 8, 17, 42, 29, 11, 50, 12, 7], [23, 4, 61, 13, 37], [9, 9, 30]]
NEW = 14


@pytest.fixture(params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=CACHES)
def cache(request: pytest.FixtureRequest) -> str:
    return request.param


def encodes(model: Any) -> bool:
    return bool(adapter_for(model).spec.is_encoder_decoder)


def ask(model: Any, inputs: Any = PROMPTS, **keys: Any) -> Any:
    keys = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0, "output_logits": True, **keys}
    return generate(model, inputs, return_dict_in_generate=True, **keys)


def same(got: Any, want: Any) -> None:
    assert torch.equal(got.sequences, want.sequences)
    if got.logits is not None:
        for mine, other in zip(got.logits, want.logits, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3 * float(other.std()))


def fits(cache: str, name: str) -> bool:
    return name not in SEES_ALL.get(cache, ())


def goes_on(model: Any, seen: Tensor, **keys: Any) -> Any:
    """Continue `seen` [B, T]: of an encoder-decoder model the decoder's tokens."""
    if not encodes(model):
        return ask(model, seen, attention_mask=torch.ones_like(seen), **keys)
    return ask(model, [PROMPTS[0]], decoder_input_ids=seen, **keys)


@pytest.mark.parametrize("name", WHOLE)
def test_other_ways_are_refused_alike(small: Callable[[str], Any], cache: str, name: str) -> None:
    """A cache that does not fit is refused before anything runs, with what would do instead."""
    if fits(cache, name):
        ask(small(name), max_new_tokens=1, cache_implementation=cache)
        return
    with pytest.raises(ConfigError, match=r"sliding_window: needs layers with a window.*set cache_impl.*'hybrid'"):
        ask(small(name), cache_implementation=cache)


def test_greedy(small: Callable[[str], Any], cache: str, name: str) -> None:
    """Padded rows, past every window."""
    if fits(cache, name):
        model = small(name)
        inputs = [PROMPTS[0]] * 2 if name == "gpt2" else PROMPTS
        same(ask(model, inputs, cache_implementation=cache), ask(model, inputs, use_cache=False))


@pytest.mark.parametrize("name", WHOLE)
def test_sampling(small: Callable[[str], Any], cache: str, name: str) -> None:
    if fits(cache, name):
        keys: dict[str, Any] = {"do_sample": True, "seed": 3, "num_return_sequences": 2}
        same(ask(small(name), cache_implementation=cache, **keys), ask(small(name), use_cache=False, **keys))


@pytest.mark.parametrize("name", WHOLE)
def test_beams(small: Callable[[str], Any], cache: str, name: str) -> None:
    if fits(cache, name):
        keys: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 3, "output_logits": False, "do_sample": False}
        got, want = (
            ask(small(name), cache_implementation=cache, **keys),
            ask(small(name), use_cache=False, **keys),
        )
        same(got, want)
        torch.testing.assert_close(got.sequences_scores, want.sequences_scores, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", WHOLE)
def test_a_passed_cache_goes_on(small: Callable[[str], Any], cache: str, name: str) -> None:
    """B27: what a run leaves in its cache serves the next one, once for each number of new tokens."""
    if not fits(cache, name):
        return
    model = small(name)
    room = {"cache_config": {"max_cache_len": 60}} if "static" in cache else {}
    first = ask(model, [PROMPTS[0]], cache_implementation=cache, max_new_tokens=9, **room)
    seen = first.sequences
    whole = goes_on(model, seen, use_cache=False)
    same(goes_on(model, seen, cache=first.cache), whole)
    if not encodes(model):  # the new token alone, with a mask over all
        first.cache.crop(seen.shape[1] - 1)
        last: dict[str, Any] = {"attention_mask": torch.ones_like(seen), "cache": first.cache}
        got = ask(model, seen[:, -1:], **last)
        assert torch.equal(got.sequences[:, 1:], whole.sequences[:, seen.shape[1] :])
    more = torch.cat([whole.sequences, torch.tensor([[20, 21, 22, 23, 24, 25, 26, 27]])], 1)
    same(goes_on(model, more, cache=first.cache), goes_on(model, more, use_cache=False))


@pytest.mark.parametrize("name", WHOLE)
def test_a_cropped_cache_goes_on(small: Callable[[str], Any], cache: str, name: str) -> None:
    """B20: tokens are taken back in the middle of windows and behind them; crop(0) keeps nothing."""
    if not fits(cache, name):
        return
    model = small(name)
    room = {"cache_config": {"max_cache_len": 60}} if "static" in cache else {}
    for back in (1, 3, 8):
        first = ask(model, [PROMPTS[0]], cache_implementation=cache, **room)
        kept = first.cache.get_seq_length() - back
        first.cache.crop(kept if back != 3 else -back)
        assert first.cache.get_seq_length() == kept
        seen = torch.cat([first.sequences[:, :kept], torch.tensor([[40, 41]])], 1)
        same(goes_on(model, seen, cache=first.cache), goes_on(model, seen, use_cache=False))
    first.cache.crop(0)
    assert first.cache.get_seq_length() == 0
    same(goes_on(model, seen, cache=first.cache), goes_on(model, seen, use_cache=False))


@pytest.mark.parametrize("name", WHOLE)
@torch.no_grad()
def test_b25_beams_that_trade_places(small: Callable[[str], Any], cache: str, name: str) -> None:
    """Four rows over twenty steps: each step's logits equal a cache-free pass over that row's own tokens."""
    if not fits(cache, name) or name == "t5":
        return
    from decodekit import plan

    adapter = adapter_for(small(name))
    kept = plan(small(name), [[5]] * 4, cache_implementation=cache, max_new_tokens=40, pad_token_id=0).cache
    random = torch.Generator().manual_seed(0)
    tokens = fed = torch.randint(3, 71, (4, 9), generator=random)
    for step in range(20):
        place = torch.arange(tokens.shape[1] - fed.shape[1], tokens.shape[1]).expand_as(fed)
        got = adapter.forward(fed, place, kept).logits
        whole = adapter.forward(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None).logits
        torch.testing.assert_close(got, whole, rtol=1e-3, atol=2e-4)
        rows = torch.randint(4, (4,), generator=random) if step % 4 else torch.arange(4)
        kept.reorder_cache(rows)
        fed = torch.randint(3, 71, (4, 1), generator=random)
        tokens = torch.cat([tokens[rows], fed], 1)
