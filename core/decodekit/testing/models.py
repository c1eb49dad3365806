"""Models small enough to reason about: one that follows a script, and one that really attends."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ScriptedLM(nn.Module):
    """Gives the logits that a table says, whatever the tokens are.

    table: [S, V], or [N, S, V] with a script for each kind of row. Entry s is given after `prompt` + s real tokens;
    before and beyond the table its first and last entry hold. With several scripts, the first real token of a row
    chooses: script ``token % N``. Padding does not count.
    """

    def __init__(self, table: Any, prompt: int = 1) -> None:
        super().__init__()
        given = torch.as_tensor(table, dtype=torch.float32)
        if given.dim() not in (2, 3):
            raise ValueError(f"table must be [S, V] or [N, S, V], got {tuple(given.shape)}")
        self.register_buffer("table", given if given.dim() == 3 else given[None], persistent=False)
        self.table: Tensor
        self.prompt = prompt
        self.vocab_size = given.shape[-1]

    def forward(self, tokens: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Logits float32 [B, T, V] after each of the tokens int64 [B, T]."""
        mask = torch.ones_like(tokens) if attention_mask is None else attention_mask.long()
        scripts, entries, _ = self.table.shape
        first = tokens.gather(1, mask.argmax(-1, keepdim=True))
        entry = (mask.cumsum(-1) - self.prompt).clamp(0, entries - 1)
        return self.table[first % scripts, entry]


class TinyLM(nn.Module):
    """Random decoder of two attention layers with learned positions; takes a mask, positions and any cache.

    The smallest model for which padding, positions and the order of rows in the cache all matter.
    """

    def __init__(self, vocab_size: int = 37, width: int = 16, heads: int = 2, seed: int = 0) -> None:
        super().__init__()
        self.vocab_size, self.heads = vocab_size, heads
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed = nn.Embedding(vocab_size, width)
            self.place = nn.Embedding(256, width)
            self.layers = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(2))
            self.lm_head = nn.Linear(width, vocab_size, bias=False)
            for weight in self.parameters():
                nn.init.normal_(weight, std=0.5)

    def forward(
        self,
        tokens: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        logits_to_keep: int = 0,
    ) -> Tensor:
        """Logits float32 [B, Q or logits_to_keep, V]; `attention_mask` [B, K] covers cached and new tokens."""
        rows, new = tokens.shape
        past = 0 if cache is None else int(cache.get_seq_length())
        if position_ids is None:
            position_ids = torch.arange(past, past + new, device=tokens.device)[None]
        x = self.embed(tokens) + self.place(position_ids)
        query = torch.arange(past, past + new, device=tokens.device)[:, None]
        for index, layer in enumerate(self.layers):
            keys, offset = (new, 0) if cache is None else cache.get_mask_sizes(new, index)
            slot = torch.arange(offset, offset + keys, device=tokens.device)
            seen = (slot <= query)[None]
            if attention_mask is not None:
                real = F.pad(attention_mask.bool(), (0, max(offset + keys - attention_mask.shape[1], 0)))
                seen = seen & real[:, None, offset : offset + keys] | (slot == query)
            q, k, v = layer(x).view(rows, new, 3 * self.heads, -1).transpose(1, 2).chunk(3, 1)
            if cache is not None:
                k, v = cache.update(k, v, index)
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])
            x = x + mixed.transpose(1, 2).reshape(rows, new, -1)
        logits: Tensor = self.lm_head(x[:, -logits_to_keep:])
        return logits
