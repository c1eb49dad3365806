"""An adapter whose decoding step is compiled."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import attrs
import torch
from decodekit.errors import PipelineError
from decodekit.pipeline import cache_offers
from decodekit.protocols import Forward, ModelAdapter
from torch import Tensor

from .config import CompileConfig
from .step import Caller


class CompiledAdapter:
    """Runs passes of one token on a compiled model, over a cache that offers ``compile``; all others as they were.

    Everything else is the inner adapter's, which must have a `call` that its passes go through. Prompts, drafts of
    several tokens and early exits are not compiled: each of their lengths would make a graph. Raises `ConfigError` for
    a backend, mode or options that torch does not have.
    """

    default_cache = "static"

    def __init__(self, inner: Any, config: CompileConfig, strict: bool = False) -> None:
        self.inner, self.config = inner, config
        self._fast = copy.copy(inner)
        self._fast.call = Caller(inner.model, config, strict)
        self._real: Tensor | None = None
        self._slots = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("inner", "_fast"):  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: Any, /, *, mask: Tensor | None = None, **more: Any
    ) -> Forward:
        """As the inner adapter's."""
        view = None
        if tokens.shape[1] == 1 and more.get("layers") is None and not torch.is_grad_enabled():
            view = cache.fixed(tokens.shape[0]) if "compile" in cache_offers(cache) else None
        if view is None:
            return self.inner.forward(tokens, positions, cache, mask=mask, **more)
        slots = self._ready(cache)
        real = None if mask is None else self._wide(mask, slots)
        found = self._fast.forward(_column(tokens), _column(positions), view, mask=real, **more)
        cache.advance(1)
        return attrs.evolve(found, cache=cache)

    def _ready(self, cache: Any) -> int:
        """The slots of a cache; tables that passes over so many look up are made before any is traced."""
        slots: int = getattr(cache, "self_attention_cache", cache).get_max_length()
        if slots != self._slots:
            self._slots = slots
            getattr(self.inner, "ready", int)(slots)
        return slots

    def _wide(self, mask: Tensor, slots: int) -> Tensor:
        """The mask [B, K] over all slots, always in the same memory; nobody sees what lies behind the query."""
        rows, width = mask.shape
        if self._real is None or self._real.shape != (rows, slots) or self._real.device != mask.device:
            self._real = mask.new_ones(rows, slots)
        self._real[:, :width].copy_(mask)
        return self._real

    def __repr__(self) -> str:
        return f"CompiledAdapter({self.inner!r})"


def _column(values: Tensor) -> Tensor:
    """The same [B, 1] with the usual strides: what a slice left of others would make graphs of their own."""
    return values.contiguous().as_strided(values.shape, (1, 1))


def inside(adapter: Any, change: Callable[[Any], ModelAdapter]) -> Any:
    """The adapter with `change` made to the innermost one: wrappers of others stay around it.

    Raises `PipelineError` where that one gives no hand in how its model is called.
    """
    held = getattr(adapter, "__dict__", {})
    if isinstance(adapter, CompiledAdapter) or "call" in held:
        return change(adapter)
    if "inner" in held:
        other = copy.copy(adapter)
        other.inner = inside(adapter.inner, change)
        return other
    raise PipelineError(
        f"{type(adapter).__name__} does not say how its model is called (an attribute `call`), so its step cannot be "
        f"compiled: leave compile_config and prepare='compiled' out"
    )


def compiled_in(adapter: Any) -> CompiledAdapter | None:
    """The compiled adapter in this one or under its wrappers."""
    while adapter is not None and not isinstance(adapter, CompiledAdapter):
        adapter = getattr(adapter, "__dict__", {}).get("inner")
    return adapter
