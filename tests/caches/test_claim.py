"""Kernels that write keys and values where they belong leave a cache as `update` does."""

from __future__ import annotations

import pytest
import torch
from decodekit_caches.dynamic import DynamicCache
from decodekit_caches.layered import LayeredCache
from decodekit_caches.static import Size, StaticCache

SHAPE = (2, 3, 1, 4)


def filled(cache: LayeredCache) -> LayeredCache:
    torch.manual_seed(0)
    cache.update(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 5, 4), 0)
    return cache


@pytest.mark.parametrize("make", [DynamicCache, lambda: StaticCache(Size(16), None)], ids=["dynamic", "static"])
def test_as_update(make: object) -> None:
    one, other = filled(make()), filled(make())  # type: ignore[operator]
    key, value = torch.randn(SHAPE), torch.randn(SHAPE)
    want = one.update(key, value, 0)
    found = other.claim(0, SHAPE, torch.float32)
    assert found is not None
    keys, values, start = found
    assert start == 5
    keys[:, :, start : start + 1] = key
    values[:, :, start : start + 1] = value
    assert other.get_seq_length() == one.get_seq_length() == 6
    got = other.update(key, value, 0)
    want = one.update(key, value, 0)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_refused_without_a_trace() -> None:
    cache = filled(DynamicCache())
    assert DynamicCache().claim(0, SHAPE, torch.float32) is None, "nothing was ever written"
    for shape, dtype in (
        ((1, 3, 1, 4), torch.float32),
        ((2, 2, 1, 4), torch.float32),
        ((2, 3, 1, 8), torch.float32),
        ((2, 3, 60, 4), torch.float32),  # no room
        (SHAPE, torch.bfloat16),
    ):
        assert cache.claim(0, shape, dtype) is None
    assert cache.claim(1, SHAPE, torch.float32) is None
    assert cache.get_seq_length() == 5


def test_caches_that_do_more_are_not_bypassed() -> None:
    class Counts(DynamicCache):
        def update(self, *args: object, **keys: object) -> object:  # type: ignore[override]
            return super().update(*args, **keys)  # type: ignore[arg-type]

    assert filled(Counts()).claim(0, SHAPE, torch.float32) is None
