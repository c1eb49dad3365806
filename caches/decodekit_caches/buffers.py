"""Keys and values of one layer, in buffers [B, H, capacity, D] of which the first slots are filled.

This layout keeps every head's keys together: fused attention reads views of the filled part as fast as contiguous
tensors, and batched matrix products need no copy, which the layout with heads behind tokens forces (40 times slower
on a CPU).
"""

from __future__ import annotations

import functools

import torch
from decodekit import GenerationError, InputError
from torch import Tensor

UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
STEP = 64
"""Buffers are multiples of this many slots, unless a fixed size was asked for."""


@functools.lru_cache(maxsize=64)
def trades(order: tuple[int, ...]) -> tuple[tuple[tuple[int, int], ...], bool]:
    """(new row, former row) of those that move, and whether no row is both read and written.

    Beams that continue themselves stay where they are. All layers move alike: the answer is found once for them.
    """
    moved = tuple((i, row) for i, row in enumerate(order) if i != row)
    return moved, not {i for i, _ in moved} & {row for _, row in moved}


def no_memory(key: Tensor, value: Tensor, capacity: int, remedy: str) -> GenerationError:
    """The words for buffers of `capacity` slots that there is no memory for; `key` and `value`: tokens for them."""
    slot = sum(part.shape[0] * part.shape[1] * part.shape[3] * part.element_size() for part in (key, value))
    size = capacity * slot
    name, unit = next((pair for pair in UNITS if size >= pair[1]), UNITS[-1])
    wanted = f"{size / unit:.1f} {name}"
    return GenerationError(
        f"there is no memory for a cache of {capacity} tokens: {remedy}, or feed fewer rows or tokens, or set "
        f"cache_implementation='quantized' (a quarter of the bytes and less) or 'disk'. Each layer wants {wanted} for "
        f"{key.shape[0]} rows, {slot} bytes a token, on {key.device}"
    )


