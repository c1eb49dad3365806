"""`generate`, `stream` and `plan`: one call, from what the caller says to what comes out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from .config import METADATA, GenerationConfig
from .errors import ConfigError, DecodekitError, InputError, PipelineError, Problem, expect, named
from .graphs import outside_graphs
from .hooks import hooks
from .keys import SECTIONS, keys
from .models import adapter_for
from .options import Choices, Outputs
from .outputs import GenerateDecoderOnlyOutput
from .pipeline import Pipeline, assemble
from .prompt import as_list, prepare
from .registry import registry
from .run import Run, Step
from .settings import CHOICES, Settings, resolve
from .text import as_tokenizer

# What callers may pass as generation_config, and what `generate` returns.
Config = GenerationConfig | Mapping[str, Any] | None
Output = Tensor | GenerateDecoderOnlyOutput

PARTS = ("logits_processor", "stopping_criteria", "streamer")
"""Arguments of `generate` that go to the assembly as they are."""


@outside_graphs
def plan(
    model: Any, inputs: Any = None, generation_config: Config = None, *, attention_mask: Any = None,
    strategy: Any = None, cache: Any = None, tokenizer: Any = None, **kwargs: Any,
) -> Pipeline:  # fmt: skip
    """Assemble the pipeline of a call without running it; takes everything that `generate` takes.

    Without `inputs` it plans for one row of one token. Raises what `generate` would raise before its first forward
    pass: `ConfigError` with all problems of the configuration, `InputError`, `PluginError`.
    """
    adapter = adapter_for(model, kwargs.pop("adapter", None))
    tokenizer = as_tokenizer(tokenizer) if tokenizer is not None else adapter.tokenizer
    cache = _either("cache", cache, "past_key_values", kwargs)
    if isinstance(cache, str):
        raise InputError(f"cache takes an object; by name it is cache_implementation={cache!r}")
    cache = None if cache is None else expect("cache", cache, "get_seq_length")
    inputs = _either("inputs", inputs, "input_ids", kwargs)
    parts = {name: kwargs.pop(name) for name in PARTS if name in kwargs}
    if isinstance(strategy, str):
        kwargs["strategy"], strategy = strategy, None
    # What the model's own forward pass takes; the rest must be config keys.
    accepts = getattr(adapter, "model_kwargs", ())
    model_kwargs = {n: kwargs.pop(n) for n in [*kwargs] if n in accepts and n not in keys and n not in SECTIONS}
    settings = settle(adapter, generation_config, kwargs)
    chosen = settings.of(Choices)
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    kept_in_step = {True: "synced", None: "sharded"}.get(chosen.synced_gpus) if several else None
    for name in filter(None, (chosen.prepare, kept_in_step)):
        made = settings.active.get(("preparers", registry.find("preparers", name).qualified))
        try:
            ready = (made.options if made else registry.load("preparers", name)()).prepare(adapter)
            adapter = expect(f"what the preparer {name!r} returns", ready, "forward")
        except DecodekitError:
            raise
        except Exception as error:
            raise named(error, f"the preparer {name!r} cannot prepare {adapter!r}", PipelineError) from error
    hooks.call.config_translated(settings=settings)
    past = int(cache.get_seq_length()) if cache is not None else 0
    if (arrange := getattr(adapter, "arrange", None)) is not None:
        more: Any = {"settings": settings, "tokenizer": tokenizer, "past": past}
        prompt, model_kwargs = arrange(inputs, attention_mask, model_kwargs, **more)
    else:
        prompt = prepare(inputs, adapter, settings, attention_mask=attention_mask, tokenizer=tokenizer, past=past)
    for part in [*(a.options for a in settings.kind("processors")), *as_list(parts.get("logits_processor"))]:
        if hasattr(part, "edit_prompt"):
            prompt = part.edit_prompt(prompt, spec=adapter.spec, settings=settings, tokenizer=tokenizer)
    parts.update(strategy=strategy, cache=cache, tokenizer=tokenizer, model_kwargs=model_kwargs)
    pipeline = assemble(adapter, settings, prompt, **parts)
    hooks.call.pipeline_assembled(pipeline=pipeline)
    return pipeline


def _either(name: str, value: Any, alias: str, kwargs: dict[str, Any]) -> Any:
    """An argument that callers of the reference may give by another name."""
    other = kwargs.pop(alias, None)
    if value is not None and other is not None:
        raise InputError(f"{alias} is another name of {name}: pass only one of them")
    return other if value is None else value


def settle(adapter: Any, generation_config: Any, kwargs: Mapping[str, Any]) -> Settings:
    """Merge call, passed object, model and library. Raises `ConfigError` with all problems."""
    if generation_config is None or isinstance(generation_config, Mapping):
        passed = GenerationConfig(**generation_config or {}).set_keys
    elif isinstance(generation_config, GenerationConfig):
        passed = {**generation_config.unknown_keys, **generation_config.set_keys}
    elif hasattr(generation_config, "to_diff_dict"):  # a configuration object of the reference
        passed = {k: v for k, v in vars(generation_config).items() if v is not None and k[0] != "_"}
        if strange := [name for name in passed if name not in keys and name not in METADATA]:
            # What the model's own file says is no wish of the caller's, nor is what the object is born with.
            usual = {**vars(type(generation_config)()), **adapter.defaults}
            wrong = [Problem(name, keys.unknown(name)) for name in strange if passed[name] != usual.get(name)]
            if wrong:
                raise ConfigError(wrong)
    else:
        raise InputError(f"generation_config must be a GenerationConfig or a dict, not {generation_config!r}")
    layers = [("model", adapter.defaults), ("config", passed), ("call", kwargs)]
    known = _fingerprint(layers)
    if known in _settled:
        return _settled[known].copy()
    settings = resolve(layers)
    chosen, problems = settings.of(Choices), []
    for kind, key in CHOICES.items():
        name = getattr(chosen, key)
        if name is not None and not (kind == "caches" and name == "model"):
            try:
                registry.find(kind, name)
            except LookupError as error:
                problems.append(Problem(key, str(error)))
    out = settings.of(Outputs)
    recorded = out.output_scores or out.output_logits or out.output_attentions or out.output_hidden_states
    if recorded and settings.origin("return_dict_in_generate") == "unset":
        settings.core[Outputs] = attrs.evolve(out, return_dict_in_generate=True)
    if problems:
        raise ConfigError(problems)
    if known is not None:
        if len(_settled) >= 64:
            _settled.clear()
        _settled[known] = settings.copy()
    return settings


_settled: dict[Any, Settings] = {}
"""What `settle` found lately: calls in a loop say the same again and again."""


def _fingerprint(layers: Any) -> Any:
    """Equal for layers that say the same, types included; None where a value may change behind our back."""

    def frozen(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value), tuple(map(frozen, value))
        if type(value) not in (str, int, float, bool, type(None)):
            raise TypeError
        return type(value), value

    try:
        said = tuple((origin, *((name, frozen(value)) for name, value in layer.items())) for origin, layer in layers)
    except TypeError:
        return None
    return registry.generation, os.environ.get("DECODEKIT_PREFER"), said


@outside_graphs
def stream(model: Any, inputs: Any = None, generation_config: Config = None, **kwargs: Any) -> Iterator[Step]:
    """Generate step by step: an iterator of `Step`. Closing it cancels the run.

    Takes everything that `generate` takes; the pipeline is assembled, and its errors raised, by this call itself.
    """
    return iter(Run(plan(model, inputs, generation_config, **kwargs)))


@outside_graphs
def generate(model: Any, inputs: Any = None, generation_config: Config = None, **kwargs: Any) -> Output:
    """Continue `inputs` with `model`.

    model: a model some ``models`` plugin knows (a transformers model, `decodekit.load`, your own nn.Module).
    inputs: token ids (tensor [B, T] or [T], lists, ragged lists) or text where a tokenizer is known.
    generation_config: `GenerationConfig` or dict; keyword arguments win over it, it wins over the model's own.
    kwargs: config keys (``decodekit keys``), and attention_mask, logits_processor, stopping_criteria, strategy
        (a name or an object), cache, streamer, tokenizer; what is left must be arguments of the model's forward pass.
        custom_generate: a loop of your own that runs instead, ``(model, input_ids, logits_processor=...,
        stopping_criteria=..., generation_config=..., **model_kwargs)``; its result is returned as it is.

    Returns int64 [rows, T] prompt and new tokens, or `GenerateDecoderOnlyOutput` with ``return_dict_in_generate``.
    Rows that end early are filled with the pad token. Raises `ConfigError` with every problem of the configuration,
    `InputError`, `PluginError`, or `GenerationError` when the running loop finds no token to choose.
    """
    if (loop := kwargs.pop("custom_generate", None)) is not None:
        custom: Callable[..., Output] = registry.load("frontends", "custom_generate")
        return custom(loop, model, inputs, generation_config, kwargs)
    try:
        run = Run(plan(model, inputs, generation_config, **kwargs))
    except BaseException as error:
        # A consumer may be waiting already: it must hear of errors before the first token, too.
        getattr(kwargs.get("streamer"), "fail", lambda _: None)(error)
        raise
    for _ in run:
        pass
    output = run.output()
    return output if run.outputs.return_dict_in_generate else output.sequences
