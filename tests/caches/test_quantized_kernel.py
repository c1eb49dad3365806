"""The kernel in C gives what torch's operations give, whatever the shapes; without a builder those run instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from decodekit import PipelineError, PluginNotFound
from decodekit.registry import registry
from decodekit_caches import quantized_attention, quantized_kernel
from decodekit_caches.quantized import Quantized, QuantizedCache
from decodekit_caches.quantized_attention import MOST_NEW
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

needs_kernel = pytest.mark.skipif(quantized_kernel.kernel() is None, reason="no kernels can be built: no compiler")
EXACT = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""How far two neighbours are apart, at most, relative to their size."""


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def both(query: Tensor, *parts: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """The answers of the kernel, which must have run, and of torch's operations."""
    ran: list[bool] = []

    def watched(*args: Any) -> Tensor | None:
        ran.append((found := quantized_kernel.attend(*args)) is not None)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantized_attention, "attend", watched)
        mine = F.scaled_dot_product_attention(query, *parts, **more)
        patch.setattr(quantized_attention, "attend", lambda *_: None)
        torchs = F.scaled_dot_product_attention(query, *parts, **more)
    assert ran == [True]
    return mine, torchs


@st.composite
def cases(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any], torch.dtype, str, int]:
    shape = {
        "rows": draw(st.integers(1, 3)),
        "heads": draw(st.integers(1, 2)),
        "group": draw(st.sampled_from([1, 1, 2, 3, 5])),
        "new": draw(st.sampled_from([1, 1, 2, 3, MOST_NEW])),
        "width": draw(st.sampled_from([1, 8, 12, 16, 24, 40, 48, 64, 72, 80, 128, 208])),
        "prompt": draw(st.integers(1, 700)),
    }
    options = {
        "nbits": draw(st.sampled_from([2, 4, 8])),
        "q_group_size": draw(st.sampled_from([8, 16, 24, 40, 64, 128, 320])),
        "residual_length": draw(st.sampled_from([0, 5, 64, 300])),
    }
    dtype = draw(st.sampled_from(list(EXACT)))
    mask = draw(st.sampled_from(["none", "bool", "rows", "float", "half", "heads"]))
    return shape, options, dtype, mask, draw(st.integers(0, 1000))


def mask_of(kind: str, shape: dict[str, Any], total: int, dtype: torch.dtype, seed: int) -> Tensor | None:
    rows, every, new = shape["rows"], shape["heads"] * shape["group"], shape["new"]
    causal = torch.ones(new, total, dtype=torch.bool).tril(total - new)
    hidden = numbers(rows, 1, 1, total, seed=seed) > 0.5
    hidden[:, :, :, : total // 3] |= hidden[:, :, :, :1].clone()  # whole pieces, too
    return {
        "none": None,
        "bool": causal,
        "rows": causal & ~hidden,
        "float": torch.where(causal & ~hidden, 0.0, -torch.inf),
        "half": torch.where(causal, 0.0, torch.finfo(dtype).min).to(dtype),
        "heads": numbers(rows, every, new, total, seed=seed).masked_fill(~causal, -torch.inf),
    }[kind]


@needs_kernel
@settings(max_examples=150, deadline=None)
@given(cases())
def test_equals_torchs_operations(case: tuple[dict[str, Any], dict[str, Any], torch.dtype, str, int]) -> None:
    shape, options, dtype, masked, seed = case
    rows, heads, new, width, prompt = (shape[name] for name in ("rows", "heads", "new", "width", "prompt"))
    cache = QuantizedCache(Quantized(**options))
    key, value = (numbers(rows, heads, prompt, width, seed=seed + i, dtype=dtype) * 2 + 1 for i in (0, 1))
    more = numbers(rows, heads, new, width, seed=seed + 2, dtype=dtype)
    cache.update(key, value, 0)
    parts = cache.update(more, more - 1, 0)
    query = numbers(rows, new, heads * shape["group"], width, seed=seed + 3, dtype=dtype).transpose(1, 2)
    mask = mask_of(masked, shape, prompt + new, dtype, seed)
    got, want = both(query, *parts, attn_mask=mask, enable_gqa=True)
    assert got.shape == want.shape
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=2e-5 + EXACT[dtype], atol=1e-4 + EXACT[dtype] / 8)


