"""Which plugin owns a config key. Reads entry points only: nothing is imported until a value is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from .converter import field_types, type_name
from .errors import PluginClash, PluginError, suggest
from .options import CORE_OPTIONS
from .registry import KINDS, Plugin, Registry, registry

CORE = "core"


@attrs.frozen
class Key:
    """A config key and the field of the options class that owns it."""

    name: str
    target: str
    """``module:Class`` of the owner."""
    field: str
    distribution: str
    kind: str
    """Plugin kind of the owner, or ``core``."""
    plugin: str
    """Plugin name of the owner, or the class name for core options."""
    entry: Plugin | None = attrs.field(default=None, eq=False)

    @property
    def owner(self) -> str:
        """``distribution:plugin``, for messages."""
        return f"{self.distribution}:{self.plugin}"

    def load(self) -> type:
        """The owner class. Raises `PluginBroken` with the cause where it cannot be imported."""
        if self.entry is None:
            return next(cls for cls in CORE_OPTIONS if cls.__name__ == self.plugin)
        found: type = self.entry.load()
        return found


class KeyTable:
    """All keys of a registry, rebuilt when its plugins change."""

    def __init__(self, source: Registry) -> None:
        self._registry = source
        self._seen = -1
        self._keys: dict[str, list[Key]] = {}
        self._fields: dict[str, dict[str, str]] = {}

    def _table(self) -> dict[str, list[Key]]:
        if self._seen == self._registry.current():
            return self._keys
        entries = self._registry.plugins("keys")
        owners = {(p.distribution, p.value): p for p in self._registry.plugins()}
        table: dict[str, list[Key]] = {}
        for cls in CORE_OPTIONS:
            for name in attrs.fields_dict(cls):
                target = f"{cls.__module__}:{cls.__name__}"
                table[name] = [Key(name, target, name, "decodekit", CORE, cls.__name__)]
        for entry in entries:
            if entry.disabled:
                continue
            target, _, field = entry.value.rpartition(".")
            owner = owners.get((entry.distribution, target))
            if owner is None or owner.disabled:
                continue
            key = Key(entry.name, target, field, entry.distribution, owner.kind, owner.name, owner)
            for name in (key.name, f"{key.distribution}:{key.name}"):
                table.setdefault(name, []).append(key)
        self._fields = {}
        for name, found in table.items():
            for key in found if ":" not in name else ():
                self._fields.setdefault(key.target, {})[key.field] = key.name
        self._keys, self._seen = table, self._registry.generation
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
        matches = self._table().get(name, [])
        if len(matches) > 1:
            prefer = set(self._registry.switches.prefer)
            chosen = [k for k in matches if prefer & {k.distribution, f"{k.distribution}:{name}", k.owner}]
            if len(chosen) != 1:
                choices = ", ".join(f"{k.distribution}:{name}" for k in matches)
                raise PluginClash(f"config key {name!r} is owned by several distributions: use one of {choices}")
            return chosen[0]
        return matches[0] if matches else None

    def library(self, name: str) -> Key | None:
        """decodekit's own key of this name: what the library's defaults are about, whoever clashes with it."""
        return next((k for k in self._table().get(name, []) if k.distribution == "decodekit"), None)

    def of(self, target: str) -> Mapping[str, str]:
        """Field name -> key name, for an owner ``module:Class``."""
        self._table()
        return self._fields.get(target, {})

    def unknown(self, name: str, also: Mapping[str, Any] | tuple[str, ...] = ()) -> str:
        """The words for a key nobody owns, or whose owner is switched off or missing."""
        for entry in self._registry.plugins("keys"):
            if name in (entry.name, entry.qualified):
                off = next((p.disabled for p in self._registry.plugins() if p.disabled and p.value in entry.value), "")
                off = entry.disabled or off
                why = f"is switched off ({off})" if off else f"has no plugin {entry.value.rpartition('.')[0]}"
                return f"belongs to {entry.distribution}, which {why}"
        hint = suggest(name, [*self.names(), *also])
        return f"unknown key; {hint or 'see `decodekit keys` for all keys'}"

    def describe(self, key: Key) -> dict[str, Any]:
        """Type, default, range and documentation of a key. Loads its owner."""
        row: dict[str, Any] = {"key": key.name, "kind": key.kind, "owner": key.owner}
        try:
            cls = key.load()
            field = attrs.fields_dict(cls)[key.field]
        except (PluginError, KeyError, attrs.exceptions.NotAnAttrsClassError) as error:
            return {**row, "error": str(error)}
        default = None if field.default is attrs.NOTHING or isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]
        check = field.validator
        return {
            **row,
            "type": type_name(field_types(cls)[key.field]),
            "default": default,
            "range": str(check) if type(check).__module__.startswith("decodekit") else "",
            "doc": field.metadata.get("doc", ""),
        }


keys = KeyTable(registry)
"""The keys of this process's registry."""

SECTIONS = tuple(kind for kind in KINDS if kind not in ("hooks", "models", "commands"))
"""Nested serial form: ``{"processors": {"sharpen": {"power": 2.0}}}``."""
