"""Every error decodekit raises on purpose. Each message names the fix."""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import attrs


class DecodekitError(Exception):
    """Base of all errors raised on purpose."""


class InputError(DecodekitError, ValueError):
    """The prompt, mask or another input of `generate` cannot be used."""


class PipelineError(DecodekitError, ValueError):
    """Parts of a pipeline do not fit together (order, capabilities, missing parts)."""


class GenerationError(DecodekitError, RuntimeError):
    """The running loop met something it must not paper over (an emptied row, NaN logits)."""


class Cancelled(DecodekitError):
    """The consumer of a stream went away: there is nobody to generate for."""


class MissingExtra(DecodekitError, ImportError):
    """An optional dependency is not installed; the message names the extra."""

    def __init__(self, package: str, extra: str, what: str) -> None:
        super().__init__(f"{what} needs {package}: pip install 'decodekit[{extra}]'", name=package)
        self._made_of = (package, extra, what)

    def __reduce__(self) -> Any:
        return type(self), self._made_of


class PluginError(DecodekitError):
    """Base of the errors about plugins."""


class PluginNotFound(PluginError, LookupError):
    """No installed plugin has this name."""


class PluginBroken(PluginError):
    """The plugin is installed but cannot be loaded; the cause is chained."""


class PluginClash(PluginError):
    """Two distributions offer the same name; the message lists the qualified names."""


@attrs.frozen
class Problem:
    """One thing wrong with a configuration."""

    key: str
    message: str
    owner: str = ""

    def __str__(self) -> str:
        where = f" (owner: {self.owner})" if self.owner else ""
        return f"{self.key}: {self.message}{where}"


class ConfigError(DecodekitError, ValueError):
    """A configuration is wrong; `problems` lists everything found, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        lines = [f"{len(self.problems)} problems in the configuration:", *(f"  - {each}" for each in self.problems)]
        super().__init__(str(self.problems[0]) if len(self.problems) == 1 else "\n".join(lines))

    def __reduce__(self) -> Any:
        return type(self), (self.problems,)


def named(error: Exception, words: str, kind: type[DecodekitError] = GenerationError) -> DecodekitError:
    """`error` once more, with `words` before its own.

    It is a `kind`, and where Python allows that of the type of `error`, too: whoever expects that still catches it.
    """
    own, said = type(error), f"{words}: {type(error).__name__}: {error}".rstrip(": ")
    # KeyError and OSError would show something else; a pickle cannot name a class made here.
    body: dict[str, Any] = {"__module__": kind.__module__, "__str__": Exception.__str__}
    body["__reduce__"] = lambda self: (kind, (said,))
    try:
        made: DecodekitError = type(kind.__name__, (kind, own), body)(said)
    except TypeError:
        return kind(said)
    made.__dict__.update(vars(error))
    return made


def warn(message: object) -> None:
    """Warn at the line of whoever called decodekit."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("decodekit", "pluggy")):
        level, frame = level + 1, frame.f_back
    warnings.warn(str(message), stacklevel=level)


def instance(what: str, item: Any) -> Any:
    """Return `item`, or an instance of it where it is a class. Raises `InputError` for a class that needs arguments."""
    try:
        return item() if isinstance(item, type) else item
    except TypeError as error:
        raise InputError(f"{what} {item.__name__} needs arguments: pass an object of it ({error})") from error


def expect(what: str, item: Any, *methods: str) -> Any:
    """Return `instance(what, item)`. Raises `InputError` unless it has all `methods`."""
    item = instance(what, item)
    if not all(callable(getattr(item, name, None)) for name in methods):
        raise InputError(f"{what} must be an object with {' and '.join(methods)}, not {item!r}")
    return item


def suggest(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean ...?`` for the nearest known names, or an empty string."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else ""
