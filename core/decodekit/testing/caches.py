"""The conformance suite of key/value caches, held against a cache that merely concatenates."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from decodekit.pipeline import cache_offers

from .support import context

METHODS = {
    "crop": ("crop",),
    "reorder": ("reorder_cache",),
    "fork": ("fork",),
    "reorder_tail": ("reorder_tail",),
    "select": ("batch_select_indices", "batch_repeat_interleave"),
    "store": ("state", "load"),
    "compile": ("fixed", "advance"),
}
"""What a cache that offers an ability must have."""

Truth = list[tuple[Tensor, ...]]
"""Keys and values of each layer, [B, H, T, D]: everything that was fed."""


class CacheContract:
    """Subclass it in a file that pytest collects, and name what to test::

        class TestRing(CacheContract):
            def make(self):
                return Ring(window=64)

    `make` gives options, or a fresh cache. Keep `tolerance` at 0 unless the cache stores less than it is given
    (quantization). Tests of abilities that the cache does not offer are skipped.
    """

    rows, heads, width, layers = 3, 2, 4, 2
    longest = 300
    """Tokens fed at most; a cache of fixed size must have room for them."""
    tolerance = 0.0

    def make(self) -> Any:
        """Return fresh options or a fresh cache. It is called many times."""
        raise NotImplementedError(f"{type(self).__name__} must define make()")

    # -- helpers -----------------------------------------------------------------------------------

    def cache(self) -> Any:
        """An empty cache for a run that may reach `longest` tokens."""
        made = self.make()
        tokens = torch.full((self.rows, 1), 3)
        return made.bind(context(tokens, max_length=self.longest)) if hasattr(made, "bind") else made

    def feed(self, cache: Any, count: int, seed: int, rows: int | None = None, past: Truth | None = None) -> Truth:
        """Feed `count` tokens to every layer, check what comes back, and return all that was fed so far."""
        random = torch.Generator().manual_seed(seed)
        shape = (rows or self.rows, self.heads, count, self.width)
        truth: Truth = []
        for layer in range(self.layers):
            key, value = torch.randn(shape, generator=random), torch.randn(shape, generator=random)
            whole: tuple[Tensor, ...] = (key, value)
            if past is not None:
                whole = tuple(torch.cat(pair, 2) for pair in zip(past[layer], whole, strict=True))
            size, offset = cache.get_mask_sizes(count, layer)
            got = cache.update(key.clone(), value.clone(), layer)
            self.compare(got, whole, int(size), int(offset), f"layer {layer}, {count} more tokens")
            truth.append(whole)
        total = truth[0][0].shape[2]
        assert int(cache.get_seq_length()) == total, f"get_seq_length() is {int(cache.get_seq_length())}, not {total}"
        return truth

    def compare(self, got: Any, whole: Any, size: int, offset: int, what: str) -> None:
        """What `update` returned against everything fed: slots `offset` and on, unwritten ones at the end ignored."""
        for name, mine, full in zip(("keys", "values"), got, whole, strict=True):
            assert mine.shape[2] == size, f"{what}: {name} have {mine.shape[2]} slots, get_mask_sizes said {size}"
            kept = full[:, :, offset : offset + size]
            assert torch.allclose(mine[:, :, : kept.shape[2]], kept, rtol=0, atol=self.tolerance), (
                f"{what}: {name} differ from what was fed"
            )

    def able(self, ability: str) -> Any:
        """An empty cache, or skip the test."""
        cache = self.cache()
        if ability not in cache_offers(cache):
            self._skip(f"{ability} is not offered")
        return cache

    @staticmethod
    def _skip(why: str) -> NoReturn:
        import pytest

        pytest.skip(why)

    # -- attention ---------------------------------------------------------------------------------

    def test_starts_empty(self) -> None:
        """Nothing is held, and layers never written to hold nothing."""
        cache = self.cache()
        assert int(cache.get_seq_length()) == 0
        assert int(cache.get_seq_length(self.layers - 1)) == 0
        size, offset = cache.get_mask_sizes(5, 0)
        assert int(offset) + int(size) >= 5

    def test_update_gives_everything_back(self) -> None:
        """Prompts, single tokens and chunks, in the slots that `get_mask_sizes` announced."""
        cache, truth = self.cache(), None
        for seed, count in enumerate((5, 1, 1, 7, 1, 3)):
            truth = self.feed(cache, count, seed, past=truth)

    def test_grows_without_losing_anything(self) -> None:
        """Token by token, past every boundary of its buffers."""
        cache, truth = self.cache(), None
        for step in range(min(self.longest, 300)):
            truth = self.feed(cache, 1, step, past=truth)

    def test_keeps_copies(self) -> None:
        """What the model does with its own tensors afterwards does not reach the cache, and they stay as they were."""
        cache = self.cache()
        key = torch.randn(self.rows, self.heads, 4, self.width)
        value, before, passed = key.clone(), key.clone(), {"position_ids": 1}
        cache.update(key, value, 0, kwargs=passed)
        assert torch.equal(key, before), "update wrote into the keys it was given"
        assert torch.equal(value, before), "update wrote into the values it was given"
        assert passed == {"position_ids": 1}, "update wrote into the caller's keyword arguments"
        key.zero_()
        value.zero_()
        more = torch.ones(self.rows, self.heads, 1, self.width)
        size, offset = cache.get_mask_sizes(1, 0)
        got = cache.update(more, more, 0)
        whole = torch.cat([before, more], 2)
        self.compare(got, (whole, whole), int(size), int(offset), "after the model cleared its own tensors")

    def test_goes_on_outside_inference_mode(self) -> None:
        """Filled in inference mode, continued without it."""
        cache = self.cache()
        with torch.inference_mode():
            truth = self.feed(cache, 4, 0)
        with torch.no_grad():
            self.feed(cache, 2, 1, past=truth)

    def test_offers_what_it_has(self) -> None:
        """Every ability offered has its methods, and the options class names no other."""
        cache = self.cache()
        offers = cache_offers(cache)
        for ability in sorted(offers):
            for method in METHODS.get(ability, ()):
                assert callable(getattr(cache, method, None)), f"offers {ability}, but has no {method}"
        provides = getattr(self.make(), "provides", None)
        if provides is not None:
            told = {name.removeprefix("cache:") for name in provides}
            assert told == set(offers), f"the class provides {sorted(told)}, the cache offers {sorted(offers)}"

    # -- abilities ---------------------------------------------------------------------------------

    def test_crop(self) -> None:
        """Tokens are forgotten from the end, and new ones take their places."""
        for argument, kept in ((6, 6), (-3, 6), (0, 0), (-9, 0), (-50, 0), (9, 9), (40, 9)):
            cache = self.able("crop")
            truth = self.feed(cache, 9, 0)
            cache.crop(argument)
            assert int(cache.get_seq_length()) == kept, f"crop({argument}) of 9 left {int(cache.get_seq_length())}"
            short: Truth = [(k[:, :, :kept], v[:, :, :kept]) for k, v in truth]
            self.feed(cache, 2, 1, past=self.feed(cache, 1, 2, past=short))

    def test_crop_of_an_empty_cache(self) -> None:
        """Nothing to forget is no error."""
        cache = self.able("crop")
        cache.crop(-1)
        cache.crop(3)
        assert int(cache.get_seq_length()) == 0

    def test_reorder(self) -> None:
        """Row i becomes former row `rows[i]`, doubled and dropped rows included, again and again."""
        cache, n = self.able("reorder"), self.rows
        truth = self.feed(cache, 5, 0)
        orders = ([*range(n)], [*reversed(range(n))], [n - 1] * n, [0, *range(n - 1)])
        for seed, order in enumerate(orders, 1):
            rows = torch.tensor(order)
            cache.reorder_cache(rows)
            truth = [(k[rows], v[rows]) for k, v in truth]
            truth = self.feed(cache, 1, seed, past=truth)
            assert rows.tolist() == order, "reorder_cache wrote into its argument"

    def test_reorder_tail(self) -> None:
        """Rows with a common beginning trade places as with `reorder_cache`; a row may be read and written at once."""
        cache, n, common = self.able("reorder_tail"), self.rows, 4
        first = torch.zeros(n, dtype=torch.long)
        truth: Truth = [(k[first], v[first]) for k, v in self.feed(cache, common, 0)]
        cache.reorder_cache(first)
        truth = self.feed(cache, 3, 1, past=truth)
        for seed, order in enumerate(([n - 1] * n, [*range(n)], [*reversed(range(n))], [0, *range(n - 1)]), 2):
            rows = torch.tensor(order)
            cache.reorder_tail(rows, common)
            truth = [(k[rows], v[rows]) for k, v in truth]
            truth = self.feed(cache, 1, seed, past=truth)

    def test_select(self) -> None:
        """Rows are kept, dropped and repeated."""
        cache = self.able("select")
        truth = self.feed(cache, 5, 0)
        rows = torch.tensor([self.rows - 1, 0])
        cache.batch_select_indices(rows)
        truth = [(k[rows], v[rows]) for k, v in truth]
        truth = self.feed(cache, 1, 1, rows=2, past=truth)
        cache.batch_repeat_interleave(2)
        truth = [(k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)) for k, v in truth]
        self.feed(cache, 3, 2, rows=4, past=truth)

    def test_fork(self) -> None:
        """Neither copy sees what happens to the other."""
        for first in (0, 1):
            cache = self.able("fork")
            truth = self.feed(cache, 6, 0)
            both = [cache, cache.fork()]
            one, other = both[first], both[1 - first]
            held = self.feed(one, 2, 1, past=truth)
            if "crop" in cache_offers(one):
                one.crop(3)
                held = self.feed(one, 4, 2, past=[(k[:, :, :3], v[:, :, :3]) for k, v in held])
            if "reorder" in cache_offers(one):
                rows = torch.arange(self.rows).flip(0)
                one.reorder_cache(rows)
                held = [(k[rows], v[rows]) for k, v in held]
            self.feed(other, 3, 3, past=truth)
            self.feed(one, 1, 4, past=held)

    def test_store(self) -> None:
        """What `state` gives, written to bytes and read back, rebuilds the cache; both go on by themselves."""
        from safetensors.torch import load, save

        cache = self.able("store")
        truth = self.feed(cache, 6, 0)
        state = dict(cache.state())
        data = save(state)
        self.feed(cache, 2, 1, past=truth)
        assert save(state) == data, "the state changed when the cache went on"
        again = self.cache()
        self.feed(again, 3, 9)
        read = load(data)
        again.load(read)
        assert int(again.get_seq_length()) == 6
        later = self.feed(again, 2, 2, past=truth)
        if "crop" in cache_offers(again):
            again.crop(2)
            self.feed(again, 2, 3, past=[(k[:, :, :2], v[:, :, :2]) for k, v in later])
        assert save(read) == data, "the cache wrote into the state it was loaded from"

    def test_compile(self) -> None:
        """A pass of fixed shapes over all slots, between passes of the usual kind, crops and reorders.

        `fixed(rows)` gives the cache of one such pass, or None while nothing is held: its length is a tensor, it hands
        out every slot, all of them numbers, and a pass may be run again until `advance` says that it is over.
        """
        cache, n = self.able("compile"), self.rows
        assert cache.fixed(n) is None, "an empty cache has nothing to hand out"
        truth = self.feed(cache, 5, 0)
        for seed in range(1, 7):
            if seed == 3 and "crop" in cache_offers(cache):
                cache.crop(4)
                truth = [(k[:, :, :4], v[:, :, :4]) for k, v in truth]
            if seed == 4 and "reorder" in cache_offers(cache):
                rows = torch.tensor([n - 1, *range(n - 1)])
                cache.reorder_cache(rows)
                truth = [(k[rows], v[rows]) for k, v in truth]
            if seed == 5 and "fork" in cache_offers(cache):
                self.feed(cache.fork(), 2, 9, past=truth)
            view, random = cache.fixed(n), torch.Generator().manual_seed(seed)
            held = truth[0][0].shape[2]
            assert isinstance(view.get_seq_length(), Tensor), "a length in Python would make a graph for each length"
            assert int(view.get_seq_length()) == held
            after: Truth = []
            for layer, past in enumerate(truth):
                pair = [torch.randn(n, self.heads, 1, self.width, generator=random) for _ in past]
                after.append(tuple(torch.cat(both, 2) for both in zip(past, pair, strict=True)))
                size, offset = view.get_mask_sizes(1, layer)
                view.update(torch.zeros_like(pair[0]), torch.zeros_like(pair[1]), layer)
                got = view.update(*pair, layer)
                self.compare(got, after[layer], size, offset, f"layer {layer}, one more token of fixed shape")
                assert all(bool(part.isfinite().all()) for part in got), "unwritten slots hold no numbers"
            cache.advance(1)
            truth = after
            assert int(cache.get_seq_length()) == held + 1
            truth = self.feed(cache, 1, seed + 10, past=truth)
