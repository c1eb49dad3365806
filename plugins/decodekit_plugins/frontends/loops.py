"""Loops of a caller's own, written for the ``custom_generate`` of transformers, on a pipeline of decodekit."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import attrs
import torch
from decodekit.api import plan
from decodekit.config import GenerationConfig
from decodekit.errors import GenerationError, InputError
from decodekit.graphs import outside_graphs
from decodekit.hooks import hooks
from decodekit.keys import keys
from decodekit.options import Choices
from decodekit.pipeline import Pipeline
from decodekit.prompt import repeat
from decodekit.settings import Settings
from decodekit.shortlist import Shortlist
from torch import Tensor

CACHES = ("cache", "past_key_values")
USUAL = ("model", "input_ids", "logits_processor", "stopping_criteria", "generation_config", "attention_mask", *CACHES)


@outside_graphs
def run_loop(function: Callable[..., Any], model: Any, inputs: Any, config: Any, call: Mapping[str, Any]) -> Any:
    """Prepare a call as for any strategy, and let `function` be the loop. Returns what it returns.

    It gets the model, the prompts int64 [rows, T] (each as often as there are beams or sequences), attention_mask, the
    cache under the name the model has for it, `logits_processor` and `stopping_criteria` as lists that can be called,
    the configuration, and of the call whatever else it names; streamer and tokenizer among it.

    Raises `InputError` where it takes no streamer and there is one.
    """
    wanted = inspect.signature(function).parameters
    own = {name: value for name, value in call.items() if name in wanted and name not in USUAL and name not in keys}
    if "streamer" in call and "streamer" not in own:
        raise InputError(f"custom_generate: {_name(function)} takes no streamer; add the argument, or leave it out")
    rest = {name: value for name, value in call.items() if name not in own or name == "tokenizer"}
    pipeline = plan(model, inputs, config, strategy=_Caller(), **rest)
    follower = _Follower(pipeline)
    prompt, choices = pipeline.prompt, pipeline.settings.of(Choices)
    given: dict[str, Any] = {"use_cache": choices.use_cache, **_passed(pipeline), **own}
    names = inspect.signature(model.forward).parameters
    cache = next((name for name in CACHES if name in names), None)
    if cache is not None and hasattr(pipeline.cache, "update"):
        given[cache] = pipeline.cache
    if not any(item.kind is item.VAR_KEYWORD for item in wanted.values()):
        given = {name: value for name, value in given.items() if name in wanted}
    with hooks.around(pipeline), torch.no_grad():
        return function(
            model,
            prompt.tokens.clone(),
            logits_processor=_Processors([follower.process]),
            stopping_criteria=_Criteria(_Criterion(follower, part) for part in _limits_first(pipeline)),
            generation_config=_config(model, pipeline),
            **given,
        )


def _passed(pipeline: Pipeline) -> dict[str, Any]:
    """Arguments of the forward pass, with as many rows as the prompt: the caller's, an encoder's outputs, the mask."""
    prompt, values = pipeline.prompt, pipeline.model_kwargs
    if (encode := getattr(pipeline.adapter, "encode", None)) is not None:
        with torch.no_grad():
            values, _ = encode(values)
    rows, width = prompt.tokens.shape
    values = repeat(values, rows // pipeline.copies, pipeline.copies)
    held = prompt.past if prompt.fresh else 0
    ones = torch.ones(rows, held + width, dtype=torch.long, device=prompt.tokens.device)
    masks = [mask.long() for mask in (prompt.past_mask, prompt.mask) if mask is not None]
    mask = ones if not masks else torch.cat([ones[:, : ones.shape[1] - sum(m.shape[1] for m in masks)], *masks], 1)
    if pipeline.adapter.spec.is_encoder_decoder:
        return {"attention_mask": None, **values, **({"decoder_attention_mask": mask} if masks else {})}
    return {**values, "attention_mask": mask, **({"position_ids": prompt.positions} if masks else {})}


def _name(function: Any) -> str:
    return getattr(function, "__name__", type(function).__name__)


@attrs.frozen
class _Caller:
    """Stands where the strategy is: the loop is the caller's."""

    needs: ClassVar[frozenset[str]] = frozenset()
    samples: ClassVar[bool | None] = None

    def rows_per_prompt(self, settings: Settings, /) -> int:
        """As many as beams or sequences are asked for, whichever is more."""
        return max(int(settings.get("num_beams") or 1), settings.of(Choices).num_return_sequences)

    def decode(self, run: Any, /) -> Iterator[Any]:
        raise NotImplementedError


