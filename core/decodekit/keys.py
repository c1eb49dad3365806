"""Which plugin owns a config key. Reads entry points only: nothing is imported until a value is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from . import __version__
from .errors import suggest
from .options import ARGUMENTS, CORE_OPTIONS, MADE, REFERENCE
from .registry import KINDS, Plugin, Registry, registry

CORE = "core"
"""The kind of the core's own options classes: they own keys like any plugin, and are no plugins."""


@attrs.frozen
class Key:
    """A config key and the field of the options class that owns it."""

    name: str
    field: str
    plugin: Plugin
    """The owner."""

    @property
    def kind(self) -> str:
        """Plugin kind of the owner, or ``core``."""
        return self.plugin.kind

    @property
    def distribution(self) -> str:
        """Who ships the owner."""
        return self.plugin.distribution

    @property
    def owner(self) -> str:
        """``distribution:plugin``, for messages."""
        return self.plugin.qualified

    def load(self) -> Any:
        """The owner class. Raises `PluginBroken` with the cause where it cannot be imported."""
        return self.plugin.load()


class KeyTable:
    """All keys of a registry, rebuilt when its plugins change."""

    def __init__(self, source: Registry) -> None:
        self._registry = source
        self._seen = -1
        self._keys: dict[str, list[Key]] = {}
        self._fields: dict[str, dict[str, str]] = {}

    def _table(self) -> dict[str, list[Key]]:
        generation = self._registry.generation
        if self._seen == generation:
            return self._keys
        owners = {(p.distribution, p.value): p for p in self._registry.plugins()}
        table: dict[str, list[Key]] = {}
        for cls in CORE_OPTIONS:
            core = Plugin(CORE, cls.__name__, f"{cls.__module__}:{cls.__name__}", "decodekit", __version__)
            table.update((name, [Key(name, name, core)]) for name in attrs.fields_dict(cls))
        for entry in self._registry.plugins("keys"):
            target, _, field = entry.value.rpartition(".")
            owner = owners.get((entry.distribution, target))
            if entry.disabled or owner is None or owner.disabled:
                continue
            for name in (entry.name, entry.qualified):
                table.setdefault(name, []).append(Key(entry.name, field, owner))
        fields: dict[str, dict[str, str]] = {}
        for key in (key for name, found in table.items() if ":" not in name for key in found):
            fields.setdefault(key.plugin.value, {})[key.field] = key.name
        self._keys, self._fields, self._seen = table, fields, generation
        return table

    def __contains__(self, name: object) -> bool:
        return name in self._table()

    def names(self) -> list[str]:
        """All bare key names."""
        return sorted(name for name in self._table() if ":" not in name)

    def all(self) -> list[Key]:
        """Every key once, clashing ones included, by name."""
        return [key for name in self.names() for key in self._table()[name]]

    def find(self, name: str) -> Key | None:
        """The key of a bare or qualified name, or None. Raises `PluginClash` where two distributions own it."""
        found = {f"{key.distribution}:{name}": key for key in self._table().get(name, [])}
        return self._registry.choose(f"config key {name!r} is owned", found) if found else None

    def library(self, name: str) -> Key | None:
        """decodekit's own key of this name: what the library's defaults are about, whoever clashes with it."""
        return next((k for k in self._table().get(name, []) if k.distribution == "decodekit"), None)

    def of(self, target: str) -> Mapping[str, str]:
        """Field name -> key name, for an owner ``module:Class``."""
        self._table()
        return self._fields.get(target, {})

    def idle(self, name: str, value: Any) -> bool:
        """Whether nobody owns the key, and the value asks for nothing that the reference has of this name."""
        known = f"{REFERENCE} {ARGUMENTS} {MADE}".split()
        return name in known and name not in self and (value is None or value is False)

    def unknown(self, name: str) -> str:
        """The words for a key nobody owns, or whose owner is switched off or missing."""
        for entry in self._registry.plugins("keys"):
            if name in (entry.name, entry.qualified):
                target = entry.value.rpartition(".")[0]
                owners = (plugin.disabled for plugin in self._registry.plugins() if plugin.value == target)
                off = entry.disabled or next(filter(None, owners), "")
                why = f"is switched off ({off})" if off else f"has no plugin {target}"
                return f"belongs to {entry.distribution}, which {why}"
        if name in REFERENCE.split() or name in ARGUMENTS.split():
            return "not available in this version of decodekit; `decodekit keys` lists what is"
        if name in MADE.split():
            return "decodekit makes what a model's forward pass needs of this: leave it out"
        return f"unknown key; {suggest(name, self.names()) or 'see `decodekit keys` for all keys'}"


keys = KeyTable(registry)
"""The keys of this process's registry."""

SECTIONS = tuple(kind for kind in KINDS if kind not in ("hubs", "hooks", "models", "commands", "frontends"))
"""Nested serial form: ``{"processors": {"sharpen": {"power": 2.0}}}``."""
