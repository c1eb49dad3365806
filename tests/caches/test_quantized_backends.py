"""The quantized cache with blocks that optimum-quanto or hqq pack: what ours can, theirs can."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from decodekit import DecodekitError, generate, load
from decodekit.testing import CacheContract
from decodekit_caches.quantized import Quantized, QuantizedCache
from decodekit_caches.quantized_backends import PACKS, package
from torch import Tensor

SMALL: dict[str, Any] = {"q_group_size": 8, "residual_length": 3}
PACKAGES = {"quanto": "optimum.quanto", "hqq": "hqq"}
FORMS = [(name, bits) for name in PACKAGES for bits in PACKS[name]]


@pytest.fixture(params=PACKAGES)
def backend(request: pytest.FixtureRequest) -> str:
    there(request.param)
    return request.param


def there(backend: str) -> None:
    pytest.importorskip(PACKAGES[backend], reason=f"an extra: pip install 'decodekit[{backend}]'")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize(("backend", "bits"), FORMS)
@pytest.mark.parametrize("axes", [(False, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("width", [8, 12])
def test_numbers_are_near_what_they_were(backend: str, bits: int, axes: tuple[bool, bool], width: int) -> None:
    """Within a step of the group, as each package rounds: a step is the reach over the number of codes."""
    there(backend)
    along = {"quanto": (0, -1), "hqq": (1, 0)}[backend]
    told = {"axis_key": along[axes[0]], "axis_value": along[axes[1]]}
    cache = QuantizedCache(Quantized(backend=backend, nbits=bits, q_group_size=8, residual_length=0, **told))
    key, value = numbers(2, 3, 40, width), numbers(2, 3, 40, width, seed=1)
    cache.update(key, value, 0)
    new = numbers(2, 3, 1, width)
    for mine, true in zip(cache.update(new, new, 0), (key, value), strict=True):
        off = (mine[:, :, :40] - true).abs()
        reach = float(true.max() - true.min())
        assert 0 < off.max() <= reach / (2**bits - 1)
        assert off.mean() <= 0.35 * reach / (2**bits - 1)
        assert torch.equal(mine[:, :, 40:], new)


def test_equal_numbers_come_back(backend: str) -> None:
    cache = QuantizedCache(Quantized(backend=backend, q_group_size=8, residual_length=0))
    key = torch.full((1, 1, 16, 8), 2.5)
    cache.update(key, key, 0)
    for mine in cache.update(key[:, :, :1], key[:, :, :1], 0):
        torch.testing.assert_close(mine[:, :, :16], key)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(backend: str, dtype: torch.dtype) -> None:
    cache = QuantizedCache(Quantized(backend=backend, **SMALL))
    key = numbers(1, 2, 40, 8, dtype=dtype)
    cache.update(key, key, 0)
    found = cache.update(key[:, :, :1], key[:, :, :1], 0)[0]
    assert found.dtype == dtype
    assert (found[:, :, :40] - key).abs().max() < 0.6


def test_rows_share_what_they_have_in_common(backend: str) -> None:
    cache = QuantizedCache(Quantized(backend=backend, **SMALL))
    key = numbers(1, 2, 80, 8)
    cache.update(key, key, 0)
    before, packed = cache.layers[0].keys, [blocks.nbytes for blocks in cache.layers[0].packed]
    cache.batch_repeat_interleave(4)
    assert [blocks.nbytes for blocks in cache.layers[0].packed] == packed
    assert torch.equal(cache.layers[0].keys, before.expand(4, -1, -1, -1))


def test_beams_chunks_and_a_cache_that_goes_on(backend: str) -> None:
    lm: Any = load("bundled")
    prompt = lm.tokens("It is a truth universally acknowledged, that a single man in possession of a good fortune")
    keys: dict[str, Any] = {
        "max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "cache_implementation": "quantized",
        "cache_config": {"backend": backend, "nbits": 4, **SMALL}, "return_dict_in_generate": True,
    }  # fmt: skip
    assert generate(lm, [prompt], num_beams=3, **keys).sequences.shape[1] == len(prompt) + 12
    generate(lm, [prompt], prefill_chunk_size=5, **keys)
    first = generate(lm, [prompt], **keys)
    assert first.cache.options.backend == backend
    keys = {name: value for name, value in keys.items() if "cache" not in name}
    again = generate(lm, first.sequences, cache=first.cache, **keys)
    assert again.sequences.shape[1] == len(prompt) + 24


@pytest.mark.parametrize("backend", PACKAGES)
def test_what_is_not_installed_is_named_with_its_extra(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything runs; told by a package that is never there, and by the real one where it is not."""
    with pytest.raises(ImportError, match=rf"needs nothing: pip install 'decodekit\[{backend}\]'"):
        package("no_such_package_at_all", "nothing", backend)
    if importlib.util.find_spec(PACKAGES[backend].partition(".")[0]) is None:
        with pytest.raises((DecodekitError, ImportError), match=rf"pip install 'decodekit\[{backend}\]'"):
            generate(load("bundled"), [[5]], cache_implementation="quantized", cache_config={"backend": backend})


class TestQuanto(CacheContract):
    tolerance = 0.3

    def make(self) -> Any:
        there("quanto")
        return Quantized(backend="quanto", nbits=4, **SMALL)


class TestHqq(CacheContract):
    tolerance = 0.05

    def make(self) -> Any:
        there("hqq")
        return Quantized(backend="hqq", nbits=8, **SMALL)
