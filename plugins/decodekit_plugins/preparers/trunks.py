"""Llama-like models of transformers between tokens and head: a few tokens go through all layers in one call."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from decodekit_plugins.twins.shadow import like

from .blocks import ALIKE, LayerForward, is_class
from .stack import Stack, heard, stack_of

TAKEN = frozenset({"input_ids", "inputs_embeds", "attention_mask", "position_ids", "use_cache"})
"""Arguments that are taken, beside the cache, which is called `cache` or `past_key_values`."""
CACHES = ("cache", "past_key_values")


class DecoderForward:
    """The forward pass of a decoder without its head, [B, T] to [B, T, K]; its class stands behind it.

    A step of a plain cache, with a mask that is ready or none, builds no masks and asks no configuration of each layer;
    all else is as the class has it.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the model behind it."""
        found = None if args or torch.compiler.is_compiling() else self._run(kwargs)
        return super().forward(*args, **kwargs) if found is None else found  # type: ignore[misc]

    def _run(self, given: Mapping[str, Any]) -> Any:
        """What the model behind it would give, or None where that must run itself."""
        own: Any = self
        stack: Stack | None = own.__dict__.get("stack", ...)
        if stack is ...:
            stack = own.__dict__["stack"] = _stack(own)
        cache = next((given[name] for name in CACHES if given.get(name) is not None), None)
        places, mask, config = given.get("position_ids"), given.get("attention_mask"), own.config
        if (
            stack is None
            or getattr(cache, "claim", None) is None
            or not given.get("use_cache")
            or not isinstance(places, Tensor)
            or any(value for name, value in given.items() if name not in TAKEN and name not in CACHES)
            or config._attn_implementation != "sdpa"
            or _windowed(config)
            or getattr(config, "output_hidden_states", False)
            or getattr(config, "output_attentions", False)
            or any(map(heard, own.layers))
        ):
            return None
        x, tokens = given.get("inputs_embeds"), given.get("input_ids")
        if (x is None) == (tokens is None) or (mask is None and places.shape[-1] > 1) or not _ready(mask):
            return None
        x = own.embed_tokens(tokens) if x is None else x
        cos, sin = own.rotary_emb(x, places)
        layers = own.layers
        behind, done = stack(x, cos, sin, mask, cache, len(layers))
        if not done:
            return None
        more = {"attention_mask": mask, "position_embeddings": (cos, sin), "position_ids": places, "use_cache": True}
        for layer in layers[done:] if done < len(layers) else ():
            behind = layer(behind, **{_output(type(own))[1]: cache}, **more)
        output, name = _output(type(own))
        return output(last_hidden_state=own.norm(behind), **{name: cache})


def decoder(module: nn.Module) -> nn.Module | None:
    """A decoder like `module` that runs its layers in one call where it can; None for other modules."""
    cls = type(module)
    if cls.__module__ not in ALIKE or not is_class(cls, cls.__module__, f"{ALIKE[cls.__module__]}Model"):
        return None
    if "forward" in module.__dict__ or module.training:
        return None
    return like(module, _class(cls))


def _windowed(config: Any) -> bool:
    """Whether any layer may see less than all that is before a token."""
    kinds = getattr(config, "layer_types", None) or ()
    return getattr(config, "sliding_window", None) is not None or any(kind != "full_attention" for kind in kinds)


def _ready(mask: Any) -> bool:
    return mask is None or (isinstance(mask, Tensor) and mask.dim() == 4)


@functools.cache
def _class(cls: type) -> type:
    # Under the same name: by that transformers looks up which outputs a model can record.
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (DecoderForward, cls), named)


@functools.cache
def _output(cls: type) -> tuple[type, str]:
    """What a decoder of this class gives, and what that calls the cache."""
    output = sys.modules[cls.__module__].BaseModelOutputWithPast
    names = {field.name for field in dataclasses.fields(output)}
    return output, next(name for name in CACHES if name in names)


def _stack(decoder: Any) -> Stack | None:
    """None where a layer is no fused one, or does not attend as the model's configuration says of all."""
    layers = decoder.layers
    if len(layers) != decoder.config.num_hidden_layers or not all(isinstance(layer, LayerForward) for layer in layers):
        return None
    own = [layer.self_attn for layer in layers]
    alike = all(attention.config is decoder.config and attention.is_causal for attention in own)
    return stack_of(layers, [attention.layer_idx for attention in own]) if alike else None
