"""Assembles the parts of a call: the only place that does, for every way of generating."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch

from .chain import Chain, Part, order
from .config import GenerationMode, mode_of
from .context import BindContext, mix_seed
from .errors import ConfigError, InputError, PipelineError, Problem
from .negotiate import Need, negotiate
from .options import Choices
from .prompt import Prompt
from .protocols import ModelAdapter, Selector, Strategy, Streamer
from .registry import _import, registry
from .settings import Active, Settings, build, idle, sampling_only
from .traits import Phase, Traits, traits_of

STRATEGY_OF = {
    GenerationMode.GREEDY_SEARCH: "greedy",
    GenerationMode.SAMPLE: "sample",
    GenerationMode.BEAM_SEARCH: "beam",
    GenerationMode.BEAM_SAMPLE: "beam",
    GenerationMode.GROUP_BEAM_SEARCH: "group_beam",
    GenerationMode.CONSTRAINED_BEAM_SEARCH: "constrained_beam",
    GenerationMode.CONTRASTIVE_SEARCH: "contrastive",
    GenerationMode.ASSISTED_GENERATION: "assisted",
    GenerationMode.DOLA_GENERATION: "dola",
}
"""The plugin that serves a mode when ``strategy`` is unset."""


@attrs.define
class Pipeline:
    """All parts of one call, bound and ordered. Nothing has run."""

    adapter: ModelAdapter
    settings: Settings
    context: BindContext
    prompt: Prompt
    strategy_name: str
    strategy: Strategy
    selector_name: str
    selector: Selector
    chain: Chain
    criteria: tuple[Part, ...]
    cache_name: str
    cache: Any
    candidates: tuple[Part, ...]
    streamer: Streamer | None
    model_kwargs: dict[str, Any]
    """Further arguments of the model's forward pass, as passed by the caller."""
    left_out: dict[str, str]
    """Parts that were asked for and have nothing to do here, with the reason."""

    def describe(self) -> dict[str, Any]:
        """The pipeline as plain data: what runs, in which order, who owns it and why it is there."""

        def rows(parts: Iterable[Part]) -> list[dict[str, Any]]:
            return [
                {
                    "name": p.name,
                    "owner": p.owner,
                    "phase": p.traits.phase.name,
                    "why": p.why,
                    "options": _shown(p.runtime),
                }
                for p in parts
            ]

        values = self.settings.values
        return {
            "model": type(getattr(self.adapter, "model", self.adapter)).__name__,
            "adapter": type(self.adapter).__name__,
            "strategy": self.strategy_name,
            "selector": self.selector_name,
            "cache": self.cache_name,
            "processors": rows(self.chain.parts),
            "criteria": [{k: v for k, v in row.items() if k != "phase"} for row in rows(self.criteria)],
            "streamer": type(self.streamer).__name__ if self.streamer is not None else None,
            "left_out": dict(self.left_out),
            "settings": {
                k: {"value": v.value, "origin": v.origin, "owner": v.owner} for k, v in sorted(values.items())
            },
            "unknown_keys": dict(self.settings.unknown),
        }


def _shown(runtime: Any) -> str:
    text = repr(runtime)
    return text if " at 0x" not in text else type(runtime).__name__


def session(item: Any, what: str) -> Any:
    """A copy of a caller's object for this call only, so that state left by one call never reaches the next.

    Models and tokenizers inside it are shared, not copied. Objects with `bind` decide for themselves;
    functions and classes are used as they are.
    """
    if isinstance(item, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)):
        return item
    if attrs.has(type(item)) and type(item).__attrs_props__.is_frozen:
        return item
    memo: dict[int, Any] = {}
    for value in (item, *getattr(item, "__dict__", {}).values()):
        if isinstance(value, torch.nn.Module) or hasattr(value, "convert_ids_to_tokens") or hasattr(value, "encode"):
            memo[id(value)] = value
    try:
        return copy.deepcopy(item, memo)
    except Exception as error:
        raise PipelineError(
            f"{what} {type(item).__name__} keeps state and cannot be copied for this call ({error}); "
            f"give it bind(ctx) that returns a fresh object (or itself, to share its state between calls)"
        ) from error


