"""What a caller set in vain. The model's own file is never doubted: its author knew nothing of the call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from decodekit.config import METADATA
from decodekit.errors import Problem, warn
from decodekit.hooks import hookimpl
from decodekit.prompt import eos_ids
from decodekit.settings import Settings, Value, sampling_only

LEASTS = {"min_new_tokens": "max_new_tokens", "min_length": "max_length"}
"""Keys that keep a text from ending, and those that end it."""


_reported: set[tuple[str, ...]] = set()


@hookimpl
def config_translated(settings: Settings) -> None:
    """Say once that a file has keys nobody owns."""
    names = tuple(sorted(name for name in settings.unknown if name[0] != "_" and name not in METADATA))
    if names and names not in _reported:
        _reported.add(names)
        warn(f"the model's generation config has keys that no installed plugin owns: {', '.join(names)}")


@hookimpl
def doubts(settings: Settings, samples: bool | None) -> list[Problem]:
    """One problem for each key that was set for nothing, with the fix in its words."""
    own = {key: value for key, value in settings.values.items() if value.origin in ("config", "call")}
    if not own:
        return []
    found = [*_cache(settings, own), *_leasts(settings, own)]
    return found if samples is not False else [*found, *_sampling(settings, own)]


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
    for key in ("cache_implementation", "cache_config"):
        if key in own and settings.get("use_cache") is False:
            words = f"{own[key].value!r} has no effect with use_cache=False: leave one of the two out"
            yield Problem(key, words, own[key].owner)
    size, chosen = own.get("max_cache_len"), settings.get("cache_implementation")
    if size is not None and "static" not in str(chosen):
        words = f"{size.value} has no effect with {chosen or 'a cache that grows'}: set cache_implementation='static'"
        yield Problem("max_cache_len", words, size.owner)


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
