"""The preparer ``auto``."""

from __future__ import annotations

import os
from typing import Any, ClassVar

from decodekit.protocols import ModelAdapter
from decodekit.registry import registry
from torch import nn

from decodekit_plugins.kernels import library
from decodekit_plugins.twins.table import module_of

from .choice import LEAST
from .layers import linear, matrix, why_not
from .packed import Packed, known, prepared
from .prepared import KERNEL, Wish

ROOM = 0.5
"""Share of the free memory that packed layers take at most."""
WORTH = 0.9
"""What is packed takes at most this share of its time, as the mean over the numbers of rows that are measured."""


class Auto:
    """What `load` prepares with: ``kernels`` for all but small models on a CPU, where a compiler is.

    Elsewhere on a CPU ``packed``, where that is worth its memory; on other devices nothing.
    """

    devices: ClassVar[frozenset[str]] = frozenset()
    dtypes: ClassVar[frozenset[str]] = frozenset()
    frozen: ClassVar[bool] = False
    memory: ClassVar[float] = 1.0

    def prepare(self, adapter: ModelAdapter, /) -> ModelAdapter:
        """The faster adapter, or the same one. It never refuses a model."""
        model = module_of(adapter)
        if model is None:
            return adapter
        if freed := next((found for found in known(model) if found.frees), None):
            return prepared(adapter, freed.wish)
        layers = [module for module in model.modules() if linear(module) and not why_not(module)]
        if any(matrix(module).numel() >= LEAST for module in layers) and _on("kernels") and not library.why_not():
            made = [found.wish for found in known(model) if found.wish.layout == KERNEL and found.wish.dtype is None]
            return prepared(adapter, made[0] if made else Wish(layout=KERNEL, halve=_room(model, 0.5)))
        if not known(model) and not _room(model):
            return adapter
        return prepared(adapter, Wish(share=WORTH))

    def release(self, model: Any, /) -> bool:
        """As ``packed``."""
        return Packed().release(model)


def _on(name: str) -> bool:
    """Whether a preparer is not switched off."""
    return any(plugin.name == name and not plugin.disabled for plugin in registry.plugins("preparers"))


def _room(model: nn.Module, share: float = 1.0) -> bool:
    """Whether a copy of a model's linear layers, of this share of their size, leaves enough memory to others."""
    weights = [module._parameters.get("weight") for module in model.modules() if linear(module)]
    size = sum(weight.numel() * weight.element_size() for weight in weights if weight is not None)
    return size * share <= ROOM * _free()


def _free() -> float:
    """Bytes of memory that nobody uses; endless where the system does not say."""
    found = [float("inf")]
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found += [float(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable")]
        limit, used = (f"/sys/fs/cgroup/memory.{name}" for name in ("max", "current"))
        if os.path.exists(limit):
            with open(limit, encoding="ascii") as most, open(used, encoding="ascii") as now:
                found += [float(text) - float(now.read()) for text in [most.read().strip()] if text != "max"]
    except (OSError, ValueError):
        pass
    return min(found)
