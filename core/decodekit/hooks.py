"""One-to-many hooks around a run (pluggy). No hook is called inside the token loop.

A plugin of kind ``hooks`` is a module or object with functions of these names marked by `hookimpl`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

from .errors import DecodekitError, PipelineError, PluginError, Problem, named, warn
from .registry import Plugin, registry

if TYPE_CHECKING:
    from torch import Tensor

    from .pipeline import Pipeline
    from .settings import Settings

hookspec = pluggy.HookspecMarker("decodekit")
hookimpl = pluggy.HookimplMarker("decodekit")


@hookspec
def config_translated(settings: Settings) -> None:
    """Every key has its final value; nothing is assembled yet."""


@hookspec
def doubts(settings: Settings, samples: bool | None, strategy: str | None) -> list[Problem] | None:
    """Name keys set by the caller that cannot have an effect, or contradict each other; each is a warning.

    samples: whether tokens are drawn; None where that is not known yet.
    strategy: name of the strategy that runs, or of the class of one passed as an object; None: as the settings say.
    """


@hookspec
def pipeline_assembled(pipeline: Pipeline) -> None:
    """The pipeline is complete and ordered; nothing has run yet. Raise to refuse it."""


@hookspec
def run_wrapped(pipeline: Pipeline) -> contextlib.AbstractContextManager[Any] | None:
    """Return a context manager to hold open around the run, or None."""


@hookspec(firstresult=True)
def run_failed(pipeline: Pipeline, step: int, error: BaseException) -> BaseException | None:
    """The run ended with `error` in step `step`. Return what shall be raised instead, `error` being its cause."""


@hookspec(firstresult=True)
def nothing_left(pipeline: Pipeline, logits: Tensor, row: int, step: int) -> BaseException | None:
    """No token of `row` can be chosen; `logits` [rows, V] are what the chain got. Return what shall be raised."""


@hookspec(firstresult=True)
def would_do(capability: str) -> str | None:
    """Say which installed plugins offer a capability that a run lacks, and how to choose one."""


@hookspec
def run_finished(pipeline: Pipeline, output: Any) -> None:
    """The run ended well; `output` is its output object."""


@hookspec
def report(pipeline: Pipeline) -> dict[str, Any] | None:
    """Add entries to what `Pipeline.describe` gives and ``decodekit explain`` shows."""


class Hooks:
    """The plugin manager, filled on first use. A hooks plugin that fails to load or register is left out whole."""

    @property
    def call(self) -> Any:
        """pluggy's relay: ``hooks.call.run_finished(pipeline=..., output=...)``."""
        with _lock:
            return _filled(registry.generation)

    def doubts(self, settings: Settings, samples: bool | None, strategy: str | None = None) -> list[Problem]:
        """What all hooks have to say against a configuration."""
        found = self.call.doubts(settings=settings, samples=samples, strategy=strategy)
        return [problem for problems in found for problem in problems or ()]

    @contextlib.contextmanager
    def around(self, pipeline: Pipeline) -> Iterator[None]:
        """Hold every hook's context open."""
        with contextlib.ExitStack() as stack:
            for manager in self.call.run_wrapped(pipeline=pipeline):
                if manager is not None:
                    stack.enter_context(manager)
            yield


FITS: dict[str, Callable[[Any], bool]] = {
    "doubts": lambda made: isinstance(made, (list, tuple)) and all(isinstance(note, Problem) for note in made),
    "report": lambda made: isinstance(made, Mapping),
    "run_wrapped": lambda made: hasattr(made, "__enter__") and hasattr(made, "__exit__"),
}
"""What hooks may return beside None."""


def _guarded(entry: Plugin) -> Any:
    """The hooks of a plugin, each of which names it where it fails. What only speaks is then left out."""
    plugin, hooks_of = entry.load(), types.SimpleNamespace()

    def guarded(name: str, call: Any) -> Any:
        @functools.wraps(call)
        def guard(*args: Any, **kwargs: Any) -> Any:
            try:
                made = call(*args, **kwargs)
                if made is not None and not FITS.get(name, lambda made: True)(made):
                    raise TypeError(f"returned {made!r}")
            except DecodekitError:  # refuses something, and says why
                raise
            except Exception as error:
                told = named(error, f"hooks plugin {entry.qualified} failed in {name}", PipelineError)
                if name not in ("doubts", "report", "run_failed", "nothing_left"):
                    raise told from error
                return warn(told)
            return made

        return call if inspect.isgeneratorfunction(call) else guard

    for name in dir(plugin):
        if hasattr(call := getattr(plugin, name, None), "decodekit_impl"):
            setattr(hooks_of, name, guarded(name, call))
    return hooks_of


_lock = threading.RLock()


@functools.lru_cache(1)
def _filled(generation: int) -> Any:
    manager = pluggy.PluginManager("decodekit")
    manager.add_hookspecs(sys.modules[__name__])
    for entry in (entry for entry in registry.plugins("hooks") if not entry.disabled):
        try:
            manager.register(_guarded(entry), entry.qualified)
            manager.check_pending()  # a misspelt hook would never be called
        except PluginError as error:
            warn(error)
        except Exception as error:  # a bad hook signature harms only its plugin
            if manager.has_plugin(entry.qualified):
                manager.unregister(name=entry.qualified)
            entry.error = error
            warn(f"hooks plugin {entry.qualified} cannot be registered: {error}")
    return manager.hook


hooks = Hooks()
