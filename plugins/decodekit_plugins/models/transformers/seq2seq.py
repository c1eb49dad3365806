"""An encoder-decoder model of transformers as the loop sees it: the encoder runs once, the loop drives the decoder."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from decodekit.context import BindContext
from decodekit.errors import DecodekitError, InputError, PipelineError, named
from decodekit.prompt import Prompt, places, prepare, read
from decodekit.protocols import Forward, ModelSpec
from decodekit.settings import Settings
from decodekit.text import as_tokenizer
from torch import Tensor

from .adapter import check_attentions, defaults_of
from .caches import default_cache, make_cache
from .embeds import continued, embedded
from .facts import fact, facts_of, text_config, windows_of
from .pairs import pair
from .room import fit, readable, table_of
from .sources import floating, is_empty, real_of, refuse_both, refuse_nothing, refuse_others, shapes, state_of

SOURCES = ("input_ids", "inputs_embeds", "input_features", "input_values", "pixel_values")
"""Arguments that an encoder reads."""
UNSTARTED = ("donut", "whisper")
"""Model types whose decoder prompts begin as their caller says."""
ENCODERS_ONLY = ("cross_attn", "use_cache", "cache", "past_key_values")
RELATIVE = ("relative_attention_num_buckets", "rope_parameters", "rope_theta")
"""What configurations of decoders have whose positions are told by the attention mask or the positions alone."""


class EncoderDecoderAdapter:
    """Adapter of a `PreTrainedModel` with an encoder: text, speech or pictures in, tokens out."""

    default_cache: str

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.call: Any = model
        """What runs a pass of the decoder: the model, or something that stands for it."""
        self.defaults: Mapping[str, Any] = defaults_of(model)
        self._facts = facts_of(type(model))
        self._takes = frozenset(inspect.signature(type(model).forward).parameters)
        self._encoder = model.get_encoder()
        named = inspect.signature(self._encoder.forward).parameters
        self._encoder_takes = frozenset(named)
        self._encoder_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values())
        own = getattr(model, "main_input_name", "input_ids")
        main = getattr(self._encoder, "main_input_name", own)
        self._main: str = main if main != own else own
        self._positions = "decoder_position_ids" if "decoder_position_ids" in self._takes else None
        self.spec = _spec(model)
        self.default_cache = default_cache(model, True, self.spec.layer_windows)
        inner = frozenset(inspect.signature(model.get_decoder().forward).parameters)
        self.model_kwargs = (
            (self._takes | self._encoder_takes | {f"decoder_{name}" for name in inner} | {self._main})
            - {"self", "labels", "return_dict", "use_cache", "cache", "past_key_values", "kwargs", "args"}
            - {"attention_mask", "output_hidden_states", "output_attentions", "input_ids"}
        )

    def offers(self) -> frozenset[str]:
        """cache, mask, hidden and attentions; positions where the model's forward pass takes the decoder's."""
        return frozenset({"cache", "mask", "hidden", "attentions"} | ({"positions"} if self._positions else set()))

    def make_cache(self, name: str, /, **options: Any) -> Any:
        """The cache that the model itself would make for its decoder ("model")."""
        if options:
            words = ", ".join(options)
            raise PipelineError(f"the model's own cache takes no options ({words}): set cache_implementation")
        return make_cache(self.model, True)

    def adopt(self, cache: Any, ctx: BindContext, /) -> Any:
        """The cache with room for the encoder's keys and values, unless it has that already."""
        return cache if hasattr(cache, "cross_attention_cache") else pair()(cache, ctx.slots)

    # -- inputs ------------------------------------------------------------------------------------

    def arrange(
        self, inputs: Any, mask: Any, model_kwargs: dict[str, Any], /, *, settings: Settings, tokenizer: Any, past: int
    ) -> tuple[Prompt, dict[str, Any]]:
        """The decoder's rows to continue, and what the encoder gets.

        `inputs` are the encoder's, whose other arguments keep their names; the decoder's begin with ``decoder_``.
        Without any, the encoder reads one bos token, in one row. `encoder_outputs` stand for what it reads; tokens
        beside them are only looked at by processors. Raises `InputError` for what does not fit together.
        """
        given, source = dict(model_kwargs), None
        decoder, decoder_mask = given.pop("decoder_input_ids", None), given.pop("decoder_attention_mask", None)
        encoded = given.get("encoder_outputs")
        others = [name for name in dict.fromkeys((self._main, *SOURCES)) if given.get(name) is not None]
        state = None if encoded is None else state_of(encoded, self._encoder, hasattr(self.model.config, "encoder"))
        refuse_both(others, inputs, encoded, self._main == "input_ids")
        if inputs is not None and others:
            if others == ["inputs_embeds"] or decoder is not None:
                raise InputError(f"inputs and {others[0]} are both the encoder's input: pass only one of them")
            decoder, inputs = inputs, None  # the reference takes token ids beside other inputs for the decoder's
        if self._main == "input_ids" and not others and (encoded is None or inputs is not None):
            known, inputs = self._vocabulary(), _tokenized(inputs, tokenizer)
            refuse_nothing(inputs, settings.get("bos_token_id"))
            ids, real = read(inputs, known, settings, attention_mask=mask, tokenizer=tokenizer)
            ragged = mask is None and not isinstance(inputs, Tensor)
            mask = None if real is None else real_of(real, *ids.shape)
            if mask is not None and ragged:
                # Encoders count positions from the left: padding goes to the right.
                order = (mask == 0).long().argsort(dim=-1, stable=True)
                ids, mask = ids.gather(1, order), mask.gather(1, order)
            if state is not None:
                refuse_others(ids, state)
            given["input_ids"] = ids = ids.to(self.spec.device)
            mask = None if mask is None else mask.to(self.spec.device)
            source = ids if mask is None else ids.masked_fill(mask == 0, -1)
        elif state is None:
            name = others[0] if others else self._main
            given[name] = floating(name, given.get(name, inputs), self._width())
        heard = state if state is not None else next(given[name] for name in SOURCES if given.get(name) is not None)
        rows = len(heard)
        if mask is not None:
            width = heard.shape[1] if self._covers(given) else None
            given["attention_mask"] = real_of(mask, rows, width).to(self.spec.device)
        if self._main == "input_ids":
            readable(heard.shape[1], table_of(self._encoder), f"the encoder of {type(self.model).__name__}")
        if is_empty(decoder):
            if len(decoder) != rows:
                raise InputError(f"decoder_input_ids have {len(decoder)} rows, the encoder's input has {rows}")
            decoder = decoder_mask = None
        if (embeds := given.get("decoder_inputs_embeds")) is not None:
            more: Any = {"attention_mask": decoder_mask, "tokenizer": None, "past": past}
            prompt = embedded(self, decoder, embeds, settings, more)
        else:
            prompt = self._start(decoder, decoder_mask, rows, settings, past, given)
        padded = prompt.mask is not None or prompt.past_mask is not None
        if padded and self._positions is None and not _relative(self.model):
            raise PipelineError(
                f"{type(self.model).__name__} counts padding as positions of the decoder: "
                f"pass decoder_input_ids of one length"
            )
        fit(prompt, table_of(self.model.get_decoder()), settings, f"the decoder of {type(self.model).__name__}")
        return attrs.evolve(prompt, source=source), given

    def _vocabulary(self) -> int:
        weight = self._embedding()
        return self.spec.vocab_size if weight is None else int(weight.shape[0])

    def _width(self) -> int | None:
        weight = self._embedding()
        return None if weight is None or weight.dim() != 2 else int(weight.shape[1])

    def _embedding(self) -> Any:
        """Weight of the encoder's token embedding [V, H]; None where it reads something else."""
        if self._main != "input_ids":
            return None
        return getattr(getattr(self._encoder, "get_input_embeddings", lambda: None)(), "weight", None)

    def _covers(self, given: Mapping[str, Any]) -> bool:
        """Whether a mask has a place for each of the second dimension of what is read: tokens, samples, frames.

        What an encoder made of waves and frames is shorter than the mask that goes with it.
        """
        if given.get("encoder_outputs") is not None:
            return self._main == "input_ids"
        return self._main in ("input_ids", "input_values", "input_features")

    def _start(
        self, decoder: Any, mask: Any, rows: int, settings: Settings, past: int, given: dict[str, Any]
    ) -> Prompt:
        """The decoder's prompt, which begins with the start token; a prompt that lacks it gets it.

        given: what the encoder gets, for models whose prompt depends on what they read; its output may be put there.
        """
        more: Any = {"tokenizer": None, "past": past}
        own = None if decoder is None else prepare(decoder, self, settings, attention_mask=mask, **more)
        if own is not None and len(own.tokens) != rows:
            raise InputError(f"decoder_input_ids have {len(own.tokens)} rows, the encoder's input has {rows}")
        if own is not None and past:
            return own if mask is not None else _started(own, self._starts(rows, settings, False))
        if own is not None and self.model.config.model_type in UNSTARTED:
            return own
        starts = self._starts(rows, settings)
        if own is None:
            return prepare([[token] for token in starts], self, settings, attention_mask=None, **more)
        kept = [row.tolist() for row in own.tokens]
        if own.mask is not None:
            kept = [row[real].tolist() for row, real in zip(own.tokens, own.mask, strict=True)]
        if any(row[0] == token for row, token in zip(kept, starts, strict=True)):
            return own
        kept = [[token, *row] for row, token in zip(kept, starts, strict=True)]
        return prepare(kept, self, settings, attention_mask=None, **more)

    @staticmethod
    def _starts(rows: int, settings: Settings, needed: bool = True) -> list[Any]:
        """The start token of each row. Raises `InputError` where their number is wrong, or a `needed` one unknown."""
        start = settings.get("decoder_start_token_id")
        start = settings.get("bos_token_id") if start is None else start
        starts = list(start) if isinstance(start, tuple) else [start] * rows
        if len(starts) != rows:
            raise InputError(f"decoder_start_token_id has {len(starts)} values for {rows} rows; give one for each")
        if needed and start is None:
            raise InputError("set decoder_start_token_id (or bos_token_id): the decoder's text begins with it")
        return starts

    def encode(self, model_kwargs: dict[str, Any], /) -> tuple[dict[str, Any], dict[str, Any]]:
        """Run the encoder, unless its outputs were passed."""
        given = dict(model_kwargs)
        hidden, attentions = given.pop("output_hidden_states", False), given.get("output_attentions", False)
        out = self._encoded(given, attentions, hidden)
        given.pop("encoder_outputs", None)
        kept = {
            name: value
            for name, value in given.items()
            if name.startswith("decoder_") or (name in self._takes and name not in (self._main, "inputs_embeds"))
        }
        records = {}
        if attentions:
            kept["output_attentions"] = True
            records["encoder_attentions"] = out.get("attentions")
        if hidden:
            records["encoder_hidden_states"] = out.get("hidden_states")
        only = type(out)(last_hidden_state=out.last_hidden_state)
        return {**kept, "encoder_outputs": only}, records

    def _encoded(self, given: Mapping[str, Any], attentions: bool, hidden: bool) -> Any:
        """What the encoder makes of `given`, or made of it before."""
        check_attentions(self.model, attentions)
        if (out := given.get("encoder_outputs")) is None:
            call = {
                name: value
                for name, value in given.items()
                if not name.startswith(("decoder_", *ENCODERS_ONLY))
                and name != "encoder_outputs"
                and (self._encoder_open or name in self._encoder_takes)
            }
            wants = {"output_attentions": attentions, "output_hidden_states": hidden}
            call.update({name: True for name, wanted in wants.items() if wanted})
            try:
                return self._encoder(**call, return_dict=True)
            except DecodekitError:
                raise
            except Exception as error:  # shapes that no configuration tells, weights on another device
                words = f"the encoder of {type(self.model).__name__}, given {shapes(call)}"
                raise named(error, words, InputError) from error
        if hasattr(out, "last_hidden_state"):
            return out
        from transformers.modeling_outputs import BaseModelOutput

        return BaseModelOutput(*(out if isinstance(out, (tuple, list)) else (out,)))

    # -- the decoder -------------------------------------------------------------------------------

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
        """Run the decoder on int64 `tokens` [B, Q]; see `decodekit.protocols.ModelAdapter`."""
        call: dict[str, Any] = {"decoder_input_ids": tokens, "use_cache": cache is not None, **model_kwargs}
        embeds = call.pop("decoder_inputs_embeds", None)
        if embeds is not None and (cache is None or not cache.get_seq_length()):
            del call["decoder_input_ids"]
            call["decoder_inputs_embeds"] = continued(self.model.get_decoder(), embeds, tokens, positions.shape[1])
        if cache is not None:
            call[self._facts.cache or "cache"] = cache
        if mask is not None:
            call["decoder_attention_mask"] = mask.long()
        if self._positions is not None:
            call[self._positions] = positions
        if hidden:
            call["output_hidden_states"] = True
        out = self.call(**call, return_dict=True)
        taps = {layer: out.decoder_hidden_states[layer] for layer in hidden}
        extra = {}
        if model_kwargs.get("output_attentions"):
            extra = {"attentions": out.decoder_attentions, "cross_attentions": out.cross_attentions}
        return Forward(out.logits[:, -last:], taps, cache, extra)

    def __repr__(self) -> str:
        return f"EncoderDecoderAdapter({type(self.model).__name__})"


