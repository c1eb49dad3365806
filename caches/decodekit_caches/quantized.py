"""A cache of keys and values in 2, 4 or 8 bits, with the newest tokens in full precision.

After KIVI (Liu et al. 2024, arXiv 2402.02750): keys have channels of very different size, so they are grouped along
tokens, channel by channel; values are grouped along channels, token by token. Tokens beyond the newest few are packed
in blocks, each once; a layer's blocks are opened when its attention asks, into a buffer that all layers share.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from decodekit import InputError, at_least, one_of, option
from torch import Tensor

from .dynamic import expected
from .layered import PROVIDES, LayeredCache
from .quantized_blocks import Blocks, Scratch, own, take_rows

if TYPE_CHECKING:
    from decodekit import BindContext

PER_CHANNEL, PER_TOKEN = -1, 0
"""Values of the axes, as transformers' quanto backend has them."""


def _multiple_of_8(instance: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, int) or value < 8 or value % 8:
        raise ValueError(f"must be a multiple of 8, got {value!r}")


@attrs.frozen
class Quantized:
    """Keep keys and values in 2, 4 or 8 bits but for the newest tokens (after KIVI, arXiv 2402.02750)."""

    provides: ClassVar[frozenset[str]] = PROVIDES
    backend: str = option("What packs the numbers.", default="torch", check=one_of("torch"))
    nbits: int = option("Bits of a number.", default=4, check=one_of(2, 4, 8))
    axis_key: int = option(
        "Groups of keys: -1 along tokens, channel by channel; 0 along channels, token by token.",
        default=PER_CHANNEL,
        check=one_of(PER_CHANNEL, PER_TOKEN),
    )
    axis_value: int = option("Groups of values, likewise.", default=PER_TOKEN, check=one_of(PER_CHANNEL, PER_TOKEN))
    q_group_size: int = option(
        "Numbers that share a scale, and tokens of a block: a multiple of 8.", default=64, check=_multiple_of_8
    )
    residual_length: int = option("Newest tokens that stay in full precision.", default=128, check=at_least(0))
    compute_dtype: str | None = option(
        "Dtype that keys and values are handed out in; unset: the model's.",
        default=None,
        check=one_of("float32", "float16", "bfloat16"),
    )
    device: str | None = option("Where the packed blocks are kept; unset: beside the model.", default=None)

    def bind(self, ctx: BindContext, /) -> QuantizedCache:
        """Return an empty cache for one call.

        Raises ValueError for models of which a layer uses the keys of another: they would be opened over by then.
        """
        config = getattr(getattr(ctx.model, "model", None), "config", None)
        if getattr(config, "kv_sharing_modes", None) or getattr(config, "num_kv_shared_layers", None):
            raise ValueError("'quantized' cannot serve a model whose layers share keys; leave cache_implementation out")
        return QuantizedCache(self, expected(ctx) or 0)


