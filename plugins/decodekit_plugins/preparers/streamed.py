"""The weight as it is, read by a kernel of our own at the speed at which memory gives it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from decodekit_plugins.kernels import library

from .layouts import Plain

HALF = 12
"""Rows in half precision up to which the kernel is faster than torch's layer: that has instructions for them."""
NARROW, WIDE = 8, 256
"""The same in float32, for short registers and long ones: measured with 1 to 512 rows."""


def few(dtype: torch.dtype) -> int:
    """Rows up to which the kernel is faster than torch's layer, for a weight of this type."""
    return HALF if dtype is not torch.float32 else WIDE if library.wide() else NARROW


class Streamed(Plain):
    """Rows of the weight behind each other. Nothing is copied but for another type or order.

    What comes in and goes out may be of another type than the weight; it is not rounded to that.
    """

    name = "kernel"
    converts = True

    def _pack(self, weight: Tensor) -> Tensor:
        self.few = few(weight.dtype)
        return weight.contiguous()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Give [..., N] for x [..., K]; bias [N] is of the type of x, which comes out."""
        if 0 < x.numel() <= self.few * self.shape[1] and not torch.compiler.is_compiling() and _fits(bias, self, x):
            return library.linear(x, self.data, bias)
        if x.dtype is self.dtype:
            return F.linear(x, self.data, bias)
        y = F.linear(x.to(self.dtype), self.data).to(x.dtype)
        return y if bias is None else y + bias

    def is_part_of(self, weight: Tensor) -> bool:
        """Whether it runs the memory of `weight` itself."""
        return self.data.data_ptr() == weight.data_ptr()


def _fits(bias: Tensor | None, kernel: Streamed, x: Tensor) -> bool:
    """Whether a kernel can read a bias: torch's layer takes one number for all outputs, too."""
    return bias is None or (bias.shape == kernel.shape[:1] and bias.dtype is x.dtype and bias.stride(0) == 1)
