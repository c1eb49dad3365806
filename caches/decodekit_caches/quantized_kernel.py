"""Attention to packed keys and values in C: one call for a layer, codes are opened in registers.

The kernel is built by the builder ``c``, if there is one, the first time it is wanted.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from decodekit import DecodekitError
from decodekit.registry import registry
from torch import Tensor

SOURCE = Path(__file__).with_name("c") / "packed.c"
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}
"""Element types by the numbers of ``vectors.h``, which the builder brings along."""
_P, _L = ctypes.c_void_p, ctypes.c_long


class Side(ctypes.Structure):
    """``Side`` of ``packed.c``."""

    _fields_ = (("codes", _P), ("scale", _P), ("least", _P), ("tail", _P), ("capacity", _L), ("room", _L))


class Mask(ctypes.Structure):
    """``Mask`` of ``packed.c``."""

    _fields_ = (("data", _P), ("type", _L), ("row", _L), ("head", _L), ("query", _L))


class Shape(ctypes.Structure):
    """``Shape`` of ``packed.c``."""

    _fields_ = (
        *((name, _L) for name in ("bits", "size", "groups", "type", "rows", "heads", "kv_heads", "new", "dim")),
        *((name, _L) for name in ("blocks", "recent", "q_row", "q_head", "q_token")),
        ("scale", ctypes.c_float),
    )


_POINTERS = [ctypes.POINTER(kind) for kind in (Shape, Side, Side, Mask)]
ARGUMENTS = [_POINTERS[0], _P, *_POINTERS[1:], _P, _L]
NO_MASK = Mask()


@functools.cache
def kernel() -> Any:
    """The function of ``packed.c``; None where there is no builder or no compiler, which is not tried again."""
    try:
        function = registry.load("builders", "c")(SOURCE).dk_attend_packed
    except (DecodekitError, OSError):  # torch's operations do the same
        return None
    function.argtypes, function.restype = ARGUMENTS, ctypes.c_int
    return function


def attend(layer: Any, query: Tensor, mask: Tensor | None, scale: float) -> Tensor | None:
    """Attention of queries [B, heads, Q, D] to all of a layer without gaps; None for what the kernel is not for.

    Sums are float32 and do not depend on the number of threads. Raises MemoryError, and RuntimeError for a mask that
    does not fit.
    """
    keys, values = layer.packed
    kind = TYPES.get(query.dtype)
    if kind is None or not keys.per_channel or values.per_channel or (run := kernel()) is None:
        return None
    if layer.blocks and (keys.scale.dtype is not query.dtype or values.scale.dtype is not query.dtype):
        return None  # what was stored by a model of another dtype
    if query.stride(3) != 1:
        query = query.contiguous()
    rows, heads, new, width = query.shape
    told = NO_MASK
    if mask is not None:
        if mask.dtype not in TYPES:
            return None
        mask = mask.expand(rows, heads, new, layer.length)
        if mask.stride(3) != 1:
            mask = mask.contiguous()
        told = Mask(mask.data_ptr(), TYPES[mask.dtype], *mask.stride()[:3])
    groups = values.scale.shape[4] if layer.blocks else 1
    shape = Shape(
        keys.bits, layer.size, groups, kind, rows, heads, layer.tails[0].shape[1], new, width, layer.blocks,
        layer.recent, *query.stride()[:3], scale,
    )  # fmt: skip
    out = query.new_empty(rows, new, heads, width)
    sides = (_side(blocks, tail, layer.blocks) for blocks, tail in zip(layer.packed, layer.tails, strict=True))
    if run(shape, query.data_ptr(), *sides, told, out.data_ptr(), torch.get_num_threads()):
        raise MemoryError("no memory for an attention's scores")
    return out.transpose(1, 2)


def _side(blocks: Any, tail: Tensor, count: int) -> Side:
    if not count:
        return Side(None, None, None, tail.data_ptr(), 0, tail.shape[2])
    codes, scale, least = blocks.codes, blocks.scale, blocks.least
    return Side(codes.data_ptr(), scale.data_ptr(), least.data_ptr(), tail.data_ptr(), blocks.capacity, tail.shape[2])
