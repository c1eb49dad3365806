"""A static cache as compiled code sees it: tensors of fixed shapes, and no number in Python that changes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class FixedCache:
    """All slots of every layer, the unwritten ones included, for one pass of compiled code.

    Length and slots to write are tensors, so that one graph serves every length. Attention must mask what lies behind
    the query: `get_seq_length` is a tensor, which tells masks that they are needed. A pass writes the same slots
    however often it runs; who runs it says afterwards to the cache itself that they are filled.
    """

    is_compileable = True

    def __init__(self, buffers: list[tuple[Tensor, ...]], length: Tensor) -> None:
        self.buffers = buffers
        """Of each layer keys and values as one tensor [2, B, H, slots, D], or two [B, H, slots, D]."""
        self.length = length
        """int64 [1]: slots filled before this pass."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write [B, H, Q, D] behind the filled slots and return all slots, [B, H, slots, D]."""
        held = self.buffers[layer_idx]
        slots = self.length.to(key.device)
        if key.shape[2] != 1:
            slots = slots + torch.arange(key.shape[2], device=key.device)
        if len(held) == 1:  # one tensor: two that share memory would be copied as a whole
            held[0].index_copy_(3, slots, torch.stack([key, value]))
            return held[0][0], held[0][1]
        held[0].index_copy_(2, slots, key)
        held[1].index_copy_(2, slots, value)
        return held[0], held[1]

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Tokens held before this pass, int64 []."""
        return self.length[0]

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(all slots, 0)."""
        return self.buffers[layer_idx][0].shape[-2], 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Slots of every layer."""
        return next(held[0].shape[-2] for held in self.buffers if held)
