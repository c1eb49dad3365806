"""Every installed cache keeps the laws and its own promises, by itself and inside a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit import InputError
from decodekit.models import adapter_for
from decodekit.pipeline import cache_offers
from decodekit.registry import registry
from decodekit.testing import CacheContract, Installed, TinyLM, context, installed, results

# Options of each plugin worth testing apart, by name.
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "dynamic": [{}, {"reserve": 1}, {"reserve": 500}],
    "static": [{}, {"max_cache_len": 300}],
    "hybrid": [{}],
    "sliding_window": [{"window": 300}, {"window": 4}, {"window": 1, "rewind": 9}, {"window": 70, "rewind": 20}],
    "offloaded": [{}, {"reserve": 1}],
    "offloaded_static": [{}, {"max_cache_len": 300}],
    "disk": [{}, {"reserve": 1}],
    "quantized": [{}, {"nbits": 8}],
}
TOLERANCES = {"quantized": 0.3}
"""How far off numbers near 1 may come back; 0 where nothing is said."""

CASES = installed("caches", EXAMPLES)


def make(case: Any, rows: int = 1, max_length: int | None = 64) -> Any:
    return case.make().bind(context(rows=rows, max_length=max_length))


def test_there_are_caches_to_test() -> None:
    assert "dynamic" in {case.plugin.name for case in CASES if case.own}


class TestEveryCache(CacheContract):
    @pytest.fixture(autouse=True, params=CASES, ids=str)
    def _choose(self, request: pytest.FixtureRequest) -> None:
        self.case = request.param
        self.tolerance = TOLERANCES.get(request.param.plugin.name, 0.0)

    def make(self) -> Any:
        return self.case.make()


@pytest.mark.parametrize("case", [case for case in CASES if case.options.get("window", 99) > 40], ids=str)
@torch.no_grad()
def test_b25_cache_follows_its_rows(case: Any) -> None:
    """Four beams over twenty steps: each step's logits equal a cache-free pass over that beam's own tokens."""
    adapter = adapter_for(TinyLM().eval())
    cache = make(case, rows=4)
    if "reorder" not in cache_offers(cache):
        pytest.skip("reorder is not offered")
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 37, (4, 5), generator=random)
    fed = tokens
    for step in range(20):
        place = torch.arange(tokens.shape[1] - fed.shape[1], tokens.shape[1]).expand_as(fed)
        got = adapter.forward(fed, place, cache).logits
        whole = adapter.forward(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), None).logits
        torch.testing.assert_close(got, whole, rtol=1e-3, atol=1e-4)
        rows = torch.randint(4, (4,), generator=random) if step % 4 else torch.arange(4)
        cache.reorder_cache(rows)
        fed = torch.randint(3, 37, (4, 1), generator=random)
        tokens = torch.cat([tokens[rows], fed], 1)


class TestDynamic:
    """What only the dynamic cache promises."""

    case = Installed(registry.find("caches", "dynamic"), {}, own=True)

    def test_nothing_is_copied_per_token(self) -> None:
        cache = make(self.case, max_length=None)
        new, addresses = torch.ones(1, 2, 1, 4), set()
        for _ in range(1000):
            addresses.add(cache.update(new, new, 0)[0].data_ptr())
        assert len(addresses) < 12, f"{len(addresses)} buffers for 1000 tokens"

    def test_known_length_is_reserved_at_once(self) -> None:
        cache = make(self.case, max_length=1000)
        new = torch.ones(1, 2, 1, 4)
        assert len({cache.update(new, new, 0)[0].data_ptr() for _ in range(1000)}) == 1

    def test_keys_and_values_may_differ(self) -> None:
        cache = make(self.case)
        key, value = torch.randn(2, 3, 4, 8), torch.randn(2, 1, 4, 5)
        cache.update(key, value, 1)
        keys, values = cache.update(key, value, 1)
        assert torch.equal(keys, torch.cat([key, key], 2))
        assert torch.equal(values, torch.cat([value, value], 2))
        assert cache.get_seq_length() == 0
        assert cache.get_seq_length(1) == 8

    def test_other_number_of_rows_is_refused(self) -> None:
        cache = make(self.case)
        cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), 0)
        with pytest.raises(InputError, match="1 rows but 4 were fed; repeat its rows with batch_repeat_interleave"):
            cache.update(torch.ones(4, 2, 1, 4), torch.ones(4, 2, 1, 4), 0)
        cache.crop(0)
        cache.update(torch.ones(4, 2, 1, 4), torch.ones(4, 2, 1, 4), 0)

    def test_gradients_flow_through(self) -> None:
        cache = make(self.case)
        first = torch.randn(1, 2, 3, 4, requires_grad=True)
        cache.update(first, first, 0)
        keys, values = cache.update(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4), 0)
        (keys.sum() + values.sum()).backward()
        assert torch.equal(first.grad, torch.full_like(first, 2))

    def test_strange_state_is_refused(self) -> None:
        cache = make(self.case)
        flat, lone = torch.ones(2), torch.ones(1, 2, 3, 4)
        for state in ({"weight": lone}, {"keys.0": lone}, {"keys.0": flat, "values.0": flat}):
            with pytest.raises(InputError, match="no part of a cache's state"):
                cache.load(state)

    def test_empty_cache_is_true(self) -> None:
        assert make(self.case)


# -- caches that lie fail exactly the tests of what they get wrong ---------------------------------


def lying(**wrong: Any) -> dict[str, str]:
    """The tests that a dynamic cache with other methods fails."""
    from decodekit_caches.dynamic import DynamicCache

    liar = type("Liar", (DynamicCache,), wrong)

    class Suite(CacheContract):
        def make(self) -> Any:
            return liar()

    return {name: verdict for name, verdict in results(Suite()).items() if verdict not in ("ok", "skipped")}


def _first_layer_only(self: Any, rows: torch.Tensor) -> None:
    self.layers[0].select(rows, None)


def _shares(self: Any) -> Any:
    twin = type(self)()
    twin.layers = self.layers
    return twin


LIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "honest": ({}, set()),
    "crop(0) does nothing": (
        {"crop": lambda self, n: type(self).__mro__[1].crop(self, n) if n else None},
        {"test_crop"},
    ),
    "only the first layer is reordered": (
        {"reorder_cache": _first_layer_only},
        {"test_reorder", "test_reorder_tail", "test_select", "test_fork"},
    ),
    "forks share everything": ({"fork": _shares}, {"test_fork"}),
    "offers what it has not": ({"crop": None}, {"test_offers_what_it_has", "test_crop", "test_crop_of_an_empty_cache"}),
    "stores nothing": ({"load": lambda self, state: None}, {"test_store"}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_cache_fails_its_lie(lie: str) -> None:
    wrong, expected = LIES[lie]
    failed = set(lying(**wrong))
    assert failed >= expected
    assert failed <= expected | {"test_fork", "test_store"}


def test_mask_sizes_must_be_true() -> None:
    failed = lying(get_mask_sizes=lambda self, count, layer: (self.get_seq_length(layer) + count + 1, 0))
    assert "test_update_gives_everything_back" in failed
    assert "get_mask_sizes said" in failed["test_update_gives_everything_back"]
