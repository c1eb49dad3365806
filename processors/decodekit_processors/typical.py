"""Typical sampling: keep the tokens whose surprise is nearest to the expected one."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import between, option
from decodekit.shortlist import Shortlist
from decodekit.traits import Phase, Traits
from torch import Tensor

from .entropy import looped, profile
from .listing import FIRST_WIDTHS, largest
from .nucleus import weights
from .rowwise import Knob, Truncation, filter_value, idle, min_tokens, resorted

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


def _reach_of_row(distance: Tensor, weight: Tensor, goal: Tensor, keep: int) -> Tensor:
    """The same for one wide row, all [1, ...]: weigh buckets, then sort the one bucket where the sum crosses."""
    if not bool(goal < torch.inf):  # NaN: the row is reported by the loop
        return distance[:, :1]
    row, heavy = distance[0], weight[0]
    bucket = (row * (_BUCKETS / _SPAN)).clamp_(max=_BUCKETS).long()
    sums = torch.bincount(bucket, weights=heavy.double(), minlength=_BUCKETS + 1).cumsum(0)
    crossing = int((sums < goal[0]).sum())
    if crossing > _BUCKETS:
        return distance.new_full((1, 1), torch.inf)
    inside = (bucket == crossing).nonzero()[:, 0]
    near, order = row[inside].sort()
    before = sums[crossing - 1] if crossing else sums.new_zeros(())
    running = heavy[inside][order].cumsum(0, dtype=torch.float64) + before
    found = near[(running < goal[0]).sum().clamp_(max=len(inside) - 1)]
    if keep > 1:
        found = torch.maximum(found, row.topk(min(keep, len(row)), largest=False).values[-1])
    return found.reshape(1, 1)


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

    def bind(self, ctx: BindContext, /) -> Any | None:
        """Return the form for this run, or None where nothing is dropped or the likeliest token is taken anyway."""
        return None if idle(ctx, "typical_p") else Truncation.bind(self, ctx)

    def _drop(self, scores: Tensor, share: Knob) -> Tensor:
        if looped(scores) and scores.shape[0] > 1:
            shares = share.split(1) if isinstance(share, Tensor) else [share] * len(scores)
            return torch.cat([self._drop(row, own) for row, own in zip(scores.split(1), shares, strict=True)])
        top = scores.amax(-1, keepdim=True)
        total, mean = profile(scores, top)
        distance, weight = distances(scores, top, mean), weights(scores, top)
        find = _reach_of_row if looped(scores) else reach
        return distance > find(distance, weight, total * share, self.min_tokens_to_keep)

    def _list_drop(self, values: Tensor, share: Knob) -> Tensor:
        top = values[:, :1]
        total, mean = profile(values, top)
        distance = distances(values, top, mean)
        return distance > reach(distance, weights(values, top), total * share, self.min_tokens_to_keep)

    def _shorten(self, shortlist: Shortlist, share: Knob, on: Tensor | None = None) -> Shortlist:
        drop = self._list_drop(shortlist.values, share)
        return resorted(shortlist, drop if on is None else drop & on)

    def _open(self, scores: Tensor, share: Knob) -> Shortlist | None:
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
            # Further entries weigh at most as much as the last one each: a row too flat for that is given up at once.
            most = weight.sum(-1, keepdim=True, dtype=torch.float64) + (FIRST_WIDTHS[-1] - width) * weight[:, -1:]
            if bool((most < goal).any()):
                return None
        return None


def _complete(values: Tensor, distance: Tensor, far: Tensor) -> Tensor:
    """Whether lists of the largest scores [B, K] surely hold all that stays: bool [B, 1]; NaN rows count as complete.

    They do where the last entry is dropped. It cannot be too likely, as all others would be likelier still and dropped
    before it; so it is too unlikely, and what follows is further away.
    """
    last = distance[:, -1:]
    return (last > far) | last.isnan() | (values[:, -1:] == -torch.inf)
