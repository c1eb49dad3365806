"""Finds the adapter of a model: the plugin that claims the nearest class it inherits from."""

from __future__ import annotations

import functools
from typing import Any, cast

from .errors import InputError, PluginNotFound
from .protocols import ModelAdapter
from .registry import Plugin, registry


def claimant(item: Any, kind: str = "models") -> Plugin | None:
    """The plugin of this kind whose ``decodekit.adapts`` entry names the nearest base class of `item`.

    Only class names are compared, so no plugin is imported to find it. Raises `PluginClash` for two claims.
    """
    return _claimant(registry.generation, kind, type(item))  # type: ignore[arg-type]


@functools.lru_cache(256)
def _claimant(generation: int, kind: str, wanted: type) -> Plugin | None:
    claims: dict[str, dict[str, Plugin]] = {}
    live = {plugin.qualified: plugin for plugin in registry.plugins(kind) if not plugin.disabled}
    for entry in registry.plugins("adapts"):
        owner = live.get(f"{entry.distribution}:{entry.value}")
        if owner is not None and not entry.disabled:
            claims.setdefault(entry.name, {})[owner.qualified] = owner
    for cls in wanted.__mro__:
        if found := claims.get(f"{cls.__module__}.{cls.__qualname__}"):
            return cast(Plugin, registry.choose(f"class {cls.__qualname__} is claimed", found))
    return None


def adapter_for(model: Any, adapter: str | None = None) -> ModelAdapter:
    """Wrap `model` for the loop; an adapter is used as it is. `adapter` names a models plugin; unset: the one that
    claims the class.

    Raises `PluginNotFound` when nobody knows this kind of model.
    """
    own = getattr(model, "__decodekit_adapter__", None)
    if own is not None or (hasattr(model, "spec") and hasattr(model, "offers")):
        if adapter:
            raise InputError(f"adapter={adapter!r}: this {type(model).__name__} has its adapter already; leave it out")
        return cast(ModelAdapter, model if own is None else own())
    plugin = registry.find("models", adapter) if adapter else claimant(model)
    if plugin is None:
        raise PluginNotFound(
            f"no models plugin knows {type(model).__name__}; there are: {', '.join(registry.names('models'))}. "
            f"Pass a torch.nn.Module that returns logits, or an object with __decodekit_adapter__()"
        )
    found: ModelAdapter | None = plugin.load()().adapt(model)
    if found is None:
        raise PluginNotFound(f"models plugin {plugin.qualified} refuses this {type(model).__name__}")
    return found
