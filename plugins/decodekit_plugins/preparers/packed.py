"""The preparers ``packed`` and ``kernels``: what runs the linear layers of a model on a CPU, and how it reads them."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from decodekit.fields import one_of, option
from decodekit.protocols import ModelAdapter
from torch import nn

from decodekit_plugins.twins.table import Table, module_of

from .prepared import KERNEL, Prepared, Wish

_table: Table[Prepared] = Table()


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


@attrs.frozen
class Kernels:
    """Run a model's linear layers by kernels in C, and the layers of Llama-like models as a whole.

    The kernels are compiled for this machine, once, by the C compiler that is there; without one the model stays as it
    is, and `explain` says so. They read weights in the order in which the model has them. Copies are made for another
    `dtype`, and where bfloat16 or float16 holds all float32 weights exactly, as it does those of most checkpoints: the
    same answers come of half as many bytes. A row's answers are the same bits in batches of any few rows.
    """

    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    dtypes: ClassVar[frozenset[str]] = frozenset({"float32", "bfloat16", "float16"})
    frozen: ClassVar[bool] = False
    memory: ClassVar[float] = 0.5

    dtype: str | None = option(
        "Type of the weights that are read; unset: one that holds the model's own exactly.",
        default=None,
        check=one_of("float32", "bfloat16", "float16"),
    )
    free: bool = option("Give the memory of originals in another type back.", default=False)

    def prepare(self, adapter: ModelAdapter, /) -> ModelAdapter:
        """The adapter with a twin of its model; itself where the model is no torch.nn.Module on a CPU.

        Raises `PipelineError` for a model whose weights were freed in another type.
        """
        dtype = None if self.dtype is None else getattr(torch, self.dtype)
        return prepared(adapter, Wish(dtype, self.free, KERNEL, halve=self.dtype is None))

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


def known(model: nn.Module) -> list[Prepared]:
    """What was made of a model, by any of the preparers here."""
    return _table.values(model)
