"""What a caller set in vain. The model's own file is never doubted: its author knew nothing of the call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import attrs
from decodekit.config import METADATA, mode_of
from decodekit.errors import PluginError, Problem, warn
from decodekit.hooks import hookimpl
from decodekit.keys import keys
from decodekit.pipeline import NOTHING_TO_DO, Pipeline
from decodekit.prompt import eos_ids
from decodekit.registry import registry
from decodekit.settings import CALLER, Settings, Value, sampling_only

LEASTS = {"min_new_tokens": "max_new_tokens", "min_length": "max_length"}
"""Keys that keep a text from ending, and those that end it."""


OFF = (attrs.NOTHING, None, 0, 1)
"""Defaults of options that switch their plugin on."""


_reported: set[tuple[str, ...]] = set()


@hookimpl
def config_translated(settings: Settings) -> None:
    """Say once that a configuration has keys nobody owns, or whose owner is switched off."""
    told: dict[str, list[str]] = {}
    for name in sorted(settings.unknown):
        if name[0] != "_" and name not in METADATA:
            about = keys.unknown(name)
            whose = "the model's" if settings.sources.get(name) == "model" else "the passed"
            why = f"that {about}" if about.startswith("belongs to") else "that no installed plugin owns"
            told.setdefault(f"{whose} generation config has keys {why}".replace("belongs", "belong"), []).append(name)
    for words, names in told.items():
        if (words, *names) not in _reported:
            _reported.add((words, *names))
            warn(f"{words}: {', '.join(names)}")


@hookimpl
def pipeline_assembled(pipeline: Pipeline) -> None:
    """Say which keys wait for another one of their plugin, which does nothing so, and where nothing can be started."""
    settings = pipeline.settings
    for active in (*settings.kind("processors"), *settings.kind("criteria")):
        if pipeline.left_out.get(active.plugin.name) != NOTHING_TO_DO or not attrs.has(type(active.options)):
            continue
        switch, names = "", keys.of(active.plugin.value)
        for field in attrs.fields(type(active.options)):
            value = settings.values.get(names.get(field.name, ""))
            mine = value is not None and value.owner == active.plugin.qualified and value.origin in CALLER
            if value is not None and mine and switch and value.value != field.default:
                warn(f"{value.key}: {value.value!r} has no effect without {switch}: set that, too, or leave this out")
            if field.name in names and any(field.default is off or field.default == off for off in OFF):
                switch = names[field.name]
    if settings.origin("decoder_start_token_id") in CALLER and not hasattr(pipeline.adapter, "encode"):
        start = settings.get("decoder_start_token_id")
        warn(f"decoder_start_token_id: {start} has no effect: this model has no encoder; leave it out")


@hookimpl
def doubts(settings: Settings, samples: bool | None, strategy: str | None) -> list[Problem]:
    """One problem for each key that was set for nothing, with the fix in its words."""
    own = {key: value for key, value in settings.values.items() if value.origin in CALLER}
    if not own:
        return []
    name, chosen = _chosen(settings, strategy)
    reads = getattr(chosen, "reads", frozenset())
    own = {key: value for key, value in own.items() if key not in reads}
    found = [*_cache(settings, own), *_lengths(own), *_leasts(settings, own), *_strategies(settings, own, name, chosen)]
    found += _batching(settings, own) if strategy is not None else []
    return found if samples is not False else [*found, *_sampling(settings, own)]


def _chosen(settings: Settings, name: str | None) -> tuple[str, Any]:
    """Name and options class of the strategy; None as class where that is nobody's plugin, or is broken."""
    name = name or settings.get("strategy")
    if name is None:  # strategies are called by the names of modes, or by the beginnings of these
        mode = mode_of({key: value.value for key, value in settings.values.items()}).value
        names = [plugin.name for plugin in registry.plugins("strategies") if f"{mode}_".startswith(f"{plugin.name}_")]
        name = max(names, key=len, default=mode)
    for plugin in registry.plugins("strategies"):
        if name in (plugin.name, plugin.qualified, plugin.value.rpartition(":")[2]) and not plugin.disabled:
            with contextlib.suppress(PluginError):
                return name, plugin.load()
    return name, None


