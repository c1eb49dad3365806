"""Assembles the parts of a call: the only place that does, for every way of generating."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint
from typing import Any

import attrs
import torch

from .chain import Chain, Part, order
from .config import mode_of
from .context import BindContext, mix_seed
from .errors import (
    ConfigError,
    DecodekitError,
    InputError,
    PipelineError,
    PluginBroken,
    Problem,
    expect,
    instance,
    named,
    warn,
)
from .hooks import hooks
from .negotiate import Need, negotiate
from .options import Choices, Outputs
from .prompt import Prompt, as_list, eos_ids
from .protocols import ModelAdapter, Selector, Strategy, Streamer
from .registry import registry
from .settings import CALLER, Active, Settings, build, sampling_only
from .traits import Phase, Traits, traits_of

RECORDS = {"output_hidden_states": "model:hidden", "output_attentions": "model:attentions"}
"""Outputs and what they need of the model."""
NOTHING_TO_DO = "has nothing to do with these values"
"""Why a part is left out whose `bind` returns None."""


@attrs.define
class Pipeline:
    """All parts of one call, bound and ordered. Nothing has run."""

    adapter: ModelAdapter
    settings: Settings
    context: BindContext
    judged: BindContext
    """What criteria look at: `context`, or the candidates of a strategy that has more of them than rows."""
    streamed: BindContext
    """The rows that the streamer hears of, those of the output, before any new token."""
    prompt: Prompt
    copies: int
    """Rows of `prompt` for each row that the caller passed."""
    strategy_name: str
    strategy: Strategy
    selector_name: str
    selector: Selector
    chain: Chain
    criteria: tuple[Part, ...]
    cache_name: str
    cache: Any
    cache_passed: bool
    """Whether the caller made the cache, and may use it again."""
    candidates: tuple[Part, ...]
    streamer: Streamer | None
    model_kwargs: dict[str, Any]
    """Further arguments of the model's forward pass, as passed by the caller."""
    left_out: dict[str, str]
    """Parts that were asked for and have nothing to do here, with the reason."""

    def describe(self) -> dict[str, Any]:
        """The pipeline as plain data: what runs, in which order, who owns it and why it is there."""
        return {name: value for found in hooks.call.report(pipeline=self) for name, value in (found or {}).items()}


