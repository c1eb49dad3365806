"""One layer of the quantized cache: packed blocks of tokens, then the newest in full precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from decodekit import InputError
from torch import Tensor

from .quantized_attention import MOST_NEW, Unopened, pays
from .quantized_blocks import Blocks, Scratch, own, take_rows


class Space:
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


class QuantizedLayer:
    """Keys and values of one layer: `blocks` packed blocks, then `recent` tokens in full precision."""

    is_croppable = True
    is_compileable = False
    is_sliding = False

    def __init__(
        self,
        packed: tuple[Any, Any],
        size: int,
        residual: int,
        dtype: torch.dtype | None,
        reserve: int,
        space: Space,
    ) -> None:
        self.packed, self.size, self.residual, self.dtype = packed, size, residual, dtype
        self.reserve, self.space = reserve, space
        self.tails: tuple[Tensor, Tensor] | None = None
        """The newest keys and values [B, H, residual + size + MOST_NEW, D]."""
        self.blocks = self.recent = self.rows = self.version = 0
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
        return self._copied(0)

    @property
    def values(self) -> Tensor | None:
        """All values, likewise."""
        return self._copied(1)

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def mask_sizes(self, count: int) -> tuple[int, int]:
        """(keys that `append` will return for `count` more tokens, slot of the first: 0)."""
        return self.length + count, 0

    def _copied(self, side: int) -> Tensor | None:
        if self.tails is None:
            return None
        like = self.tails[side]
        out = own(like, (*like.shape[:2], self.length + self.size, like.shape[3]))
        self._open(side, out)
        return out.narrow(2, 0, self.length)

    def opened(self, side: int) -> Tensor:
        """All keys or values [B, H, T, D] in a buffer that all layers share."""
        assert self.tails is not None
        out = self.space.take(("keys", "values")[side], self.tails[side], self.length + self.size, self._room)
        self._open(side, out)
        return out.narrow(2, 0, self.length)

    @property
    def _room(self) -> int:
        return self.reserve and self.reserve + self.size

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
        """Add [B, H, Q, D]; returns all keys and values, opened or, for few new tokens, such that attention opens none.

        Raises `InputError` where the rows are not those of the tokens held.
        """
        if self.dtype is not None:
            key, value = key.to(self.dtype), value.to(self.dtype)
        if key.shape[0] != self.rows:
            if self.length:
                raise InputError(
                    f"the cache holds {self.rows} rows but {key.shape[0]} were fed; "
                    f"repeat its rows with batch_repeat_interleave(n), or pass a cache of the same prompts"
                )
            self.tails, self.rows = None, key.shape[0]
        self.version += 1
        self._settle()
        if self.length and pays(key, value) and self._can_attend and self._fits(key.shape[2]):
            self._keep(key, value)
            return Unopened.of(self, 0), Unopened.of(self, 1)
        found = self._join(key, value) if self.length else (key, value)
        self._keep(key.detach(), value.detach())
        return found

    @property
    def _can_attend(self) -> bool:
        """Whether blocks are of the kind that attention reads, and beside the model."""
        return all(isinstance(blocks, Blocks) and blocks.device is None for blocks in self.packed)

    def _fits(self, new: int) -> bool:
        return self.tails is not None and self.recent + new <= self.tails[0].shape[2]

    def _join(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        held, new = self.length, key.shape[2]
        # A graph holds on to what it was given: no buffer that the next layer writes over.
        space = Space() if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad) else self.space
        found = []
        for side, (name, more) in enumerate((("keys", key), ("values", value))):
            out = space.take(name, more, held + new + self.size, self._room)
            with torch.no_grad():
                self._open(side, out)
            out.narrow(2, held, new).copy_(more)
            found.append(out.narrow(2, 0, held + new))
        return found[0], found[1]

    def _settle(self) -> None:
        """Pack what is more than the newest tokens. Done before the next tokens come, not behind the last ones: those
        are handed out in full precision."""
        if self.recent >= self.residual + self.size:
            assert self.tails is not None
            self._seal(tuple(tail.narrow(2, 0, self.recent) for tail in self.tails))

    def _keep(self, key: Tensor, value: Tensor) -> None:
        new, recent = key.shape[2], self.recent
        if self.tails is None:
            self.tails = self._tails(key, value)
        if self._fits(new):
            for tail, more in zip(self.tails, (key, value), strict=True):
                tail.narrow(2, recent, new).copy_(more)
            self.recent += new
            return
        pairs = zip(self.tails, (key, value), strict=True)
        self._seal(tuple(torch.cat([tail.narrow(2, 0, recent), more], 2) if recent else more for tail, more in pairs))

    def _tails(self, *likes: Tensor) -> tuple[Tensor, Tensor]:
        room = self.residual + self.size + MOST_NEW
        mine, yours = (own(like, (*like.shape[:2], max(room, self.recent), like.shape[3])) for like in likes)
        return mine, yours

    def _seal(self, whole: tuple[Tensor, ...]) -> None:
        """Pack all but the newest of these keys and values [B, H, T, D]; the newest become the tails."""
        assert self.tails is not None
        count = (whole[0].shape[2] - self.residual) // self.size
        over, ahead = count * self.size, max(self.reserve - self.residual, 0) // self.size
        self.recent = whole[0].shape[2] - over
        for blocks, tail, all_ in zip(self.packed, self.tails, whole, strict=True):
            blocks.seal(all_.narrow(2, 0, over), self.blocks, ahead)
            tail.narrow(2, 0, self.recent).copy_(all_.narrow(2, over, self.recent).clone())
        self.blocks += count

    # -- abilities ---------------------------------------------------------------------------------

    def check_crop(self, length: int) -> None:
        """Any length will do."""

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; a block that this cuts through stays packed as it is, and is used in part."""
        self.version += 1
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
        self.version += 1
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
                for name, part in blocks.state(self.blocks):
                    yield f"{side}.{name}", part
            yield f"{side}.recent", tail.narrow(2, 0, self.recent).clone(memory_format=torch.contiguous_format)
        yield "gaps", torch.tensor(self.gaps, dtype=torch.int64).view(-1, 2)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy what `state` gave. Raises KeyError where a part is missing."""
        recent = [state[f"{side}.recent"] for side in ("keys", "values")]
        self.recent, self.rows = recent[0].shape[2], recent[0].shape[0]
        for side, blocks in zip(("keys", "values"), self.packed, strict=True):
            start = f"{side}."
            parts = {name.removeprefix(start): part for name, part in state.items() if name.startswith(start)}
            if len(parts) > 1:
                blocks.load(parts, self.rows)
                self.blocks = blocks.capacity
        self.tails = self._tails(*recent)
        for tail, held in zip(self.tails, recent, strict=True):
            tail.narrow(2, 0, self.recent).copy_(held)
        self.gaps = [(block, kept) for block, kept in state["gaps"].tolist()]
