"""Opens a checkpoint by whichever models plugin can."""

from __future__ import annotations

from typing import Any, cast

from decodekit.errors import PluginError, PluginNotFound, suggest
from decodekit.protocols import ModelAdapter
from decodekit.registry import registry


def open_model(ref: str, *, adapter: str | None = None, **options: Any) -> ModelAdapter:
    """Load a checkpoint by plugin name, folder or Hub id. Raises `PluginNotFound` when no plugin can open it."""
    namesake = ref in registry.names("models")
    if adapter or (namesake and registry.load("models", ref)().opens(ref)):
        return cast(ModelAdapter, registry.load("models", adapter or ref)().open(ref, **options))
    failures: list[str] = []
    openers: list[tuple[bool, str, Any]] = []
    known: list[str] = []
    for plugin in registry.plugins("models"):
        try:
            entry = None if plugin.disabled else plugin.load()()
            if entry is not None and entry.opens(ref):
                openers.append((bool(getattr(entry, "fallback", False)), plugin.name, entry))
            if entry is not None and entry.opens(plugin.name):
                known.append(plugin.name)
        except PluginError as error:
            failures.append(str(error))
    if not openers:
        hint = suggest(ref, known) or f"give a folder with config.json, a Hub id, or one of: {', '.join(known)}"
        if namesake:
            hint = f"{ref!r} is a models plugin itself: give it a folder with config.json, or your own model object"
        raise PluginNotFound("\n".join([f"no models plugin can open {ref!r}; {hint}", *failures]))
    return cast(ModelAdapter, min(openers, key=lambda item: item[:2])[2].open(ref, **options))