def session(item: Any, what: str) -> Any:
    """A copy of a caller's object for this call only, so that state left by one call never reaches the next.

    Models and tokenizers inside it are shared, not copied. Objects with `bind` decide for themselves;
    functions and classes are used as they are.
    """
    if isinstance(item, (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)):
        return item
    if attrs.has(type(item)) and type(item).__attrs_props__.is_frozen:
        return item

    def shared(value: Any) -> bool:
        return isinstance(value, torch.nn.Module) or hasattr(value, "convert_ids_to_tokens") or hasattr(value, "encode")

    held = (item, *getattr(item, "__dict__", {}).values())
    try:
        return copy.deepcopy(item, {id(value): value for value in held if shared(value)})
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

    def strategy(self, given: Any) -> tuple[str, Any]:
        if given is not None:
            given = instance("strategy", given)
            return type(given).__name__, given
        # The reference's names of modes, less their endings, are the names of the plugins that serve them.
        mode = mode_of({name: final.value for name, final in self.settings.values.items()}).value
        name = self.choices.strategy or mode.removesuffix("_search").removesuffix("_generation").removesuffix("_sample")
        return name, self.build("strategies", name)

    def build(self, kind: str, name: str, options: dict[str, Any] | None = None) -> Any:
        """The options object of a plugin chosen by name: as configured, or with its defaults."""
        plugin = registry.find(kind, name)
        active = self.settings.active.get((kind, plugin.qualified))
        if active is not None and not options:
            return active.options
        shown = {field: f"cache_config.{field}" for field in options or ()}
        made = build(plugin.load(), options or {}, plugin.qualified, self.problems, shown)
        if made is None:
            raise ConfigError(self.problems)
        return made

    def bind(self, item: Any, ctx: BindContext, name: str, owner: str = "caller") -> Any:
        """What acts in this call: None where there is nothing to do, or where a value does not fit the call."""
        try:
            return item.bind(ctx) if hasattr(item, "bind") else item
        except DecodekitError:
            raise
        except ValueError as error:
            mine = ", ".join(value.key for value in self.settings.values.values() if value.owner == owner)
            self.problems.append(Problem(mine or name, str(error), owner))
            return None
        except Exception as error:
            raise named(error, f"{name!r} ({owner}) cannot be prepared for this call", PipelineError) from error

    def context(self, samples: bool, n: int) -> BindContext:
        prompt = self.prompt.expand(n)
        rows, width = prompt.tokens.shape
        return BindContext(
            spec=_spec(self.adapter, self.settings), settings=self.settings, tokens=prompt.tokens, mask=prompt.mask,
            prompt_width=width, model=self.adapter, tokenizer=self.tokenizer, samples=samples,
            seeds=_seeds(self.choices.seed, rows // n, n), slots=[row // n for row in range(rows)],
            dropped=prompt.dropped, encoder_input_ids=prompt.source,
        )  # fmt: skip

    def why(self, active: Active) -> str:
        mine = [v for v in self.settings.values.values() if v.owner == active.plugin.qualified]
        return ", ".join(f"{v.key}={v.value!r} ({v.origin})" for v in mine) or f"{active.plugin.name} ({active.origin})"

    def configured(self, kind: str, ctx: BindContext, replaced: Iterable[str] = ()) -> Iterator[Part]:
        for active in self.settings.kind(kind):
            label, options = active.plugin.name, active.options
            own = active.origin in CALLER
            if type(options).__name__ in replaced and not (own and kind == "criteria"):  # every limit can act
                self.left_out[label] = "replaced by an object of the same class that was passed"
                if own:
                    warn(f"{self.why(active)} is {self.left_out[label]}")
                continue
            if kind == "processors" and not ctx.samples and sampling_only(active):
                self.left_out[label] = "only matters when sampling; the strategy takes the likeliest token"
                continue
            yield from self.part(label, active.plugin.qualified, options, ctx, self.why(active))

    def part(self, name: str, owner: str, item: Any, ctx: BindContext, why: str) -> Iterator[Part]:
        bound = owner != "caller" or hasattr(item, "bind")
        runtime = self.bind(item, ctx, name, owner) if bound else session(item, name)
        stated = getattr(item, "traits", None)
        if runtime is None:
            self.left_out[name] = NOTHING_TO_DO
        elif not callable(runtime) and not hasattr(runtime, "propose"):
            raise PluginBroken(f"{name!r} ({owner}) cannot act: {runtime!r} has no __call__")
        elif owner != "caller" and not isinstance(stated, (Traits, property, type(None))):
            raise PluginBroken(f"{name!r} ({owner}) has traits {stated!r}, which are no Traits")
        else:
            yield Part(name, owner, runtime, traits_of(item), why)

    def passed(self, kind: str, items: Sequence[Any], ctx: BindContext) -> Iterator[Part]:
        for item in items:
            if isinstance(item, str):
                path = ":" in item and all(part.isidentifier() for part in item.partition(":")[0].split("."))
                known = any(item in (p.name, p.qualified) for p in registry.plugins(kind))
                item = EntryPoint("", item, kind).load() if path and not known else registry.load(kind, item)
            item = instance(f"{kind}:", item)
            if not callable(item) and not hasattr(item, "bind"):
                raise InputError(f"{kind} takes callables of (input_ids, scores), got {item!r}")
            name = getattr(item, "__name__", None) or type(item).__name__
            yield from self.part(name, "caller", item, ctx, "passed to the call")

    def cache(self, given: Any, ctx: BindContext) -> tuple[str, Any]:
        wanted = self.choices.cache_implementation
        if given is not None:
            if wanted is not None and self.settings.origin("cache_implementation") == "call":
                words = f"is {wanted!r}, but a cache was passed too; pass only one"
                self.problems.append(Problem("cache_implementation", words))
            return type(given).__name__, given
        able = "cache" in self.adapter.offers()
        if self.choices.use_cache and wanted is not None and not able:
            self.problems.append(Problem("cache_implementation", f"is {wanted!r}, but the model takes no cache"))
        if not (self.choices.use_cache and able):
            return "none", None
        name = str(wanted or getattr(self.adapter, "default_cache", "model"))
        if name == "model":
            return "model", self.adapter.make_cache("model", **(self.choices.cache_config or {}))
        return name, self.bind(self.build("caches", name, self.choices.cache_config), ctx, name, "cache")

    def check(self, strategy_name: str, strategy: Any, cache: Any, parts: Sequence[Part]) -> None:
        # Without their number, layers cannot be asked for.
        able = self.adapter.offers() - ({"hidden"} if self.adapter.spec.num_layers is None else set())
        offers = {
            f"model {type(self.adapter).__name__}": [f"model:{name}" for name in able],
            f"cache {type(cache).__name__}": [f"cache:{name}" for name in cache_offers(cache)],
            f"strategy {strategy_name}": getattr(strategy, "provides", ()),
        }
        needs = [Need(f"strategy {strategy_name}", frozenset(getattr(strategy, "needs", ())))]
        needs += [Need(part.name, part.traits.needs) for part in parts]
        outputs = self.settings.of(Outputs)
        needs += [Need(key, frozenset({need})) for key, need in RECORDS.items() if getattr(outputs, key)]
        self.problems += negotiate(needs, offers)
        names = {part.name for part in parts}
        for part in parts:
            for other in sorted(names & set(part.traits.conflicts)):
                self.problems.append(Problem(part.name, f"cannot run together with {other}; take one out", part.owner))
        custom = [part.name for part in parts if part.owner == "caller" and part.traits.pure is None]
        words = f"{', '.join(custom)} say nothing about themselves (no traits): {strategy_name} may be wrong"
        if custom and self.choices.strict:
            self.problems.append(Problem("strict", words))
        elif custom and getattr(strategy, "needs_pure", False):
            warn(words)
        if self.problems:
            raise ConfigError(self.problems)


def _spec(adapter: ModelAdapter, settings: Settings) -> Any:
    """The model's facts with the special tokens that the configuration settles on."""
    eos = tuple(token for token in eos_ids(settings) if token >= 0)
    pad, bos = settings.get("pad_token_id"), settings.get("bos_token_id")
    return attrs.evolve(adapter.spec, eos_token_ids=eos, pad_token_id=pad, bos_token_id=bos)


def _seeds(seed: int | tuple[int, ...] | None, prompts: int, copies: int) -> list[int] | None:
    if seed is None:
        return None
    bases = seed if isinstance(seed, tuple) else tuple(mix_seed(seed, row) for row in range(prompts))
    if len(bases) != prompts:
        words = f"has {len(bases)} values for {prompts} prompt{'s'[: prompts != 1]}; give one, or one each"
        raise ConfigError([Problem("seed", words)])
    return [mix_seed(base, copy_, salt=1) for base in bases for copy_ in range(copies)]


def cache_offers(cache: Any) -> frozenset[str]:
    """Abilities of a cache; one made elsewhere is judged by its methods."""
    if cache is None:  # everything is computed anew from the tokens, in whatever order they are
        return frozenset({"reorder", "select", "crop"})
    if callable(getattr(cache, "offers", None)):
        return frozenset(cache.offers())
    crop = hasattr(cache, "crop") and getattr(cache, "is_croppable", True)
    able = {"reorder": hasattr(cache, "reorder_cache"), "crop": crop}
    return frozenset(name for name, yes in able.items() if yes)


def assemble(
    adapter: ModelAdapter, settings: Settings, prompt: Prompt, *, logits_processor: Any = None,
    stopping_criteria: Any = None, strategy: Any = None, cache: Any = None, streamer: Any = None, tokenizer: Any = None,
    model_kwargs: dict[str, Any] | None = None,
) -> Pipeline:  # fmt: skip
    """Choose, bind, order and check every part. Raises everything wrong at once; runs nothing of the model."""
    work = _Assembly(adapter, settings, prompt, tokenizer)
    strategy_name, chosen = work.strategy(strategy)
    samples = getattr(chosen, "samples", False)
    samples = bool(work.choices.do_sample if samples is None else samples)
    copies = getattr(chosen, "rows_per_prompt", lambda _: work.choices.num_return_sequences)(settings)
    ctx = judged = streamed = work.context(samples, copies)
    bound = work.bind(chosen, ctx, strategy_name, "strategy")
    what = f"strategy {strategy_name!r}" if strategy is None else "strategy"
    chosen = bound if work.problems else expect(what, bound, "decode")
    if (candidates_ := getattr(chosen, "judged_per_prompt", None)) is not None:
        judged = work.context(samples, candidates_)
    if (returned := getattr(chosen, "streamed_per_prompt", None)) is not None:
        streamed = work.context(samples, returned)
    processors, criteria = as_list(logits_processor), as_list(stopping_criteria)
    stops = list(work.configured("criteria", judged, {type(c).__name__ for c in criteria}))
    stops += work.passed("criteria", criteria, judged)
    if not stops:
        never = Problem("max_new_tokens", "nothing would ever stop this run; set it, or pass stopping_criteria")
        raise ConfigError(work.problems or [never])
    limits = [part.runtime.limit(ctx.prompt_width) for part in stops if hasattr(part.runtime, "limit")]
    ctx.max_length = judged.max_length = min(limits, default=None)
    # At the same token an eos or a stop string says more than "length" does.
    stops.sort(key=lambda part: hasattr(part.runtime, "limit"))
    parts = list(work.configured("processors", ctx, {type(p).__name__ for p in processors}))
    for mark in work.configured("watermarkers", ctx):
        parts.append(attrs.evolve(mark, traits=attrs.evolve(mark.traits, phase=Phase.WATERMARK)))
    parts = order([*parts, *work.passed("processors", processors, ctx)], work.choices.processor_order)
    candidates = tuple(work.configured("candidates", ctx))
    cache_name, made = work.cache(cache, ctx)
    adopt = getattr(adapter, "adopt", None)
    made = made if made is None or adopt is None else adopt(made, ctx)
    selector_name = str(work.choices.selector or getattr(chosen, "selector", "draw" if samples else "argmax"))
    selector = work.bind(work.build("selectors", selector_name), ctx, selector_name, "selector")
    selector = selector if work.problems else expect(f"selector {selector_name!r}", selector, "__call__")
    listed = [active.options for active in settings.kind("streamers")]
    if len(listed) + (streamer is not None) > 1:
        work.problems.append(Problem("streamers", "a run has one streamer: name one, or pass one"))
    streamer = listed[0] if listed else streamer
    streamer = work.build("streamers", streamer) if isinstance(streamer, str) else streamer
    streamer = None if streamer is None else work.bind(expect("streamer", streamer, "put", "end"), streamed, "streamer")
    work.check(strategy_name, chosen, made, [*parts, *stops, *candidates])
    for note in hooks.doubts(settings, samples, strategy_name):
        warn(note)
    return Pipeline(
        adapter, settings, ctx, judged, streamed, prompt.expand(copies), copies, strategy_name, chosen, selector_name,
        selector,
        Chain(parts), tuple(stops), cache_name, made, cache is not None, candidates, streamer,
        model_kwargs or {}, work.left_out,
    )  # fmt: skip
