"""The largest of many sums, found without sorting all of them."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
"""Scores of which only the greatest is looked at first: of a row of 32,000 that leaves 500."""
FEW = 8
"""Below so many blocks for each one wanted, a plain top-k costs no more."""


Lists = tuple[list[list[float]], list[list[int]], list[list[int]]]


def largest_sums(scores: Tensor, offsets: Tensor, searches: int, wanted: int) -> Lists:
    """The `wanted` greatest of ``scores + offsets`` in each search, greatest first.

    scores: floating [R, V]; offsets: [R]. The rows of a search are R / searches neighbours. Returns sums, row inside
    the search and column: a list of N for each search, where N is less than `wanted` only where there are fewer sums.
    NaN counts as the greatest.
    """
    (rows, columns), each = scores.shape, scores.shape[0] // searches
    blocks = columns // BLOCK
    if blocks * each < FEW * wanted:
        best, place = (scores + offsets[:, None]).reshape(searches, -1).topk(min(wanted, each * columns))
        places = place.tolist()
        rows_of = [[at // columns for at in some] for some in places]
        return best.tolist(), rows_of, [[at % columns for at in some] for some in places]
    inner = scores.narrow(1, 0, blocks * BLOCK).unflatten(1, (blocks, BLOCK))
    # A block holds one of the greatest only if its own greatest is among the greatest of all blocks.
    tops = (inner.amax(-1) + offsets[:, None]).reshape(searches, -1).topk(wanted).indices
    if searches > 1:
        tops = tops + torch.arange(0, rows * blocks, each * blocks, device=tops.device)[:, None]
    row = tops // blocks
    if columns == blocks * BLOCK and scores.is_contiguous():
        values = scores.view(-1, BLOCK).index_select(0, tops.flatten()).view(searches, wanted, BLOCK)
    else:
        values = inner[row, tops % blocks]
    values = (values + offsets[row].unsqueeze(-1)).flatten(1)
    rest = columns - blocks * BLOCK
    if rest:
        tail = scores.narrow(1, columns - rest, rest) + offsets[:, None]
        values = torch.cat([values, tail.reshape(searches, -1)], 1)
    best, place = values.topk(wanted)
    # What is left are a few numbers: in plain Python they cost less than a kernel for each step would.
    found: list[list[tuple[int, int]]] = []
    for search, (picked, some) in enumerate(zip(tops.tolist(), place.tolist(), strict=True)):
        first, mine = search * each, list[tuple[int, int]]()
        for at in some:
            if at < wanted * BLOCK:
                above, block = divmod(picked[at // BLOCK], blocks)
                mine.append((above - first, block * BLOCK + at % BLOCK))
            else:
                above, column = divmod(at - wanted * BLOCK, rest)
                mine.append((above, columns - rest + column))
        found.append(mine)
    return (
        best.tolist(),
        [[row for row, _ in mine] for mine in found],
        [[column for _, column in mine] for mine in found],
    )
