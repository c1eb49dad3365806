"""Blocks of tokens in 2, 4 or 8 bits: what the quantized cache packs once and opens at every step.

A block is `size` tokens of every row and head. Its numbers form groups that share a scale and a least value: the
tokens of one channel ("per channel"), or up to `size` channels of one token ("per token"). With the step of a group,
s = (greatest - least) / (2^bits - 1), a number x is kept as round((x - least) / s) and comes back as that times s plus
least, so it is off by at most s / 2, beside the rounding of the dtype it is handed out in.

The codes of several tokens share a byte, never those of several channels: a byte holds the same channel of tokens that
lie `size` / n apart, so that opening writes n stretches of memory one after the other instead of every n-th number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

AT_ONCE = 1 << 18
"""Numbers opened in one go on a CPU: what fits the second cache as float32."""
AT_ONCE_ELSEWHERE = 1 << 24
"""The same where each operation has a price of its own: a launch."""

HALF = torch.finfo(torch.float16).max


class Scratch:
    """Memory for the numbers in between, kept: on a CPU fresh pages cost more than what is computed in them."""

    def __init__(self) -> None:
        self._held: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def take(self, shape: tuple[int, ...], kind: torch.dtype, device: torch.device) -> Tensor:
        """A tensor of this shape, holding anything; the next one of its dtype may be the same memory."""
        count, held = math.prod(shape), self._held.get((kind, device))
        if held is None or held.numel() < count:
            held = self._held[kind, device] = own(torch.empty(0, device=device), (count,), device, kind)
        return held[:count].view(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(held.nbytes for held in self._held.values())


class Blocks:
    """Keys, or values, of one layer: packed blocks in buffers that grow by half. They are written once, never read back
    to be packed again."""

    __slots__ = ("bits", "capacity", "codes", "device", "least", "per_channel", "scale", "size")

    def __init__(self, bits: int, size: int, per_channel: bool, device: torch.device | None = None) -> None:
        self.bits, self.size, self.per_channel, self.device = bits, size, per_channel, device
        self.capacity = 0
        self.codes: Tensor | None = None
        """uint8 [B, H, capacity, size * bits / 8, D]."""
        self.scale: Tensor | None = None
        """[B, H, capacity, 1, D] per channel, [B, H, capacity, size, groups] per token, in the dtype of the numbers."""
        self.least: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, those not filled yet included."""
        return sum(part.nbytes for part in (self.codes, self.scale, self.least) if part is not None)

    def parts(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and least values of the first `count` blocks, as views."""
        assert self.codes is not None
        assert self.scale is not None
        assert self.least is not None
        return self.codes[:, :, :count], self.scale[:, :, :count], self.least[:, :, :count]

    def state(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """Named copies of the first `count` blocks."""
        for name, part in zip(("codes", "scale", "least"), self.parts(count), strict=True):
            yield name, part.clone(memory_format=torch.contiguous_format)

    def load(self, state: Mapping[str, Tensor], rows: int) -> None:
        """Copy what `state` gave. Raises KeyError where a part is missing."""
        codes, scale, least = (state[name] for name in ("codes", "scale", "least"))
        self.capacity = codes.shape[2]
        self.codes, self.scale, self.least = (
            own(part, part.shape, self.device).copy_(part) for part in (codes, scale, least)
        )

    # -- packing -----------------------------------------------------------------------------------

    def seal(self, numbers: Tensor, first: int, reserve: int) -> None:
        """Pack [B, H, n * size, D] as blocks `first` and on; earlier blocks stay as they are."""
        count = numbers.shape[2] // self.size
        self._grow(numbers, first + count, reserve, first)
        codes, scale, least = self.parts(first + count)
        for start, stop in self.pieces(numbers, count):
            piece = numbers[:, :, start * self.size : stop * self.size].unflatten(2, (stop - start, self.size)).float()
            place = slice(first + start, first + stop)
            self._pack(piece, codes[:, :, place], scale[:, :, place], least[:, :, place])

    def _pack(self, piece: Tensor, codes: Tensor, scale: Tensor, least: Tensor) -> None:
        """Pack float32 [B, H, n, size, D]."""
        levels, grouped = (1 << self.bits) - 1, piece
        if self.per_channel:
            low, high = torch.aminmax(piece, dim=3, keepdim=True)
        else:
            grouped = piece.unflatten(4, (scale.shape[-1], -1))
            low, high = torch.aminmax(grouped, dim=5)
        # Rounded up a little, or the greatest number would lie beyond the last code.
        step = ((high - low) / levels * (1 + torch.finfo(scale.dtype).eps)).to(scale.dtype)
        scale.copy_(step)
        least.copy_(low)
        step = step.float()
        inverse = torch.where(step == 0, torch.zeros_like(step), 1 / step)
        low, inverse = (low, inverse) if self.per_channel else (low.unsqueeze(-1), inverse.unsqueeze(-1))
        found = (grouped - low).mul_(inverse).round_().clamp_(0, levels).to(torch.uint8)
        whole = found.reshape(piece.shape).unflatten(3, (8 // self.bits, -1))
        packed = whole[:, :, :, 0]
        for plane in range(1, 8 // self.bits):
            packed = packed | (whole[:, :, :, plane] << (plane * self.bits))
        codes.copy_(packed)

    def open(self, out: Tensor, first: int, count: int, at: int, scratch: Scratch) -> None:
        """Write blocks `first` to `first + count` as numbers into `out` [B, H, T, D], from token `at` on."""
        codes, scale, least = self.parts(first + count)
        room = out.narrow(2, at, count * self.size).unflatten(2, (count, self.size))
        pieces = self.pieces(out, count)
        # Arithmetic is float32: a half-precision product is rounded by as much as an 8-bit code is off.
        shape = (*out.shape[:2], pieces[0][1], self.size, out.shape[3])
        work = None if out.dtype == torch.float32 else scratch.take(shape, torch.float32, out.device)
        spare = scratch.take((*shape[:3], *codes.shape[3:]), torch.uint8, out.device)
        for start, stop in pieces:
            place = slice(first + start, first + stop)
            target, found = room[:, :, start:stop], spare[:, :, : stop - start]
            numbers = target if work is None else work[:, :, : stop - start]
            self._unpack(numbers, found, *(part[:, :, place].to(out.device) for part in (codes, scale, least)))
            if work is not None:
                if out.dtype == torch.float16:  # its greatest number is not far off: half a step may lie beyond
                    numbers.clamp_(-HALF, HALF)
                target.copy_(numbers)

    def _unpack(self, out: Tensor, spare: Tensor, codes: Tensor, scale: Tensor, least: Tensor) -> None:
        """Write codes as float32 numbers into `out` [B, H, n, size, D]; `spare` is of the codes' shape."""
        planes, bits = out.unflatten(3, (8 // self.bits, -1)), self.bits
        last = 8 // bits - 1
        for plane in range(last + 1):
            found = torch.bitwise_right_shift(codes, plane * bits, out=spare) if plane else codes
            if plane < last:
                found = torch.bitwise_and(found, (1 << bits) - 1, out=spare)
            planes[:, :, :, plane].copy_(found)
        if self.per_channel:
            torch.addcmul(least.float(), out, scale.float(), out=out)
        else:  # a product and a sum: broadcast along the innermost dimension, the fused form is several times slower
            grouped = out.unflatten(4, (scale.shape[-1], -1))
            grouped.mul_(scale.float().unsqueeze(-1)).add_(least.float().unsqueeze(-1))

    # Sums over codes c_0, c_1, ... that share a byte can do with fewer passes: what is opened are the bytes' lower ends
    # y_p = c_0 + c_1 2^b + ... + c_p 2^(p b): all but the last cost a mask. c_p = (y_p - y_(p-1)) / 2^(p b)
    # is taken care of in the sums.

    def bytes_of(self, like: Tensor, count: int, budget: int, scratch: Scratch) -> Iterator[tuple[int, int, Tensor]]:
        """(start, stop, y [B, H, n, size, D]) of pieces of the first `count` blocks, float32: y_p where c_p would be.

        Each is valid until the next. `budget`: numbers of a piece.
        """
        codes, last = self.parts(count)[0], 8 // self.bits - 1
        for start, stop in self.pieces(like, count, budget):
            part = codes[:, :, start:stop]
            shape = (*part.shape[:3], self.size, part.shape[4])
            out = scratch.take(shape, torch.float32, codes.device)
            planes = out.unflatten(3, (last + 1, -1))
            planes[:, :, :, last].copy_(part)
            if last:
                spare = scratch.take(tuple(part.shape), torch.uint8, codes.device)
                for plane in range(last):
                    planes[:, :, :, plane].copy_(torch.bitwise_and(part, (1 << (plane + 1) * self.bits) - 1, out=spare))
            yield start, stop, out

    def differences(self, sums: Tensor) -> None:
        """Turn sums over y [..., size], one for each token, into sums over c, in place."""
        planes = sums.unflatten(-1, (8 // self.bits, -1))
        for plane in range(8 // self.bits - 1, 0, -1):
            planes[..., plane, :].sub_(planes[..., plane - 1, :]).mul_(2.0 ** (-plane * self.bits))

    def differed(self, weights: Tensor) -> Tensor:
        """Weights [..., size] for y that make the sum that these make over c."""
        if self.bits == 8:
            return weights
        steps = 2.0 ** (-self.bits * torch.arange(8 // self.bits, device=weights.device, dtype=weights.dtype))
        planes = weights.unflatten(-1, (8 // self.bits, -1)) * steps.unsqueeze(1)
        planes[..., :-1, :] -= planes[..., 1:, :].clone()
        return planes.flatten(-2)

    def pieces(self, like: Tensor, count: int, budget: int | None = None) -> list[tuple[int, int]]:
        """(start, stop) of runs of blocks that are worth handling at once; `budget`: numbers that are."""
        budget = budget or (AT_ONCE if like.device.type == "cpu" else AT_ONCE_ELSEWHERE)
        step = max(budget // max(like.shape[0] * like.shape[1] * self.size * like.shape[3], 1), 1)
        return [(start, min(start + step, count)) for start in range(0, count, step)]

    # -- buffers -----------------------------------------------------------------------------------

    def _grow(self, like: Tensor, wanted: int, reserve: int, filled: int) -> None:
        if wanted <= self.capacity and self.codes is not None and self.codes.shape[0] == like.shape[0]:
            return
        rows, heads, _, width = like.shape
        capacity = max(wanted, reserve, self.capacity * 3 // 2)
        old = self.parts(filled) if filled else None
        place = self.device or like.device
        marks = (1, width) if self.per_channel else (self.size, groups_of(width, self.size))
        self.codes = own(like, (rows, heads, capacity, self.size * self.bits // 8, width), place, torch.uint8)
        self.scale = own(like, (rows, heads, capacity, *marks), place)
        self.least = own(like, (rows, heads, capacity, *marks), place)
        self.capacity = capacity
        if old is not None:
            for mine, before in zip(self.parts(filled), old, strict=True):
                mine.copy_(before)

    def select(self, rows: Tensor, moved: list[int] | None, start: int, filled: int) -> None:
        """Row i becomes former row `rows[i]`: only rows `moved` change where it is given, from block `start` on."""
        if self.codes is None:
            return
        here = None if moved is None else torch.tensor(moved, device=self.codes.device)
        rows = rows.to(self.codes.device)
        parts = self.parts(self.capacity)
        self.codes, self.scale, self.least = (take_rows(part, rows, here, start, filled) for part in parts)


def groups_of(width: int, size: int) -> int:
    """Groups of one token's `width` channels: of equal size, as large as `size` allows."""
    return next(n for n in range(1, width + 1) if width % n == 0 and width // n <= size)


def take_rows(part: Tensor, rows: Tensor, here: Tensor | None, start: int, filled: int) -> Tensor:
    """A buffer [B, H, N, ...] with its rows rearranged: in place, entries `start` to `filled` only, where rows `here`
    are all that changes; else a new one."""
    if here is not None:
        tail = part.narrow(2, start, filled - start)
        tail.index_copy_(0, here, tail.index_select(0, rows.index_select(0, here)))
        return part
    fresh = own(part, (len(rows), *part.shape[1:]))
    fresh.narrow(2, 0, filled).copy_(part.narrow(2, 0, filled).index_select(0, rows))
    return fresh


def own(
    like: Tensor, shape: tuple[int, ...], device: torch.device | None = None, kind: torch.dtype | None = None
) -> Tensor:
    """A buffer that may be written to in and out of inference mode."""
    with torch.inference_mode(False):
        return torch.empty(shape, dtype=kind or like.dtype, device=device or like.device)
