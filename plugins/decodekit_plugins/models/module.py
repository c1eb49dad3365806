"""Any `torch.nn.Module` that maps token ids to logits: your own model, as it is."""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from decodekit import DecodekitError, GenerationConfig, PipelineError
from decodekit.models import adapter_for
from decodekit.protocols import Forward, ModelAdapter, ModelSpec
from torch import Tensor, nn

MASKS = ("attention_mask", "mask", "key_padding_mask", "padding_mask")
"""The last two are torch's own convention: True at padding."""
POSITIONS = ("position_ids", "positions", "pos_ids")
CACHES = ("cache", "past_key_values", "kv_cache")
KEEPS = ("logits_to_keep", "num_logits_to_keep", "last")
HEADS = ("lm_head", "head", "output_projection", "unembed", "output", "to_logits", "embed_out")
IGNORED = ("use_cache", "labels", "return_dict")
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


class UserModule:
    """The ``module`` models plugin."""

    provides = frozenset({"model:cache", "model:mask", "model:positions", "model:last"})
    """What adapters can offer; the module at hand may lack some of it."""

    def adapt(self, model: Any, /) -> ModelAdapter | None:
        """Wrap a module whose forward takes int64 tokens [B, T] first and gives logits [B, T, V]."""
        if not isinstance(model, nn.Module):
            return None
        inner = getattr(model, "_orig_mod", None)
        if isinstance(inner, nn.Module):
            # A compiled model hides its signature: the facts come from what was compiled, the calls go to the outside.
            adapter = copy.copy(adapter_for(inner))
            adapter.model = model  # type: ignore[attr-defined]
            return adapter
        return ModuleAdapter(model)

    def opens(self, ref: str, /) -> bool:
        """Never: a module of your own is passed as an object."""
        return False

    def open(self, ref: str, /, **options: Any) -> ModelAdapter:
        """Refuse."""
        raise PipelineError(f"your own modules are passed as objects, not opened by name ({ref!r})")


@attrs.frozen
class Arguments:
    """How a module's forward pass spells what the loop can give it; None: it has no such argument."""

    tokens: str | None
    """Name of the tokens where they must be passed by it; None: they are the first argument."""
    mask: str | None
    positions: str | None
    cache: str | None
    keep: str | None
    use_cache: bool
    always: frozenset[str]
    """Those that do not default to None, so that leaving them out would be wrong."""
    others: frozenset[str]
    required: frozenset[str]
    """Those that have no default."""

    @classmethod
    def of(cls, forward: Any) -> Arguments:
        """Read the signature; the tokens are the first argument that is nothing else we know by name."""
        parameters = [*inspect.signature(forward).parameters.values()]
        if not parameters:
            raise PipelineError("the model's forward takes no argument at all; it must take token ids")
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        known = {*MASKS, *POSITIONS, *CACHES, *KEEPS, *IGNORED}
        first = next((p for p in parameters if p.name not in known), parameters[0])
        by_name = first is not parameters[0] or first.kind is first.KEYWORD_ONLY
        named = {p.name: p for p in parameters if p.kind not in kinds and p is not first}

        def spelt(spellings: tuple[str, ...]) -> str | None:
            return next((name for name in spellings if name in named), None)

        mask, positions, cache, keep = spelt(MASKS), spelt(POSITIONS), spelt(CACHES), spelt(KEEPS)
        return cls(
            first.name if by_name else None, mask, positions, cache, keep, "use_cache" in named,
            always=frozenset(name for name, p in named.items() if p.default is not None),
            others=frozenset(named) - {mask, positions, cache, keep, *IGNORED},
            required=frozenset(name for name, p in named.items() if p.default is p.empty),
        )  # fmt: skip


