"""Attention to packed tokens gives what attention to the opened ones gives, and anything else opens them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decodekit import InputError
from decodekit_caches import quantized_attention, quantized_kernel
from decodekit_caches.quantized import Quantized, QuantizedCache
from decodekit_caches.quantized_attention import MOST_NEW, Unopened
from decodekit_caches.quantized_blocks import groups_of
from torch import Tensor

AXES = [{"axis_key": key, "axis_value": value} for key in (-1, 0) for value in (-1, 0)]


@pytest.fixture(params=["kernel", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything here holds with the kernel in C and with torch's operations."""
    if request.param == "torch":
        monkeypatch.setattr(quantized_attention, "attend", lambda *_: None)
    elif quantized_kernel.kernel() is None:
        pytest.skip("no kernels can be built: no compiler")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def held(
    rows: int = 2, heads: int = 2, width: int = 12, new: int = 1, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[QuantizedCache, Tensor, Tensor]:
    """A cache that holds packed tokens, and what its last update gave."""
    cache = QuantizedCache(Quantized(**{"q_group_size": 8, "residual_length": 5, **options}))
    key, value = (numbers(rows, heads, 60, width, seed=seed, dtype=dtype) for seed in (0, 1))
    cache.update(key, value, 0)
    found = cache.update(key[:, :, :new] + 1, value[:, :, :new] - 1, 0)
    assert all(isinstance(part, Unopened) for part in found)
    return cache, *found


def opened(*parts: Tensor) -> list[Tensor]:
    return [part.clone() for part in parts]


@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("width", "groups"), [(8, 1), (12, 2), (40, 5)])
@pytest.mark.parametrize("new", [1, 3])
def test_equals_attention_to_opened_tokens(
    monkeypatch: pytest.MonkeyPatch, axes: dict[str, int], bits: int, width: int, groups: int, new: int
) -> None:
    monkeypatch.setattr("decodekit_caches.quantized_attention.AT_ONCE", 8 * 2 * 2 * width * 2)  # several pieces
    _cache, key, value = held(width=width, new=new, nbits=bits, **axes)
    assert groups_of(width, 8) == groups
    query = numbers(2, 2, new, width, seed=4)
    mask = torch.ones(2, 1, new, 60 + new, dtype=torch.bool).tril(60)
    mask[1, :, :, :7] = False
    for told in (None, mask, torch.where(mask, 0.0, -torch.inf)):
        got = F.scaled_dot_product_attention(query, key, value, attn_mask=told)
        want = F.scaled_dot_product_attention(query, *opened(key, value), attn_mask=told)
        assert type(got) is Tensor
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Closer to exact arithmetic over the same packed numbers than attention in that dtype is."""
    _, key, value = held(dtype=dtype, nbits=4)
    query = numbers(2, 2, 1, 12, seed=4, dtype=dtype)
    got = F.scaled_dot_product_attention(query, key, value)
    want = F.scaled_dot_product_attention(query.double(), *(part.double() for part in opened(key, value)))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2 * torch.finfo(dtype).eps)


def test_several_queries_of_a_key_head() -> None:
    _, key, value = held()
    query = numbers(2, 6, 3, 12, seed=4)
    mask = torch.ones(3, 63, dtype=torch.bool)[:, :61].tril(58)
    got = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.2, enable_gqa=True)
    want = F.scaled_dot_product_attention(query, *opened(key, value), attn_mask=mask, scale=0.2, enable_gqa=True)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)


def test_a_query_that_sees_nothing_gives_zero() -> None:
    """As padding does: not a number would spread to what follows it."""
    _, key, value = held()
    mask = torch.ones(2, 1, 1, 61, dtype=torch.bool)
    mask[0] = False
    got = F.scaled_dot_product_attention(numbers(2, 2, 1, 12), key, value, attn_mask=mask)
    assert (got[0] == 0).all()
    assert (got[1] != 0).all()


def test_not_a_number_stays_in_its_row() -> None:
    cache = QuantizedCache(Quantized(q_group_size=8, residual_length=0))
    key = numbers(2, 1, 40, 8)
    key[1, 0, 3, 2] = torch.nan
    cache.update(key, numbers(2, 1, 40, 8, seed=1), 0)
    found = cache.update(key[:, :, :1], key[:, :, :1], 0)
    got = F.scaled_dot_product_attention(numbers(2, 1, 1, 8), *found)
    assert got[0].isfinite().all()
    assert got[1].isnan().all()


def test_everything_else_opens_them() -> None:
    cache, key, value = held(nbits=8)
    want, plain = cache.layers[0].keys, opened(key)[0]
    assert torch.equal(plain, want)
    assert key.shape == (2, 2, 61, 12)
    assert key.dtype == torch.float32
    assert len(key) == 2
    assert "Unopened(tensor(" in repr(key)
    for read in (key + 0, key[:], copy.deepcopy(key), torch.cat([key]), key.contiguous().view(-1).view(key.shape)):
        assert type(read) is Tensor
        assert torch.equal(read, want)
    assert key.tolist() == want.tolist()
    assert (key.numpy() == want.numpy()).all()
    assert torch.equal(key.transpose(2, 3) @ value, want.transpose(2, 3) @ cache.layers[0].values)
    query = numbers(2, 2, 1, 12).requires_grad_()
    F.scaled_dot_product_attention(query, key, value).sum().backward()
    assert query.grad is not None
    with torch.inference_mode():
        F.scaled_dot_product_attention(numbers(2, 2, 1, 12), key, value)
        assert torch.equal(key.clone(), want)


def test_reading_them_after_the_cache_has_changed_is_an_error() -> None:
    """They would be other tokens' by then."""
    for change in (
        lambda cache, key: cache.update(key, key, 0),
        lambda cache, key: cache.crop(-1),
        lambda cache, key: cache.reorder_cache(torch.tensor([1, 0])),
    ):
        cache, key, value = held()
        change(cache, numbers(2, 2, 1, 12))
        with pytest.raises(InputError, match="gone once the cache has changed"):
            key.clone()
        with pytest.raises(InputError, match="gone once the cache has changed"):
            F.scaled_dot_product_attention(numbers(2, 2, 1, 12), key, value)