class _Space:
    """Buffers that opened keys and values are handed out in, for one layer after the other."""

    def __init__(self) -> None:
        self._held: dict[tuple[Any, ...], Tensor] = {}
        self.scratch = Scratch()

    def take(self, name: str, like: Tensor, length: int, reserve: int) -> Tensor:
        """A buffer [B, H, length or more, D] for rows like these."""
        rows, heads, _, width = like.shape
        kind = (name, rows, heads, width, like.dtype, like.device)
        held = self._held.get(kind)
        if held is None or held.shape[2] < length:
            if any(other[1] != rows for other in self._held):
                self._held.clear()
            before = 0 if held is None else held.shape[2]
            held = self._held[kind] = own(like, (rows, heads, max(length, reserve, before * 3 // 2), width))
        return held

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return self.scratch.nbytes + sum(held.nbytes for held in self._held.values())


class _Layer:
    """Keys and values of one layer: `blocks` packed blocks, then `recent` tokens in full precision."""

    is_croppable = True
    is_compileable = False
    is_sliding = False

    def __init__(self, options: Quantized, reserve: int, space: _Space) -> None:
        self.size, self.residual = options.q_group_size, options.residual_length
        self.reserve, self.space = reserve, space
        self.dtype: torch.dtype | None = (
            None if options.compute_dtype is None else getattr(torch, options.compute_dtype)
        )
        device = None if options.device is None else torch.device(options.device)
        make = [
            Blocks(options.nbits, self.size, axis == PER_CHANNEL, device)
            for axis in (options.axis_key, options.axis_value)
        ]
        self.packed: tuple[Blocks, Blocks] = (make[0], make[1])
        self.tails: tuple[Tensor, Tensor] | None = None
        """The newest keys and values [B, H, residual + 2 * size, D]."""
        self.blocks = self.recent = self.rows = 0
        self.gaps: list[tuple[int, int]] = []
        """(block, tokens of it that count): cropping leaves blocks that are used in part."""

    @property
    def sealed(self) -> int:
        """Tokens in blocks."""
        return self.blocks * self.size - sum(self.size - kept for _, kept in self.gaps)

    @property
    def length(self) -> int:
        """Tokens held."""
        return self.sealed + self.recent

    @property
    def is_initialized(self) -> bool:
        """Whether anything was ever written."""
        return self.tails is not None

    @property
    def nbytes(self) -> int:
        """Bytes of packed blocks with their scales and of the newest tokens, room not filled yet included."""
        return sum(part.nbytes for part in (*self.packed, *(self.tails or ())))

    @property
    def keys(self) -> Tensor | None:
        """All keys [B, H, T, D], opened into a new tensor; None before the first update."""
        return self._opened(0)

    @property
    def values(self) -> Tensor | None:
        """All values, likewise."""
        return self._opened(1)

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def mask_sizes(self, count: int) -> tuple[int, int]:
        """(keys that `append` will return for `count` more tokens, slot of the first: 0)."""
        return self.length + count, 0

    def _opened(self, side: int) -> Tensor | None:
        if self.tails is None:
            return None
        like = self.tails[side]
        out = own(like, (*like.shape[:2], self.length + self.size, like.shape[3]))
        self._open(side, out)
        return out.narrow(2, 0, self.length)

    def _open(self, side: int, out: Tensor) -> None:
        """Write everything held into `out` [B, H, T + size, D]."""
        assert self.tails is not None
        # What a partly used block has too much is written over by what follows it.
        for first, count, at in self._runs():
            self.packed[side].open(out, first, count, at, self.space.scratch)
        out.narrow(2, self.sealed, self.recent).copy_(self.tails[side].narrow(2, 0, self.recent))

    def _runs(self) -> Iterator[tuple[int, int, int]]:
        """(first block, number of blocks, place of its first token) of runs without a gap inside."""
        first = at = 0
        for block, kept in self.gaps:
            yield first, block + 1 - first, at
            at += (block - first) * self.size + kept
            first = block + 1
        if first < self.blocks:
            yield first, self.blocks - first, at

    # -- growing -----------------------------------------------------------------------------------

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.dtype is not None:
            key, value = key.to(self.dtype), value.to(self.dtype)
        if key.shape[0] != self.rows:
            if self.length:
                raise InputError(
                    f"the cache holds {self.rows} rows but {key.shape[0]} were fed; "
                    f"repeat its rows with batch_repeat_interleave(n), or pass a cache of the same prompts"
                )
            self.tails, self.rows = None, key.shape[0]
        found = self._join(key, value) if self.length else (key, value)
        self._keep(key.detach(), value.detach())
        return found

    def _join(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        held, new = self.length, key.shape[2]
        # A graph holds on to what it was given: no buffer that the next layer writes over.
        space = _Space() if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad) else self.space
        reserve = self.reserve and self.reserve + self.size
        found = []
        for side, (name, more) in enumerate((("keys", key), ("values", value))):
            out = space.take(name, more, held + new + self.size, reserve)
            with torch.no_grad():
                self._open(side, out)
            out.narrow(2, held, new).copy_(more)
            found.append(out.narrow(2, 0, held + new))
        return found[0], found[1]

    def _keep(self, key: Tensor, value: Tensor) -> None:
        if self.tails is None:
            room = self.residual + 2 * self.size
            mine, yours = (own(new, (*new.shape[:2], room, new.shape[3])) for new in (key, value))
            self.tails = mine, yours
        new, recent = key.shape[2], self.recent
        if recent + new <= self.tails[0].shape[2]:
            for tail, more in zip(self.tails, (key, value), strict=True):
                tail.narrow(2, recent, new).copy_(more)
            self.recent += new
            if self.recent < self.residual + self.size:
                return
            whole = [tail.narrow(2, 0, self.recent) for tail in self.tails]
        else:
            pairs = zip(self.tails, (key, value), strict=True)
            whole = [torch.cat([tail.narrow(2, 0, recent), more], 2) if recent else more for tail, more in pairs]
        count = (recent + new - self.residual) // self.size
        over, ahead = count * self.size, max(self.reserve - self.residual, 0) // self.size
        self.recent = recent + new - over
        for blocks, tail, all_ in zip(self.packed, self.tails, whole, strict=True):
            blocks.seal(all_.narrow(2, 0, over), self.blocks, ahead)
            tail.narrow(2, 0, self.recent).copy_(all_.narrow(2, over, self.recent).clone())
        self.blocks += count

    # -- abilities ---------------------------------------------------------------------------------

    def check_crop(self, length: int) -> None:
        """Any length will do."""

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; a block that this cuts through stays packed as it is, and is used in part."""
        if length >= self.sealed:
            self.recent = min(self.recent, length - self.sealed)
            return
        self.recent, size = 0, self.size
        while self.gaps and self._before(len(self.gaps) - 1) >= length:
            self.gaps.pop()
        done, first = 0, 0  # tokens and blocks up to the last gap that stays
        if self.gaps:
            first, kept = self.gaps.pop()
            before = self._before(len(self.gaps), first)
            self.gaps.append((first, min(kept, length - before)))
            done, first = before + self.gaps[-1][1], first + 1
        full, part = divmod(length - done, size)
        self.blocks = first + full + (part > 0)
        if part:
            self.gaps.append((self.blocks - 1, part))

    def _before(self, gap: int, block: int | None = None) -> int:
        """Tokens before the block of a gap."""
        block = self.gaps[gap][0] if block is None else block
        return block * self.size - sum(self.size - kept for _, kept in self.gaps[:gap])

    def select(self, rows: Tensor, order: list[int] | None, start: int = 0) -> None:
        """Row i becomes former row `rows[i]`; `order` is the same as a list where reading it costs nothing.

        start: tokens before it are equal already in rows that trade places, and need no copy.
        """
        if self.tails is None:
            return
        moved = None
        if order is not None and len(order) == self.rows:
            moved = [i for i, row in enumerate(order) if i != row]
        block = 0 if self.gaps else min(start // self.size, self.blocks)
        for blocks in self.packed:
            blocks.select(rows, moved, block, self.blocks)
        here = None if moved is None else torch.tensor(moved, device=self.tails[0].device)
        rows = rows.to(self.tails[0].device)
        tail = max(min(start - self.sealed, self.recent), 0)
        mine, yours = (take_rows(part, rows, here, tail, self.recent) for part in self.tails)
        self.tails, self.rows = (mine, yours), len(rows)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Named copies of everything held."""
        assert self.tails is not None
        for side, blocks, tail in zip(("keys", "values"), self.packed, self.tails, strict=True):
            if self.blocks:
                for name, part in zip(("codes", "scale", "least"), blocks.parts(self.blocks), strict=True):
                    yield f"{side}.{name}", part.clone(memory_format=torch.contiguous_format)
            yield f"{side}.recent", tail.narrow(2, 0, self.recent).clone(memory_format=torch.contiguous_format)
        yield "gaps", torch.tensor(self.gaps, dtype=torch.int64).view(-1, 2)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy what `state` gave. Raises KeyError where a part is missing."""
        tails = []
        for side, blocks in zip(("keys", "values"), self.packed, strict=True):
            recent = state[f"{side}.recent"]
            if f"{side}.codes" in state:
                blocks.hold(*(state[f"{side}.{name}"] for name in ("codes", "scale", "least")))
                self.blocks = blocks.capacity
            tail = own(recent, (*recent.shape[:2], self.residual + 2 * self.size, recent.shape[3]))
            tail.narrow(2, 0, recent.shape[2]).copy_(recent)
            tails.append(tail)
            self.recent, self.rows = recent.shape[2], recent.shape[0]
        self.tails = tails[0], tails[1]
        self.gaps = [(block, kept) for block, kept in state["gaps"].tolist()]


class QuantizedCache(LayeredCache):
    """Keys and values of all tokens, packed but for the newest; accepted by transformers models in place of their own.

    The first `update` gives back what it was given; later ones give the packed tokens as they were kept, each number
    off by at most half a step of its group, in a buffer that the next layer's `update` writes over: use it before.
    """

    def __init__(self, options: Quantized | None = None, reserve: int = 0) -> None:
        super().__init__()
        self.options = options or Quantized()
        self._reserve, self._space = reserve, _Space()

    def make_layer(self, index: int) -> Any:
        """An empty layer."""
        return _Layer(self.options, self._reserve, self._space)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers: codes, scales and newest tokens, room not filled yet included."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def working_nbytes(self) -> int:
        """Bytes of the buffers that one layer at a time is opened into."""
        return self._space.nbytes

    def fork(self) -> QuantizedCache:
        """Return an independent copy."""
        copy = QuantizedCache(self.options, self._reserve)
        copy.load(self.state())
        return copy

    def state(self) -> dict[str, Tensor]:
        """Copies of everything held: ``<layer>.keys.codes`` and so on, and ``layout``, how they are to be read."""
        found = {"layout": self._layout()}
        for index, layer in enumerate(self.layers):
            if layer.is_initialized:
                found.update((f"{index}.{name}", part) for name, part in layer.state())
        return found

    def load(self, state: Mapping[str, Tensor], /) -> None:
        """Take over copies of what `state` returned. Raises `InputError` for what another cache, or one with other
        options, has stored."""
        if "layout" not in state:
            raise InputError("this is no state of a quantized cache: it has no layout")
        if (told := state["layout"].tolist()) != (mine := self._layout().tolist()):
            names = ("nbits", "q_group_size", "axis_key", "axis_value")
            wrong = [f"{n} {a} instead of {b}" for n, a, b in zip(names, told, mine, strict=True) if a != b]
            raise InputError(f"the state is of a quantized cache with {', '.join(wrong)}: set cache_config as it was")
        groups: dict[int, dict[str, Tensor]] = {}
        for name, part in state.items():
            number, _, rest = name.partition(".")
            if number.isdigit():
                groups.setdefault(int(number), {})[rest] = part
        layers = [self.make_layer(index) for index in range(max(groups, default=-1) + 1)]
        try:
            for index, parts in groups.items():
                layers[index].load(parts)
        except KeyError as error:
            raise InputError(f"the state of a quantized cache lacks {error.args[0]}") from error
        self.layers = layers

    def _layout(self) -> Tensor:
        told = self.options
        return torch.tensor([told.nbits, told.q_group_size, told.axis_key, told.axis_value])
