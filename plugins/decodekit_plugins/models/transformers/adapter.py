"""A transformers model as the loop sees it. The model object is only called, never changed."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from decodekit.errors import InputError, PipelineError
from decodekit.prompt import Prompt, prepare
from decodekit.protocols import Forward, ModelSpec
from decodekit.settings import Settings
from torch import Tensor

from .caches import SelfMade, default_cache, in_shell, make_cache
from .embeds import continued, embedded
from .facts import fact, facts_of, recurrent, text_config, windows_of
from .masks import ready_mask, takes_ready
from .padding import refuse_padding
from .room import fit, table_of

PROMPT_ONLY = ("pixel_", "image_", "video_", "audio_", "input_features", "feature_attention_mask", "mm_encoder_outputs")
"""How arguments begin that go with places in the prompt: a cached step must not pass them again."""
PER_TOKEN = ("token_type_ids", "mm_token_type_ids")
"""Arguments with a value for each token: new tokens continue the last one."""

UNCACHED = ("cpmant",)
"""Model types that are right only without a cache: in CPM-Ant a prompt's tokens see those after them."""
MASKED = ("xlm", "flaubert", "xlnet")
"""Model types that say what stands at a place which is hidden from them, not what comes next."""


class TransformersAdapter:
    """Adapter of a decoder-only `PreTrainedModel` with a language-model head."""

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model = model
        self.call: Any = model
        """What runs a pass: the model, or something that stands for it."""
        self.tokenizer = tokenizer
        self.defaults: Mapping[str, Any] = defaults_of(model)
        facts = facts_of(type(model))
        if text_config(model).model_type in UNCACHED:
            facts = attrs.evolve(facts, cache=None)
        self.facts = facts
        known = _known_of(model, facts.cache is not None)
        self.spec, self.default_cache, self._dict, self._fits, self._recurrent = known
        self.model_kwargs = facts.others
        self._room = table_of(model.get_decoder() if hasattr(model, "get_decoder") else model)
        self._mixed = len(set(self.spec.layer_windows or ())) > 1
        self._ready = takes_ready(model, self.spec.layer_windows)

    def offers(self) -> frozenset[str]:
        """hidden and attentions always; early_logits where states fit the head; the rest where forward takes it."""
        facts = self.facts
        able = {"cache": facts.cache, "mask": facts.mask, "positions": facts.positions, "last": facts.keep}
        able["early_logits"] = self._fits
        return frozenset({name for name, yes in able.items() if yes} | {"hidden", "attentions"})

    def arrange(
        self, inputs: Any, mask: Any, model_kwargs: dict[str, Any], /, *, settings: Settings, tokenizer: Any, past: int
    ) -> tuple[Prompt, dict[str, Any]]:
        """The rows to continue. With ``inputs_embeds`` [B, E, H] and no inputs they are empty: new tokens come back."""
        more: Any = {"attention_mask": mask, "tokenizer": tokenizer, "past": past}
        if model_kwargs.get("inputs_embeds") is None:
            given = {name: value for name, value in model_kwargs.items() if name != "inputs_embeds"}
            if inputs is None and (named := [name for name in given if name.startswith(PROMPT_ONLY)]):
                raise InputError(
                    f"{named[0]} goes with places in a prompt: pass inputs with them, as its processor does"
                )
            prompt = prepare(inputs, self, settings, **more)
        else:
            prompt, given = embedded(self, inputs, model_kwargs["inputs_embeds"], settings, more), model_kwargs
        if prompt.mask is not None or prompt.past_mask is not None:
            refuse_padding(self, self._name, prompt)
        fit(prompt, self._room, settings, self._name)
        return prompt, given

    def make_cache(self, name: str, /, **options: Any) -> Any:
        """The cache that the model itself would make ("model"), or None where it takes none."""
        if options:
            words = ", ".join(options)
            raise PipelineError(f"the model's own cache takes no options ({words}): set cache_implementation")
        return make_cache(self.model, self.facts.cache is not None)

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

        Raises `PipelineError` for padded rows on a model without attention_mask, and for attention weights on a
        fused attention that computes none.
        """
        facts = self.facts
        call: dict[str, Any] = {"input_ids": tokens}
        if facts.use_cache:
            call["use_cache"] = cache is not None
        if cache is not None and type(cache) is not SelfMade:
            if facts.cache is None:
                raise PipelineError(f"{self._name} takes no cache: leave cache and cache_implementation out")
            call[facts.cache] = in_shell(cache) if self._mixed else cache
        if facts.positions:
            # Rows that have ended are fed on beside longer ones, where a table has no more positions for them.
            call["position_ids"] = positions if self._room is None else positions.clamp_max(self._room - 1)
        if mask is not None:
            if not facts.mask:
                raise PipelineError(f"{self._name} takes no attention_mask: pass prompts of one length, or one by one")
            if self._recurrent:
                mask = mask[:, -tokens.shape[1] :]
            step = self._ready and tokens.shape[1] == 1 and facts.cache in call and not model_kwargs
            ready = ready_mask(self.model, mask, cache, self.spec.dtype) if step else None
            call["attention_mask"] = mask.long() if ready is None else ready
        if facts.keep is not None:
            call[facts.keep] = last
        if hidden:
            call["output_hidden_states"] = True
        if model_kwargs:
            first = cache is None or not cache.get_seq_length()
            self._pass_on(call, model_kwargs, first)
            if (embeds := call.pop("inputs_embeds", None)) is not None and first:
                call["inputs_embeds"] = continued(self.model, embeds, call.pop("input_ids"), positions.shape[1])
        if self._dict:
            call["return_dict"] = True
        out = self.call(**call)
        logits = out.logits
        if logits.shape[1] > last:
            logits = logits[:, -last:]
        if not hidden and not model_kwargs:
            return Forward(logits, {}, _cache_of(out) if type(cache) is SelfMade else cache, {})
        taps = {layer: out.hidden_states[layer] for layer in hidden}
        extra = {"attentions": out.attentions} if model_kwargs.get("output_attentions") else {}
        return Forward(logits, taps, _cache_of(out) if type(cache) is SelfMade else cache, extra)

    def early_logits(self, hidden: Tensor, /) -> Tensor:
        """Logits [..., V] that the head gives for hidden states [..., H] of any layer, without a norm before it.

        Models that scale or squeeze their logits have that done to these, too.
        """
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        said = text_config(self.model)
        logits = logits * (getattr(said, "logit_scale", None) or 1) / (getattr(said, "logits_scaling", None) or 1)
        cap = getattr(said, "final_logit_softcapping", None)
        return torch.tanh(logits / cap) * cap if cap else logits

    @property
    def tied_embeddings(self) -> bool:
        """Whether the head is the embedding."""
        ends = self.model.get_input_embeddings(), self.model.get_output_embeddings()
        first, last = (getattr(end, "weight", None) for end in ends)
        return first is not None and first is last

    @property
    def _name(self) -> str:
        return type(self.model).__name__

    def _pass_on(self, call: dict[str, Any], given: Mapping[str, Any], first: bool) -> None:
        """Add the caller's own arguments to a call; `first`: of the whole sequence, nothing of which is cached."""
        rows, new = call["input_ids"].shape
        for name, value in given.items():
            if not first and name.startswith(PROMPT_ONLY):
                continue
            if name == "output_attentions":
                check_attentions(self.model, value)
            if name in PER_TOKEN and isinstance(value, Tensor):
                value = _fit(value, rows, new, name == "token_type_ids")
            call[name] = value

    def __repr__(self) -> str:
        return f"TransformersAdapter({self._name})"


