"""How sharp a distribution is: its total weight, mean distance below the best score, and entropy, row by row.

Sums are float64 over float32 weights, so their order does not show: dense rows, shortlists and neighbours agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .listing import looped

_FLOOR = -800.0
"""Scores this far below the best weigh nothing in float64 either; removed ones are put here, as 0 * inf is NaN."""


def profile(scores: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Total weight of rows [B, V], exp(score - top) summed, and the mean of score - top under the distribution.

    `top` [B, 1] are the best scores. Both results are float64 [B, 1]; NaN where a row holds NaN, +inf or nothing.
    The entropy in nats is log(total) - mean.
    """
    if looped(scores) and scores.shape[0] > 1:
        rows = [profile(scores[i : i + 1], top[i : i + 1]) for i in range(len(scores))]
        return torch.cat([total for total, _ in rows]), torch.cat([mean for _, mean in rows])
    if scores.dtype not in (torch.float32, torch.float64):
        scores, top = scores.float(), top.float()
    below = (scores - top).clamp_(min=_FLOOR)
    weight = below.exp()
    total = weight.sum(-1, keepdim=True, dtype=torch.float64)
    return total, weight.mul_(below).sum(-1, keepdim=True, dtype=torch.float64) / total


def entropy(total: Tensor, mean: Tensor) -> Tensor:
    """Entropy in nats of what `profile` returned: float64 [B, 1], at least 0."""
    return (total.log() - mean).clamp_(min=0)


def level(top: Tensor, total: Tensor) -> Tensor:
    """The score that a token of probability 1 would have: float64 [B, 1]. Adding log(p) gives that of probability p."""
    return top.double() + total.log()
