"""The K largest scores of every row without reading the row twice: what shortlists are made from."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from decodekit.shortlist import Shortlist
from torch import Tensor

LOOP_FROM = 8192
"""Vocabulary from which row by row beats the whole batch: a row stays in the processor's cache between passes."""
_BLOCK = 32
"""Length of the columns in which scores above a known one are looked for."""
FIRST_WIDTHS = (64, 1024)
"""Shortlist widths tried where the number of survivors is not known beforehand. Beyond them dense is no slower."""


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest scores of each row of [B, V], descending, and their int64 ids: both [B, k]. NaN is largest.

    On the CPU `topk` is scalar code, five times slower than a maximum. So the row is laid out as `block` rows of
    `count` columns, and the maximum of every column is taken first: the k largest scores lie in the k columns with
    the largest maxima. Both remaining searches are small.
    """
    width = scores.shape[-1]
    block = 1 << max(0, int(math.log2(max(width / max(k, 1), 1)) / 2))
    if block < 8 or scores.device.type != "cpu":
        values, ids = scores.topk(k)
        return values, ids
    return _best_of(scores, _maxima(scores, block).topk(k, sorted=False).indices, block, k)


def _maxima(scores: Tensor, block: int) -> Tensor:
    """Of rows [B, V] laid out as `block` rows, the maximum of every whole column: [B, V // block]."""
    rows, width = scores.shape
    count = width // block
    whole = scores if count * block == width else scores.narrow(1, 0, count * block)
    return whole.reshape(rows, block, count).amax(1)


def _best_of(scores: Tensor, columns: Tensor, block: int, k: int | Tensor) -> tuple[Tensor, Tensor]:
    """The largest scores of [B, V] in some of its columns [B, N] and in the rest that fills no column, with their ids.

    So many: `k`, or as many as the row with the most of them has at or above `k` [B, 1], but at least one.
    """
    rows, width = scores.shape
    count = width // block
    ids = (columns.unsqueeze(1) + _steps(block, count)).view(rows, block * columns.shape[-1])
    if count * block < width:
        rest = torch.arange(count * block, width, device=scores.device)
        ids = torch.cat([ids, rest.expand(rows, -1)], dim=-1)
    found = scores.gather(1, ids)
    if isinstance(k, Tensor):
        k = max(int((found >= k).sum(-1).amax()), 1)
    values, places = found.topk(k)
    return values, ids.gather(1, places)


@functools.lru_cache(maxsize=16)
def _steps(block: int, count: int) -> Tensor:
    """Distances between the entries of a column, int64 [block, 1]."""
    return torch.arange(0, block * count, count)[:, None]


def looped(scores: Tensor) -> bool:
    """Whether rows of [B, V] are better worked on one by one, and may be asked for values in between."""
    return scores.device.type == "cpu" and scores.shape[-1] >= LOOP_FROM and not torch.compiler.is_compiling()


def at_or_above(scores: Tensor, low: Tensor, high: Tensor | None = None) -> Tensor:
    """Scores [B, V] on the CPU with -inf below `low` [B, 1], and above `high`. Rows where those are NaN stay."""
    if scores.element_size() < 4:  # half precision has none of these functions
        kept = scores.masked_fill(scores < low, -torch.inf)
        return kept if high is None else kept.masked_fill_(scores > high, -torch.inf)
    # A comparison and a fill with a mask take ten times as long.
    out = scores.clone()
    _raise(out, low, -torch.inf)
    if high is not None:
        _raise(out.neg_(), high.neg(), torch.inf)
        out.neg_()
    return out


def _raise(rows: Tensor, low: Tensor, value: float) -> None:
    """Write `value` over everything below `low` [B, 1]."""
    below = torch.nextafter(low, torch.full_like(low, -torch.inf))
    for row, limit in zip(rows, below[:, 0].tolist(), strict=True):
        torch.threshold_(row, limit, value)


def settled(values: Tensor, cut: Tensor) -> Tensor:
    """Whether a list [B, K] surely holds everything at or above `cut` [B, 1]: bool [B, 1].

    It does where its last entry lies below the cut, or is removed already. NaN rows count as settled: no width helps.
    """
    last = values[:, -1:]
    return (last >= cut).logical_not_().logical_or_(last == -torch.inf)


def open_list(scores: Tensor, widths: Sequence[int], cut_of: Callable[[Tensor], Tensor]) -> Shortlist | None:
    """Shortlist everything at or above the cut, trying growing widths; None where none of them is wide enough.

    `cut_of` maps a descending list [B, K] of the largest scores to the smallest kept score [B, 1].
    """
    vocab = scores.shape[-1]
    for width in widths:
        values, ids = largest(scores, min(width, vocab))
        cut = cut_of(values)
        if width >= vocab or bool(settled(values, cut).all()):
            return Shortlist(values.masked_fill(values < cut, -torch.inf), ids, vocab)
    return None


def list_above(scores: Tensor, cut: Tensor) -> Shortlist | None:
    """Shortlist everything at or above a `cut` [B, 1] known beforehand; None where that is too much."""
    vocab = scores.shape[-1]
    if scores.device.type != "cpu" or vocab < _BLOCK * _BLOCK:
        some = min(max(int((scores >= cut).sum(-1).amax()), 1), vocab)
        if some > FIRST_WIDTHS[-1]:
            return None
        values, ids = scores.topk(some)
        return Shortlist(values.masked_fill(values < cut, -torch.inf), ids, vocab)
    maxima = _maxima(scores, _BLOCK)
    # So many columns hold something to keep; of a broken row, whose cut is NaN, one will do.
    some = max(int((maxima >= cut).sum(-1).amax()), 1)
    if some > FIRST_WIDTHS[-1]:
        return None
    values, ids = _best_of(scores, maxima.topk(some, sorted=False).indices, _BLOCK, cut)
    return Shortlist(values.masked_fill(values < cut, -torch.inf), ids, vocab)


def likely_mass(weight: Tensor, width: int) -> Tensor:
    """A guess at what the `width` largest weights of rows sum to, from the first few of them: float64 [B, 1].

    `weight` [B, K] descends. It goes on as a power of the rank, as it did from the middle of the list to its end: real
    tails fall faster, so the guess is rarely too low.
    """
    count = weight.shape[-1]
    last, half = weight[:, -1:].double(), weight[:, count // 2 - 1 : count // 2].double()
    power = 1 - (half / last).log2()
    ratio = width / count
    grows = torch.where(power.abs() < 1e-3, math.log(ratio), (ratio**power - 1) / power)
    return weight.sum(-1, keepdim=True, dtype=torch.float64) + last * count * grows
