"""The largest of many sums, found without sorting all of them."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
"""Scores of which only the greatest is looked at first: of a row of 32,000 that leaves 500."""
FEW = 8
"""Below so many blocks for each one wanted, a plain top-k costs no more."""


def largest_sums(scores: Tensor, offsets: Tensor, searches: int, wanted: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `wanted` greatest of ``scores + offsets`` in each search, greatest first.

    scores: floating [R, V]; offsets: [R]. The rows of a search are R / searches neighbours. Returns sums, row inside
    the search and column: [searches, N] each, where N is less than `wanted` only where there are fewer sums. NaN counts
    as the greatest.
    """
    (rows, columns), each = scores.shape, scores.shape[0] // searches
    blocks = columns // BLOCK
    if blocks * each < FEW * wanted:
        best, place = (scores + offsets[:, None]).reshape(searches, -1).topk(min(wanted, each * columns))
        return best, place // columns, place % columns
    inner = scores.narrow(1, 0, blocks * BLOCK).unflatten(1, (blocks, BLOCK))
    # A block holds one of the greatest only if its own greatest is among the greatest of all blocks.
    tops = (inner.amax(-1) + offsets[:, None]).reshape(searches, -1).topk(wanted).indices
    row, block = tops // blocks, tops % blocks
    whole = row if searches == 1 else row + torch.arange(0, rows, each, device=row.device)[:, None]
    values = (inner[whole, block] + offsets[whole].unsqueeze(-1)).flatten(1)
    rest = columns - blocks * BLOCK
    if rest:
        tail = scores.narrow(1, columns - rest, rest) + offsets[:, None]
        values = torch.cat([values, tail.reshape(searches, -1)], 1)
    best, place = values.topk(wanted)
    at = place // BLOCK
    known = at.clamp(max=wanted - 1)
    found = row.gather(1, known), block.gather(1, known) * BLOCK + place % BLOCK
    if not rest:
        return best, *found
    behind = place - wanted * BLOCK
    inside = behind < 0
    return (
        best,
        torch.where(inside, found[0], behind // rest),
        torch.where(inside, found[1], columns - rest + behind % rest),
    )
