"""Where top-p cuts: the smallest score of the nucleus, found without sorting the vocabulary."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import accumulate, repeat

import attrs
import torch
from decodekit.shortlist import Shortlist
from torch import Tensor

from .listing import FIRST_WIDTHS, LOOP_FROM, largest, likely_mass, settled

_BUCKETS = 4096
FEW = 256
"""Entries up to which a list is worked on in Python."""
_SPAN = 32.0
"""Scores further below the best than this share one bucket: together they weigh less than 1e-8 of it."""


def weights(values: Tensor, top: Tensor) -> Tensor:
    """Probabilities up to a constant: exp(values - top), float32 unless the scores are float64."""
    if values.dtype not in (torch.float32, torch.float64):
        values, top = values.float(), top.float()
    return (values - top).exp_()


def mass(scores: Tensor, top: Tensor) -> Tensor:
    """Total weight of each row of [B, V], float64 [B, 1].

    Sums are float64 over float32 weights, so their order does not show: neighbours, list length and threads
    change nothing that a comparison could see.
    """
    if scores.device.type == "cpu" and scores.shape[-1] >= LOOP_FROM:
        return torch.stack([weights(r, t).sum(dtype=torch.float64) for r, t in zip(scores, top, strict=True)])[:, None]
    return weights(scores, top).sum(-1, keepdim=True, dtype=torch.float64)


def list_cut(values: Tensor, p: float | Tensor, keep: int, total: Tensor | None = None) -> Tensor:
    """Smallest kept score [B, 1] of rows given as descending lists [B, K].

    A token stays while the weight of the tokens before it is below `p` (a number, or float64 [B, 1]) times the total;
    the best `keep` stay anyway. `total` float64 [B, 1] is the weight of the whole row, the list's own where it is None.
    """
    sums = weights(values, values[:, :1]).cumsum(-1, dtype=torch.float64)
    goal = (sums[:, -1:] if total is None else total) * p
    end = values.shape[-1] - 1
    last = (sums < goal).sum(-1, keepdim=True)
    if total is not None or keep > 1:  # the list's own sum reaches the goal at its end at the latest
        last.clamp_(min(keep - 1, end), end)
    return values.gather(-1, last)


def shorten_few(shortlist: Shortlist, p: float | Tensor, keep: int) -> Shortlist | None:
    """Cut a list of few entries off where `list_cut` says; None where a row holds NaN, +inf, or nothing.

    In Python: on a few dozen numbers each torch call costs more than all of its work.
    """
    values = shortlist.values
    known = shortlist.weights if shortlist.weights is not None else weights(values, values[:, :1])
    kept = []
    shares = p[:, 0].tolist() if isinstance(p, Tensor) else repeat(p)
    for row, weight, share in zip(values.tolist(), known.tolist(), shares, strict=False):
        sums = list(accumulate(weight))
        if not sums[-1] > 0:
            return None
        last = min(max(bisect_left(sums, sums[-1] * share), keep - 1), len(row) - 1)
        end = last + 1
        while end < len(row) and row[end] >= row[last]:
            end += 1
        kept.append(end)
    width = max(kept)
    values, known = values.narrow(1, 0, width), known.narrow(1, 0, width)
    if min(kept) < width:
        gone = torch.arange(width) >= torch.tensor(kept)[:, None]
        values, known = values.masked_fill(gone, -torch.inf), known.masked_fill(gone, 0.0)
    return Shortlist(values, shortlist.ids.narrow(1, 0, width), shortlist.vocab_size, known)


def full_total(scores: Tensor, values: Tensor) -> Tensor | None:
    """The weight of whole rows, for lists [B, K] that may not hold all of it; None where they do."""
    last = values[:, -1:]
    if values.shape[-1] == scores.shape[-1] or bool((last == -torch.inf).all()):
        return None
    return mass(scores, values[:, :1])


@attrs.frozen
class Found:
    """The largest scores of rows [B, V] as lists [B, K], and where top-p cuts each row."""

    values: Tensor
    ids: Tensor
    cut: Tensor
    """Smallest kept score [B, 1]."""
    done: Tensor
    """bool [B, 1]: the list surely reaches down to the cut. Elsewhere `cut` is too high."""
    goal: Tensor | None
    """Weight wanted of each row, float64 [B, 1]; None where the lists hold all there is."""
    spare: Tensor | None
    """Weight of each row that is not wanted, likewise."""


def find(scores: Tensor, p: float | Tensor, keep: int) -> Found:
    """Look for the cut among the largest scores of [B, V], in lists that grow while that can help."""
    vocab = scores.shape[-1]
    values, ids = largest(scores, min(FIRST_WIDTHS[0], vocab))
    total = full_total(scores, values)
    cut = list_cut(values, p, keep, total)
    if total is None:
        return Found(values, ids, cut, torch.ones_like(cut, dtype=torch.bool), None, None)
    goal, done = total * p, settled(values, cut)
    for width in FIRST_WIDTHS[1:]:
        # A row too flat for the next width is given up at once.
        if bool(done.all()) or bool((likely_mass(weights(values, values[:, :1]), width) < goal)[~done].any()):
            break
        values, ids = largest(scores, min(width, vocab))
        cut = list_cut(values, p, keep, total)
        done = settled(values, cut) if width < vocab else torch.ones_like(done)
    return Found(values, ids, cut, done, goal, total - goal)


def dense_cut(scores: Tensor, p: float | Tensor, keep: int, found: Found | None = None) -> Tensor:
    """Smallest kept score [B, 1] of dense rows [B, V]; NaN where the best score is NaN. `found`: of the same rows."""
    if scores.device.type != "cpu":
        # Sorting is cheap there, waiting for an answer is not.
        return list_cut(scores.sort(-1, descending=True).values, p, keep)
    found = find(scores, p, keep) if found is None else found
    if found.goal is None or found.spare is None or bool(found.done.all()):
        return found.cut
    cut = found.cut.clone()
    for row in (~found.done[:, 0]).nonzero()[:, 0].tolist():
        cut[row] = _search(scores[row], float(found.goal[row]), float(found.spare[row]), keep)
    return cut


def open_nucleus(scores: Tensor, p: float | Tensor, keep: int) -> Shortlist | Found:
    """The nucleus of every row of [B, V] as a shortlist; where one is too wide for that, what was found out."""
    found = find(scores, p, keep)
    if not bool(found.done.all()):
        return found
    return Shortlist(found.values.masked_fill(found.values < found.cut, -torch.inf), found.ids, scores.shape[-1])


def light(count: int, spare: float) -> float:
    """How far below the best score `count` tokens weigh less than half of `spare` together, whatever they are."""
    return math.log(2 * count / spare) if spare > 0 else math.inf


def _search(row: Tensor, goal: float, spare: float, keep: int) -> Tensor:
    """The same cut for one wide row [V]: weigh buckets of scores, then sort the one bucket where the sum crosses."""
    top = row.amax()
    least = row.topk(min(keep, len(row))).values[-1] if keep > 1 else None
    # What is too far down to matter even if all of it was there is most of a vocabulary.
    row = row[row >= top - light(len(row), spare)]
    span = min(float(top - row.amin()), _SPAN) or 1.0
    weight = weights(row, top)
    # Rounding is monotone, so equal scores share a bucket and buckets are in the order of the scores.
    bucket = ((top - row).float() * (_BUCKETS / span)).clamp_(max=_BUCKETS).long()
    sums = torch.bincount(bucket, weights=weight.double(), minlength=_BUCKETS + 1).cumsum(0)
    crossing = int((sums < goal).sum())
    if crossing > _BUCKETS:
        return row.new_tensor(-torch.inf)
    inside = row[bucket == crossing].sort(descending=True).values
    before = sums[crossing - 1] if crossing else sums.new_zeros(())
    running = weights(inside, top).cumsum(0, dtype=torch.float64) + before
    last = int((running < goal).sum().clamp_(max=len(inside) - 1))
    found = inside[last]
    return found if least is None else torch.minimum(found, least)
