"""Keys from every source become structured options: call over object over model over library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import attrs

from .converter import checked, words
from .errors import ConfigError, PluginClash, PluginNotFound, Problem
from .keys import CORE, SECTIONS, Key, keys
from .options import CORE_OPTIONS, LIBRARY
from .registry import Plugin, registry
from .traits import Phase, traits_of

T = TypeVar("T")

ORIGINS = ("library", "model", "config", "call")
"""Sources of a value, weakest first."""
CALLER = ORIGINS[2:]
"""Those that are the caller's own wish."""

CHOICES = {"strategies": "strategy", "selectors": "selector", "caches": "cache_implementation", "preparers": "prepare"}
"""Kinds of which a run has one: naming a plugin in a section chooses it, as this key does."""


@attrs.frozen
class Value:
    """The final value of a key, and where it came from."""

    key: str
    value: Any
    origin: str
    owner: str


@attrs.define
class Active:
    """A plugin that the configuration asks for, with its structured options."""

    plugin: Plugin
    options: Any
    origin: str
    """The strongest source that named it."""


@attrs.define
class Settings:
    """The outcome of `resolve`."""

    values: dict[str, Value]
    active: dict[tuple[str, str], Active]
    """By (kind, qualified plugin name)."""
    core: dict[type, Any]
    unknown: dict[str, Any]
    """Keys of files that nobody owns."""
    sources: dict[str, str] = attrs.field(factory=dict)
    """Where each of these came from."""

    def get(self, key: str, default: Any = None) -> Any:
        """The final value of a key, or `default` where it is unset."""
        found = self.values.get(key)
        return default if found is None else found.value

    def origin(self, key: str) -> str:
        """Where the value of a key came from, or ``unset``."""
        found = self.values.get(key)
        return "unset" if found is None else found.origin

    def copy(self) -> Settings:
        """An independent collection of the same values and options."""
        return Settings(dict(self.values), dict(self.active), dict(self.core), dict(self.unknown), self.sources)

    def of(self, cls: type[T]) -> T:
        """A core options object."""
        return cast(T, self.core[cls])

    def kind(self, kind: str) -> list[Active]:
        """All active plugins of a kind, by name."""
        mine = [active for (of, _), active in self.active.items() if of == kind]
        return sorted(mine, key=lambda active: (active.plugin.name, active.plugin.qualified))


@attrs.define
class _Set:
    shown: str
    value: Any
    rank: int


def resolve(layers: Sequence[tuple[str, Mapping[str, Any]]], *, library: bool = True) -> Settings:
    """Merge `layers` of (origin, keys), weakest first, and structure every value by its owner.

    None in a layer unsets what weaker layers said. Raises one `ConfigError` with all problems, or
    `PluginBroken`/`PluginClash` where a key's owner cannot be used.
    """
    problems: list[Problem] = []
    unknown: dict[str, Any] = {}
    sources: dict[str, str] = {}
    owners: dict[str, tuple[Plugin, dict[str, _Set]]] = {}
    named: set[str] = set()
    silenced: set[str] = set()

    def put(owner: Plugin, field: str, entry: _Set) -> None:
        fields = owners.setdefault(owner.value, (owner, {}))[1]
        if entry.value is None:
            fields.pop(field, None)
            silenced.add(owner.value)
            return
        old = fields.get(field)
        if old is not None and old.rank == entry.rank and old.shown != entry.shown and old.value != entry.value:
            problems.append(Problem(entry.shown, f"is {entry.value!r}, but {old.shown} says {old.value!r}"))
        fields[field] = entry

    def put_section(kind: str, label: str, plugin: Plugin, options: Mapping[str, Any] | None, rank: int) -> None:
        target = plugin.value
        if options is None:  # off, whatever weaker layers said
            owners.pop(target, None)
            named.discard(target)
            silenced.add(target)
            return
        named.add(target)
        owners[target] = (plugin, owners[target][1] if target in owners else {})
        choice = keys.find(CHOICES.get(kind, ""))
        if choice is not None:
            put(choice.plugin, choice.field, _Set(f"{kind}.{label}", label, rank))
        for field, item in options.items():
            put(plugin, field, _Set(f"{kind}.{plugin.name}.{field}", item, rank))

    for origin, layer in layers:
        rank = ORIGINS.index(origin)
        for name, value in layer.items():
            if name in SECTIONS:
                for label, plugin, options in _section(name, value, problems):
                    put_section(name, label, plugin, options, rank)
            elif (key := _find(name, origin)) is not None:
                put(key.plugin, key.field, _Set(name, value, rank))
            elif origin == "call":
                problems += [] if keys.idle(name, value) else [Problem(name, keys.unknown(name))]
            else:
                unknown[name], sources[name] = value, sources.get(name, origin)
    if library:
        said = {entry.shown for _, fields in owners.values() for entry in fields.values()}
        for name, value in LIBRARY.items():
            key = keys.library(name)
            if key is None or name in said or (key.plugin.value in owners and owners[key.plugin.value][1]):
                continue
            # None takes a processor away for good; a run still needs an end.
            if key.plugin.value not in silenced or key.kind == "criteria":
                put(key.plugin, key.field, _Set(name, value, 0))

    values: dict[str, Value] = {}
    active: dict[tuple[str, str], Active] = {}
    core: dict[type, Any] = {cls: cls() for cls in CORE_OPTIONS}
    for target, (plugin, fields) in owners.items():
        if not fields and target not in named:
            continue
        cls, label, shown = plugin.load(), plugin.qualified, keys.of(target)
        _shadow(cls, fields, shown)
        data, asked = {f: s.value for f, s in fields.items()}, {f: s.shown for f, s in fields.items()}
        options = build(cls, data, label, problems, {**shown, **asked})
        for field, entry in fields.items():
            name = shown.get(field, entry.shown)
            name = f"{label}.{field}" if name in values else name  # two distributions have a key of this name
            values[name] = Value(name, getattr(options, field, entry.value), ORIGINS[entry.rank], label)
        if plugin.kind == CORE:
            core[cls] = options
        else:
            strongest = max((s.rank for s in fields.values()), default=len(ORIGINS) - 1)
            active[(plugin.kind, label)] = Active(plugin, options, ORIGINS[strongest])
    if problems:
        raise ConfigError(problems)
    return Settings(values, active, core, unknown, sources)


