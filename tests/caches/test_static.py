"""What only caches of fixed size promise: their size, what happens when they are full, and buffers used again."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import ConfigError, InputError, generate, plan, stream
from decodekit.registry import registry
from decodekit.testing import TinyLM, context
from decodekit_caches.static import Size, StaticCache

KEYS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
STATIC = ("static", "offloaded_static")


def ask(model: Any, inputs: Any, cache: str = "static", **keys: Any) -> Any:
    return generate(model, inputs, cache_implementation=cache, **{**KEYS, **keys})


@pytest.mark.parametrize("cache", STATIC)
def test_the_buffers_never_grow(cache: str) -> None:
    out = ask(TinyLM().eval(), [[5, 9]], cache, max_new_tokens=40, max_cache_len=50)
    assert {layer.capacity for layer in out.cache.layers} == {50}
    assert out.cache.get_seq_length() == 41


@pytest.mark.parametrize("cache", STATIC)
def test_a_full_cache_says_what_was_wanted(cache: str) -> None:
    """At the token that does not fit; the cache still holds what it held."""
    with pytest.raises(InputError, match="it has 6 slots, and 7 were wanted; set max_cache_len to 7 or more"):
        ask(TinyLM().eval(), [[5, 9]], cache, max_new_tokens=9, max_cache_len=6)
    assert ask(TinyLM().eval(), [[5, 9]], cache, max_new_tokens=5, max_cache_len=6).sequences.shape == (1, 7)


@pytest.mark.parametrize("cache", STATIC)
def test_a_prompt_that_cannot_fit_is_refused_at_once(cache: str) -> None:
    with pytest.raises(ConfigError, match="max_cache_len is 3, but the prompt has 4 tokens"):
        plan(TinyLM().eval(), [[5, 9, 7, 8]], cache_implementation=cache, max_cache_len=3)


@pytest.mark.parametrize("cache", STATIC)
def test_a_size_that_nobody_knows_is_asked_for(cache: str) -> None:
    kind = registry.load("caches", cache)
    with pytest.raises(ValueError, match="set max_cache_len, or max_new_tokens"):
        kind().bind(context(max_length=None))
    assert kind().bind(context(max_length=None, max_cache_len=12)).get_seq_length() == 0
    assert kind(max_cache_len=12).bind(context(max_length=None)).get_seq_length() == 0


def test_the_key_and_the_option_are_one() -> None:
    size = {"max_cache_len": 20}
    ways = (size, {"cache_config": size}, {"caches": {"static": size}}, {**size, "cache_config": {"reuse": False}})
    for keys in ways:
        assert ask(TinyLM().eval(), [[5]], max_new_tokens=3, **keys).cache.get_max_length() == 20


def test_prompts_of_embeddings_have_room(small: Callable[[str], Any]) -> None:
    """Their length is known only when they are fed."""
    model = small("llama")
    embeds = torch.randn(1, 90, 32, generator=torch.Generator().manual_seed(0))
    keys: dict[str, Any] = {"inputs_embeds": embeds, "max_new_tokens": 60, "eos_token_id": None}
    want = generate(model, use_cache=False, **keys)
    for cache in STATIC:
        assert torch.equal(generate(model, cache_implementation=cache, **keys), want)


def addresses(cache: Any) -> set[int]:
    return {layer.keys.untyped_storage().data_ptr() for layer in cache.layers}


def test_the_next_call_uses_the_buffers_again() -> None:
    model = TinyLM().eval()
    first = ask(model, [[5, 9]], max_new_tokens=4)
    kept, sequences = addresses(first.cache), first.sequences
    del first
    gc.collect()
    second = ask(model, [[5, 9]], max_new_tokens=4)
    assert addresses(second.cache) == kept
    assert torch.equal(second.sequences, sequences)
    assert not addresses(ask(TinyLM().eval(), [[5, 9]], max_new_tokens=4).cache) & kept, "another model's"
    del second
    gc.collect()
    apart = ask(model, [[5, 9]], max_new_tokens=4, cache_config={"reuse": False})
    assert not addresses(apart.cache) & kept


def test_calls_that_overlap_share_nothing() -> None:
    model = TinyLM().eval()
    plain = [generate(model, [[token]], use_cache=False, max_new_tokens=12, **KEYS) for token in (5, 9)]
    want = [out.sequences[0, 1:].tolist() for out in plain]
    generate(model, [[7]], cache_implementation="static", max_new_tokens=12)
    gc.collect()  # there are spare buffers now, and two calls that want them
    both = [stream(model, [[token]], cache_implementation="static", max_new_tokens=12, **KEYS) for token in (5, 9)]
    got: list[list[int]] = [[], []]
    for one, other in zip(*both, strict=True):
        got[0] += one.tokens.tolist()
        got[1] += other.tokens.tolist()
    assert got == want


def test_what_somebody_still_looks_at_is_not_used_again() -> None:
    """A caller may keep keys of a cache that is gone, or a copy of it."""
    model = TinyLM().eval()
    first = ask(model, [[5, 9, 8]], max_new_tokens=4)
    keys = first.cache.layers[0].keys
    before = keys.clone()
    fork = first.cache.fork()
    state = {name: tensor.clone() for name, tensor in fork.state().items()}
    del first
    gc.collect()
    ask(model, [[7, 7, 7]], max_new_tokens=4)
    assert torch.equal(keys, before)
    for name, tensor in fork.state().items():
        assert torch.equal(tensor, state[name])


def test_rows_may_come_and_go() -> None:
    cache = StaticCache(8)
    key = torch.randn(2, 1, 3, 4)
    cache.update(key, key, 0)
    cache.batch_repeat_interleave(2)
    assert cache.batch_size == 4
    keys, _ = cache.update(torch.zeros(4, 1, 1, 4), torch.zeros(4, 1, 1, 4), 0)
    assert torch.equal(keys[:, :, :3], key.repeat_interleave(2, 0))
    assert cache.layers[0].capacity == 8


def test_gradients_do_not_make_room() -> None:
    cache = StaticCache(Size(4))
    key = torch.randn(1, 1, 3, 4, requires_grad=True)
    cache.update(key, key, 0)
    with pytest.raises(InputError, match="4 slots, and 6 were wanted"):
        cache.update(key, key, 0)
