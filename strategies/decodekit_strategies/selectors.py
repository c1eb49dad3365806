"""Selectors: from processed scores to one token a row. -1 says that a row has no token to choose."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate
from math import inf

import attrs
import torch
from decodekit.context import BindContext
from decodekit.shortlist import Shortlist
from torch import Tensor

_BLOCKED_FROM = 1 << 20
"""Entries from which two vectorised passes beat one pass of scalar code, the caches being cold."""
_BLOCK = 64
_LOOP_FROM = 8192
_FEW = 256
"""Entries up to which a list is drawn from in Python: there each torch call costs more than all of its work."""


def _likeliest(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Best score and its lowest id in each row of [B, V]: both [B]."""
    rows, width = scores.shape
    count = width // _BLOCK
    if scores.numel() < _BLOCKED_FROM or count < _BLOCK or scores.device.type != "cpu":
        best, ids = scores.max(-1)
        return best, ids
    # Find the block with the vectorised maximum, then look inside that block.
    whole = scores[:, : count * _BLOCK].reshape(rows, count, _BLOCK)
    block = whole.amax(-1).argmax(-1, keepdim=True)
    inside = whole.gather(1, block.unsqueeze(-1).expand(-1, 1, _BLOCK))[:, 0]
    place = inside.argmax(-1, keepdim=True)
    best, ids = inside.gather(-1, place)[:, 0], (block * _BLOCK + place)[:, 0]
    if count * _BLOCK == width:
        return best, ids
    tail_best, tail_ids = _likeliest(scores[:, count * _BLOCK :])
    later = (tail_best > best) | (tail_best.isnan() & ~best.isnan())
    return torch.where(later, tail_best, best), torch.where(later, tail_ids + count * _BLOCK, ids)


@attrs.frozen
class Argmax:
    """The likeliest token of every row; among equals the lowest id."""

    def __call__(self, scores: Tensor | Shortlist, ctx: BindContext, /) -> Tensor:
        """Return int64 [B]; -1 where a row has no score above -inf, or holds NaN."""
        if isinstance(scores, Shortlist):
            values = scores.values
            best = values.amax(-1)
            ids = scores.ids.masked_fill(values < best[:, None], scores.vocab_size).amin(-1)
        else:
            best, ids = _likeliest(scores)
            if best.device.type == "cpu" and all(value > -inf for value in best.tolist()):
                return ids
        return ids.where(best > -torch.inf, -1)


_BELOW_ONE = 1 - 2.0**-52
"""Keeps a goal below the total, where a product with the largest number below 1 would round up to it."""


def _place(values: Tensor, top: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw from rows of scores [B, N], the best of which is `top` [B, 1], by numbers float64 [B, 1] in [0, 1).

    Returns places int64 [B, 1] and whether each row had anything to draw, bool [B, 1].
    """
    sums = (values - top).exp_().cumsum(-1, dtype=torch.float64)
    total = sums[:, -1:]
    # The first place whose sum exceeds the goal: never one that adds nothing.
    place = torch.searchsorted(sums, torch.minimum(uniform * total, total * _BELOW_ONE), right=True)
    return place.clamp_(max=values.shape[-1] - 1), total > 0


@attrs.frozen
class Draw:
    """A random token of every row, by the inverse of the cumulative distribution (Devroye 1986, chapter III).

    Candidates come in the order of their ids and sums are float64, whether scores are dense or a shortlist: the same
    uniform number gives the same token in both forms. A token of probability zero is never drawn.
    """

    def __call__(self, scores: Tensor | Shortlist, ctx: BindContext, /) -> Tensor:
        """Return int64 [B], drawn by `ctx.uniform()`; -1 where a row holds NaN, or nothing above -inf.

        A score of +inf leaves no chance to finite ones; of several such tokens each is as likely.
        """
        uniform = ctx.uniform()
        tokens = self._draw(scores, uniform)
        if int(tokens.min()) < 0:
            dense = _full(scores.dense() if isinstance(scores, Shortlist) else scores)
            certain = dense.amax(-1, keepdim=True) == inf
            tokens = self._draw(dense.where(~certain, torch.where(dense == inf, 0.0, -inf)), uniform)
        return tokens

    def _draw(self, scores: Tensor | Shortlist, uniform: Tensor) -> Tensor:
        if isinstance(scores, Shortlist) and scores.ids.numel() <= _FEW and scores.ids.device.type == "cpu":
            return _draw_few(scores, uniform)
        uniform = uniform[:, None]
        if isinstance(scores, Shortlist):
            ids, order = scores.ids.sort(-1)
            values = _full(scores.values)
            place, some = _place(values.gather(-1, order), values[:, :1], uniform.to(ids.device))
            return ids.gather(-1, place).where(some, -1)[:, 0]
        if scores.device.type == "cpu" and scores.shape[-1] >= _LOOP_FROM and scores.shape[0] > 1:
            # One row at a time stays in the processor's cache from pass to pass.
            return torch.cat([_dense(scores[i : i + 1], uniform[i : i + 1]) for i in range(len(scores))])
        return _dense(scores, uniform.to(scores.device))


def _draw_few(scores: Shortlist, uniform: Tensor) -> Tensor:
    """The same draw from a short list: the same float32 weights, the same float64 sums in the same order."""
    weights = scores.weights
    if weights is None:
        values = _full(scores.values)
        weights = (values - values[:, :1]).exp_()
    tokens = []
    for ids, row, number in zip(scores.ids.tolist(), weights.tolist(), uniform.tolist(), strict=True):
        pairs = sorted(zip(ids, row, strict=True))
        sums = list(accumulate(weight for _, weight in pairs))
        total = sums[-1]
        place = bisect_right(sums, min(number * total, total * _BELOW_ONE))
        tokens.append(pairs[min(place, len(pairs) - 1)][0] if total > 0 else -1)
    return torch.tensor(tokens)


def _dense(scores: Tensor, uniform: Tensor) -> Tensor:
    scores = _full(scores)
    place, some = _place(scores, scores.amax(-1, keepdim=True), uniform)
    return place.where(some, -1)[:, 0]


def _full(scores: Tensor) -> Tensor:
    """At least float32: half precision would lose small weights."""
    return scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
