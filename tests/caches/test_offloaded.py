"""Layers that live in host memory. Without an accelerator the copying is tried with the CPU as the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import decodekit_caches.offloaded as offloaded
import pytest
import torch
from decodekit import InputError, generate
from decodekit.models import adapter_for
from decodekit.testing import CacheContract, TinyLM
from decodekit_caches.offloaded import OffloadedCache
from decodekit_caches.staging import Staging
from decodekit_caches.static import Size


class Always(Staging):
    """Copies although the model computes where the layers are."""

    def idle(self, device: torch.device) -> bool:
        return False


class TestStaged(CacheContract):
    def make(self) -> Any:
        return OffloadedCache(staging=Always())


class TestStagedMany(CacheContract):
    """More layers than places on the device, in buffers that grow all the time."""

    layers = 5

    def make(self) -> Any:
        return OffloadedCache(reserve=1, staging=Always())


class TestStagedAlone(CacheContract):
    layers = 1

    def make(self) -> Any:
        return OffloadedCache(staging=Always())


class TestStagedStatic(CacheContract):
    layers = 3

    def make(self) -> Any:
        return OffloadedCache(size=Size(300), staging=Always())


class TestStagedWindows(CacheContract):
    layers = 4

    def make(self) -> Any:
        return OffloadedCache(windows=(4, None, 4, None), staging=Always())


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "t5"])
def test_beams_and_texts(small: Callable[[str], Any], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded, "Staging", Always)
    keys: dict[str, Any] = {"max_new_tokens": 16, "eos_token_id": None, "pad_token_id": 0}
    for more in ({}, {"num_beams": 3}):
        want = generate(small(name), [[5, 9, 8, 33]], use_cache=False, **keys, **more)
        for cache in ("offloaded", "offloaded_static"):
            assert torch.equal(generate(small(name), [[5, 9, 8, 33]], cache_implementation=cache, **keys, **more), want)


def test_layers_come_before_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second pass on each layer is on the device when it is asked for."""
    brought: list[tuple[int, int]] = []
    cache = OffloadedCache(staging=Always())
    bring, now = Staging._bring, -1

    def watch(self: Any, place: Any, layer: Any) -> None:
        brought.append((now, cache.layers.index(layer)))
        bring(self, place, layer)

    monkeypatch.setattr(Staging, "_bring", watch)
    new = torch.ones(1, 1, 1, 2)
    for step in range(3):
        brought.clear()
        for now in range(4):
            cache.update(new, new, now)
        if step:
            assert brought == [(at, (at + 1) % 4) for at in range(4)]


def test_only_layers_that_see_everything_leave_the_device() -> None:
    cache = OffloadedCache(windows=(4, None), staging=Always())
    new = torch.ones(1, 1, 1, 2)
    for layer in (0, 1):
        cache.update(new, new, layer)
    assert [type(layer).__name__ for layer in cache.layers] == ["SlidingLayer", "OffloadedLayer"]
    assert cache.is_sliding == [True, False]


def test_one_device() -> None:
    staging = Staging()
    staging.begin(torch.device("cpu"))
    with pytest.raises(InputError, match="serves one device"):
        staging.begin(torch.device("meta"))


def test_it_says_once_that_nothing_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloaded, "_said", False)
    with pytest.warns(UserWarning, match="saves nothing on a CPU"):
        generate(TinyLM().eval(), [[5]], cache_implementation="offloaded", max_new_tokens=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(TinyLM().eval(), [[5]], cache_implementation="offloaded_static", max_new_tokens=2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies beside the computation need a CUDA device")
@pytest.mark.parametrize("name", ["llama", "gemma3", "t5"])
def test_on_a_device(small: Callable[[str], Any], name: str) -> None:
    import copy

    model = copy.deepcopy(small(name)).cuda()
    keys: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": None, "pad_token_id": 0}
    for more in ({}, {"num_beams": 3}):
        want, *others = (
            generate(model, [[5, 9, 8, 33]], cache_implementation=cache, return_dict_in_generate=True, **keys, **more)
            for cache in ("dynamic", "offloaded", "offloaded_static")
        )
        for got in others:
            assert torch.equal(got.sequences, want.sequences)
            held = getattr(got.cache, "self_attention_cache", got.cache)
            assert {layer.keys.device.type for layer in held.layers if not layer.is_sliding} == {"cpu"}
    assert adapter_for(model).spec.device.type == "cuda"
