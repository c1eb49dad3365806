"""The arguments of `generate` as transformers has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decodekit.api import generate
from decodekit.errors import ConfigError, Problem
from decodekit.keys import keys

from .custom import CustomGenerate
from .loops import run_loop


def generate_as(
    model: Any,
    inputs: Any = None,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    prefix_allowed_tokens_fn: Callable[..., Any] | None = None,
    synced_gpus: bool | None = None,
    assistant_model: Any = None,
    streamer: Any = None,
    negative_prompt_ids: Any = None,
    negative_prompt_attention_mask: Any = None,
    custom_generate: str | Callable[..., Any] | None = None,
    **kwargs: Any,
) -> Any:
    """`decodekit.generate` with the arguments, and their order, of transformers' method; kwargs are decodekit's, too.

    custom_generate: a loop of your own, whose result is returned as it is: ``custom_generate(model, input_ids,
        logits_processor=..., stopping_criteria=..., generation_config=..., **model_kwargs)``; or what
        `decodekit.as_custom_generate` made.

    Raises what `decodekit.generate` raises; `ConfigError` for what decodekit does not have yet: assistant_model,
    a repository as custom_generate.
    """
    named = {
        "logits_processor": logits_processor,
        "stopping_criteria": stopping_criteria,
        "prefix_allowed_tokens_fn": prefix_allowed_tokens_fn,
        "assistant_model": assistant_model,
        "streamer": streamer,
        "negative_prompt_ids": negative_prompt_ids,
        "negative_prompt_attention_mask": negative_prompt_attention_mask,
        "synced_gpus": synced_gpus,
        "custom_generate": custom_generate,
    }
    problems = []
    if assistant_model is not None and "assistant_model" not in keys:
        problems.append(Problem("assistant_model", "no installed plugin drafts with a model: leave it out"))
    if problems:
        raise ConfigError(problems)
    return generate(model, inputs, generation_config, **{k: v for k, v in named.items() if v is not None}, **kwargs)


def custom_generate(function: Any, model: Any, inputs: Any, generation_config: Any, call: dict[str, Any]) -> Any:
    """Run a loop of the caller's, or what `as_custom_generate` made. Raises `ConfigError` for what is no function."""
    if isinstance(function, CustomGenerate):
        return generate(model, inputs, generation_config, strategy=function.strategy, **{**function.keys, **call})
    if not callable(function):
        words = f"is {function!r}, but repositories are not loaded in this version: pass a function"
        raise ConfigError([Problem("custom_generate", words)])
    return run_loop(function, model, inputs, generation_config, call)
