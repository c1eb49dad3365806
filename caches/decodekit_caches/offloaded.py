"""Caches whose layers live in host memory and come to the device when their turn is near."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from decodekit import at_least, option
from decodekit.errors import warn
from torch import Tensor

from .buffers import Layer, no_memory
from .dynamic import expected
from .layered import PROVIDES, LayeredCache
from .sliding import SlidingLayer
from .staging import Staging
from .static import Size, StaticLayer, size_of
from .windows import REWIND

if TYPE_CHECKING:
    from decodekit import BindContext


@attrs.frozen
class Offloaded:
    """Keep every token in host memory; the device holds the layer at work, the next one and sliding layers."""

    provides: ClassVar[frozenset[str]] = PROVIDES
    reserve: int | None = option(
        "Slots to make room for at once; unset: up to the run's greatest length, where it is known.",
        default=None,
        check=at_least(1),
    )

    def bind(self, ctx: BindContext, /) -> OffloadedCache:
        """Return an empty cache for one call."""
        _say(ctx.spec.device)
        reserve = expected(ctx) if self.reserve is None else self.reserve
        return OffloadedCache(reserve=reserve, windows=ctx.spec.layer_windows or ())


@attrs.frozen
class OffloadedStatic:
    """`offloaded` with buffers of fixed size."""

    provides: ClassVar[frozenset[str]] = PROVIDES
    max_cache_len: int | None = option(
        "Slots of the cache; unset: the key of this name, or the run's greatest length, where it is known.",
        default=None,
        check=at_least(1),
    )

    def bind(self, ctx: BindContext, /) -> OffloadedCache:
        """Return an empty cache for one call. Raises ValueError where its size is too small, or unknown."""
        _say(ctx.spec.device)
        return OffloadedCache(size=size_of(self.max_cache_len, ctx))


_said = False


def _say(device: torch.device) -> None:
    """Say once that there is no other memory to go to."""
    global _said
    if device.type == "cpu" and not _said:
        _said = True
        warn("an offloaded cache saves nothing on a CPU: its memory is the host's already; leave it out, or use 'disk'")


class _OnHost(Layer):
    """What layers in host memory do differently. Their buffers lie as [capacity, B, H, D]: new tokens are one piece."""

    __slots__ = ()
    staging: Staging

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.staging.idle(key.device) or (key.requires_grad and torch.is_grad_enabled()):
            return super().append(key, value)
        self.staging.begin(key.device)
        end = self.length + key.shape[2]
        if end > self.capacity or key.shape[0] != self.rows:
            self._grow(key, value, end)
        found = self.staging.append(self, (key, value))
        self.length = end
        return found

    def _make(self, key: Tensor, value: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        if self.staging.lane is None:
            return super()._make(key, value, capacity)
        self._both = None
        try:
            self._key, self._value = self.staging.host(key, capacity), self.staging.host(value, capacity)
        except RuntimeError as error:  # host memory, pinned or not
            raise no_memory(key, value, capacity, self.remedy) from error
        return self._key, self._value

    @property
    def keys(self) -> Tensor | None:
        """Filled keys [B, H, T, D] on the host, a view; None before the first update."""
        self.staging.settle()
        return super().keys

    @property
    def values(self) -> Tensor | None:
        """Filled values [B, H, T, D] on the host, a view; None before the first update."""
        self.staging.settle()
        return super().values

    @property
    def buffers(self) -> tuple[Tensor, Tensor] | None:
        """The memory of keys and values on the host; None where there is none, or somebody else's."""
        return None if self._key is None or self._value is None or not self.capacity else (self._key, self._value)

    def select(self, rows: Tensor, order: list[int] | None, start: int = 0) -> None:
        """Row i becomes former row `rows[i]`."""
        self.staging.clear()
        super().select(rows, order, start)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.staging.clear()
        super().crop(length)


class OffloadedLayer(_OnHost):
    """A growing layer in host memory."""

    __slots__ = ("staging",)

    def __init__(self, staging: Staging, reserve: int = 0) -> None:
        self.staging = staging
        super().__init__(reserve)

    def fresh(self) -> OffloadedLayer:
        """An empty layer beside this one."""
        return OffloadedLayer(self.staging, self.reserve)


class OffloadedStaticLayer(_OnHost, StaticLayer):
    """A layer of fixed size in host memory."""

    __slots__ = ("staging",)

    def __init__(self, staging: Staging, size: Size) -> None:
        self.staging = staging
        super().__init__(size)

    def fresh(self) -> OffloadedStaticLayer:
        """An empty layer beside this one."""
        return OffloadedStaticLayer(self.staging, self.size)


class OffloadedCache(LayeredCache):
    """Keys and values in host memory. Layers with a window are small: they stay where the model is.

    size: of layers that never grow; None: they grow, with room for `reserve` slots at once.
    """

    def __init__(
        self,
        *,
        reserve: int | None = None,
        size: Size | None = None,
        windows: Sequence[int | None] = (),
        staging: Staging | None = None,
    ) -> None:
        super().__init__()
        self._reserve, self._size, self._windows = reserve or 0, size, tuple(windows)
        self._staging = Staging() if staging is None else staging

    def make_layer(self, index: int) -> Layer:
        """An empty layer of the kind that layer number `index` needs."""
        window = self._windows[index] if index < len(self._windows) else None
        if window is not None:
            return SlidingLayer(window, REWIND, self._reserve)
        if self._size is None:
            layer: Any = OffloadedLayer(self._staging, self._reserve)
        else:
            layer = OffloadedStaticLayer(self._staging, self._size)
        self._staging.follow(layer)
        return layer

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers forget, those included that nothing was written to yet."""
        rest = [layer.is_sliding for layer in self.layers[len(self._windows) :]]
        return [window is not None for window in self._windows] + rest

    def reorder_cache(self, rows: Tensor, start: int = 0, /) -> None:
        """Row i becomes a copy of former row `rows[i]`, int64 [new B]; the number of rows may change."""
        super().reorder_cache(rows.cpu(), start)  # that is where the keys and values are

    def fork(self) -> OffloadedCache:
        """Return an independent copy. Tensors are copied by whichever of the two is written to, when it is."""
        self._staging.settle()
        other: OffloadedCache = super().fork()
        other._staging = self._staging.another()
        for layer in other.layers:
            if isinstance(layer, _OnHost):
                layer.staging = other._staging
                other._staging.follow(layer)
        return other

    def load(self, state: Mapping[str, Tensor], /) -> None:
        """Take over what `state` returned; the tensors are never written to. Raises `InputError` for anything else."""
        self._staging.clear()
        before, self._staging = self._staging, self._staging.another()
        try:
            super().load(state)
        except BaseException:
            self._staging = before
            raise