class ModuleAdapter:
    """Adapter of a plain module. Without a cache argument, the whole sequence is fed at every step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.tokenizer = getattr(model, "tokenizer", None)
        self.arguments = Arguments.of(model.forward)
        self.model_kwargs = self.arguments.others
        self._makes = getattr(model, "make_cache", None)
        takes = self.arguments.cache is not None
        self.default_cache = "dynamic" if takes and not callable(self._makes) else "model"
        self.defaults: Mapping[str, Any] = _defaults(model)
        self._checked = False
        place = next(iter([*model.parameters(), *model.buffers()]), torch.empty(0))
        config = getattr(model, "config", None)
        self.spec = ModelSpec(
            vocab_size=_vocabulary(model, self),
            device=place.device,
            dtype=place.dtype if place.is_floating_point() else torch.get_default_dtype(),
            max_positions=_number(config, "max_position_embeddings"),
        )

    def offers(self) -> frozenset[str]:
        """Whichever of cache, mask, positions and last the forward pass has an argument for."""
        names = self.arguments
        able = {"cache": names.cache, "mask": names.mask, "positions": names.positions, "last": names.keep}
        return frozenset(name for name, argument in able.items() if argument)

    def make_cache(self, name: str, /, **options: Any) -> Any:
        """What the module's own `make_cache` returns; None (no cache) where it has none."""
        if self.arguments.cache is None or not callable(self._makes):
            return None
        return self._makes(**options)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Any,
        /,
        *,
        mask: Tensor | None = None,
        last: int = 1,
        hidden: Sequence[int] = (),
        **model_kwargs: Any,
    ) -> Forward:
        """Run int64 `tokens` [B, Q] at `positions` [B, Q]; see `decodekit.protocols.ModelAdapter`.

        Rows padded for a module without a mask argument are run apart from each other, each without its padding;
        with a cache that is not possible and `PipelineError` is raised.
        """
        if hidden:
            raise PipelineError(f"{type(self.model).__name__}: hidden states of a module of your own cannot be tapped")
        if cache is not None and self.arguments.cache is None:
            raise PipelineError(
                f"{type(self.model).__name__}.forward takes no cache: leave cache and cache_implementation out, "
                f"or give forward an argument named cache"
            )
        if mask is not None and self.arguments.mask is None:
            return Forward(self._apart(tokens, positions, cache, mask, last, model_kwargs), {}, None, {})
        first = cache is not None and not self._checked
        try:
            logits, out = self._call(tokens, positions, cache, mask, last, model_kwargs)
        except (AttributeError, TypeError, ValueError, IndexError) as error:
            if not first or callable(self._makes) or isinstance(error, DecodekitError):
                raise
            raise PipelineError(
                f"{type(self.model).__name__}.forward failed with a cache of decodekit as its {self.arguments.cache} "
                f"({type(error).__name__}: {error}); {_CACHE_FIX}"
            ) from error
        made = None if cache is None else getattr(out, "cache", None)
        if first and made is None and not callable(self._makes) and _is_empty(cache):
            # Going on would feed one token at a time to a module that remembers none of those before.
            raise PipelineError(
                f"{type(self.model).__name__}.forward takes {self.arguments.cache}, but wrote no token to it; "
                f"{_CACHE_FIX}"
            )
        return Forward(logits, {}, cache if made is None else made, {})

    def _call(
        self, tokens: Tensor, positions: Tensor, cache: Any, mask: Tensor | None, last: int, extra: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        names = self.arguments
        call = dict(extra)
        if lost := (names.required & names.others) - call.keys():
            raise PipelineError(
                f"{type(self.model).__name__}.forward needs {', '.join(sorted(lost))}, which nobody passed: give it to "
                f"generate by name, or give the argument a default"
            )
        if names.cache is not None and (cache is not None or names.cache in names.required):
            call[names.cache] = cache
        if names.use_cache:
            call["use_cache"] = cache is not None
        if names.positions is not None:
            call[names.positions] = positions
        if names.mask is not None and mask is None and names.mask in names.always:
            held = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else 0
            mask = torch.ones(tokens.shape[0], held + tokens.shape[1], dtype=torch.bool, device=tokens.device)
        if names.mask is not None and mask is not None:
            call[names.mask] = _spell(mask, names.mask)
        if names.keep is not None:
            call[names.keep] = last
        out = self.model(tokens, **call) if names.tokens is None else self.model(**{names.tokens: tokens}, **call)
        logits = _logits(out)
        if logits is None or logits.dim() != 3 or logits.shape[0] != tokens.shape[0]:
            got = type(out).__name__ if logits is None else tuple(logits.shape)
            raise PipelineError(
                f"{type(self.model).__name__}.forward must return logits [B, T, V], alone, first in a tuple or as "
                f".logits; for tokens {tuple(tokens.shape)} it returned {got}"
            )
        if not self._checked:
            self._check(logits, tokens.shape[1], min(last, tokens.shape[1]))
        return (logits if logits.shape[1] <= last else logits[:, -last:]), out

    def _check(self, logits: Tensor, fed: int, last: int) -> None:
        """What cannot be known before the first pass."""
        name = type(self.model).__name__
        if logits.shape[1] not in (fed, last):
            raise PipelineError(f"{name}.forward gave logits for {logits.shape[1]} positions, {fed} tokens were fed")
        if hasattr(self, "spec") and logits.shape[2] != self.spec.vocab_size:
            raise PipelineError(
                f"{name} gives {logits.shape[2]} logits, but a vocabulary of {self.spec.vocab_size} was found on it; "
                f"set vocab_size = {logits.shape[2]} on the module"
            )
        self._checked = hasattr(self, "spec")

    def _apart(
        self, tokens: Tensor, positions: Tensor, cache: Any, mask: Tensor, last: int, extra: dict[str, Any]
    ) -> Tensor:
        """Rows of one real length together, without their padding."""
        name = type(self.model).__name__
        if cache is not None:
            raise PipelineError(
                f"{name}.forward takes no attention_mask, so prompts of different length cannot share its cache: "
                f"set use_cache=False, pass prompts of one length, or add attention_mask to forward"
            )
        lengths = mask.sum(-1)
        result: Tensor | None = None
        for length in sorted(set(lengths.tolist())):
            rows = (lengths == length).nonzero()[:, 0]
            real = mask[rows]
            part = tokens[rows][real].view(-1, length)
            where = positions[rows][real].view(-1, length)
            mine = {k: _rows(v, rows, tokens.shape[0]) for k, v in extra.items()}
            logits = self._call(part, where, None, None, last, mine)[0]
            if result is None:
                result = logits.new_zeros(tokens.shape[0], last, logits.shape[2])
            result[rows, -logits.shape[1] :] = logits
        assert result is not None
        return result

    def __repr__(self) -> str:
        return f"ModuleAdapter({type(self.model).__name__})"


_CACHE_FIX = (
    "call its update(key, value, layer) in every attention layer and use what that returns; for state of your own kind "
    "give the module make_cache(), which returns an object that forward writes to; or pass use_cache=False"
)


def _is_empty(cache: Any) -> bool:
    """Whether no layer of a cache holds anything."""
    layers = range(len(getattr(cache, "layers", None) or [None]))
    return callable(getattr(cache, "get_seq_length", None)) and not any(int(cache.get_seq_length(i)) for i in layers)


def _spell(mask: Tensor, name: str) -> Tensor:
    """The mask [B, K] in the form that an argument of this name expects."""
    if name == "attention_mask":
        return mask.long()
    return ~mask if "padding" in name else mask


def _rows(value: Any, rows: Tensor, all_rows: int) -> Any:
    """These rows of an argument that has one entry for each row; anything else as it is."""
    return value[rows] if isinstance(value, Tensor) and value.dim() and value.shape[0] == all_rows else value


def _logits(out: Any) -> Tensor | None:
    if isinstance(out, Tensor):
        return out
    found = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    if found is None and isinstance(out, (tuple, list)) and out:
        found = out[0]
    return found if isinstance(found, Tensor) else None


def _defaults(model: nn.Module) -> dict[str, Any]:
    """Special tokens named on the module or its config, then its `generation_config`."""
    found: dict[str, Any] = {}
    given = getattr(model, "generation_config", None)
    for source in (getattr(model, "config", None), model):
        for name in SPECIAL:
            value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
            if value is not None:
                found[name] = value
    if isinstance(given, GenerationConfig):
        given = {**given.unknown_keys, **given.set_keys}
    elif given is not None and not isinstance(given, Mapping):
        given = {k: v for k, v in vars(given).items() if v is not None and not k.startswith("_")}
    return {**found, **(given or {})}


def _number(source: Any, name: str) -> int | None:
    value = source.get(name) if isinstance(source, Mapping) else getattr(source, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


_probed: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def _vocabulary(model: nn.Module, adapter: ModuleAdapter) -> int:
    """Width of the logits: as stated by the module, by its config, by its output layer, or found by one small pass."""
    for source in (model, getattr(model, "config", None)):
        stated = _number(source, "vocab_size")
        if stated is not None:
            return stated
    for name in HEADS:
        width = getattr(getattr(model, name, None), "out_features", None)
        if isinstance(width, int):
            return width
    if model not in _probed:
        _probed[model] = _probe(model, adapter)
    return _probed[model]


def _probe(model: nn.Module, adapter: ModuleAdapter) -> int:
    """One token through the model, leaving random numbers and training modes as they were."""
    modes = [(module, module.training) for module in model.modules()]
    place = next(iter([*model.parameters(), *model.buffers()]), torch.empty(0)).device
    token = torch.zeros(1, 1, dtype=torch.long, device=place)
    try:
        for module, _ in modes:
            module.training = False
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return adapter._call(token, torch.zeros_like(token), None, None, 1, {})[0].shape[2]
    except PipelineError:
        raise
    except Exception as error:
        name = type(model).__name__
        raise PipelineError(f"the vocabulary of {name} is unknown ({error}): set vocab_size on the module") from error
    finally:
        for module, mode in modes:
            module.training = mode
