"""The weight as it is, read by a kernel of our own at the speed at which memory gives it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from decodekit_plugins.kernels import library

from .layouts import Plain

ALL = 1 << 62
FEW, TILED = 12, 128
"""Rows in bfloat16 up to which the kernel is faster than torch's layer, which has instructions for them: without and
with such of its own. In float16 the kernel with them is always the faster one."""
NARROW, WIDE = 8, 256
"""The same in float32, for short registers and long ones: measured with 1 to 512 rows."""
HALVES = (torch.bfloat16, torch.float16)
PIECE = 1 << 20
"""Numbers that are looked at together."""


class Streamed(Plain):
    """Rows of the weight behind each other. Nothing is copied but for another type or order.

    What comes in and goes out may be of another type than the weight; it is not rounded to that.
    """

    name = "kernel"
    converts = True
    source: Tensor | None = None
    """Where the weight is `exact`, and still there: itself, [N, K] in its own type."""

    def _pack(self, weight: Tensor) -> Tensor:
        self.few = _few(weight.dtype)
        return weight.contiguous()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Give [..., N] for x [..., K]; bias [N] is of the type of x, which comes out."""
        if 0 < x.numel() <= self.few * self.shape[1] and not torch.compiler.is_compiling() and _fits(bias, self, x):
            return library.linear(x, self.data, bias)
        return self.stock(x, bias)

    def stock(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """As a call, by torch's layer."""
        if self.exact:
            return F.linear(x, (self.data if self.source is None else self.source).to(x.dtype), bias)
        if x.dtype is self.dtype:
            return F.linear(x, self.data, bias)
        y = F.linear(x.to(self.dtype), self.data).to(x.dtype)
        return y if bias is None else y + bias

    def is_part_of(self, weight: Tensor) -> bool:
        """Whether it runs the memory of `weight` itself."""
        return self.data.data_ptr() == weight.data_ptr()


class Halved(Streamed):
    """A weight in a type of half its size that holds each of its numbers exactly: the same products, read faster.

    Models are mostly stored in such types, and run in float32 on a CPU.
    """

    exact = True

    def __init__(self, weight: Tensor, dtype: torch.dtype) -> None:
        super().__init__(weight.to(dtype))
        self.few = ALL if library.tiled() else _few(weight.dtype)
        self.source = weight.detach()

    def __reduce__(self) -> tuple[type, tuple[Tensor, torch.dtype]]:
        return Halved, (self.plain().to(torch.float32), self.dtype)


def half_of(weights: Iterable[Tensor], among: Sequence[torch.dtype] = HALVES) -> torch.dtype | None:
    """The first type `among` those of half the size that holds all float32 `weights` exactly; None where none does."""
    able = set(among)
    for weight in weights:
        for piece in weight.detach().reshape(-1).split(PIECE):
            able = {dtype for dtype in able if torch.equal(piece.to(dtype).to(piece.dtype), piece)}
            if not able:
                return None
    return next((dtype for dtype in among if dtype in able), None)


def _few(dtype: torch.dtype) -> int:
    """Rows up to which the kernel is faster than torch's layer, for a weight of this type."""
    if dtype is torch.float32:
        return ALL if library.tiled() else WIDE if library.wide() else NARROW
    return FEW if not library.tiled() else ALL if dtype is torch.float16 else TILED


def _fits(bias: Tensor | None, kernel: Streamed, x: Tensor) -> bool:
    """Whether a kernel can read a bias: torch's layer takes one number for all outputs, too."""
    return bias is None or (bias.shape == kernel.shape[:1] and bias.dtype is x.dtype and bias.stride(0) == 1)