def layer_of(**options: Any) -> tuple[Any, Tensor]:
    cache = QuantizedCache(Quantized(**{"q_group_size": 16, "residual_length": 5, **options}))
    key = numbers(2, 2, 1500, 64)
    cache.update(key, key, 0)
    parts = cache.update(key[:, :, :3], key[:, :, :3], 0)
    return parts, numbers(2, 6, 3, 64, seed=1)


@needs_kernel
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_does_not_depend_on_threads(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, query = layer_of(nbits=bits)
    found = []
    for threads in (1, 2, 5):
        monkeypatch.setattr("decodekit_caches.quantized_kernel.torch.get_num_threads", lambda threads=threads: threads)
        found.append(F.scaled_dot_product_attention(query, *parts, enable_gqa=True))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@needs_kernel
def test_rows_and_queries_do_not_depend_on_each_other() -> None:
    """Beams and drafts get what they would get alone."""
    parts, query = layer_of()
    whole = F.scaled_dot_product_attention(query, *parts, enable_gqa=True)
    for token in range(3):
        alone = F.scaled_dot_product_attention(query[:, :, token : token + 1], *parts, enable_gqa=True)
        torch.testing.assert_close(whole[:, :, token : token + 1], alone, rtol=1e-6, atol=1e-6)


@needs_kernel
def test_any_strides_of_queries_and_masks() -> None:
    parts, query = layer_of()
    want = F.scaled_dot_product_attention(query, *parts, enable_gqa=True)
    spread = numbers(2, 6, 3, 128)[:, :, :, ::2].copy_(query)
    column = torch.ones(3, 1, dtype=torch.bool)
    backwards = torch.zeros(1503, 3).mT
    for told in (column, backwards, torch.ones(1503, dtype=torch.bool)):
        mine, torchs = both(spread, *parts, attn_mask=told, enable_gqa=True)
        assert torch.equal(mine, want)
        torch.testing.assert_close(torchs, want, rtol=1e-5, atol=1e-6)


@needs_kernel
def test_greatest_numbers_stay_finite() -> None:
    """Half a step may lie beyond the greatest number of float16."""
    cache = QuantizedCache(Quantized(nbits=2, q_group_size=16, residual_length=0))
    value = torch.full((1, 1, 32, 16), 65504.0, dtype=torch.float16)
    value[:, :, :, ::2] = -65504.0
    cache.update(value * 0, value, 0)
    parts = cache.update(value[:, :, :1] * 0, value[:, :, :1], 0)
    assert F.scaled_dot_product_attention(value[:, :, :1], *parts).isfinite().all()


@pytest.fixture
def forgotten() -> Iterator[None]:
    """As in a process where no kernel was asked for yet."""
    quantized_kernel.kernel.cache_clear()
    yield
    quantized_kernel.kernel.cache_clear()


def refuse(*_: Any) -> Any:
    raise PipelineError("a C compiler was not found: install gcc")


@pytest.mark.usefixtures("forgotten")
@pytest.mark.parametrize("missing", ["builder", "compiler"])
def test_torch_does_it_where_nothing_can_be_built(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, query = layer_of()
    plain = [part.clone() for part in parts]
    asked: list[tuple[str, str]] = []

    def load(kind: str, name: str) -> Callable[..., Any]:
        asked.append((kind, name))
        if missing == "builder":
            raise PluginNotFound("there is none")
        return refuse

    monkeypatch.setattr(registry, "load", load)
    for _ in range(2):
        got = F.scaled_dot_product_attention(query, *parts, enable_gqa=True)
        want = F.scaled_dot_product_attention(query, *plain, enable_gqa=True)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
    assert asked == [("builders", "c")], "a failure is not tried again"


@pytest.mark.parametrize("axes", [{"axis_key": 0}, {"axis_value": -1}], ids=str)
def test_other_axes_are_torchs(axes: dict[str, int]) -> None:
    (key, _), query = layer_of(**axes)
    assert quantized_kernel.attend(key.layer, query, None, 0.1) is None


def test_a_mask_that_does_not_fit_is_an_error() -> None:
    parts, query = layer_of()
    with pytest.raises(RuntimeError, match="size"):
        F.scaled_dot_product_attention(query, *parts, attn_mask=torch.ones(7, dtype=torch.bool), enable_gqa=True)
