"""What is done for a run that cannot begin or has failed: a word on who is to blame, and a passed cache put back."""

from __future__ import annotations

import contextlib
import signal
from typing import Any

from decodekit.chain import Chain, Part
from decodekit.errors import ConfigError, DecodekitError, GenerationError, Problem, named, warn
from decodekit.hooks import hookimpl
from decodekit.options import Choices
from decodekit.pipeline import Pipeline, cache_offers
from decodekit.run import Run
from decodekit.settings import CALLER
from decodekit.traits import UNKNOWN
from torch import Tensor


@hookimpl
def pipeline_assembled(pipeline: Pipeline) -> None:
    """Refuse a pad token that the model cannot take back in, copies of one text, and keys of other kinds of model."""
    spec, settings = pipeline.context.spec, pipeline.settings
    foreign = [
        Problem(
            value.key,
            f"is for {active.plugin.name} models, and this is a {_class(pipeline)}: leave it out",
            value.owner,
        )
        for active in settings.kind("models")
        for value in settings.values.values()
        if value.owner == active.plugin.qualified and value.origin in CALLER
        if not getattr(active.options, "serves", lambda _: True)(pipeline.adapter)
    ]
    if foreign:
        raise ConfigError(foreign)
    n, sole = settings.of(Choices).num_return_sequences, (settings.get("num_beams") or 1) == 1
    if n > 1 and sole and not pipeline.context.samples and pipeline.strategy_name == "greedy":
        raise ConfigError(
            [Problem("num_return_sequences", f"is {n}, but without do_sample=True all would be the same")]
        )
    pad, known = spec.pad_token_id, spec.num_embeddings or spec.vocab_size
    # Some models' own files name one that they lack: a lone row never needs it.
    if pad is not None and pad >= known and (pipeline.context.rows > 1 or settings.origin("pad_token_id") != "model"):
        words = f"is {pad}, outside the model's vocabulary of {known}; set another, such as its end token"
        raise ConfigError([Problem("pad_token_id", words)])
    never = [token for token in spec.eos_token_ids if token >= spec.vocab_size]
    if never and settings.origin("eos_token_id") in CALLER:
        which = ", ".join(map(str, never))
        warn(f"eos_token_id: {which} can never come: the model's vocabulary has {spec.vocab_size} tokens")


def _class(pipeline: Pipeline) -> str:
    return type(getattr(pipeline.adapter, "model", pipeline.adapter)).__name__


@hookimpl
def run_failed(pipeline: Pipeline, step: int, error: BaseException) -> BaseException | None:
    """Put a passed cache back to where it was, and name the plugin that the error came from."""
    if pipeline.cache_passed:
        _restore(pipeline.cache, pipeline.prompt.past)
    if isinstance(error, DecodekitError) or not isinstance(error, Exception):
        return None  # one says what it must, the other is nobody's fault
    if isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        error = error.__cause__  # Python has changed it on its way through a generator
    part = culprit(error, pipeline)
    if part is None:
        return None
    words = f"{part.name!r} ({part.owner}) failed in step {step}"
    # Raised in a generator, a StopIteration of any kind would be changed once more.
    return GenerationError(f"{words}: {error!r}") if isinstance(error, StopIteration) else named(error, words)


@hookimpl
def nothing_left(pipeline: Pipeline, logits: Tensor, row: int, step: int) -> BaseException:
    """Run the chain once more, part by part, to name who left `row` without a token."""
    where, ids, scores = f"(row {row}, step {step})", pipeline.context.input_ids, logits
    infinite: str | None = None
    said = [("the model", "check its weights and dtype", Chain([]))]
    for part in pipeline.chain.parts:
        said.append((f"logits processor {part.name!r} ({part.owner})", "loosen it or take it out", Chain([part])))
    for who, fix, chain in said:
        try:
            scores = chain.dense(ids, scores)
        except DecodekitError as error:
            return error
        except Exception as error:  # some say themselves what is wrong, where it is asked for
            told = named(error, f"{who} failed {where}")
            told.__cause__ = error
            return told
        if bool(scores[row].isnan().any()):
            return GenerationError(f"{who} gave NaN {where}; {fix}")
        if not bool((scores[row] > float("-inf")).any()):
            return GenerationError(f"{who} leaves no token to choose {where}; {fix}")
        if infinite is None and bool((scores[row] == float("inf")).any()):
            infinite = f"{who} gave +inf {where}, and {pipeline.strategy_name!r} adds scores up: make it finite"
    if infinite is not None:
        return GenerationError(infinite)
    return GenerationError(f"selector {pipeline.selector_name!r} chose no token, though there are some {where}")


def culprit(error: BaseException, pipeline: Pipeline) -> Part | None:
    """The part in whose code `error` was raised. The traceback tells: nothing is spent on it while all goes well.

    None where that is the model, or a handler of a signal, which may be called in anybody's code.
    """
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    handlers = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    if any(frame.f_code in handlers for frame in frames):
        return None
    strategy = Part(pipeline.strategy_name, "strategy", pipeline.strategy, UNKNOWN, "")
    parts = [*pipeline.chain.parts, *pipeline.criteria, *pipeline.candidates, strategy]
    parts.append(Part(pipeline.selector_name, "selector", pipeline.selector, UNKNOWN, ""))
    if pipeline.cache is not None:
        parts.append(Part(pipeline.cache_name, "cache", pipeline.cache, UNKNOWN, ""))
    if pipeline.streamer is not None:
        parts.append(Part(type(pipeline.streamer).__name__, "streamer", pipeline.streamer, UNKNOWN, ""))
    for frame in reversed(frames):
        code, values = frame.f_code, frame.f_locals
        if code in (Run._forward.__code__, Run.prefill.__code__):
            return None
        first = values.get(code.co_varnames[0]) if code.co_varnames else None
        for part in parts:
            acting = getattr(part.runtime, "__self__", part.runtime), getattr(part.runtime, "__code__", frame)
            if first is acting[0] or code is acting[1] or values.get("part") is part:
                return part
    # What `decode` returned is no iterator of steps, or one whose code is elsewhere.
    return strategy if any(frame.f_code.co_name == "_advance" for frame in frames) else None


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
