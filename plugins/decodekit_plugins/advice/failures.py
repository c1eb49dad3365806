"""What is done for a run that cannot begin or has failed: a word on what is wrong, and a passed cache put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from decodekit.chain import Part
from decodekit.errors import ConfigError, DecodekitError, Problem, named, warn
from decodekit.hooks import hookimpl
from decodekit.pipeline import Pipeline, cache_offers
from decodekit.traits import UNKNOWN


@hookimpl
def pipeline_assembled(pipeline: Pipeline) -> None:
    """Refuse a pad token that the model cannot take back in."""
    spec, settings = pipeline.context.spec, pipeline.settings
    pad, known = spec.pad_token_id, spec.num_embeddings or spec.vocab_size
    # Some models' own files name one that they lack: a lone row never needs it.
    if pad is not None and pad >= known and (pipeline.context.rows > 1 or settings.origin("pad_token_id") != "model"):
        words = f"is {pad}, outside the model's vocabulary of {known}; set another, such as its end token"
        raise ConfigError([Problem("pad_token_id", words)])


@hookimpl
def run_failed(pipeline: Pipeline, step: int, error: BaseException) -> BaseException | None:
    """Put a passed cache back to where it was, and name the plugin that the error came from."""
    if pipeline.cache_passed:
        _restore(pipeline.cache, pipeline.prompt.past)
    if isinstance(error, DecodekitError) or not isinstance(error, Exception):
        return None  # one says what it must, the other is nobody's fault
    selector = Part(pipeline.selector_name, "selector", pipeline.selector, UNKNOWN, "")
    part = culprit(error, [*pipeline.chain.parts, *pipeline.criteria, *pipeline.candidates, selector])
    return None if part is None else named(error, f"{part.name!r} ({part.owner}) failed in step {step}")


def culprit(error: BaseException, parts: Iterable[Part]) -> Part | None:
    """The part in whose code `error` was raised. The traceback tells: nothing is spent on it while all goes well."""
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in reversed(frames):
        code, values = frame.f_code, frame.f_locals
        first = values.get(code.co_varnames[0]) if code.co_varnames else None
        for part in parts:
            acting = getattr(part.runtime, "__self__", part.runtime), getattr(part.runtime, "__code__", frame)
            if first is acting[0] or code is acting[1] or values.get("part") is part:
                return part
    return None


def _restore(cache: Any, past: int) -> None:
    """Take what a failed call added out of its caller's cache; say so where that cannot be done."""
    more = 0
    with contextlib.suppress(Exception):
        # In the protocol `crop` keeps that many tokens; caches of other libraries mean something else by it.
        if hasattr(cache, "offers") and "crop" in cache_offers(cache):
            cache.crop(past)
        more = int(cache.get_seq_length()) - past
    if more:
        warn(f"this call failed, and the cache passed to it has grown by {more} tokens: begin again with a new one")