class _Follower:
    """Keeps the state of a pipeline's parts with a loop that shows no more than the tokens so far."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.context, self.chain = pipeline.context, pipeline.chain
        parts = [part.runtime for part in (*pipeline.chain.parts, *pipeline.criteria)]
        self.accepts = [item.accept for item in parts if hasattr(item, "accept")]
        self.reorders = [item.reorder for item in parts if hasattr(item, "reorder")]

    def follow(self, input_ids: Tensor) -> None:
        """Take the columns that are new. Rows may have changed places; raises GenerationError where one is unknown."""
        ctx = self.context
        rows, width = input_ids.shape
        words = "custom_generate: processors and criteria can follow rows that grow or trade places"
        if width < ctx.length:
            raise GenerationError(f"{words}, but tokens were taken back ({ctx.length} -> {width})")
        before = input_ids[:, : ctx.length]
        if rows != ctx.rows or not torch.equal(before, ctx.input_ids):
            same = (before[:, None] == ctx.input_ids[None]).all(-1)
            if rows != ctx.rows or not bool(same.any(-1).all()):
                raise GenerationError(f"{words}, but a row came that was not there before")
            order = same.int().argmax(-1)
            ctx.reorder(order)
            for reorder in self.reorders:
                reorder(order)
        for tokens in input_ids[:, ctx.length :].unbind(1):
            ctx.append(tokens)
            for accept in self.accepts:
                accept(tokens, None)

    def process(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:
        """The whole chain: float [rows, V], dense."""
        self.follow(input_ids)
        made = self.chain(self.context.input_ids, scores.float())
        return made.dense() if isinstance(made, Shortlist) else made


class _Processors(list[Any]):
    """Called, it applies its members one after another."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **keys: Any) -> Tensor:
        for processor in self:
            scores = processor(input_ids, scores, **keys)
        return scores


class _Criterion:
    """One criterion of the pipeline. Those that know it say `max_length`, or `eos_token_id` int64 [N]."""

    def __init__(self, follower: _Follower, part: Any) -> None:
        self.follower, self.part, ctx = follower, part, follower.context
        if hasattr(part.runtime, "limit"):
            self.max_length = part.runtime.limit(ctx.prompt_width)
        if part.name == "eos":
            self.eos_token_id = torch.tensor(ctx.spec.eos_token_ids, device=ctx.tokens.device)

    def __call__(self, input_ids: Tensor, scores: Any = None, **_: Any) -> Tensor:
        self.follower.follow(input_ids)
        verdict = self.part.runtime(self.follower.context.input_ids, scores)
        return torch.as_tensor(verdict, device=input_ids.device).bool().expand(input_ids.shape[0])


class _Criteria(list[_Criterion]):
    """Called, it says which rows any of its members ends: bool [rows]."""

    def __call__(self, input_ids: Tensor, scores: Any = None, **keys: Any) -> Tensor:
        done = input_ids.new_zeros(input_ids.shape[0], dtype=torch.bool)
        for criterion in self:
            done = done | criterion(input_ids, scores, **keys)
        return done

    @property
    def max_length(self) -> int | None:
        """Total width at which every row has ended; None where no criterion knows."""
        return min((item.max_length for item in self if hasattr(item, "max_length")), default=None)


def _limits_first(pipeline: Pipeline) -> Any:
    return sorted(pipeline.criteria, key=lambda part: not hasattr(part.runtime, "limit"))


def _config(model: Any, pipeline: Pipeline) -> Any:
    """The configuration in force: of transformers' class, with its prepared tokens, for a model of transformers."""
    values = {name: item.value for name, item in pipeline.settings.values.items() if ":" not in name}
    own = getattr(model, "generation_config", None)
    if not hasattr(own, "to_diff_dict") or not hasattr(model, "_prepare_special_tokens"):
        return GenerationConfig(**{name: value for name, value in values.items() if name in keys})
    config: Any = copy.deepcopy(own)
    if hasattr(model, "_prepare_generation_config"):
        config = model._prepare_generation_config(config)[0]
    for name, value in values.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config.max_length = pipeline.context.max_length
    model._prepare_special_tokens(config, True, device=pipeline.prompt.tokens.device)
    return config
