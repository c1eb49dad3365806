"""What all caches of this package have in common: layers, asked and changed together."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from decodekit import InputError
from torch import Tensor

from .buffers import Layer

OFFERS = frozenset({"crop", "reorder", "reorder_tail", "fork", "select", "store"})
PROVIDES = frozenset(f"cache:{name}" for name in OFFERS)
AHEAD = 4096
"""Most slots beyond the prompt reserved at once unless more are asked for: on a GPU that memory is really taken."""


class LayeredCache:
    """Keys and values, layer by layer; accepted by transformers models in place of their own.

    A subclass says in `make_layer` what a layer is.
    """

    is_compileable = False
    is_croppable = True

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def make_layer(self, index: int) -> Layer:
        """An empty layer number `index`."""
        return Layer()

    def _at(self, index: int) -> Any:
        while index >= len(self.layers):
            self.layers.append(self.make_layer(len(self.layers)))
        return self.layers[index]

    # -- what attention asks ----------------------------------------------------------------------

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [B, H, Q, D] to a layer and return what its attention must see, [B, H, K, D].

        Key and value may differ in heads and width. Further arguments are ignored. Raises `InputError` when the
        number of rows is not that of the tokens held, or where there is no room.
        """
        layers = self.layers
        layer = layers[layer_idx] if layer_idx < len(layers) else self._at(layer_idx)
        found: tuple[Tensor, Tensor] = layer.append(key, value)
        return found

    def claim(self, layer_idx: int, shape: Any, dtype: Any) -> tuple[Tensor, Tensor, int] | None:
        """For kernels that write keys and values themselves; as `Layer.claim`. None: use `update`."""
        if (
            layer_idx >= len(self.layers)
            or type(self).update is not LayeredCache.update
            or "update" in self.__dict__  # put on this very object
        ):
            return None
        claim = getattr(self.layers[layer_idx], "claim", None)
        return None if claim is None else claim(shape, dtype)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens seen by a layer, forgotten ones included."""
        return self.layers[layer_idx].get_seq_length() if layer_idx < len(self.layers) else 0

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(keys that `update` will return for `query_length` more tokens, slot of the first)."""
        if layer_idx >= len(self.layers):
            return query_length, 0
        sizes: tuple[int, int] = self.layers[layer_idx].mask_sizes(query_length)
        return sizes

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no limit."""
        return -1

    @property
    def is_initialized(self) -> bool:
        """Whether every layer has been written to."""
        return bool(self.layers) and all(layer.is_initialized for layer in self.layers)

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers forget what lies outside a window."""
        return [layer.is_sliding for layer in self.layers]

    @property
    def is_linear(self) -> list[bool]:
        """No layer has a recurrent state."""
        return [False] * len(self.layers)

    is_dummy = is_linear

    @property
    def batch_size(self) -> int:
        """Rows held; -1 while empty."""
        return next((layer.rows for layer in self.layers if layer.is_initialized), -1)

    def activate_past_recording(self) -> None:
        """Nothing to do: what may be cropped is always kept."""

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
        """Keep the first `length` tokens; a negative number drops that many; 0 keeps nothing.

        Raises `InputError`, before anything is changed, where a layer has forgotten what it would need then.
        """
        kept = [length if length >= 0 else max(layer.get_seq_length() + length, 0) for layer in self.layers]
        for layer, number in zip(self.layers, kept, strict=True):
            layer.check_crop(number)
        for layer, number in zip(self.layers, kept, strict=True):
            layer.crop(number)

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

    def fork(self) -> Any:
        """Return an independent copy. Tensors are copied by whichever of the two is written to, when it is."""
        other = copy.copy(self)
        other.layers = [layer.share() for layer in self.layers]
        return other

    def state(self) -> dict[str, Tensor]:
        """Copies of the filled keys and values: ``keys.<layer>`` and ``values.<layer>``, [B, H, T, D].

        ``dropped.<layer>``, int64 [], is there where a layer has forgotten that many tokens before them.
        """
        found: dict[str, Tensor] = {}
        for index, layer in enumerate(self.layers):
            if layer.keys is not None and layer.values is not None:
                found[f"keys.{index}"] = layer.keys.clone(memory_format=torch.contiguous_format)
                found[f"values.{index}"] = layer.values.clone(memory_format=torch.contiguous_format)
                if layer.dropped:
                    found[f"dropped.{index}"] = torch.tensor(layer.dropped)
        return found

    def load(self, state: Mapping[str, Tensor], /) -> None:
        """Take over what `state` returned; the tensors are never written to. Raises `InputError` for anything else."""
        parts: dict[int, dict[str, Tensor]] = {}
        for name, tensor in state.items():
            kind, _, number = name.partition(".")
            if kind not in ("keys", "values", "dropped") or not number.isdigit():
                raise _strange(name)
            parts.setdefault(int(number), {})[kind] = tensor
        layers = [self.make_layer(index) for index in range(1 + max(parts, default=-1))]
        for number, found in parts.items():
            key, value = found.get("keys"), found.get("values")
            if key is None or value is None or key.dim() != 4 or value.dim() != 4 or key.shape[::2] != value.shape[::2]:
                raise _strange(f"{next(iter(found))}.{number}")
            layers[number].set(key, value, int(found.get("dropped", 0)))
        self.layers = layers

    def __repr__(self) -> str:
        name = type(self).__name__
        return f"{name}({len(self.layers)} layers, {self.batch_size} rows, {self.get_seq_length()} tokens)"


def _strange(name: str) -> InputError:
    return InputError(f"{name!r} is no part of a cache's state: keys.N and values.N, [B, H, T, D]")
