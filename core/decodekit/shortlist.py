"""The tokens that survived truncation, as [B, K] instead of [B, V]."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor


@attrs.frozen
class Shortlist:
    """Scores of the K likeliest tokens of every row; every other token of the vocabulary is removed (-inf).

    Processors that work here must keep exactly the tokens that their dense form keeps, ties included.
    """

    values: Tensor
    """float [B, K], descending in each row; -inf marks removed entries."""
    ids: Tensor
    """int64 [B, K], the token of each value; distinct inside a row."""
    vocab_size: int
    weights: Tensor | None = None
    """exp(values - values[:, :1]) at float32 or better, where somebody has computed it already."""

    def replace(self, values: Tensor) -> Shortlist:
        """The same tokens with new scores, still descending."""
        return Shortlist(values, self.ids, self.vocab_size)

    def dense(self) -> Tensor:
        """The same as scores over the whole vocabulary: float [B, V]."""
        full = self.values.new_full((self.values.shape[0], self.vocab_size), -torch.inf)
        return full.scatter_(1, self.ids, self.values)