def _spec(model: Any) -> ModelSpec:
    config = text_config(model)
    whole, counts = model.config, ("num_decoder_layers", "decoder_layers")
    layers = [fact(whole, name) for name in counts] + [fact(config, "num_hidden_layers")]
    head, embedding = model.get_output_embeddings(), _embedding(model)
    width = getattr(head, "weight", None)
    return ModelSpec(
        vocab_size=width.shape[0] if width is not None else config.vocab_size,
        device=model.device,
        dtype=model.dtype,
        num_layers=next((number for number in layers if number is not None), None),
        num_heads=fact(config, "decoder_attention_heads") or fact(config, "num_attention_heads"),
        max_positions=fact(config, "max_target_positions") or fact(config, "max_position_embeddings"),
        num_embeddings=None if embedding is None else embedding.shape[0],
        is_encoder_decoder=True,
        layer_windows=windows_of(model),
    )


def _embedding(model: Any) -> Any:
    """The weight of the decoder's token embedding, where there is one to be found."""
    try:
        return getattr(model.get_decoder().get_input_embeddings(), "weight", None)
    except (AttributeError, NotImplementedError):
        return None


def _relative(model: Any) -> bool:
    return any(fact(text_config(model), name) is not None for name in RELATIVE)


def _started(prompt: Prompt, starts: Sequence[Any]) -> Prompt:
    """The prompt with a start token in front of each row made real, where it looked like padding: some models use the
    same token for both."""
    if prompt.mask is None or prompt.fresh:
        return prompt
    mask = prompt.mask.clone()
    for row, (place, token) in enumerate(zip(mask.long().argmax(-1).tolist(), starts, strict=True)):
        if place and int(prompt.tokens[row, place - 1]) == token:
            mask[row, place - 1] = True
    return attrs.evolve(prompt, mask=None if bool(mask.all()) else mask, positions=places(mask))


def _tokenized(inputs: Any, tokenizer: Any) -> Any:
    """Texts as their tokens, those that end a text included: encoders are trained on whole ones."""
    texts = [inputs] if isinstance(inputs, str) else inputs
    if tokenizer is None or not isinstance(texts, (list, tuple)) or not any(isinstance(text, str) for text in texts):
        return inputs
    encode = as_tokenizer(tokenizer).encode_whole
    return [encode(text) if isinstance(text, str) else text for text in texts]
