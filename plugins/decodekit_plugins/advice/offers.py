"""Which installed plugins would do where a part of a run lacks an ability."""

from __future__ import annotations

import contextlib

from decodekit.errors import PluginError
from decodekit.hooks import hookimpl
from decodekit.registry import registry

GROUPS = {"cache": "caches", "model": "models", "strategy": "strategies"}
SETTINGS = {"caches": "cache_implementation", "models": "adapter", "strategies": "strategy"}


@hookimpl
def would_do(capability: str) -> str:
    """Name the plugins that declare the capability (class attribute ``provides``) and the setting that chooses one."""
    group = GROUPS.get(capability.partition(":")[0])
    if group is None:
        return "no installed plugin kind offers it"
    able = []
    for plugin in registry.plugins(group):
        with contextlib.suppress(PluginError):
            if not plugin.disabled and capability in getattr(plugin.load(), "provides", ()):
                able.append(plugin.name)
    words = f"these do: {', '.join(sorted(able))} (set {SETTINGS[group]})"
    return words if able else "no installed plugin offers it"
