"""The key ``prompt_cache``: a prompt's keys and values are kept in a file, and runs that begin with it skip it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from decodekit import option
from decodekit.errors import ConfigError, InputError, Problem, warn
from decodekit.hooks import hookimpl, hooks
from decodekit.pipeline import Pipeline, cache_offers

if TYPE_CHECKING:
    from decodekit.protocols import Forward, ModelAdapter

NAME = "prompt_cache"


@attrs.frozen
class PromptCache:
    """Keep the keys and values of a prompt in a file, and continue from it where a prompt begins with the stored one.

    The file is written by the first run that names it, right after its prompt was read, and never changed: run the
    common beginning once, then prompts that go on from it. What it was not made for is refused.
    """

    prompt_cache: str | None = option(
        "File (safetensors) with the keys and values of the prompt, or of what it begins with; written if missing.",
        default=None,
    )

    @staticmethod
    @hookimpl
    def pipeline_assembled(pipeline: Pipeline) -> None:
        """Read the file if there is one. Raises `ConfigError` where the key cannot act, `InputError` for a file of
        another model, prompt, dtype, kind of cache or version, and for half a file."""
        if (path := _path(pipeline)) is None:
            return
        if problems := [Problem(NAME, words) for words in _hindrances(pipeline, path)]:
            raise ConfigError(problems)
        if path.exists():
            _read(pipeline, path)

    @staticmethod
    @hookimpl
    def run_wrapped(pipeline: Pipeline) -> contextlib.AbstractContextManager[Any] | None:
        """Where there is no file: watch for the end of the prompt, and write it then."""
        path = _path(pipeline)
        return None if path is None or path.exists() else _watched(pipeline, path)

    @staticmethod
    @hookimpl
    def report(pipeline: Pipeline) -> dict[str, Any] | None:
        """What the file spares the run."""
        if (path := _path(pipeline)) is None:
            return None
        past, width = pipeline.prompt.past, pipeline.prompt.tokens.shape[1]
        return {NAME: {"file": str(path), "columns read": past, "columns to run": width - past}}


def _path(pipeline: Pipeline) -> Path | None:
    path = pipeline.settings.get(NAME)
    return None if path is None else Path(path).expanduser()


def _hindrances(pipeline: Pipeline, path: Path) -> Iterator[str]:
    """Why the key cannot act in this call."""
    cache, kind = pipeline.cache, type(pipeline.cache).__name__
    if pipeline.settings.origin(NAME) == "model":
        yield "comes with the model's own files, which may not name files to read or write: set it in the call"
    if pipeline.cache_passed:
        yield "names a file, but a cache was passed too; pass only one"
    elif cache is None:
        yield "has no effect without a cache: leave use_cache=False out"
    elif "store" not in cache_offers(cache):
        yield f"needs cache:store, which {kind} does not offer; {hooks.call.would_do(capability='cache:store')}"
    elif pipeline.copies > 1 and "fork" not in cache_offers(cache) and not path.exists():
        yield f"needs cache:fork for {pipeline.copies} rows of a prompt, which {kind} does not offer"
    if pipeline.context.spec.is_encoder_decoder or pipeline.model_kwargs:
        beside = ", ".join(sorted(pipeline.model_kwargs)) or "what the encoder reads"
        yield f"knows a prompt by its tokens, and this one has more to it ({beside}): leave it out"
    if not path.exists() and not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        yield f"cannot be written: {path.parent} is no folder that may be written to"


def _facts(adapter: ModelAdapter, cache_name: str) -> dict[str, str]:
    from .identity import identity

    return {**identity(adapter), "cache": cache_name}


def _read(pipeline: Pipeline, path: Path) -> None:
    from .files import read
    from .fitting import Misfit, fit, place

    with read(path) as stored:
        mine = _facts(pipeline.adapter, pipeline.cache_name)
        if wrong := [name for name in sorted({*mine, *stored.facts}) if mine.get(name) != stored.facts.get(name)]:
            told = [f"{name} ({stored.facts.get(name)} there, {mine.get(name)} here)" for name in wrong]
            raise stored.wrong(f"was stored with another {', '.join(told)}; name another file, or delete it")
        state = stored.state()  # first: a damaged file shall not be taken for one of another prompt
        try:
            found = fit(stored.tokens, stored.mask, pipeline.prompt, pipeline.copies)
            if found.past <= 0:
                return
            device = pipeline.context.spec.device
            pipeline.cache.load({name: part.to(device) for name, part in state.items()})
            place(pipeline.cache, found, stored.tokens.shape[1])
        except Misfit as error:
            raise stored.wrong(str(error)) from None
        except InputError as error:  # of the cache, which knows nothing of files
            raise error if str(path) in str(error) else stored.wrong(f"cannot be used: {error}") from error
    pipeline.prompt = attrs.evolve(pipeline.prompt, past=found.past)


@contextlib.contextmanager
def _watched(pipeline: Pipeline, path: Path) -> Iterator[None]:
    inner = pipeline.adapter
    watch: Any = _Watch(pipeline, path)
    pipeline.adapter = watch
    try:
        yield
    finally:
        pipeline.adapter = inner
    if not watch.written:
        warn(f"{NAME}: {path} was not written, since the run never gave its whole prompt to the model at once")


class _Watch:
    """An adapter that is `pipeline.adapter` in all things, and writes the file when the cache holds the prompt."""

    def __init__(self, pipeline: Pipeline, path: Path) -> None:
        self._inner, self._pipeline, self._path = pipeline.adapter, pipeline, path
        self.written = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, tokens: Any, positions: Any, cache: Any, /, **more: Any) -> Forward:
        found = self._inner.forward(tokens, positions, cache, **more)
        held = found.cache if found.cache is not None else cache
        prompt = self._pipeline.prompt
        width = prompt.tokens.shape[1]
        if not self.written and held is self._pipeline.cache and int(held.get_seq_length()) == width:
            self.written = True
            self._write(held)
        return found

    def _write(self, cache: Any) -> None:
        import torch

        from .files import write

        pipeline, copies = self._pipeline, self._pipeline.copies
        tokens, mask = pipeline.prompt.tokens[::copies], pipeline.prompt.mask
        mask = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask[::copies]
        if copies > 1:
            cache = cache.fork()
            cache.reorder_cache(torch.arange(0, pipeline.prompt.tokens.shape[0], copies, device=tokens.device))
        state = {f"state.{name}": part for name, part in cache.state().items()}
        try:
            facts = _facts(self._inner, pipeline.cache_name)
            write(self._path, facts, {"tokens": tokens, "mask": mask, **state})
        except OSError as error:  # a full disk is no reason to lose what is being generated
            warn(f"{NAME}: {self._path} could not be written: {error}")
