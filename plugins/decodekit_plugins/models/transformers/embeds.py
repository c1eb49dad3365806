"""Prompts that come as embeddings instead of tokens."""

from __future__ import annotations

from typing import Any

import torch
from decodekit.errors import InputError
from decodekit.prompt import Prompt, places, prepare
from torch import Tensor


def embedded(adapter: Any, inputs: Any, embeds: Any, settings: Any, more: dict[str, Any]) -> Prompt:
    """The prompt of `embeds` [B, E, H]: rows without tokens, or the tokens passed beside them, which are not fed.

    Raises `InputError` where shapes do not agree, where a cache was passed, and for padding on the right.
    """
    if not isinstance(embeds, Tensor) or embeds.dim() != 3 or not embeds.is_floating_point() or not embeds.numel():
        shape = f"{embeds.dtype} {tuple(embeds.shape)}" if isinstance(embeds, Tensor) else type(embeds).__name__
        raise InputError(f"inputs_embeds must be a floating tensor [B, E, H], got {shape}")
    if settings.get("prefill_chunk_size"):
        raise InputError("prefill_chunk_size: embeddings are read at once; leave it out, or pass tokens")
    if more["past"]:
        raise InputError("inputs_embeds cannot follow a cache that holds tokens: pass the new tokens as inputs")
    (rows, width), mask = embeds.shape[:2], more["attention_mask"]
    real = torch.ones(rows, width, dtype=torch.bool) if mask is None else torch.as_tensor(mask).bool()
    if real.shape != (rows, width):
        raise InputError(f"attention_mask must be [B, E] = {(rows, width)} as inputs_embeds, got {tuple(real.shape)}")
    if not bool(real[:, -1].all()):
        raise InputError("inputs_embeds are padded on the right: generation goes on behind them, so pad on the left")
    if inputs is not None:
        prompt = prepare(inputs, adapter, settings, **more)
        if prompt.tokens.shape != (rows, width):
            words = f"inputs are {tuple(prompt.tokens.shape)}, inputs_embeds {(rows, width)}"
            raise InputError(f"{words}: tokens beside embeddings must be the same, or leave them out")
        return prompt
    device = adapter.spec.device
    real = real.to(device)
    tokens = torch.empty(rows, 0, dtype=torch.long, device=device)
    return Prompt(tokens, None, places(real), width, True, None if bool(real.all()) else real)


def continued(model: Any, embeds: Tensor, tokens: Tensor, total: int) -> Tensor:
    """The first `total` embeddings: those passed, and behind them those of the newest tokens."""
    new = total - embeds.shape[1]
    if not new:
        return embeds
    return torch.cat([embeds, model.get_input_embeddings()(tokens[:, -new:]).to(embeds.dtype)], 1)