class Layer:
    """Buffers that grow by half when they are full. `reserve`: slots to make room for at once.

    `capacity` 0 with `length` > 0: the tensors are shared with someone else and copied before anything is written.
    """

    __slots__ = ("_both", "_key", "_value", "capacity", "length", "reserve", "rows")
    is_croppable = True
    is_compileable = False
    is_sliding = False
    remedy = "lower cache_config's reserve"
    """What makes the buffers smaller."""
    dropped = 0
    """Tokens that came before the first slot and are forgotten."""

    def __init__(self, reserve: int = 0) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._both: Tensor | None = None
        """Where keys and values are of one shape: their buffers as one tensor [2, B, H, capacity, D]."""
        self.reserve = reserve
        self.capacity = self.length = self.rows = 0

    def fresh(self) -> Layer:
        """An empty layer of the same kind."""
        return Layer(self.reserve)

    @property
    def keys(self) -> Tensor | None:
        """Filled keys [B, H, T, D], a view; None before the first update."""
        return None if self._key is None else self._key.narrow(2, 0, self.length)

    @property
    def values(self) -> Tensor | None:
        """Filled values [B, H, T, D], a view; None before the first update."""
        return None if self._value is None else self._value.narrow(2, 0, self.length)

    @property
    def is_initialized(self) -> bool:
        """Whether anything was ever written."""
        return self._key is not None

    def get_seq_length(self) -> int:
        """Tokens seen, forgotten ones included."""
        return self.dropped + self.length

    def mask_sizes(self, count: int) -> tuple[int, int]:
        """(keys that `append` will return for `count` more tokens, slot of the first)."""
        return self.length + count, 0

    # -- writing -----------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write [B, H, Q, D] behind what is there and return what attention must see."""
        start = self.length
        end = start + key.shape[2]
        if key.requires_grad and torch.is_grad_enabled():
            return self._join(key, value)
        if end > self.capacity or key.shape[0] != self.rows:
            self._grow(key, value, end)
        mine, yours = self._key, self._value
        assert mine is not None
        assert yours is not None
        mine.narrow(2, start, end - start).copy_(key)
        yours.narrow(2, start, end - start).copy_(value)
        self.length = end
        return mine.narrow(2, 0, end), yours.narrow(2, 0, end)

    def claim(self, shape: tuple[int, int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, int] | None:
        """Count tokens [B, H, Q, D] as written that the caller writes: whole buffers, and the slot of the first.

        None where `append` would do more than write, or give something else: nothing is counted then.
        """
        mine, yours, end = self._key, self._value, self.length + shape[2]
        if (
            mine is None
            or yours is None
            or end > self.capacity
            or type(self).append is not Layer.append
            or (mine.shape[0], mine.shape[1], mine.shape[3]) != (shape[0], shape[1], shape[3])
            or yours.shape != mine.shape
            or mine.dtype is not dtype
            or yours.dtype is not dtype
            or mine.device.type != "cpu"
        ):
            return None
        start, self.length = self.length, end
        return mine, yours, start

    def _check_rows(self, key: Tensor) -> None:
        if self.length and key.shape[0] != self.rows:
            raise InputError(
                f"the cache holds {self.rows} rows but {key.shape[0]} were fed; "
                f"repeat its rows with batch_repeat_interleave(n), or pass a cache of the same prompts"
            )

    def _size(self, end: int) -> int:
        """Slots of the buffers that shall hold `end` tokens."""
        wanted = max(end, self.reserve, self.capacity * 3 // 2)
        return -(-wanted // STEP) * STEP

    def _grow(self, key: Tensor, value: Tensor, end: int) -> None:
        self._check_rows(key)
        capacity = self._size(end)
        keys, values = self.keys, self.values
        mine, yours = self._make(key, value, capacity)
        if self.length and keys is not None and values is not None:
            mine.narrow(2, 0, self.length).copy_(keys)
            yours.narrow(2, 0, self.length).copy_(values)
        self.capacity, self.rows = capacity, key.shape[0]

    def _make(self, key: Tensor, value: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """New buffers for rows like these."""
        self._both = None
        try:
            if key.shape == value.shape and key.dtype == value.dtype and key.device == value.device:
                rows = key.shape[0]
                self._both = self._room(key, capacity, 2 * rows).view(2, rows, key.shape[1], capacity, key.shape[3])
                self._key, self._value = self._both[0], self._both[1]
            else:
                self._key = self._room(key, capacity, key.shape[0])
                self._value = self._room(value, capacity, value.shape[0])
        except RuntimeError as error:  # of torch's allocators, on whatever device
            raise no_memory(key, value, capacity, self.remedy) from error
        return self._key, self._value

    def _room(self, like: Tensor, capacity: int, rows: int) -> Tensor:
        """Memory [rows, H, capacity, D] for rows as `like`."""
        # Buffers made inside inference_mode could never be written outside it.
        with torch.inference_mode(False):
            return torch.empty(rows, like.shape[1], capacity, like.shape[3], dtype=like.dtype, device=like.device)

    def _join(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        # Writing in place would cut the graph that gradients flow back through.
        if self.length and self._key is not None and self._value is not None:
            key = torch.cat([self._key.narrow(2, 0, self.length), key], 2)
            value = torch.cat([self._value.narrow(2, 0, self.length), value], 2)
        self.set(key, value)
        return key, value

    def set(self, key: Tensor, value: Tensor, dropped: int = 0) -> None:
        """Hold these tensors [B, H, T, D] as shared ones; only layers that forget can have `dropped` any."""
        if dropped:
            raise InputError(f"the state lacks the first {dropped} tokens, and this cache keeps all of them")
        self._key, self._value, self._both = key, value, None
        self.length, self.rows, self.capacity = key.shape[2], key.shape[0], 0

    # -- changing what is there --------------------------------------------------------------------

    def check_crop(self, length: int) -> None:
        """Raise `InputError` where `crop` to `length` tokens cannot be done."""

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.length = min(self.length, length)

    def share(self) -> Layer:
        """A layer with the same content; whichever is written to first copies it then."""
        other = self.fresh()
        other._key, other._value = self._key, self._value
        other.length, other.rows = self.length, self.rows
        self.capacity = 0
        return other

    def select(self, rows: Tensor, order: list[int] | None, start: int = 0) -> None:
        """Row i becomes former row `rows[i]`; `order` is the same as a list where reading it costs nothing.

        start: slots before it are equal already in rows that trade places, and need no copy.
        """
        if self._key is None or self._value is None:
            return
        rows = rows.to(self._key.device)
        if order is not None and len(order) == self.rows and self.capacity and not self._key.requires_grad:
            moved, free = trades(tuple(order))
            start = min(start, self.length)
            for buffer in (self._key, self._value) if self._both is None else (self._both,):
                tail = buffer.narrow(-2, start, self.length - start)
                if free:
                    for i, row in moved:
                        tail.select(-4, i).copy_(tail.select(-4, row))
                else:
                    here = torch.tensor([i for i, _ in moved], dtype=torch.long, device=rows.device)
                    tail.index_copy_(-4, here, tail.index_select(-4, rows.index_select(0, here)))
            return
        keys, values = self.keys, self.values
        assert keys is not None
        assert values is not None
        key, value = keys.index_select(0, rows), values.index_select(0, rows)
        length = self.length
        capacity = self.capacity or self._size(length)
        mine, yours = self._make(key, value, capacity)
        mine.narrow(2, 0, length).copy_(key)
        yours.narrow(2, 0, length).copy_(value)
        self.rows, self.capacity = key.shape[0], capacity
