"""``decodekit.release``: undo what preparers made of a model."""

from __future__ import annotations

from typing import Any

from decodekit.registry import registry


def release(model: Any, /) -> bool:
    """Give back the memory that preparers took for a model, and its weights where they were freed.

    model: the model object, its adapter, or what `decodekit.load` returned. Returns whether there was anything to undo.
    Raises `PipelineError` where that cannot be (weights freed in another type).
    """
    undone = False
    for plugin in registry.plugins("preparers"):
        if not plugin.disabled and hasattr(made := plugin.load(), "release"):
            undone = bool(made().release(model)) or undone
    return undone
