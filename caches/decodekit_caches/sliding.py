"""One layer that keeps the newest tokens only."""

from __future__ import annotations

import torch
from decodekit import InputError
from torch import Tensor

from .buffers import STEP, Layer


class SlidingLayer(Layer):
    """Buffers through which a window moves: written from left to right, and when they are full the window goes back
    to their beginning. That is once in many tokens, where a window that is shifted by each token copies all of it.

    window: tokens that a query sees, itself included. rewind: tokens further back that are kept, so that cropping that
    many leaves a whole window. reserve: tokens expected in all; buffers are no larger.
    """

    __slots__ = ("dropped", "past", "rewind", "window")
    is_sliding = True

    def __init__(self, window: int, rewind: int, reserve: int = 0) -> None:
        super().__init__(reserve)
        self.window, self.rewind = window, rewind
        self.past = window - 1
        """Earlier tokens that a new one sees."""
        self.dropped = 0

    def fresh(self) -> SlidingLayer:
        """An empty layer of the same kind."""
        return SlidingLayer(self.window, self.rewind, self.reserve)

    @property
    def kept(self) -> int:
        """Tokens that must stay when older ones go."""
        return self.past + self.rewind

    def mask_sizes(self, count: int) -> tuple[int, int]:
        """(keys that `append` will return for `count` more tokens, slot of the first)."""
        seen = min(self.length, self.past)
        return seen + count, self.dropped + self.length - seen

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write [B, H, Q, D] behind what is there and return it with the window before it."""
        start, count = self.length, key.shape[2]
        seen = start if start < self.past else self.past
        if key.requires_grad and torch.is_grad_enabled():
            key, value = self._join(key, value)
            return key.narrow(2, start - seen, seen + count), value.narrow(2, start - seen, seen + count)
        if start + count > self.capacity or key.shape[0] != self.rows:
            self._check_rows(key)
            if count + self.kept > self._most():
                return self._pass(key, value, seen)
            self._move(key, value)
            start = self.length
        mine, yours = self._key, self._value
        assert mine is not None
        assert yours is not None
        mine.narrow(2, start, count).copy_(key)
        yours.narrow(2, start, count).copy_(value)
        self.length = start + count
        return mine.narrow(2, start - seen, seen + count), yours.narrow(2, start - seen, seen + count)

    def _most(self) -> int:
        """Slots of the buffers once they are as large as they get."""
        return -(-(self.kept + max(STEP, self.kept // 4)) // STEP) * STEP

    def _size(self, end: int) -> int:
        return min(super()._size(end), self._most())

    def _move(self, key: Tensor, value: Tensor) -> None:
        """Make room for tokens like these, by larger buffers or by forgetting what nobody will see."""
        count = key.shape[2]
        held = min(self.length, self.kept)
        if self.length + count <= self._most() and self._size(self.length + count) > self.capacity:
            held = self.length
        surplus = self.length - held
        keys, values = self.keys, self.values
        size = self._size(held + count)
        if self.capacity >= max(size, held + count) and key.shape[0] == self.rows:
            mine, yours = self._key, self._value
        else:
            mine, yours = self._make(key, value, size)
            self.capacity = size
        if held and keys is not None and values is not None and mine is not None and yours is not None:
            # Where both places overlap, a copy in between keeps them from running into each other.
            clash = surplus < held and keys.data_ptr() == mine.data_ptr()
            for new, old in ((mine, keys), (yours, values)):
                old = old.narrow(2, surplus, held)
                new.narrow(2, 0, held).copy_(old.clone() if clash else old)
        self.dropped += surplus
        self.length, self.rows = held, key.shape[0]

    def _pass(self, key: Tensor, value: Tensor, seen: int) -> tuple[Tensor, Tensor]:
        """More new tokens than the buffers are meant for: attention sees them all, and the newest are kept."""
        count, held = key.shape[2], self.length
        keys, values = self.keys, self.values
        if held and keys is not None and values is not None:
            key, value = torch.cat([keys, key], 2), torch.cat([values, value], 2)
        total = held + count
        left = min(total, self.kept)
        size = self._size(left)
        if size > self.capacity or key.shape[0] != self.rows:
            self._make(key, value, size)
            self.capacity = size
        assert self._key is not None
        assert self._value is not None
        self._key.narrow(2, 0, left).copy_(key.narrow(2, total - left, left))
        self._value.narrow(2, 0, left).copy_(value.narrow(2, total - left, left))
        self.dropped += total - left
        self.length, self.rows = left, key.shape[0]
        return key.narrow(2, held - seen, seen + count), value.narrow(2, held - seen, seen + count)

    def _join(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        dropped = self.dropped
        joined = super()._join(key, value)
        self.dropped = dropped
        return joined

    def set(self, key: Tensor, value: Tensor, dropped: int = 0) -> None:
        """Hold these tensors [B, H, T, D] as shared ones, `dropped` tokens before them forgotten.

        Raises `InputError` where they are fewer than a window.
        """
        if dropped and key.shape[2] < self.past:
            raise InputError(f"the state holds {key.shape[2]} tokens of a layer that sees {self.window}")
        super().set(key, value)
        self.dropped = dropped

    def check_crop(self, length: int) -> None:
        """Raise `InputError` where the window before `length` tokens is forgotten already."""
        if 0 < length < self.dropped + self.length and length - self.dropped < min(length, self.past):
            gone, lost = self.dropped + self.length - length, min(length, self.past) - (length - self.dropped)
            raise InputError(
                f"{gone} tokens cannot be taken back: a layer that sees {self.window} has forgotten {lost} "
                f"that it would need; set cache_config={{'rewind': {gone}}}, or cache_implementation='dynamic'"
            )

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; what was forgotten stays so, unless nothing is kept."""
        if length <= 0:
            self.length = self.dropped = 0
        elif length < self.dropped + self.length:
            self.length = length - self.dropped

    def share(self) -> Layer:
        """A layer with the same content; whichever is written to first copies it then."""
        other = super().share()
        other.dropped = self.dropped
        return other

    def select(self, rows: Tensor, order: list[int] | None, start: int = 0) -> None:
        """Row i becomes former row `rows[i]`; `start` counts all tokens, forgotten ones included."""
        super().select(rows, order, max(start - self.dropped, 0))
