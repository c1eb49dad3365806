"""Typical sampling: keep the tokens whose surprise is nearest to the expected one."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs
import torch
from decodekit.fields import between, option
from decodekit.shortlist import Shortlist
from decodekit.traits import Phase, Traits
from torch import Tensor

from .entropy import profile
from .listing import FIRST_WIDTHS, at_or_above, largest, likely_mass, looped
from .nucleus import light, weights
from .rowwise import Knob, Truncation, filter_value, min_tokens, resorted

_BUCKETS = 4096
_SPAN = 32.0
"""Distances beyond this share one bucket: what is there weighs less than 1e-8 of the row, but for rows without weight
anywhere near."""


def distances(scores: Tensor, top: Tensor, mean: Tensor) -> Tensor:
    """How far the surprise of each token [B, V] is from the entropy: |(score - top) - mean|, inf for removed tokens.

    The surprise is log(total) - (score - top), the entropy log(total) - mean: the total cancels out.
    """
    if scores.dtype not in (torch.float32, torch.float64):
        scores, top = scores.float(), top.float()
    return (scores - top).sub_(mean.to(scores.dtype)).abs_()


def reach(distance: Tensor, weight: Tensor, goal: Tensor, keep: int) -> Tensor:
    """Largest kept distance [B, 1]: of the smallest set nearest to the entropy that weighs `goal` and has `keep`."""
    near, order = distance.sort(-1)
    sums = weight.gather(-1, order).cumsum(-1, dtype=torch.float64)
    end = distance.shape[-1] - 1
    last = (sums < goal).sum(-1, keepdim=True).clamp_(min(keep - 1, end), end)
    return near.gather(-1, last)


def _bounds(row: Tensor, top: Tensor, total: float, mean: Tensor, share: float, keep: int) -> tuple[float, float]:
    """Lowest and highest kept score of one wide row [V]: weigh buckets of distances, then sort the one bucket where the
    sum crosses. Distances grow on both sides of the mean, so what is kept are the scores in between."""
    goal = total * share
    # What is further down than the best is up, and too far down to matter even if all of it was there, is most of it.
    far_down = max(light(len(row), total - goal), -2.0 * float(mean) + 1.0)
    near = row[row >= top - far_down]
    distance, weight = distances(near, top, mean), weights(near, top)
    bucket = (distance * (_BUCKETS / _SPAN)).clamp_(max=_BUCKETS).long()
    sums = torch.bincount(bucket, weights=weight.double(), minlength=_BUCKETS + 1).cumsum(0)
    crossing = int((sums < goal).sum())
    if crossing > _BUCKETS:
        return -math.inf, math.inf
    inside = (bucket == crossing).nonzero()[:, 0]
    ordered, order = distance[inside].sort()
    before = sums[crossing - 1] if crossing else sums.new_zeros(())
    running = weight[inside][order].cumsum(0, dtype=torch.float64) + before
    far = ordered[(running < goal).sum().clamp_(max=len(inside) - 1)]
    if keep > 1:
        distance = distances(row, top, mean)
        far = torch.maximum(far, distance.topk(min(keep, len(row)), largest=False).values[-1])
        near = row
    kept = near[distance <= far]
    return float(kept.amin()), float(kept.amax())


@attrs.frozen
class TypicalLogitsWarper(Truncation):
    """Keep the tokens whose surprise is nearest to the entropy, until they hold `mass` of the probability.

    Drops both unlikely tokens and, where the distribution is flat, too likely ones; all tokens as far away as the last
    kept one stay. 1.0 switches it off. It matters only where tokens are drawn, and is left out elsewhere. Scores are
    floating [B, V]; sums are float64. Raises ValueError for a mass outside of (0, 1].
    (Meister et al. 2023, "Locally typical sampling", arXiv 2202.00666.)
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.TRUNCATE,
        after=("top_n_sigma", "top_h", "top_k", "top_p", "min_p"),
        reads_history=False,
        only_sampling=True,
        pure=True,
    )
    knob: ClassVar[str] = "mass"
    off: ClassVar[float | None] = 1

    mass: float | tuple[float, ...] = option(
        "Keep the tokens nearest to the expected surprise that together hold this much probability; 1.0 keeps all.",
        default=0.9,
        check=between(0, 1, low_open=True),
        per_row=True,
    )
    filter_value: float = filter_value()
    min_tokens_to_keep: int = min_tokens()

    def _keep(self, scores: Tensor, share: Knob, on: Tensor | None = None, clue: Any = None) -> Tensor:
        top = scores.amax(-1, keepdim=True)
        total, mean = profile(scores, top) if clue is None else clue
        if looped(scores) and self.filter_value == -math.inf and scores.element_size() >= 4:
            return self._keep_wide(scores, top, total, mean, share, on)
        distance = distances(scores, top, mean)
        drop = distance > reach(distance, weights(scores, top), total * share, self.min_tokens_to_keep)
        return scores.masked_fill(drop if on is None else drop & on, self.filter_value)

    def _keep_wide(
        self, scores: Tensor, top: Tensor, total: Tensor, mean: Tensor, share: Knob, on: Tensor | None
    ) -> Tensor:
        low, high = torch.full_like(top, -torch.inf), torch.full_like(top, torch.inf)
        shares = share[:, 0].tolist() if isinstance(share, Tensor) else [share] * len(scores)
        for i, (weight, own) in enumerate(zip(total[:, 0].tolist(), shares, strict=True)):
            if math.isfinite(weight) and (on is None or bool(on[i])):  # others are reported by the loop
                low[i], high[i] = _bounds(scores[i], top[i], weight, mean[i], own, self.min_tokens_to_keep)
        return at_or_above(scores, low, high if bool((high < top).any()) else None)

    def _list_drop(self, values: Tensor, share: Knob) -> Tensor:
        top = values[:, :1]
        total, mean = profile(values, top)
        distance = distances(values, top, mean)
        return distance > reach(distance, weights(values, top), total * share, self.min_tokens_to_keep)

    def _shorten(self, shortlist: Shortlist, share: Knob, on: Tensor | None = None) -> Shortlist:
        drop = self._list_drop(shortlist.values, share)
        return resorted(shortlist, drop if on is None else drop & on)

    def _open(self, scores: Tensor, share: Knob) -> Shortlist | tuple[Tensor, Tensor]:
        vocab = scores.shape[-1]
        top = scores.amax(-1, keepdim=True)
        total, mean = profile(scores, top)
        goal = total * share
        for width in FIRST_WIDTHS:
            values, ids = largest(scores, min(width, vocab))
            distance, weight = distances(values, top, mean), weights(values, top)
            far = reach(distance, weight, goal, self.min_tokens_to_keep)
            if width >= vocab or bool(_complete(values, distance, far).all()):
                return resorted(Shortlist(values, ids, vocab), distance > far)
            # A row too flat for the next width is given up at once.
            if bool((likely_mass(weight, FIRST_WIDTHS[-1]) < goal).any()):
                break
        return total, mean


def _complete(values: Tensor, distance: Tensor, far: Tensor) -> Tensor:
    """Whether lists of the largest scores [B, K] surely hold all that stays: bool [B, 1]; NaN rows count as complete.

    They do where the last entry is dropped. It cannot be too likely, as all others would be likelier still and dropped
    before it; so it is too unlikely, and what follows is further away.
    """
    last = distance[:, -1:]
    return (last > far) | last.isnan() | (values[:, -1:] == -torch.inf)
