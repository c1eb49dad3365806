"""The K largest scores of every row without reading the row twice: what shortlists are made from."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import torch
from decodekit.shortlist import Shortlist
from torch import Tensor

FIRST_WIDTHS = (64, 1024)
"""Shortlist widths tried where the number of survivors is not known beforehand. Beyond them dense is no slower."""


def largest(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The `k` largest scores of each row of [B, V], descending, and their int64 ids: both [B, k]. NaN is largest.

    On the CPU `topk` is scalar code, five times slower than a maximum. So the row is laid out as `block` rows of
    `count` columns, and the maximum of every column is taken first: the k largest scores lie in the k columns with
    the largest maxima. Both remaining searches are small.
    """
    rows, width = scores.shape
    block = 1 << max(0, int(math.log2(max(width / max(k, 1), 1)) / 2))
    if block < 8 or scores.device.type != "cpu":
        values, ids = scores.topk(k)
        return values, ids
    count = width // block
    whole = scores if count * block == width else scores.narrow(1, 0, count * block)
    maxima = whole.reshape(rows, block, count).amax(1)
    columns = maxima.topk(k, sorted=False).indices
    ids = (columns.unsqueeze(1) + _steps(block, count)).view(rows, block * k)
    if count * block < width:
        rest = torch.arange(count * block, width, device=scores.device)
        ids = torch.cat([ids, rest.expand(rows, -1)], dim=-1)
    values, places = scores.gather(1, ids).topk(k)
    return values, ids.gather(1, places)


@functools.lru_cache(maxsize=16)
def _steps(block: int, count: int) -> Tensor:
    """Distances between the entries of a column, int64 [block, 1]."""
    return torch.arange(0, block * count, count)[:, None]


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
