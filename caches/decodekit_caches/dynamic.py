"""A key/value cache that grows as needed and copies nothing per token.

Each layer keeps its keys and values in buffers [B, H, capacity, D] and hands out views of the filled part. This
layout keeps every head's keys together: fused attention reads such views as fast as contiguous tensors, and batched
matrix products need no copy, which the layout with heads behind tokens forces (40 times slower on a CPU).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from decodekit import GenerationError, InputError, at_least, option
from torch import Tensor

if TYPE_CHECKING:
    from decodekit import BindContext

OFFERS = frozenset({"crop", "reorder", "reorder_tail", "fork", "select", "store"})
STEP = 64
AHEAD = 4096
"""Most slots beyond the prompt reserved at once unless `reserve` says more: on a GPU that memory is really taken."""


@attrs.frozen
class Dynamic:
    """Keep keys and values of every token, in buffers that grow by half when they are full."""

    provides: ClassVar[frozenset[str]] = frozenset(f"cache:{name}" for name in OFFERS)
    reserve: int | None = option(
        "Slots to make room for at once; unset: up to the run's greatest length, where it is known.",
        default=None,
        check=at_least(1),
    )

    def bind(self, ctx: BindContext, /) -> DynamicCache:
        """Return an empty cache for one call."""
        reserve = self.reserve
        if reserve is None and ctx.max_length is not None:
            reserve = min(ctx.max_length, ctx.prompt_width + AHEAD)
        return DynamicCache(reserve)


class _Layer:
    """Keys and values of one layer: buffers, of which the first `length` slots are filled.

    `capacity` 0 with `length` > 0: the tensors are shared with someone else and copied before anything is written.
    """

    __slots__ = ("_both", "_key", "_value", "capacity", "length", "rows")
    is_croppable = True
    is_compileable = False
    is_sliding = False

    def __init__(self) -> None:
        self._key: Tensor | None = None
        self._value: Tensor | None = None
        self._both: Tensor | None = None
        """Where keys and values are of one shape: their buffers as one tensor [2, B, H, capacity, D]."""
        self.capacity = self.length = self.rows = 0

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
        """Tokens held."""
        return self.length

    def append(self, key: Tensor, value: Tensor, reserve: int) -> tuple[Tensor, Tensor]:
        start = self.length
        end = start + key.shape[2]
        if key.requires_grad and torch.is_grad_enabled():
            return self._join(key, value)
        if end > self.capacity or key.shape[0] != self.rows:
            self._grow(key, value, end, reserve)
        mine, yours = self._key, self._value
        assert mine is not None
        assert yours is not None
        mine.narrow(2, start, end - start).copy_(key)
        yours.narrow(2, start, end - start).copy_(value)
        self.length = end
        return mine.narrow(2, 0, end), yours.narrow(2, 0, end)

    def _grow(self, key: Tensor, value: Tensor, end: int, reserve: int) -> None:
        if self.length and key.shape[0] != self.rows:
            raise InputError(
                f"the cache holds {self.rows} rows but {key.shape[0]} were fed; "
                f"repeat its rows with batch_repeat_interleave(n), or pass a cache of the same prompts"
            )
        wanted = max(end, reserve, self.capacity * 3 // 2)
        capacity = -(-wanted // STEP) * STEP
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
                self._both = _room(key, capacity, 2 * rows).view(2, rows, key.shape[1], capacity, key.shape[3])
                self._key, self._value = self._both[0], self._both[1]
            else:
                self._key, self._value = _room(key, capacity), _room(value, capacity)
        except RuntimeError as error:  # of torch's allocators, on whatever device
            fix = "lower cache_config's reserve, or the number of rows and tokens"
            raise GenerationError(f"there is no memory for a cache of {capacity} tokens: {fix}") from error
        return self._key, self._value

    def _join(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        # Writing in place would cut the graph that gradients flow back through.
        if self.length and self._key is not None and self._value is not None:
            key = torch.cat([self._key.narrow(2, 0, self.length), key], 2)
            value = torch.cat([self._value.narrow(2, 0, self.length), value], 2)
        self.set(key, value)
        return key, value

    def set(self, key: Tensor, value: Tensor) -> None:
        """Hold these tensors [B, H, T, D] as shared ones."""
        self._key, self._value, self._both = key, value, None
        self.length, self.rows, self.capacity = key.shape[2], key.shape[0], 0

    def share(self) -> _Layer:
        """A layer with the same content; whichever is written to first copies it then."""
        other = _Layer()
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
        if order is None:
            rows = rows.to(self._key.device)
        elif len(order) == self.rows and self.capacity and not self._key.requires_grad:
            # Beams that continue themselves stay where they are.
            moved = [(i, row) for i, row in enumerate(order) if i != row]
            buffers = [self._key, self._value] if self._both is None else [self._both]
            free = not {i for i, _ in moved} & {row for _, row in moved}
            here = torch.tensor([i for i, _ in moved])
            for buffer in buffers:
                tail = buffer.narrow(-2, start, self.length - start)
                if free:  # no row is both read and written
                    for i, row in moved:
                        tail.select(-4, i).copy_(tail.select(-4, row))
                else:
                    tail.index_copy_(-4, here, tail.index_select(-4, rows.index_select(0, here)))
            return
        keys, values = self.keys, self.values
        assert keys is not None
        assert values is not None
        key, value = keys.index_select(0, rows), values.index_select(0, rows)
        length = self.length
        capacity = self.capacity or -(-length // STEP) * STEP
        mine, yours = self._make(key, value, capacity)
        mine.narrow(2, 0, length).copy_(key)
        yours.narrow(2, 0, length).copy_(value)
        self.rows, self.capacity = key.shape[0], capacity


def _room(like: Tensor, capacity: int, rows: int | None = None) -> Tensor:
    heads, _, width = like.shape[1:]
    rows = like.shape[0] if rows is None else rows
    # Buffers made inside inference_mode could never be written outside it.
    with torch.inference_mode(False):
        return torch.empty(rows, heads, capacity, width, dtype=like.dtype, device=like.device)


class DynamicCache:
    """Keys and values of all tokens, layer by layer; accepted by transformers models in place of their own.

    It keeps everything, for sliding-window layers too: models mask what lies outside the window.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self, reserve: int | None = None) -> None:
        self.layers: list[_Layer] = []
        self._reserve = reserve or 0

    # -- what attention asks ----------------------------------------------------------------------

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [B, H, Q, D] to a layer and return everything it holds, [B, H, K, D], as views.

        Key and value may differ in heads and width. Further arguments are ignored. Raises `InputError` when the
        number of rows is not that of the tokens held.
        """
        layers = self.layers
        while layer_idx >= len(layers):
            layers.append(_Layer())
        return layers[layer_idx].append(key, value, self._reserve)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens held by a layer."""
        return self.layers[layer_idx].length if layer_idx < len(self.layers) else 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys that `update` will return for `query_length` more tokens, slot of the first: 0)."""
        return self.get_seq_length(layer_idx) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no limit."""
        return -1

    @property
    def is_initialized(self) -> bool:
        """Whether every layer has been written to."""
        return bool(self.layers) and all(layer.is_initialized for layer in self.layers)

    @property
    def is_sliding(self) -> list[bool]:
        """No layer forgets."""
        return [False] * len(self.layers)

    is_linear = is_dummy = is_sliding

    @property
    def batch_size(self) -> int:
        """Rows held; -1 while empty."""
        return next((layer.rows for layer in self.layers if layer.is_initialized), -1)

    def activate_past_recording(self) -> None:
        """Nothing to do: the past is always kept."""

    def is_recording_past(self, layer_idx: int) -> bool:
        """False: cropping needs no preparation."""
        return False

    def __len__(self) -> int:
        return len(self.layers)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, None]]:
        return iter([(layer.keys, layer.values, None) for layer in self.layers])

    # -- abilities --------------------------------------------------------------------------------

    def offers(self) -> frozenset[str]:
        """crop, reorder, reorder_tail, fork, select, store."""
        return OFFERS

    def crop(self, length: int, /) -> None:
        """Keep the first `length` tokens; a negative number drops that many; 0 keeps nothing."""
        for layer in self.layers:
            layer.length = min(layer.length, length) if length >= 0 else max(layer.length + length, 0)

    def reset(self) -> None:
        """Forget every token; the buffers stay."""
        self.crop(0)

    def reorder_tail(self, rows: Tensor, start: int, /) -> None:
        """`reorder_cache` where rows that trade places have all tokens before `start` in common: no copy of those."""
        self.reorder_cache(rows, start)

    def reorder_cache(self, rows: Tensor, start: int = 0, /) -> None:
        """Row i becomes a copy of former row `rows[i]`, int64 [new B]; the number of rows may change."""
        # On a CPU the order can be read for free, and rows that stay are not copied.
        order = rows.tolist() if rows.device.type == "cpu" else None
        if order == list(range(self.batch_size)):
            return
        for layer in self.layers:
            layer.select(rows, order, start)

    def batch_select_indices(self, indices: Tensor, /) -> None:
        """Keep only these rows, int64 or bool [B], in this order."""
        self.reorder_cache(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)

    def batch_repeat_interleave(self, repeats: int, /) -> None:
        """Repeat each row `repeats` times, neighbours first."""
        if repeats != 1 and self.batch_size > 0:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def fork(self) -> DynamicCache:
        """Return an independent copy. Tensors are copied by whichever of the two is written to, when it is."""
        copy = DynamicCache(self._reserve)
        copy.layers = [layer.share() for layer in self.layers]
        return copy

    def state(self) -> dict[str, Tensor]:
        """Copies of the filled keys and values: ``keys.<layer>`` and ``values.<layer>``, [B, H, T, D]."""
        found: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if layer.keys is not None and layer.values is not None:
                found[f"keys.{index}"] = layer.keys.clone(memory_format=torch.contiguous_format)
                found[f"values.{index}"] = layer.values.clone(memory_format=torch.contiguous_format)
        return found

    def load(self, state: Mapping[str, Tensor], /) -> None:
        """Take over what `state` returned; the tensors are never written to. Raises `InputError` for anything else."""
        layers: list[_Layer] = []
        for name in state:
            kind, _, number = name.partition(".")
            partner = state.get(f"values.{number}" if kind == "keys" else f"keys.{number}")
            good = kind in ("keys", "values") and number.isdigit() and partner is not None
            if not good or state[name].dim() != 4 or state[name].shape[::2] != partner.shape[::2]:  # type: ignore[union-attr]
                raise InputError(f"{name!r} is no part of a dynamic cache's state: keys.N and values.N, [B, H, T, D]")
            while int(number) >= len(layers):
                layers.append(_Layer())
            if kind == "keys":
                layers[int(number)].set(state[name], state[f"values.{number}"])
        self.layers = layers

    def __repr__(self) -> str:
        return f"DynamicCache({len(self.layers)} layers, {self.batch_size} rows, {self.get_seq_length()} tokens)"