def test_blocks_used_in_part_are_opened() -> None:
    """After a crop through a block, attention sees only the tokens of it that count."""
    cache, _, _ = held()
    cache.crop(20)
    assert cache.layers[0].gaps
    key, value = cache.update(numbers(2, 2, 1, 12), numbers(2, 2, 1, 12), 0)
    query = numbers(2, 2, 1, 12)
    got = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(query, *opened(key, value)))
    assert key.shape[2] == 21


def test_many_new_tokens_and_gradients_get_tensors() -> None:
    cache, _, _ = held()
    key = numbers(2, 2, MOST_NEW + 1, 12)
    assert not any(isinstance(part, Unopened) for part in cache.update(key, key, 0))
    key = numbers(2, 2, 1, 12).requires_grad_()
    assert not any(isinstance(part, Unopened) for part in cache.update(key, key, 0))


@pytest.mark.parametrize("bits", [2, 4])
def test_a_single_block_of_a_single_head(bits: int) -> None:
    """What overlaps in memory is then seen, and refused, by torch."""
    cache = QuantizedCache(Quantized(nbits=bits, q_group_size=8, residual_length=0))
    cache.update(numbers(1, 1, 8, 8), numbers(1, 1, 8, 8, seed=1), 0)
    parts = cache.update(numbers(1, 1, 1, 8, seed=2), numbers(1, 1, 1, 8, seed=3), 0)
    query = numbers(1, 1, 1, 8, seed=4)
    got = F.scaled_dot_product_attention(query, *parts)
    torch.testing.assert_close(got, F.scaled_dot_product_attention(query, *opened(*parts)), rtol=1e-5, atol=2e-6)