def _strategies(settings: Settings, own: dict[str, Value], name: str, chosen: Any) -> Iterator[Problem]:
    """Keys of strategies that do not run, unless they say what holds anyway."""
    for key, value in own.items() if chosen is not None else ():
        owner = settings.active.get(("strategies", value.owner))
        if owner is None or type(owner.options) is chosen:
            continue
        # Some defaults are no wish; others choose the strategy by themselves.
        if value.value == _default(type(owner.options), key) and value.value in (None, False, 0, 1):
            continue
        words = f"{value.value!r} has no effect with strategy {name!r}, which other keys ask for"
        yield Problem(key, f"{words}; leave it out, or set strategy={owner.plugin.name!r}", value.owner)


def _batching(settings: Settings, own: dict[str, Value]) -> list[Problem]:
    """Keys of schedulers: in a configuration they wait for a run that batches continuously, and this is none."""
    owners = {active.plugin.qualified for active in settings.kind("schedulers")}
    words = "has no effect: generate runs one batch from end to end; leave it out"
    return [Problem(key, words, value.owner) for key, value in own.items() if value.owner in owners]


def _default(cls: Any, field: str) -> Any:
    found = attrs.fields_dict(cls).get(field) if attrs.has(cls) else None
    return attrs.NOTHING if found is None else found.default


def _sampling(settings: Settings, own: dict[str, Value]) -> Iterator[Problem]:
    strategy = settings.get("strategy")
    fix = (
        f"with strategy={strategy!r}: leave it out, or set strategy='sample'" if strategy else "without do_sample=True"
    )
    idle = {active.plugin.qualified: active.origin for active in settings.kind("processors") if sampling_only(active)}
    for value in own.values():
        if value.origin == idle.get(value.owner):
            yield Problem(value.key, f"{value.value!r} has no effect {fix}: the likeliest token is taken", value.owner)
    if (seed := own.get("seed")) is not None:
        yield Problem("seed", f"{seed.value!r} has no effect {fix}: nothing is drawn", seed.owner)


def _cache(settings: Settings, own: dict[str, Value]) -> Iterator[Problem]:
    for key in ("cache_implementation", "cache_config", "prefill_chunk_size"):
        if key in own and settings.get("use_cache") is False:
            words = f"{own[key].value!r} has no effect with use_cache=False: leave one of the two out"
            yield Problem(key, words, own[key].owner)
    size, chosen = own.get("max_cache_len"), settings.get("cache_implementation")
    if size is not None and "static" not in str(chosen):
        words = f"{size.value} has no effect with {chosen or 'a cache that grows'}: set cache_implementation='static'"
        yield Problem("max_cache_len", words, size.owner)


def _lengths(own: dict[str, Value]) -> Iterator[Problem]:
    """Where both are said in one place, the number of new tokens rules."""
    total, new = own.get("max_length"), own.get("max_new_tokens")
    if total is not None and new is not None and total.origin == new.origin:
        words = f"{total.value} has no effect beside max_new_tokens={new.value}: leave one of the two out"
        yield Problem("max_length", words, total.owner)


def _leasts(settings: Settings, own: dict[str, Value]) -> Iterator[Problem]:
    for key, limit in LEASTS.items():
        least, most = own[key].value if key in own else 0, settings.values.get(limit)
        # A number of new tokens rules where there is one.
        if not _above(least, 0) or (key == "min_length" and settings.get("max_new_tokens") is not None):
            continue
        if most is not None and most.value is not None and _above(least, most.value):
            where = f" ({most.origin})" if most.origin in ("library", "model") else ""
            words = f"{least} cannot be reached: {limit} is {most.value}{where}; raise that, or lower this"
            yield Problem(key, words, own[key].owner)
        elif not any(token >= 0 for token in eos_ids(settings)):
            words = f"{least} has no effect without an end token, which is all it forbids: set eos_token_id"
            yield Problem(key, words, own[key].owner)


def _above(one: Any, other: Any) -> bool:
    """Whether `one` is greater for any prompt; each is a number, or one for each prompt."""
    ones, others = (value if isinstance(value, tuple) else (value,) for value in (one, other))
    prompts = max(len(ones), len(others))
    return any(ones[row % len(ones)] > others[row % len(others)] for row in range(prompts))