def check_attentions(model: Any, wanted: Any) -> None:
    """Raise `PipelineError` where attention weights are wanted of an implementation that computes none."""
    used = getattr(model.config, "_attn_implementation", "eager")
    if wanted and used not in (None, "eager"):
        raise PipelineError(
            f"output_attentions: {used} attention computes no weights; load {type(model).__name__} with "
            f"attn_implementation='eager', or call model.set_attn_implementation('eager')"
        )


def _fit(value: Tensor, rows: int, new: int, repeat: bool) -> Tensor:
    """Stretch [B, T] to the tokens fed: the whole sequence, or the newest of it."""
    value = value.repeat_interleave(rows // value.shape[0], 0)
    if new == value.shape[1]:
        return value
    tail = value[:, -1:] if repeat else torch.zeros_like(value[:, -1:])
    if new > value.shape[1]:
        return torch.cat([value, tail.expand(-1, new - value.shape[1])], 1)
    return tail.expand(-1, new)


def _cache_of(out: Any) -> Any:
    found = getattr(out, "cache", None)
    return found if found is not None else getattr(out, "past_key_values", None)


def _check(model: Any) -> None:
    name = type(model).__name__
    if text_config(model).model_type in MASKED:
        raise PipelineError(
            f"{name} says what stands at a masked place, not what comes next: wrap it in a torch.nn.Module whose "
            f"forward(input_ids) adds such a place and returns the logits of it alone, [B, 1, V]"
        )
    if model.get_output_embeddings() is None and not model.can_generate():
        raise PipelineError(
            f"{name} has no language-model head, so it gives no logits; load it with AutoModelForCausalLM"
        )
    if (not model.can_generate() and facts_of(type(model)).cache is None) or _looks_ahead(model):
        raise PipelineError(
            f"{name} is no causal language model: its tokens see those after them, or its logits are not those of the "
            f"next token. Load a decoder with AutoModelForCausalLM; for BERT and its kin, config.is_decoder=True"
        )


def _looks_ahead(model: Any) -> bool:
    """Whether this is an encoder with a language-model head, attending both ways unless configured as a decoder.

    Other configurations have the switch, too, and mean nothing by it: only families with masked models count.
    """
    if getattr(model.config, "is_decoder", True):
        return False
    homes = [sys.modules.get(cls.__module__) for cls in type(model).__mro__ if "transformers" in cls.__module__]
    return any(name.endswith("ForMaskedLM") for home in homes for name in vars(home or object))


def defaults_of(model: Any) -> dict[str, Any]:
    """What the model's generation_config sets; the objects themselves, which nobody writes to."""
    config = getattr(model, "generation_config", None)
    if config is None:
        given = vars(model.config)
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        return {name: given[name] for name in names if given.get(name) is not None}
    found = {k: v for k, v in vars(config).items() if v is not None and k[0] != "_" and k != "transformers_version"}
    if found.get("cache_implementation") == "hybrid":  # an older spelling of "as the model likes"
        del found["cache_implementation"]
    return found


def _alike(config: Any, name: str, usual: Any) -> Any:
    """A number that all layers share, `usual` where nothing is said of it; None where each layer has its own."""
    found = fact(config, name, unclear=0)
    return None if found == 0 else found or usual


Known = tuple[ModelSpec, str, bool, bool, bool]

_models: weakref.WeakKeyDictionary[Any, tuple[Any, Known]] = weakref.WeakKeyDictionary()


def _known_of(model: Any, takes_cache: bool) -> Known:
    """Facts about a model, its default cache, whether it must be asked for a dict of outputs, whether hidden states of
    any layer fit its head, and whether it is recurrent.

    Checked and looked up once per model and kept while its input and output layers and what its configuration says of
    attention are the same: reading a configuration costs more than the rest of a call's preparation.
    Raises `PipelineError` for a model that is no decoder with a language-model head.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    place = getattr(embedding, "weight", None)
    if place is None:
        place = next(model.parameters())
    width = getattr(head, "weight", None)
    said = vars(model.config)
    kind = said.get("is_decoder"), said.get("is_encoder_decoder"), said.get("return_dict")
    attention = id(model.config), said.get("sliding_window"), id(said.get("layer_types")), *kind
    state = (place.device, place.dtype, place.shape, None if width is None else width.shape[0], attention)
    known = _models.get(model)
    if known is not None and known[0] == state:
        return known[1]
    _check(model)
    config = text_config(model)
    heads, size = fact(config, "num_attention_heads"), fact(config, "hidden_size")
    share = size // heads if isinstance(size, int) and isinstance(heads, int) and heads else None
    spec = ModelSpec(
        vocab_size=width.shape[0] if width is not None else config.vocab_size,
        device=model.device,
        dtype=model.dtype,
        num_layers=fact(config, "num_hidden_layers"),
        num_heads=heads if isinstance(heads, int) else None,
        num_kv_heads=_alike(config, "num_key_value_heads", heads),
        head_dim=_alike(config, "head_dim", share),
        max_positions=fact(config, "max_position_embeddings"),
        num_embeddings=place.shape[0] if place.dim() == 2 else None,
        layer_windows=windows_of(model),
    )
    fits = width is not None and width.shape[-1] == size
    asked = not getattr(model.config, "return_dict", True)
    found = spec, default_cache(model, takes_cache, spec.layer_windows), asked, fits, recurrent(model)
    _models[model] = (state, found)
    return found
