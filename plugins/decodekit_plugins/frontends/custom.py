"""Strategies of decodekit for whoever takes a ``custom_generate`` function."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import attrs
import torch
from decodekit.api import generate
from decodekit.converter import plain
from decodekit.keys import keys
from decodekit.models import adapter_for
from decodekit.prompt import as_list
from torch import Tensor

CACHES = ("cache", "past_key_values")
LEFT_OUT = ("position_ids", "use_cache", "logits_to_keep", "attention_mask", "tokenizer", "synced_gpus", *CACHES)
"""What the loop sees to itself."""
LISTS = ("logits_processor", "stopping_criteria")
"""Arguments of which there may be some on both sides."""
MADE = ("cache_implementation", "cache_config", "max_length", "max_new_tokens", "eos_token_id")
"""Keys whose parts are made already, or read apart."""


def as_custom_generate(strategy: Any, **keys: Any) -> CustomGenerate:
    """A decoding strategy as a function for ``model.generate(..., custom_generate=...)`` of transformers.

    strategy: a plugin's name, class or object. keys: of decodekit, and what else `decodekit.generate` takes. A streamer
    belongs here: transformers keeps it from such functions.
    """
    return CustomGenerate(strategy, keys)


@attrs.frozen
class CustomGenerate:
    """What `as_custom_generate` makes."""

    strategy: Any
    keys: Mapping[str, Any]

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Run the strategy on what transformers prepared. Returns what `decodekit.generate` returns.

        The processors and criteria of transformers act as they are, before those that `keys` ask for; prompts that it
        repeated for beams or several sequences are taken once, and repeated as the strategy likes.
        """
        said = vars(generation_config) if generation_config is not None else {}
        times = max(said.get("num_beams") or 1, said.get("num_return_sequences") or 1)
        width, rows = input_ids.shape[1], input_ids.shape[0]

        def once(value: Any) -> Any:
            if isinstance(value, Tensor):
                return value[::times] if value.dim() > 0 and value.shape[0] == rows else value
            if isinstance(value, (tuple, list)):
                return type(value)(map(once, value))
            return type(value)(**{name: once(item) for name, item in value.items()}) if _is_output(value) else value

        # Whatever counts of the model's own configuration is in the one that was passed.
        adapter = copy.copy(adapter_for(model))
        adapter.defaults = {}
        mask, inputs = model_kwargs.get("attention_mask"), once(input_ids)
        if adapter.spec.is_encoder_decoder:  # the mask is the encoder's, which has run
            model_kwargs, inputs = {**model_kwargs, "decoder_input_ids": input_ids}, None
        elif mask is None:  # transformers leaves out a mask that hides nothing
            mask = torch.ones(rows, said.get("_mask_length") or width, dtype=torch.long, device=input_ids.device)
        if not width:
            inputs = None  # embeddings stand for the prompt
        call = {name: once(value) for name, value in model_kwargs.items() if name not in LEFT_OUT and value is not None}
        call |= {"top_k": None, "eos_token_id": plain(said.get("eos_token_id")), **_of(said)}
        if said.get("max_length") is not None:
            call["max_new_tokens"] = said["max_length"] - width
        call["cache"] = next((model_kwargs[name] for name in CACHES if model_kwargs.get(name) is not None), None)
        call["logits_processor"] = [*(logits_processor or ()), *as_list(self.keys.get("logits_processor"))]
        stops = [item for item in stopping_criteria or () if not _known(item, said)]
        call["stopping_criteria"] = [*stops, *as_list(self.keys.get("stopping_criteria"))]
        call = {**call, **{name: value for name, value in self.keys.items() if name not in LISTS}}
        call |= {"attention_mask": once(mask), "strategy": self.strategy}
        return generate(adapter, inputs, **call)


def _is_output(value: Any) -> bool:
    """Whether this is an output object of a model, such as the encoder's."""
    return isinstance(value, Mapping) and hasattr(value, "to_tuple")


def _of(said: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration says beyond its processors and criteria, which are objects by now."""
    found = {}
    for name, value in said.items():
        key = keys.find(name) if value is not None and name not in MADE else None
        if key is None or key.kind in ("processors", "criteria"):
            continue
        default = attrs.fields_dict(key.load())[key.field].default
        if type(value) is not type(default) or value != default:
            found[name] = value
    return found


def _known(criterion: Any, said: Mapping[str, Any]) -> bool:
    """Whether a criterion only repeats what the keys say: decodekit's own know more about why and when a row ends."""
    name = type(criterion).__name__
    if name == "MaxLengthCriteria":
        return getattr(criterion, "max_length", None) == said.get("max_length")
    return name == "EosTokenCriteria" and sorted(as_list(plain(criterion.eos_token_id))) == sorted(
        as_list(plain(said.get("eos_token_id")))
    )
