"""Masks in the form that attention adds, where a model would build the same from ours at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .facts import text_config

PLAIN = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose forward pass only hands a mask on to attention, which takes a ready one as it is."""
ADDED = ("sdpa", "eager")
"""Attention implementations that add the mask to the scores."""


def takes_ready(model: Any, windows: tuple[int | None, ...] | None) -> bool:
    """Whether a step of this model may get a mask from `ready_mask`: one of transformers' own classes, not a subclass
    that may do something else with it, all of whose layers see everything."""
    own = type(model).__module__.startswith("transformers.models.")
    return own and text_config(model).model_type in PLAIN and windows is not None and not any(windows)


def ready_mask(model: Any, mask: Tensor, cache: Any, dtype: torch.dtype) -> Tensor | None:
    """What one new token of each row adds to its scores, `dtype` [B, 1, 1, K], for bool `mask` [B, K] over all slots.

    A token always sees itself, so that no row is left with nothing. None where the model must build its own: for a
    cache that holds something else than all tokens in order, other kinds of attention, and under autocast.
    """
    if getattr(cache, "is_compileable", False) or cache.get_mask_sizes(1, 0) != (mask.shape[1], 0):
        return None
    if model.config._attn_implementation not in ADDED or torch.is_autocast_enabled(mask.device.type):
        return None
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -torch.inf)
    added[:, -1] = 0
    return added[:, None, None]
