"""The ``packed`` preparer: linear layers of a model on a CPU read their weights in an order that suits the CPU."""

from __future__ import annotations

import os
from typing import Any, ClassVar

import attrs
import torch
from decodekit.fields import one_of, option
from decodekit.protocols import ModelAdapter
from torch import nn

from decodekit_plugins.twins.table import Table, module_of

from .layers import linear
from .prepared import Prepared, Wish

_table: Table[Prepared] = Table()
ROOM = 0.5
"""Share of the free memory that `auto` takes at most."""
WORTH = 0.9
"""What `auto` packs takes at most this share of its time, as the mean over the numbers of rows that are measured."""


@attrs.frozen
class Packed:
    """Reorder the weights of linear layers once, for the CPU.

    The model object stays as it is; what runs is a twin over the same parameters. It is made once for a model and
    these options, and made anew when the model's weights or modules are others. Float32 gives the same answers up to
    the order of sums; bfloat16 and float16 round the weights and what goes into and comes out of these layers.
    """

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16", "float16"})
    frozen: ClassVar[bool] = False
    memory: ClassVar[float] = 1.0

    dtype: str | None = option(
        "Type of the packed weights; unset: the model's own.",
        default=None,
        check=one_of("float32", "bfloat16", "float16"),
    )
    free: bool = option("Give the originals' memory back: the model then runs prepared only.", default=False)
    layout: str = option(
        "Order of the weights: measured for each shape, or one for all.",
        default="measured",
        check=one_of("measured", "blocks", "columns"),
    )

    def prepare(self, adapter: ModelAdapter, /) -> ModelAdapter:
        """The adapter with a packed twin of its model; itself where the model is no torch.nn.Module on a CPU.

        Raises `PipelineError` for a model whose weights were freed in another type.
        """
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        return prepared(adapter, Wish(dtype, self.free, self.layout))

    def release(self, model: Any, /) -> bool:
        """Forget what was made of a model (or adapter) and give freed weights back. False: nothing was.

        Raises `PipelineError` where the weights that were freed had been rounded.
        """
        model = module_of(model)
        known = [] if model is None else _table.values(model)
        for found in known:
            if found.frees:
                found.release(model)
        return bool(model is not None and _table.pop(model))


class Auto:
    """What `load` prepares with: ``packed`` on a CPU where it is worth its memory, nothing elsewhere."""

    devices: ClassVar[frozenset[str]] = frozenset()
    dtypes: ClassVar[frozenset[str]] = frozenset()
    frozen: ClassVar[bool] = False
    memory: ClassVar[float] = 1.0

    def prepare(self, adapter: ModelAdapter, /) -> ModelAdapter:
        """The faster adapter, or the same one. It never refuses a model."""
        model = module_of(adapter)
        if model is None:
            return adapter
        if freed := next((found for found in _table.values(model) if found.frees), None):
            return prepared(adapter, freed.wish)
        if not _room(model):
            return adapter
        return prepared(adapter, Wish(share=WORTH))

    def release(self, model: Any, /) -> bool:
        """As ``packed``."""
        return Packed().release(model)


def prepared(adapter: Any, wish: Wish) -> Any:
    """The adapter as `wish` says."""
    adapter = getattr(adapter, "__dict__", {}).get("unprepared", adapter)
    model = module_of(adapter)
    if model is None or not hasattr(adapter, "__dict__"):
        return adapter
    found = _table.get(model, wish, lambda old: Prepared(model, wish) if old is None else old.renewed(model))
    return found.through(adapter)


def _room(model: nn.Module) -> bool:
    """Whether a second copy of the model's linear layers leaves enough memory to others."""
    if _table.values(model):
        return True
    weights = [module._parameters.get("weight") for module in model.modules() if linear(module)]
    size = sum(weight.numel() * weight.element_size() for weight in weights if weight is not None)
    return size <= ROOM * _free()


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
