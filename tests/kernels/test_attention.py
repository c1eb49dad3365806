"""Attention in C against torch's: any shapes, types, masks and strides, and the same bits on any number of threads."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F
from decodekit_plugins.kernels import library
from decodekit_plugins.kernels.library import TYPES, Keys, Mask
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

NO_COMPILER = library.why_not()
pytestmark = pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER or "kernels can be built")


def keys(held: Tensor) -> object:
    return ctypes.byref(Keys(held.data_ptr(), *held.stride()[:3]))


def few(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, threads: int = 2) -> Tensor:
    rows, length, heads, dim = query.shape
    out = torch.full_like(query, torch.nan)
    seen = Mask()
    if mask is not None:
        strides = [0 if mask.shape[side] == 1 else mask.stride(side) for side in (0, 2)]
        seen = Mask(mask.data_ptr(), TYPES[mask.dtype], *strides)
    library.library().dk_attend(
        query.data_ptr(), keys(key), keys(value), TYPES[key.dtype], ctypes.byref(seen), rows, length, heads,
        key.shape[1], key.shape[2], dim, dim**-0.5, out.data_ptr(), threads,
    )  # fmt: skip
    return out


def many(query: Tensor, key: Tensor, value: Tensor, causal: bool, threads: int = 2) -> Tensor:
    rows, length, heads, dim = query.shape
    out = torch.full_like(query, torch.nan)
    library.library().dk_prompt(
        query.data_ptr(), keys(key), keys(value), TYPES[key.dtype], causal, rows, length, heads, key.shape[1],
        key.shape[2], dim, dim**-0.5, out.data_ptr(), threads,
    )  # fmt: skip
    return out


def want(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    made = query.double().transpose(1, 2), key.double(), value.double()
    added = mask if mask is None or mask.dtype is torch.bool else mask.double()
    found = F.scaled_dot_product_attention(*made, attn_mask=added, enable_gqa=True)
    return found.nan_to_num(0.0).transpose(1, 2)


def inputs(
    seed: int, rows: int, length: int, kv_heads: int, group: int, slots: int, dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and keys and values that are views of longer buffers, as those of caches are."""
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, length, kv_heads * group, dim, generator=random)
    held = torch.randn(2, rows, kv_heads, slots + 7, dim, generator=random).to(dtype)
    return query, held[0, :, :, 3 : slots + 3], held[1, :, :, :slots]


SHAPES = {
    "seed": st.integers(0, 99), "rows": st.integers(1, 3), "kv_heads": st.integers(1, 3), "group": st.integers(1, 5),
    "dim": st.sampled_from([2, 6, 16, 20, 48, 64, 80, 128]), "dtype": st.sampled_from(list(TYPES)[:3]),
}  # fmt: skip


@given(length=st.integers(1, 6), slots=st.integers(1, 600), kind=st.sampled_from(["none", "bool", "added"]), **SHAPES)
def test_few_queries(
    seed: int, rows: int, length: int, kv_heads: int, group: int, slots: int, dim: int, dtype: torch.dtype, kind: str
) -> None:
    query, key, value = inputs(seed, rows, length, kv_heads, group, slots, dim, dtype)
    random = torch.Generator().manual_seed(seed)
    shared = seed % 2 and kind != "none"
    seen = torch.rand(1 if shared else rows, 1, length, slots, generator=random) < 0.6
    mask = (
        None if kind == "none" else seen if kind == "bool" else torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)
    )
    got = few(query, key, value, mask)
    assert float((got - want(query, key, value, mask)).abs().max()) < 1e-5
    assert torch.equal(few(query, key, value, mask, 1), got)
    assert torch.equal(few(query, key, value, mask, 3), got)


@given(length=st.integers(1, 150), earlier=st.integers(0, 200), causal=st.booleans(), **SHAPES)
def test_many_queries(
    seed: int,
    rows: int,
    length: int,
    kv_heads: int,
    group: int,
    earlier: int,
    dim: int,
    dtype: torch.dtype,
    causal: bool,
) -> None:
    query, key, value = inputs(seed, rows, length, kv_heads, group, earlier + length, dim, dtype)
    mask = torch.ones(length, earlier + length, dtype=torch.bool).tril(earlier) if causal else None
    got = many(query, key, value, causal)
    assert float((got - want(query, key, value, mask)).abs().max()) < 1e-5
    assert torch.equal(many(query, key, value, causal, 1), got)


def test_who_sees_nothing_gets_zeros() -> None:
    query, key, value = inputs(0, 2, 1, 2, 2, 40, 16, torch.float32)
    mask = torch.ones(2, 1, 1, 40, dtype=torch.bool)
    mask[1] = False
    got = few(query, key, value, mask)
    assert not got[1].any()
    assert got[0].any()


def test_large_scores_overflow_nothing() -> None:
    query, key, value = inputs(0, 1, 1, 1, 1, 300, 16, torch.float32)
    key = key * 1000
    assert torch.allclose(few(query, key, value, None), want(query, key, value).float(), atol=1e-5)
    query = query.expand(1, 70, 1, 16).contiguous()
    assert torch.allclose(many(query, key, value, False), want(query, key, value).float(), atol=1e-5)


def test_what_is_no_number_stays_none() -> None:
    query, key, value = inputs(0, 1, 1, 1, 1, 300, 16, torch.float32)
    key[0, 0, 280, 3] = torch.nan
    assert few(query, key, value, None).isnan().all()
    assert many(query.expand(1, 40, 1, 16).contiguous(), key, value, False).isnan().all()
