"""Caches of encoder-decoder models: the decoder's own keys and values beside those of the encoder's output."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from decodekit.pipeline import cache_offers
from torch import Tensor


@functools.cache
def pair() -> Any:
    """transformers' EncoderDecoderCache, which the models insist on, around any cache for the decoder's own part."""
    from transformers import DynamicCache, EncoderDecoderCache

    class PairedCache(EncoderDecoderCache):  # type: ignore[misc]
        """The cache `own` for self-attention, and one for cross-attention that is filled once."""

        def __init__(self, own: Any, slots: Sequence[int]) -> None:
            # Not the base's: it refuses caches that are no transformers class.
            self.self_attention_cache = own
            self.cross_attention_cache = DynamicCache()
            self.is_updated: dict[int, bool] = {}
            self._prompts = list(slots)
            """Which encoder output each row reads."""

        def __bool__(self) -> bool:
            return True

        def offers(self) -> frozenset[str]:
            """What the decoder's own part offers."""
            return cache_offers(self.self_attention_cache) - {"store", "paged"}

        def crop(self, length: int, /) -> None:
            """Keep the first `length` tokens of the decoder; the encoder's part stays."""
            self.self_attention_cache.crop(length)

        def reorder_cache(self, rows: Tensor, /) -> None:
            """Make row i a copy of former row `rows[i]`."""
            self.self_attention_cache.reorder_cache(rows)
            self._reorder_cross(rows)

        def reorder_tail(self, rows: Tensor, start: int, /) -> None:
            """`reorder_cache`, told that all tokens before `start` are the same in the rows that trade places."""
            self.self_attention_cache.reorder_tail(rows, start)
            self._reorder_cross(rows)

        def _reorder_cross(self, rows: Tensor) -> None:
            new = [self._prompts[row] for row in rows.tolist()]
            if new != self._prompts:  # rows that read the same encoder output have nothing to trade
                self.cross_attention_cache.reorder_cache(rows)
            self._prompts = new

        def batch_select_indices(self, indices: Tensor, /) -> None:
            """Keep only these rows, int64 or bool [B], in this order."""
            self.self_attention_cache.batch_select_indices(indices)
            self.cross_attention_cache.batch_select_indices(indices)
            kept = indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices
            self._prompts = [self._prompts[row] for row in kept.tolist()]

        def batch_repeat_interleave(self, repeats: int, /) -> None:
            """Repeat every row `repeats` times, neighbours first."""
            self.self_attention_cache.batch_repeat_interleave(repeats)
            self.cross_attention_cache.batch_repeat_interleave(repeats)
            self._prompts = [prompt for prompt in self._prompts for _ in range(repeats)]

        def fixed(self, rows: int, count: int = 1) -> Any:
            """The decoder's part for a compiled pass, beside the same encoder's part; None where it has none now."""
            own = self.self_attention_cache.fixed(rows, count)
            if own is None:
                return None
            other = copy.copy(self)
            other.self_attention_cache = own
            return other

        def advance(self, count: int = 1) -> None:
            """`count` more tokens of the decoder are held: a compiled pass has written them."""
            self.self_attention_cache.advance(count)

        def fork(self) -> Any:
            """Return an independent copy; the encoder's part, which nobody writes to again, is shared."""
            other = copy.copy(self)
            other.self_attention_cache = self.self_attention_cache.fork()
            other.cross_attention_cache = copy.deepcopy(self.cross_attention_cache)
            other.is_updated, other._prompts = dict(self.is_updated), list(self._prompts)
            return other

    return PairedCache