class _Assembly:
    """Collects parts and problems; raises them together."""

    def __init__(self, adapter: ModelAdapter, settings: Settings, prompt: Prompt, tokenizer: Any) -> None:
        self.adapter, self.settings, self.prompt, self.tokenizer = adapter, settings, prompt, tokenizer
        self.problems: list[Problem] = []
        self.left_out: dict[str, str] = {}
        self.choices = settings.of(Choices)
        self.custom: list[str] = []

    def strategy(self, given: Any) -> tuple[str, Any]:
        if given is not None and not isinstance(given, str):
            return type(given).__name__, given
        chosen = self.settings.kind("strategies")
        default = chosen[0].plugin.name if len(chosen) == 1 else STRATEGY_OF[mode_of(self.settings.plain())]
        name = str(given or self.choices.strategy or default)
        return name, self.build("strategies", name)

    def build(self, kind: str, name: str, options: dict[str, Any] | None = None) -> Any:
        """The options object of a plugin chosen by name: as configured, or with its defaults."""
        plugin = registry.find(kind, name)
        active = self.settings.active.get((kind, plugin.qualified))
        if active is not None and not options:
            return active.options
        made = build(plugin.load(), options or {}, plugin.qualified, self.problems)
        if made is None:
            raise ConfigError(self.problems)
        return made

    def bind(self, item: Any, ctx: BindContext) -> Any:
        return item.bind(ctx) if hasattr(item, "bind") else item

    def context(self, samples: bool) -> BindContext:
        prompt, settings = self.prompt, self.settings
        n = self.choices.num_return_sequences
        tokens, mask = prompt.tokens, prompt.mask
        rows, width = tokens.shape
        return BindContext(
            spec=_spec(self.adapter, settings),
            settings=settings,
            tokens=tokens,
            mask=mask,
            prompt_width=width,
            model=self.adapter,
            tokenizer=self.tokenizer,
            samples=samples,
            seeds=_seeds(self.choices.seed, rows // n, n),
            slots=[row // n for row in range(rows)],
        )

    def why(self, active: Active) -> str:
        mine = [v for v in self.settings.values.values() if v.owner == active.plugin.qualified]
        return ", ".join(f"{v.key}={v.value!r} ({v.origin})" for v in mine) or f"{active.plugin.name} ({active.origin})"

    def configured(self, kind: str, ctx: BindContext, replaced: set[str]) -> list[Part]:
        parts = []
        for active in self.settings.kind(kind):
            label, options = active.plugin.name, active.options
            if type(options).__name__ in replaced:
                self.left_out[label] = "replaced by an object of the same class that was passed"
                continue
            if kind == "processors" and not ctx.samples and sampling_only(active):
                self.left_out[label] = "only matters when sampling; the strategy takes the likeliest token"
                continue
            runtime = self.bind(options, ctx)
            if runtime is None:
                self.left_out[label] = "has nothing to do with these values"
                continue
            parts.append(Part(label, active.plugin.qualified, runtime, traits_of(options), self.why(active)))
        return parts

    def passed(self, kind: str, items: Sequence[Any], ctx: BindContext) -> list[Part]:
        parts = []
        for item in items:
            if isinstance(item, str):
                path = ":" in item and all(part.isidentifier() for part in item.partition(":")[0].split("."))
                known = any(item in (p.name, p.qualified) for p in registry.plugins(kind))
                item = _import(item) if path and not known else registry.load(kind, item)
            if isinstance(item, type):
                item = item()
            if not callable(item) and not hasattr(item, "bind"):
                raise InputError(f"{kind} takes callables of (input_ids, scores), got {item!r}")
            name = getattr(item, "__name__", None) or type(item).__name__
            runtime = self.bind(item, ctx) if hasattr(item, "bind") else session(item, kind)
            if runtime is None:
                self.left_out[name] = "has nothing to do with these values"
                continue
            traits = traits_of(item)
            if traits.pure is None:
                self.custom.append(name)
            parts.append(Part(name, "caller", runtime, traits, "passed to the call"))
        return parts

    def cache(self, given: Any, ctx: BindContext) -> tuple[str, Any]:
        if given is not None:
            if self.choices.cache_implementation is not None:
                origin = self.settings.origin("cache_implementation")
                if origin == "call":
                    problem = f"is {self.choices.cache_implementation!r}, but a cache was passed too; pass only one"
                    self.problems.append(Problem("cache_implementation", problem))
            return type(given).__name__, given
        if not self.choices.use_cache:
            return "none", None
        name = str(self.choices.cache_implementation or getattr(self.adapter, "default_cache", "model"))
        if "cache" not in self.adapter.offers():
            if self.choices.cache_implementation is not None:
                model = type(getattr(self.adapter, "model", self.adapter)).__name__
                self.problems.append(Problem("cache_implementation", f"is {name!r}, but {model} takes no cache"))
            return "none", None
        if name == "model":
            return "model", self.adapter.make_cache("model", **(self.choices.cache_config or {}))
        return name, self.bind(self.build("caches", name, self.choices.cache_config), ctx)

    def check(self, strategy_name: str, strategy: Any, cache: Any, parts: Sequence[Part]) -> None:
        offers = {
            f"model {type(self.adapter).__name__}": [f"model:{name}" for name in self.adapter.offers()],
            f"cache {type(cache).__name__}": [f"cache:{name}" for name in cache_offers(cache)],
            f"strategy {strategy_name}": getattr(strategy, "provides", ()),
        }
        needs = [Need(f"strategy {strategy_name}", frozenset(getattr(strategy, "needs", ())))]
        needs += [Need(part.name, part.traits.needs) for part in parts]
        self.problems += negotiate(needs, offers)
        names = {part.name for part in parts}
        for part in parts:
            for other in part.traits.conflicts:
                if other in names:
                    self.problems.append(
                        Problem(part.name, f"cannot run together with {other}; take one out", part.owner)
                    )
        if self.custom and (self.choices.strict or getattr(strategy, "needs_pure", False)):
            words = (
                f"{', '.join(self.custom)} say nothing about themselves (no traits), so {strategy_name} cannot "
                "promise to be right with them"
            )
            if self.choices.strict:
                self.problems.append(Problem("strict", words))
            else:
                warnings.warn(words, stacklevel=4)
        if self.problems:
            raise ConfigError(self.problems)


def _spec(adapter: ModelAdapter, settings: Settings) -> Any:
    """The model's facts with the special tokens that the configuration settles on."""
    eos = settings.get("eos_token_id")
    ids = tuple(eos) if isinstance(eos, (tuple, list)) else () if eos is None else (eos,)
    return attrs.evolve(
        adapter.spec,
        eos_token_ids=tuple(i for i in ids if i >= 0),
        pad_token_id=settings.get("pad_token_id"),
        bos_token_id=settings.get("bos_token_id"),
    )


def _seeds(seed: int | tuple[int, ...] | None, prompts: int, copies: int) -> list[int] | None:
    if seed is None:
        return None
    if isinstance(seed, tuple):
        if len(seed) != prompts:
            raise ConfigError([Problem("seed", f"has {len(seed)} values for {prompts} prompts; give one for each")])
        bases = list(seed)
    else:
        bases = [mix_seed(seed, row) for row in range(prompts)]
    return [mix_seed(base, copy_, salt=1) for base in bases for copy_ in range(copies)]


def cache_offers(cache: Any) -> frozenset[str]:
    """Abilities of a cache; one made elsewhere is judged by its methods."""
    if cache is None:
        return frozenset()
    if callable(getattr(cache, "offers", None)):
        found: frozenset[str] = cache.offers()
        return found
    able = {"reorder"} if hasattr(cache, "reorder_cache") else set()
    if hasattr(cache, "crop") and getattr(cache, "is_croppable", True):
        able.add("crop")
    return frozenset(able)


def assemble(
    adapter: ModelAdapter,
    settings: Settings,
    prompt: Prompt,
    *,
    logits_processor: Sequence[Any] | None = None,
    stopping_criteria: Sequence[Any] | None = None,
    strategy: Any = None,
    cache: Any = None,
    streamer: Any = None,
    tokenizer: Any = None,
    model_kwargs: dict[str, Any] | None = None,
) -> Pipeline:
    """Choose, bind, order and check every part. Raises everything wrong at once; runs nothing of the model."""
    work = _Assembly(adapter, settings, prompt, tokenizer)
    strategy_name, chosen = work.strategy(strategy)
    samples = bool(getattr(chosen, "samples", False))
    ctx = work.context(samples)
    chosen = work.bind(chosen, ctx)
    processors, criteria = list(logits_processor or ()), list(stopping_criteria or ())
    stops = work.configured("criteria", ctx, {type(c).__name__ for c in criteria}) + work.passed(
        "criteria", criteria, ctx
    )
    if not stops:
        raise ConfigError(
            [Problem("max_new_tokens", "nothing would ever stop this run; set it, or pass stopping_criteria")]
        )
    limits = [part.runtime.limit(ctx.prompt_width) for part in stops if hasattr(part.runtime, "limit")]
    ctx.max_length = min(limits, default=None)
    # At the same token an eos or a stop string says more than "length" does.
    stops.sort(key=lambda part: hasattr(part.runtime, "limit"))
    parts = work.configured("processors", ctx, {type(p).__name__ for p in processors})
    for active in settings.kind("watermarkers"):
        runtime = work.bind(active.options, ctx)
        mark = Traits(phase=Phase.WATERMARK, pure=traits_of(active.options).pure)
        parts.append(Part(active.plugin.name, active.plugin.qualified, runtime, mark, work.why(active)))
    parts = order(parts + work.passed("processors", processors, ctx), work.choices.processor_order)
    candidates = work.configured("candidates", ctx, set())
    cache_name, made = work.cache(cache, ctx)
    selector_name = str(work.choices.selector or getattr(chosen, "selector", "draw" if samples else "argmax"))
    selector = work.bind(work.build("selectors", selector_name), ctx)
    if isinstance(streamer, str):
        streamer = work.build("streamers", streamer)
    if hasattr(streamer, "bind"):
        streamer = streamer.bind(ctx)
    work.check(strategy_name, chosen, made, [*parts, *stops, *candidates])
    if work.choices.strategy is None and not samples:
        for note in idle(settings):
            warnings.warn(str(note), stacklevel=4)
    return Pipeline(
        adapter, settings, ctx, prompt, strategy_name, chosen, selector_name, selector, Chain(parts), tuple(stops),
        cache_name, made, tuple(candidates), streamer, model_kwargs or {}, work.left_out,
    )  # fmt: skip
