"""Blocks that another package packs: optimum-quanto, or hqq. Slower than our own; for those who want their numbers.

Every pack of blocks is made once, row by row, and never changed: rows that are reordered share what they hold, a crop
shortens what counts of it. Groups are those of our own blocks: `size` tokens of a channel, or channels of a token.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import torch
from decodekit import MissingExtra
from torch import Tensor

from .quantized_blocks import HALF, Scratch, groups_of

PACKS: dict[str, tuple[int, ...]] = {"torch": (2, 4, 8), "quanto": (2, 4), "hqq": (1, 2, 3, 4, 8)}
"""Backend -> the bits it packs."""


def package(module: str, name: str, backend: str) -> Any:
    """Import what a backend needs. Raises `MissingExtra`, which names the extra, where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtra(name, backend, f"backend {backend!r} of the quantized cache") from error


class Quanto:
    """Packs groups [N, members] with optimum-quanto."""

    def __init__(self, bits: int) -> None:
        self._quanto = package("optimum.quanto", "optimum-quanto", "quanto")
        self._packed = package("optimum.quanto.tensor.packed", "optimum-quanto", "quanto").PackedTensor
        self._kind = {2: self._quanto.qint2, 4: self._quanto.qint4}[bits]
        self._bits = bits

    def pack(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and shifts."""
        members = groups.shape[1]
        scale, shift = self._quanto.MaxOptimizer()(groups, self._kind, 0, members)
        # A group of equal numbers has no step: nothing to divide by, and any will do.
        scale = torch.where(scale == 0, torch.ones_like(scale), scale)
        found = self._quanto.quantize_weight(groups, self._kind, 0, scale, shift, members, optimized=False)
        return found._data._data, found._scale, found._shift

    def open(self, parts: tuple[Tensor, Tensor, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The groups [N, members] again."""
        codes, scale, shift = parts
        data = self._packed(codes, self._bits, torch.Size(shape), (shape[1], 1))
        told = (self._kind, 0, shape[1], torch.Size(shape), (shape[1], 1))
        found: Tensor = self._quanto.WeightQBitsTensor(*told, data, scale, shift).dequantize()
        return found.to(dtype)


class Hqq:
    """Packs groups [N, members] with hqq, whose optimisation looks for the best zero of each."""

    def __init__(self, bits: int) -> None:
        self._quantizer = package("hqq.core.quantize", "hqq", "hqq").Quantizer
        self._bits = bits

    def pack(self, groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and zeros."""
        if over := -groups.shape[0] % (8 // self._bits):  # hqq fills whole bytes, with numbers of several groups
            groups = torch.cat([groups, groups.new_zeros(over, groups.shape[1])])
        codes, found = self._quantizer.quantize(
            groups, nbits=self._bits, group_size=groups.shape[1], axis=1, device=str(groups.device),
            compute_dtype=groups.dtype,
        )  # fmt: skip
        return codes, found["scale"].to(groups.dtype), found["zero"].to(groups.dtype)

    def open(self, parts: tuple[Tensor, Tensor, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The groups [N, members] again."""
        codes, scale, zero = parts
        told, count = self._quantizer, shape[0]
        shape = (scale.shape[0], shape[1])
        packing = told.bit_to_packing[self._bits]
        meta = {
            "nbits": self._bits, "group_size": shape[1], "axis": 1, "packing": packing, "view_as_float": False,
            "unpack_view_dtype": told.unpack_view_dtype[packing], "compute_dtype": dtype, "shape": torch.Size(shape),
            "scale": scale.to(dtype), "zero": zero.to(dtype),
        }  # fmt: skip
        found: Tensor = told.dequantize(codes, meta)
        return found[:count]


BACKENDS: dict[str, Any] = {"quanto": Quanto, "hqq": Hqq}


@attrs.frozen(eq=False)
class _Pack:
    """Blocks `first` and on, `count` of them count: of one row, all heads."""

    first: int
    count: int
    parts: tuple[Tensor, Tensor, Tensor]
    whole: tuple[int, int]
    """(blocks that it was made of, groups)."""


class PackedBlocks:
    """Keys, or values, of one layer, packed by another package; the same members as `Blocks`."""

    def __init__(self, backend: str, bits: int, size: int, per_channel: bool, device: torch.device | None) -> None:
        self.backend, self.size, self.per_channel, self.device = BACKENDS[backend](bits), size, per_channel, device
        self.capacity = 0
        self.shape: tuple[int, int] = (0, 0)
        """(heads, width)."""
        self.dtype = torch.float32
        self.rows: list[list[_Pack]] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all packs; those that rows share count once."""
        every = {id(pack): pack for row in self.rows for pack in row}
        return sum(part.nbytes for pack in every.values() for part in pack.parts)

    def seal(self, numbers: Tensor, first: int, reserve: int) -> None:
        """Pack [B, H, n * size, D] as blocks `first` and on; earlier blocks stay as they are."""
        rows, heads, tokens, width = numbers.shape
        count = tokens // self.size
        if not first or len(self.rows) != rows:
            self.rows = [[] for _ in range(rows)]
        self.shape, self.dtype, self.capacity = (heads, width), numbers.dtype, first + count
        if not count:
            return
        for row, own_numbers in zip(self.rows, numbers, strict=True):
            row[:] = _cut(row, first)
            groups = self._grouped(own_numbers.unflatten(1, (count, self.size)))
            parts = self.backend.pack(groups)
            at = self.device or numbers.device
            row.append(_Pack(first, count, tuple(part.to(at) for part in parts), (count, groups.shape[0])))

    def open(self, out: Tensor, first: int, count: int, at: int, scratch: Scratch) -> None:
        """Write blocks `first` to `first + count` as numbers into `out` [B, H, T, D], from token `at` on."""
        room = out.narrow(2, at, count * self.size).unflatten(2, (count, self.size))
        made: dict[int, Tensor] = {}
        for target, row in zip(room, self.rows, strict=True):
            for pack in _cut(row, first + count):
                start = max(pack.first, first)
                stop = pack.first + pack.count
                if start < stop:
                    if id(pack) not in made:
                        made[id(pack)] = self._numbers(pack, out)
                    target[:, start - first : stop - first] = made[id(pack)][:, start - pack.first : stop - pack.first]

    def select(self, rows: Tensor, moved: list[int] | None, start: int, filled: int) -> None:
        """Row i becomes former row `rows[i]`; nothing is copied."""
        if self.rows:
            self.rows = [list(self.rows[row]) for row in rows.tolist()]

    # -- to store ----------------------------------------------------------------------------------

    def state(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """Named copies of the first `count` blocks."""
        yield "shape", torch.tensor(self.shape)
        yield "kind", torch.zeros(0, dtype=self.dtype)
        for number, row in enumerate(self.rows):
            for pack in _cut(row, count):
                name = f"row.{number}.{pack.first}"
                yield f"{name}.told", torch.tensor([pack.first, pack.count, *pack.whole])
                for part, tensor in enumerate(pack.parts):
                    yield f"{name}.{part}", tensor.clone()

    def load(self, state: Mapping[str, Tensor], rows: int) -> None:
        """Copy what `state` gave. Raises KeyError where a part is missing."""
        self.rows, self.capacity = [[] for _ in range(rows)], 0
        heads, width = state["shape"].tolist()
        self.shape, self.dtype = (heads, width), state["kind"].dtype
        for name, told in state.items():
            if name.endswith(".told"):
                first, count, blocks, groups = told.tolist()
                at = [self.device or told.device] * 3
                parts = [state[f"{name[:-5]}.{part}"].to(where, copy=True) for part, where in enumerate(at)]
                row = self.rows[int(name.split(".")[1])]
                row.append(_Pack(first, count, (parts[0], parts[1], parts[2]), (blocks, groups)))
                row.sort(key=lambda pack: pack.first)
                self.capacity = max(self.capacity, first + count)

    # -- groups ------------------------------------------------------------------------------------

    def _grouped(self, numbers: Tensor) -> Tensor:
        """[H, n, size, D] as groups [N, members], each contiguous."""
        if self.per_channel:
            return numbers.transpose(2, 3).reshape(-1, self.size)
        return numbers.reshape(-1, numbers.shape[3] // groups_of(numbers.shape[3], self.size))

    def _numbers(self, pack: _Pack, like: Tensor) -> Tensor:
        """[H, n, size, D] of a pack, in the dtype and on the device of `like`."""
        heads, width = self.shape
        blocks, groups = pack.whole
        shape = (groups, heads * blocks * self.size * width // groups)
        parts = pack.parts if self.device is None else tuple(part.to(like.device) for part in pack.parts)
        found = self.backend.open(parts, shape, self.dtype)
        if self.dtype == torch.float16:
            found = found.clamp(-HALF, HALF)
        found = found.to(like.dtype)
        if self.per_channel:
            return found.view(heads, blocks, width, self.size).transpose(2, 3)
        return found.view(heads, blocks, self.size, width)


def _cut(row: list[_Pack], end: int) -> list[_Pack]:
    """The packs of a row up to block `end`."""
    kept = [pack for pack in row if pack.first < end]
    if kept and kept[-1].first + kept[-1].count > end:
        kept[-1] = attrs.evolve(kept[-1], count=end - kept[-1].first)
    return kept
