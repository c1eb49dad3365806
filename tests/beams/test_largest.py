"""The largest sums are those that a plain top-k finds."""

from __future__ import annotations

import math

import pytest
import torch
from decodekit_strategies.largest import BLOCK, largest_sums

SIZES = [5, 63, 64, 640, 1000, 1024, 5001]


@pytest.mark.parametrize("columns", SIZES)
@pytest.mark.parametrize(("searches", "each"), [(1, 1), (1, 4), (3, 2), (2, 5)])
@pytest.mark.parametrize("wanted", [1, 4, 12])
def test_as_a_plain_top_k(columns: int, searches: int, each: int, wanted: int) -> None:
    made = torch.Generator().manual_seed(columns * 100 + searches * 10 + wanted)
    for kind in range(4):
        scores = torch.randn(searches * each, columns, generator=made)
        offsets = torch.randn(searches * each, generator=made) * 3
        if kind == 1:  # many that are equal
            scores = scores.round()
        if kind == 2:  # few that are alive
            scores[torch.rand(scores.shape, generator=made) < 0.99] = -torch.inf
        if kind == 3:  # dead rows
            offsets[1:] = -torch.inf
        sums = (scores + offsets[:, None]).view(searches, -1)
        best, rows, columns_ = map(torch.tensor, largest_sums(scores, offsets, searches, wanted))
        assert torch.equal(best, sums.topk(min(wanted, sums.shape[1])).values)
        assert torch.equal(sums.gather(1, rows * columns + columns_), best)
        places = (rows * columns + columns_).tolist()
        assert all(len(set(row)) == len(row) for row in places)


@pytest.mark.parametrize("at", [3, BLOCK * 10 - 1, BLOCK * 20 + 5])
def test_nan_is_found(at: int) -> None:
    scores = torch.randn(2, BLOCK * 20 + 7)
    scores[1, at] = torch.nan
    best, rows, columns = largest_sums(scores, torch.zeros(2), 1, 4)
    assert math.isnan(best[0][0])
    assert (rows[0][0], columns[0][0]) == (1, at)
