"""What the kernels of this package are called, and with what."""

from __future__ import annotations

import ctypes
import functools
import time
from typing import Any

import torch
from decodekit.errors import PluginError
from decodekit.registry import registry
from torch import Tensor

from .build import HEADERS, Unbuilt

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.bool: 3}
"""Element types by the numbers that ``vectors.h`` gives them."""
SOURCES = (
    "decoder.c",
    "step.c",
    "linear.c",
    "rows.c",
    "panels.c",
    "tiles.c",
    "tiled.c",
    "spread.c",
    "attention.c",
    "prompt.c",
    "passes.c",
)
LARGE = 1 << 25
"""Bytes of a weight of which little is left in a cache from one time to the next."""
TRIES, CLEAR = 4, 1.05
"""How often each way of fetching is timed, and how many times the other it must take to be the worse one."""
_tuned: list[torch.dtype] = []
_P, _L, _F = ctypes.c_void_p, ctypes.c_long, ctypes.c_float
SIGNATURES: dict[str, list[Any]] = {
    "dk_linear": [_P, _L, _P, _P, _L, _P, _L, _L, _L, _L],
    "dk_enter": [_P, _P, _L, _L, _P, _P, _L, _L, _P, _P, _P, _L],
    "dk_leave": [_P, _P, _P, _L, _L, _P, _L],
    "dk_layers": [_P, _L, _P, _L, _L, _P, _P, _L, _L, _P, _P, _P, _P, _P, _P, _L],
    "dk_attend": [_P, _P, _P, _L, _P, _L, _L, _L, _L, _L, _L, _F, _P, _L],
    "dk_prompt": [_P, _P, _P, _L, _L, _L, _L, _L, _L, _L, _L, _F, _P, _L],
    "dk_fetch": [_L],
    "dk_norm": [_P, _P, _L, _F, _P, _L, _L, _L],
    "dk_add_norm": [_P, _P, _P, _L, _F, _P, _P, _L, _L, _L],
    "dk_turn": [_P, _L, _P, _F, _P, _P, _L, _L, _L, _P, _L, _L, _L, _L, _L],
    "dk_gate": [_P, _P, _L, _L, _P, _L, _L, _L],
}


class Layer(ctypes.Structure):
    """``Layer`` of ``decoder.c``."""

    _fields_ = (
        *((name, ctypes.c_long) for name in ("hidden", "heads", "kv_heads", "dim", "inner", "type", "weights")),
        *((name, ctypes.c_float) for name in ("eps1", "eps2", "eps_q", "eps_k")),
        *((name, _P) for name in ("norm1", "norm2", "q_norm", "k_norm")),
        *((name, _P) for name in ("q", "k", "v", "o", "gate", "up", "down")),
        *((name, _P) for name in ("bq", "bk", "bv", "bo", "bg", "bu", "bd")),
    )


class Keys(ctypes.Structure):
    """``Keys`` of ``attention.c``."""

    _fields_ = (("data", _P), ("row", _L), ("head", _L), ("slot", _L))


class Mask(ctypes.Structure):
    """``Mask`` of ``attention.c``."""

    _fields_ = (("data", _P), ("type", _L), ("row", _L), ("query", _L))


@functools.cache
def _loaded() -> ctypes.CDLL | Unbuilt:
    try:
        library = registry.load("builders", "c")(*(HEADERS / name for name in SOURCES))
    except Unbuilt as error:
        return error
    except PluginError as error:  # switched off
        return Unbuilt(str(error))
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    library.dk_wide.restype = library.dk_tiled.restype = ctypes.c_long
    return library


def library() -> Any:
    """The kernels, built and loaded on first use. Raises `Unbuilt`; a failure is not tried again in this process."""
    found = _loaded()
    if isinstance(found, Unbuilt):
        raise found
    return found


def why_not() -> str:
    """What keeps kernels from running here, or an empty string."""
    found = _loaded()
    return str(found) if isinstance(found, Unbuilt) else ""


def wide() -> bool:
    """Whether products of many rows are as fast as torch's: with registers of 64 bytes. Raises `Unbuilt`."""
    return bool(library().dk_wide())


def tiled() -> bool:
    """Whether a matrix unit makes the products of many rows. Raises `Unbuilt`."""
    return bool(library().dk_tiled())


def tune(weight: Tensor) -> None:
    """Choose how weights are fetched by timing it on one that no cache holds, [N, K] dense; once in a process.

    Takes some thirty milliseconds; answers are the same bits either way. Smaller weights leave the choice to what is
    known of this processor. Raises `Unbuilt`.
    """
    if weight.numel() * weight.element_size() < LARGE or _tuned:
        return
    _tuned.append(weight.dtype)
    x = torch.ones(1, weight.shape[1])
    best = [float("inf")] * 2
    for _ in range(TRIES):
        for far in (0, 1):
            library().dk_fetch(far)
            start = time.perf_counter()
            linear(x, weight, None)
            best[far] = min(best[far], time.perf_counter() - start)
    library().dk_fetch(best.index(min(best)) if max(best) > CLEAR * min(best) else -1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Give [..., N] in the type of x [..., K], weight [N, K] dense, bias [N] in the type of x or None.

    Sums run in float32; up to 8 rows in an order that does not depend on their number.
    """
    x = x.contiguous()
    count, width = weight.shape
    y = x.new_empty(*x.shape[:-1], count)
    library().dk_linear(
        weight.data_ptr(), TYPES[weight.dtype], None if bias is None else bias.data_ptr(), x.data_ptr(), TYPES[x.dtype],
        y.data_ptr(), x.numel() // width, count, width, torch.get_num_threads(),
    )  # fmt: skip
    return y


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm of x [..., K] by a dense weight [K] of the same type (arXiv:1910.07467)."""
    x = x.contiguous()
    y = torch.empty_like(x)
    width = weight.shape[0]
    library().dk_norm(
        x.data_ptr(), weight.data_ptr(), TYPES[x.dtype], eps, y.data_ptr(), x.numel() // width, width,
        torch.get_num_threads(),
    )  # fmt: skip
    return y
