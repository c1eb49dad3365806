"""A plugin that chose a name which decodekit uses, too."""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch
from decodekit import Phase, Traits, at_least, option
from torch import Tensor


@attrs.frozen
class TopK:
    """Keep exactly `k` tokens, ties or not."""

    traits: ClassVar = Traits(phase=Phase.TRUNCATE, reads_history=False, keeps_argmax=True, pure=True)
    k: int = option("Number of tokens to keep.", default=1, check=at_least(1))

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        kept = scores.topk(min(self.k, scores.shape[-1]))
        return torch.full_like(scores, -torch.inf).scatter(-1, kept.indices, kept.values)
