"""A key/value cache of fixed size: buffers made once, and used again by the model's next call."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from decodekit import InputError, at_least, option
from torch import Tensor

from .buffers import STEP, Layer
from .fixed import FixedCache
from .layered import OFFERS, PROVIDES, LayeredCache
from .spare import Spares

if TYPE_CHECKING:
    from decodekit import BindContext


@attrs.frozen
class Size:
    """Slots of a cache of fixed size. Where `told` is None they are found out when the first tokens come."""

    told: int | None
    least: int | None = None
    """The run's greatest length, as far as it is known."""
    more: int = 0
    """New tokens the run may make: prompts that are no tokens show their length only when they are fed."""

    def slots(self, fed: int) -> int:
        """Slots for a run whose first pass feeds `fed` tokens. Raises `InputError` where nobody knows."""
        if self.told is not None:
            return self.told
        if self.least is None:
            raise InputError("a cache of fixed size must know how long the run may get: set max_cache_len")
        return -(-max(self.least, fed + self.more) // STEP) * STEP


def size_of(told: int | None, ctx: BindContext) -> Size:
    """The size that options, the key ``max_cache_len`` or the length of the run ask for.

    Raises ValueError where the prompt alone does not fit, or where nobody knows how long the run gets.
    """
    told = ctx.settings.get("max_cache_len") if told is None else told
    if told is not None and ctx.prompt_width > told:
        raise ValueError(f"max_cache_len is {told}, but the prompt has {ctx.prompt_width} tokens; set it higher")
    if told is None and ctx.max_length is None:
        raise ValueError("no limit says how long this run may get: set max_cache_len, or max_new_tokens")
    return Size(told, ctx.max_length, 0 if ctx.max_length is None else ctx.max_length - ctx.prompt_width)


@attrs.frozen
class Static:
    """Keep every token in buffers of fixed size, which calls of one model hand on to each other."""

    provides: ClassVar[frozenset[str]] = PROVIDES | {"cache:compile"}
    max_cache_len: int | None = option(
        "Slots of a cache of fixed size; unset: the run's greatest length, where it is known.",
        default=None,
        check=at_least(1),
    )
    reuse: bool = option("Keep the buffers for the model's next call once nobody uses them.", default=True)

    def bind(self, ctx: BindContext, /) -> StaticCache:
        """Return an empty cache for one call. Raises ValueError where its size is too small, or unknown."""
        size = size_of(self.max_cache_len, ctx)
        return StaticCache(size, getattr(ctx.model, "model", None) if self.reuse else None)


class StaticLayer(Layer):
    """Buffers that never grow. `slots` is 0 until the first tokens have come."""

    __slots__ = ("clean", "held", "size", "slots", "spares")
    remedy = "lower max_cache_len"

    def __init__(self, size: Size, spares: Spares | None = None) -> None:
        super().__init__()
        self.size, self.spares, self.slots = size, spares, 0
        self.clean = False
        """Whether unwritten slots hold numbers: new memory may hold NaN, which no mask takes out of a sum."""
        self.held: list[Tensor] = []
        """The memory of the buffers, as it goes back to the spares."""

    def fresh(self) -> StaticLayer:
        """An empty layer of the same size."""
        return type(self)(self.size, self.spares)

    def _size(self, end: int) -> int:
        if not self.slots:
            self.slots = self.size.slots(end)
        if end > self.slots:
            raise InputError(
                f"the cache is full: it has {self.slots} slots, and {end} were wanted; set max_cache_len to {end} or "
                f"more (prompt and new tokens), or cache_implementation='dynamic', which grows"
            )
        return self.slots

    def _join(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        self._size(self.length + key.shape[2])
        return super()._join(key, value)

    def _make(self, key: Tensor, value: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        self.held, self.clean = [], False
        return super()._make(key, value, capacity)

    def _room(self, like: Tensor, capacity: int, rows: int) -> Tensor:
        shape = (rows, like.shape[1], capacity, like.shape[3])
        found = None if self.spares is None else self.spares.take(shape, like.dtype, like.device)
        found = super()._room(like, capacity, rows) if found is None else found
        self.held.append(found)
        return found

    def slabs(self, count: int) -> tuple[Tensor, ...]:
        """The whole buffers, with room for `count` more tokens: [2, B, H, slots, D], or two of [B, H, slots, D].

        Empty where nothing was ever written. Raises `InputError` where there is no room.
        """
        if self._key is None or self._value is None:
            return ()
        end = self.length + count
        self._size(end)  # refuses more than fits
        if end > self.capacity:
            self._grow(self._key, self._value, end)
        found = (self._key, self._value) if self._both is None else (self._both,)
        if not self.clean:
            self.clean = True
            for buffer in found:
                buffer.narrow(-2, self.length, self.slots - self.length).zero_()
        return found

    def share(self) -> Layer:
        """A layer with the same content; whichever is written to first copies it then."""
        other = super().share()
        assert isinstance(other, StaticLayer)
        other.slots = self.slots
        return other

    def __del__(self) -> None:
        held, spares = getattr(self, "held", None), getattr(self, "spares", None)
        if held and spares is not None:
            self._key = self._value = self._both = self.held = None
            spares.give(held)


class StaticCache(LayeredCache):
    """Keys and values of all tokens, in a fixed number of slots.

    The filled slots are handed out as views: attention never sees an unwritten one. Compiled code gets all of them
    (`fixed`). `InputError` says how many slots were wanted where there are too few. model: whose spare buffers to use,
    and to leave them to.
    """

    def __init__(self, size: Size | int, model: Any = None) -> None:
        super().__init__()
        self.size = Size(size) if isinstance(size, int) else size
        self._model = None if model is None else weakref.ref(model)
        self._filled: Tensor | None = None

    def offers(self) -> frozenset[str]:
        """crop, reorder, reorder_tail, fork, select, store and compile."""
        return OFFERS | {"compile"}

    def fixed(self, rows: int, count: int = 1) -> FixedCache | None:
        """The same buffers for a compiled pass of `count` more tokens [rows, count]; `advance` must follow it.

        None where no such pass is possible now: nothing is written yet, or not every layer has seen as many tokens.
        Raises `InputError` where there is no room, or the number of rows is not that of the tokens held.
        """
        written = [layer for layer in self.layers if layer.is_initialized]
        length = written[0].length if written else 0
        if not length or any(layer.length != length or layer._key.requires_grad for layer in written):
            return None
        if written[0].rows != rows:
            written[0]._check_rows(torch.empty(rows, 0))
        slabs = [layer.slabs(count) for layer in self.layers]
        device = written[0]._key.device
        if self._filled is None or self._filled.device != device:
            with torch.inference_mode(False):
                self._filled = torch.zeros(1, dtype=torch.long, device=device)
        self._filled.fill_(length)
        return FixedCache(slabs, self._filled)

    def advance(self, count: int = 1) -> None:
        """`count` more slots of every layer are filled: a compiled pass has written them."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.length += count

    def fork(self) -> StaticCache:
        """Return an independent copy. Tensors are copied by whichever of the two is written to, when it is."""
        other: StaticCache = super().fork()
        other._filled = None
        return other

    def make_layer(self, index: int) -> Layer:
        """An empty layer of the size that all have."""
        model = None if self._model is None else self._model()
        return StaticLayer(self.size, None if model is None else Spares(model, index))

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Slots of every layer; -1 while nobody knows."""
        return next((layer.slots for layer in self.layers if layer.slots), self.size.told or -1)
