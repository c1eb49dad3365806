"""Finds plugins by entry point: lazily, one scan, each failure kept to the plugin it belongs to.

Nothing here imports torch or a plugin until that plugin is asked for.
"""

from __future__ import annotations

import os
import re
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any, cast

import attrs

from .errors import PluginBroken, PluginClash, PluginNotFound, suggest

KINDS = (
    "processors", "criteria", "caches", "schedulers", "candidates", "watermarkers", "strategies",
    "models", "preparers", "streamers", "selectors", "tokenizers", "hubs", "hooks", "commands",
    "frontends", "builders",
)  # fmt: skip
"""The plugin kinds: entry-point groups are ``decodekit.<kind>``."""

TABLES = ("keys", "adapts")
"""Import-free tables beside the kinds: config key -> field, model class -> adapter plugin."""

LOCAL = "local"
"""The distribution name of plugins registered in this process by `Registry.register`."""


@attrs.define(eq=False)
class Plugin:
    """One entry point: where it comes from, and, once asked for, what it is or why it failed."""

    kind: str
    name: str
    value: str
    distribution: str
    version: str
    disabled: str = ""
    error: BaseException | None = None
    _loaded: Any = attrs.field(default=None, alias="loaded")
    _done: bool = attrs.field(default=False, alias="done")

    @property
    def qualified(self) -> str:
        """``distribution:name``, unique inside a kind."""
        return f"{self.distribution}:{self.name}"

    @property
    def labels(self) -> tuple[str, ...]:
        """What switches call it: distribution, name, qualified name, ``kind:name`` or kind; a table is no kind."""
        kind = () if self.kind in TABLES else (self.kind,)
        return (self.distribution, self.name, self.qualified, f"{self.kind}:{self.name}", *kind)

    @property
    def state(self) -> str:
        """``off``, ``BROKEN``, ``loaded`` or ``found`` (not asked for yet)."""
        if self.disabled:
            return "off"
        if self.error is not None:
            return "BROKEN"
        return "loaded" if self._done else "found"

    def load(self) -> Any:
        """Import and return the object. Raises `PluginBroken` with the cause; it is tried once."""
        if self.disabled:
            raise PluginNotFound(f"{self.kind} plugin {self.qualified} is switched off ({self.disabled})")
        with _load_lock:
            if not self._done and self.error is None:
                try:
                    self._loaded = EntryPoint(self.name, self.value, self.kind).load()
                    if self.kind not in ("hooks", "frontends") and not callable(self._loaded):
                        raise TypeError(f"it is {self._loaded!r}, neither a class nor a function")
                    self._done = True
                except (Exception, SystemExit) as error:
                    self.error = error
        if self.error is not None:
            raise PluginBroken(
                f"{self.kind} plugin {self.name!r} of {self.distribution} {self.version} cannot be loaded "
                f"from {self.value!r}: {f'{type(self.error).__name__}: {self.error}'.rstrip(': ')}. "
                f"Fix or uninstall {self.distribution}, or set DECODEKIT_DISABLE={self.distribution}."
            ) from self.error
        return self._loaded


_load_lock = threading.RLock()


@attrs.frozen
class Switches:
    """Off switches and preferences. Entries match a distribution, ``kind:name``, ``dist:name`` or a name."""

    disable: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    strict: bool = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Switches:
        """Read DECODEKIT_DISABLE, DECODEKIT_ALLOW, DECODEKIT_PREFER (comma lists) and DECODEKIT_STRICT."""

        def names(variable: str) -> tuple[str, ...]:
            return tuple(part.strip() for part in environ.get(variable, "").split(",") if part.strip())

        strict = environ.get("DECODEKIT_STRICT", "").lower() not in ("", "0", "false", "no", "off")
        return cls(names("DECODEKIT_DISABLE"), names("DECODEKIT_ALLOW"), names("DECODEKIT_PREFER"), strict)