def _find(name: str, origin: str) -> Key | None:
    """The key of a name. A model's file was written for decodekit's own, so a clash there is none."""
    try:
        return keys.find(name)
    except PluginClash:
        own = keys.library(name) if origin == "model" else None
        if own is None:
            raise
        return own


def _section(kind: str, value: Any, problems: list[Problem]) -> Iterator[tuple[str, Plugin, Mapping[str, Any] | None]]:
    """The names and plugins of a nested section, each with its options; None switches it off."""
    if not isinstance(value, Mapping):
        problems.append(Problem(kind, f"expected a dict of plugin name -> options, got {value!r}"))
        return
    for name, options in value.items():
        try:
            plugin = registry.find(kind, name)
        except PluginNotFound as error:
            problems.append(Problem(f"{kind}.{name}", str(error)))
            continue
        if options is None or options is False:
            yield name, plugin, None
        elif options is True or isinstance(options, Mapping):
            yield name, plugin, {} if options is True else options
        else:
            problems.append(Problem(f"{kind}.{name}", f"expected a dict of options, got {options!r}"))


def _shadow(cls: type, fields: dict[str, _Set], shown: Mapping[str, str]) -> None:
    """Drop what a stronger source overrules through another key of the same owner (max_length, max_new_tokens)."""
    by_key = {key: field for field, key in shown.items()}
    ranks = {name: entry.rank for name, entry in fields.items()}
    for declared in attrs.fields(cls) if attrs.has(cls) else ():
        for rival in declared.metadata.get("shadows", ()):
            other = by_key.get(rival, rival)
            if other in ranks and ranks[other] < ranks.get(declared.name, 0):
                fields.pop(other, None)


def build(
    cls: Any, data: Mapping[str, Any], owner: str, problems: list[Problem], shown: Mapping[str, str] | None = None
) -> Any:
    """Structure `data` into options class `cls`, adding every fault to `problems`. Returns None on faults."""
    shown = shown or {}
    # Of a plain class the constructor is the only check there is.
    given, faults = checked(cls, data) if attrs.has(cls) else (dict(data), {})
    problems += [Problem(shown.get(name, name), fault, owner) for name, fault in faults.items()]
    if faults:
        return None
    try:
        return cls(**given)
    except Exception as error:
        problems.append(Problem(", ".join(shown.get(n, n) for n in given) or owner, words(error), owner))
        return None


def sampling_only(active: Active) -> bool:
    """Whether a processor matters only where tokens are drawn: it says so, or never moves the likeliest token."""
    traits = traits_of(active.options)
    return traits.only_sampling or (traits.keeps_argmax and traits.phase in (Phase.SCALE, Phase.TRUNCATE))
