"""Top-n-sigma: keep the tokens whose scores stand out from the noise."""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch
from decodekit.fields import at_least, option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .listing import largest, looped
from .rowwise import Knob, Scanning, filter_value, min_tokens


def deviation(scores: Tensor, top: Tensor) -> Tensor:
    """Standard deviation of the scores of each row [B, V] that are not removed: float64 [B, 1].

    It divides by their number. `top` [B, 1] are the best scores. NaN where a row holds NaN, +inf or nothing.
    """
    if looped(scores) and scores.shape[0] > 1:
        return torch.cat([deviation(row, best) for row, best in zip(scores.split(1), top.split(1), strict=True)])
    if scores.dtype not in (torch.float32, torch.float64):
        scores, top = scores.float(), top.float()
    below = scores - top  # small numbers round less
    count: Tensor | int = scores.shape[-1]
    total = below.sum(-1, keepdim=True, dtype=torch.float64)
    if looped(scores) and bool(total > -torch.inf):
        below.sub_((total / count).to(below.dtype))
    else:
        gone = below == -torch.inf
        count = count - gone.sum(-1, keepdim=True)
        below.masked_fill_(gone, 0.0)
        below.sub_((below.sum(-1, keepdim=True, dtype=torch.float64) / count).to(below.dtype)).masked_fill_(gone, 0.0)
    return (below.mul_(below).sum(-1, keepdim=True, dtype=torch.float64) / count).sqrt_()


@attrs.frozen
class TopNSigmaLogitsWarper(Scanning):
    """Keep tokens whose score is at most `top_n_sigma` standard deviations below the best; 0 switches it off.

    The deviation is that of all scores of the row that are not removed yet, so this comes before other truncations. A
    temperature does not change what is kept. Scores are floating [B, V]; sums are float64. Raises ValueError for a
    negative number. (Tang et al. 2024, "Top-n-sigma: not all logits are you need", arXiv 2411.07641.)
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.TRUNCATE,
        before=("top_h", "top_k", "top_p", "min_p"),
        reads_history=False,
        keeps_argmax=True,
        pure=True,
        graph_safe=True,
    )
    knob: ClassVar[str] = "top_n_sigma"
    off: ClassVar[float | None] = 0

    top_n_sigma: float | tuple[float, ...] = option(
        "Keep tokens at most this many standard deviations of the scores below the best; 0 keeps all.",
        check=at_least(0),
        per_row=True,
    )
    filter_value: float = filter_value()
    min_tokens_to_keep: int = min_tokens()

    def _list_cut(self, values: Tensor, n: Knob) -> Tensor:
        top = values[:, :1]
        cut = (top.double() - deviation(values, top) * n).to(values.dtype)
        k = min(self.min_tokens_to_keep, values.shape[-1])
        return cut if k == 1 else torch.minimum(cut, values[:, k - 1 : k])

    def _scan(self, scores: Tensor, n: Knob) -> Tensor:
        top = scores.amax(-1, keepdim=True)
        cut = (top.double() - deviation(scores, top) * n).to(scores.dtype)
        k = min(self.min_tokens_to_keep, scores.shape[-1])
        return cut if k == 1 else torch.minimum(cut, largest(scores, k)[0][:, -1:])