class Registry:
    """All plugins of this process. Use the module's `registry`; tests make their own."""

    def __init__(self, switches: Switches | None = None) -> None:
        self._given = switches
        self._local: list[Plugin] = []
        self._plugins: dict[str, list[Plugin]] | None = None
        self._index: dict[tuple[str, str], list[Plugin]] = {}
        self.shadowed: list[str] = []
        """Metadata folders left out because another of the same distribution comes first."""
        self.unreadable: list[str] = []
        """Metadata folders that cannot be read, with the reason."""
        self._generation = 0

    @property
    def switches(self) -> Switches:
        """The switches in force."""
        return self._given if self._given is not None else Switches.from_environment()

    # -- discovery ---------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Forget what was found; the next look-up scans again."""
        self._plugins = None

    @property
    def generation(self) -> int:
        """Grows whenever the set of plugins changes; tables built from it compare this."""
        self._scan()
        return self._generation

    def _scan(self) -> dict[str, list[Plugin]]:
        if (found := self._plugins) is not None:
            return found
        with _load_lock:
            return self._plugins or self._fill()

    def _fill(self) -> dict[str, list[Plugin]]:
        found: dict[str, list[Plugin]] = {group: [] for group in (*KINDS, *TABLES)}
        self.shadowed, self.unreadable = [], []
        for dist in self._distributions():
            name, version = dist.metadata["Name"], dist.version
            for entry in dist.entry_points:
                kind = entry.group.removeprefix("decodekit.")
                if kind != entry.group and kind in found:
                    found[kind].append(Plugin(kind, entry.name, entry.value, name, version))
        for plugin in self._local:
            found[plugin.kind].append(plugin)
        everything = [p for plugins in found.values() for p in plugins]
        self._switch(everything)
        index: dict[tuple[str, str], list[Plugin]] = {}
        for plugin in everything:
            for label in (plugin.name, plugin.qualified):
                index.setdefault((plugin.kind, label), []).append(plugin)
        self._index, self._plugins = index, found
        self._generation += 1
        if self.switches.strict:
            try:
                for plugin in (p for kind in KINDS for p in found[kind] if not p.disabled):
                    plugin.load()
            except PluginBroken:
                self._plugins = None  # so that the next look-up refuses, too
                raise
        return found

    def _distributions(self) -> Iterator[Distribution]:
        """Each distribution with plugins, once. A dist-info wins over an egg-info, often a stale leftover."""
        found: dict[str, dict[str, Distribution]] = {}
        for dist in distributions():
            folder = str(getattr(dist, "_path", ""))
            try:
                # The raw text is read first: parsing the metadata of every installed package costs far more.
                if "decodekit." not in (dist.read_text("entry_points.txt") or ""):
                    continue
                list(dist.entry_points)
                key = re.sub(r"[-_.]+", "-", dist.metadata["Name"]).lower()
                found.setdefault(key, {}).setdefault(folder, dist)
            except Exception as error:  # damaged metadata harms only its own distribution
                self.unreadable.append(f"{folder}: {type(error).__name__}: {error}")
        for folders in found.values():
            best = min(folders, key=lambda path: path.endswith(".egg-info"))
            self.shadowed += [path for path in folders if path != best]
            yield folders[best]

    def _switch(self, plugins: Iterable[Plugin]) -> None:
        switches = self.switches
        known = {label for plugin in plugins for label in plugin.labels}
        for name in (*switches.allow, *switches.prefer, *switches.disable):
            if name not in known:
                words = f"names {name!r}, which no installed plugin matches; "
                words += f"{suggest(name, known) or 'see `decodekit plugins`'} (groups searched: {', '.join(KINDS)})"
                if name not in switches.disable:
                    raise PluginNotFound(f"DECODEKIT_ALLOW/DECODEKIT_PREFER {words}")
                warnings.warn(f"DECODEKIT_DISABLE {words}", stacklevel=2)
        for plugin in plugins:
            # Commands run only when called: switching all of decodekit off must leave the command line usable.
            command = plugin.kind == "commands"
            labels = plugin.labels[1:] if command and plugin.distribution == "decodekit" else plugin.labels
            off = next((name for name in switches.disable if name in labels), None)
            free = command or not switches.allow or plugin.distribution == LOCAL or set(labels) & set(switches.allow)
            plugin.disabled = f"DECODEKIT_DISABLE has {off!r}" if off else "" if free else "not in DECODEKIT_ALLOW"

    def register(self, kind: str, name: str, target: Any, *, keys: Mapping[str, str] | None = None) -> Plugin:
        """Add a plugin for this process only (notebooks, tests). `keys` maps config keys to its fields."""
        self.plugins(kind)
        module = getattr(target, "__module__", None) or type(target).__module__  # a module or an object is no class
        value = f"{module}:{getattr(target, '__qualname__', None) or name}"
        plugin = Plugin(kind, name, value, LOCAL, "0", loaded=target, done=True)
        self._local.append(plugin)
        for key, field in (keys or {}).items():
            self._local.append(Plugin("keys", key, f"{value}.{field}", LOCAL, "0"))
        self.refresh()
        return plugin

    def unregister(self, plugin: Plugin) -> None:
        """Take back a plugin added by `register`, and its keys."""
        shared = any(p is not plugin and p.value == plugin.value for p in self._local)
        mine = () if shared else tuple(p for p in self._local if p.value.rpartition(".")[0] == plugin.value)
        self._local = [p for p in self._local if p is not plugin and p not in mine]
        self.refresh()

    # -- look-up -----------------------------------------------------------------------------------

    def plugins(self, kind: str | None = None) -> list[Plugin]:
        """Everything found, of one kind or of all, switched-off ones included. Imports nothing."""
        found = self._scan()
        if kind is None:
            return [plugin for name in KINDS for plugin in found[name]]
        if kind not in found:
            raise PluginNotFound(f"there is no plugin kind {kind!r}; {suggest(kind, KINDS) or ', '.join(KINDS)}")
        return list(found[kind])

    def names(self, kind: str) -> list[str]:
        """The bare names in use for a kind, without switched-off plugins."""
        return sorted({plugin.name for plugin in self.plugins(kind) if not plugin.disabled})

    def find(self, kind: str, name: str) -> Plugin:
        """Return the one plugin of this kind with a bare or qualified name; loads nothing.

        Raises `PluginNotFound` with the nearest names, or `PluginClash` with the qualified names.
        """
        self._scan()
        matches = self._index.get((kind, name), [])
        live = [plugin for plugin in matches if not plugin.disabled]
        if live:
            return cast(Plugin, self.choose(f"{kind} name {name!r} is offered", {p.qualified: p for p in live}))
        if matches:
            matches[0].load()
        known = [label for p in self.plugins(kind) if not p.disabled for label in (p.name, p.qualified)]
        hint = suggest(name, known) or f"installed: {', '.join(self.names(kind)) or 'none'}"
        raise PluginNotFound(f"no {kind} plugin is named {name!r}; {hint}")

    def choose(self, what: str, found: Mapping[str, Any]) -> Any:
        """The only one, or else the preferred one, of plugins or keys by qualified name. Raises `PluginClash`."""
        liked = list(found)
        if len(found) > 1:
            labels = {name: {name, name.partition(":")[0], getattr(item, "owner", "")} for name, item in found.items()}
            liked = [name for name in found if labels[name].intersection(self.switches.prefer)] or liked
        if len(liked) > 1:
            fix = "Use a qualified name, or set DECODEKIT_PREFER to one of them."
            raise PluginClash(f"{what} by several distributions: {', '.join(sorted(found))}. {fix}")
        return found[liked[0]]

    def load(self, kind: str, name: str) -> Any:
        """`find` and load. Raises what they raise, `PluginBroken` included."""
        return self.find(kind, name).load()


registry = Registry()
"""The registry of this process."""
