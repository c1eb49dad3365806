"""The preparer ``compiled``."""

from __future__ import annotations

from typing import Any, ClassVar

from decodekit.errors import PipelineError
from decodekit.protocols import ModelAdapter

from decodekit_plugins.twins.table import module_of

from .adapter import CompiledAdapter, inside
from .config import CompileConfig
from .criteria import usual
from .step import forget


class Compiled:
    """Compile the decoding step by torch.compile, on any device, over a static cache.

    The first pass of each shape compiles, seconds on a CPU; the graphs are kept with the model, whoever prepares it,
    until `release`. Weights are arguments of the graphs: changes of them count. Needs memory for the static cache only.
    """

    frozen: ClassVar[bool] = False
    memory: ClassVar[float] = 0.0

    def prepare(self, adapter: ModelAdapter, /) -> ModelAdapter:
        """The same model with a compiled step. Raises `PipelineError` where its cache cannot be a static one."""
        return inside(adapter, self._prepare)  # type: ignore[no-any-return]

    def _prepare(self, adapter: Any) -> ModelAdapter:
        if isinstance(adapter, CompiledAdapter):
            return adapter  # type: ignore[return-value]
        own = getattr(adapter, "default_cache", "model") == "model"
        if own or "cache" not in adapter.offers():
            kind = "makes a cache of its own kind" if "cache" in adapter.offers() else "takes no cache"
            raise PipelineError(
                f"prepare='compiled' needs a static cache, and {type(adapter.model).__name__} {kind}: leave it out"
            )
        return CompiledAdapter(adapter, usual(adapter.spec.device.type))  # type: ignore[return-value]

    def release(self, model: Any, /) -> bool:
        """Drop the graphs of a model, or of an adapter's. Returns whether there were any."""
        found = module_of(model)
        return found is not None and forget(found)


__all__ = ["CompileConfig", "Compiled"]
