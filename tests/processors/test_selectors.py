"""Argmax and draw: the same token from dense scores and from a shortlist, and the right distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decodekit.context import BindContext
from decodekit.shortlist import Shortlist
from decodekit.testing import context, score_cases
from decodekit_strategies.selectors import Argmax, Draw
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor


class Fixed:
    """A context whose uniform numbers are known."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = torch.tensor(numbers, dtype=torch.float64)

    def uniform(self) -> Tensor:
        return self.numbers


def listed(scores: Tensor, size: int, seed: int = 0) -> Shortlist:
    """The largest scores as a shortlist, ids among equals in no order that a selector could lean on."""
    random = torch.Generator().manual_seed(seed)
    mixed = torch.randperm(scores.shape[-1], generator=random)
    values, places = scores[:, mixed].topk(min(size, scores.shape[-1]))
    return Shortlist(values, mixed[places], scores.shape[-1])


@pytest.mark.parametrize("vocab", [1, 2, 37, 4095, 4096, 5000, 20_011])
def test_argmax_takes_the_lowest_of_the_best_ids(vocab: int) -> None:
    for name, scores in score_cases(5, vocab).items():
        want = [row.index(max(row)) for row in scores.tolist()]
        assert Argmax()(scores, context()).tolist() == want, name
        assert Argmax()(listed(scores, vocab), context()).tolist() == want, name
        assert Argmax()(scores, context()).dtype == torch.int64


@pytest.mark.parametrize("vocab", [8, 5003])
@pytest.mark.parametrize("where", [0, 1, -1])
def test_rows_without_a_choice_give_minus_one(vocab: int, where: int) -> None:
    scores = torch.randn(4, vocab)
    scores[0] = -math.inf
    scores[1, where] = math.nan
    scores[2, where] = math.inf
    for given_ in (scores, listed(scores, 8)):
        best = Argmax()(given_, context()).tolist()
        assert best[:2] == [-1, -1]
        assert best[2] == where % vocab
        drawn = Draw()(given_, Fixed(0.5, 0.5, 0.5, 0.5)).tolist()
        assert drawn[:3] == [-1, -1, where % vocab]
        assert drawn[3] >= 0


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1, 2, 40, 900, 9000]),
    st.sampled_from([1, 3, 64, 300]),
    st.sampled_from(["random", "flat", "peaked", "tied", "all equal", "mostly -inf", "one token"]),
    st.lists(st.floats(0, 1, exclude_max=True), min_size=3, max_size=3),
)
def test_dense_and_shortlist_draw_the_same(seed: int, vocab: int, size: int, kind: str, numbers: list[float]) -> None:
    short = listed(score_cases(3, vocab, seed)[kind], size, seed)
    scores = short.dense()
    drawn = Draw()(scores, Fixed(*numbers))
    assert torch.equal(Draw()(short, Fixed(*numbers)), drawn)
    assert (scores.gather(-1, drawn[:, None]) > -math.inf).all()
    for row in range(3):
        alone = Draw()(scores[row : row + 1], Fixed(numbers[row]))
        assert alone.item() == drawn[row].item()


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    scores = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf, -500.0]])
    for number, want in ((0.0, 1), (0.4999, 1), (0.5, 3), (0.75, 3), (1 - 2**-53, 3)):
        assert Draw()(scores, Fixed(number)).item() == want
        assert Draw()(listed(scores, 6), Fixed(number)).item() == want


def test_the_last_number_below_one_picks_the_last_token_that_counts() -> None:
    random = torch.Generator().manual_seed(0)
    for _ in range(200):
        scores = torch.randn(1, 50, generator=random) * 4
        scores[:, 40:] = -math.inf
        assert Draw()(scores, Fixed(1 - 2**-53)).item() < 40


SIGNIFICANCE = 1e-6
"""Chance that a right implementation fails a test below; seeds are fixed, so it either always does or never."""


def chi_square_quantile(freedom: int, tail: float) -> float:
    """Wilson and Hilferty's approximation, good to a percent at these sizes."""
    z = math.sqrt(2) * torch.erfinv(torch.tensor(1 - 2 * tail, dtype=torch.float64)).item()
    return freedom * (1 - 2 / (9 * freedom) + z * math.sqrt(2 / (9 * freedom))) ** 3


def chi_square(counts: Tensor, probabilities: Tensor) -> tuple[float, int]:
    expected = probabilities * counts.sum()
    assert (counts[expected == 0] == 0).all()
    here = expected > 0
    return float(((counts - expected)[here] ** 2 / expected[here]).sum()), int(here.sum()) - 1


@pytest.mark.parametrize("form", ["dense", "shortlist"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_draws_follow_the_softmax(form: str, seed: int) -> None:
    """100,000 draws of one distribution against its probabilities, chi-square at 1e-6."""
    rows, steps, vocab = 1000, 100, 25
    row = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed))
    row[0, ::6] = -math.inf
    scores = row.expand(rows, -1)
    given_: Any = scores if form == "dense" else listed(scores, vocab, seed)
    ctx: BindContext = context(torch.zeros(rows, 1, dtype=torch.long), seeds=range(seed * rows, (seed + 1) * rows))
    counts = torch.zeros(vocab, dtype=torch.float64)
    for _ in range(steps):
        counts += torch.bincount(Draw()(given_, ctx), minlength=vocab)
    statistic, freedom = chi_square(counts, row[0].double().softmax(-1))
    assert statistic < chi_square_quantile(freedom, SIGNIFICANCE)


def test_the_test_of_the_distribution_would_notice() -> None:
    """The same statistic for draws at a temperature 3% off is far outside."""
    row = torch.randn(1, 25, generator=torch.Generator().manual_seed(1))
    ctx = context(torch.zeros(1000, 1, dtype=torch.long), seeds=range(1000))
    counts = torch.zeros(25, dtype=torch.float64)
    for _ in range(100):
        counts += torch.bincount(Draw()((row / 1.03).expand(1000, -1), ctx), minlength=25)
    statistic, freedom = chi_square(counts, row[0].double().softmax(-1))
    assert statistic > chi_square_quantile(freedom, SIGNIFICANCE)


def test_a_row_draws_the_same_whoever_shares_the_batch() -> None:
    scores = score_cases(4, 40)["random"]
    together = context(torch.zeros(4, 1, dtype=torch.long), seeds=[5, 6, 7, 8])
    alone = context(seeds=[7])
    batch = [Draw()(scores, together)[2].item() for _ in range(100)]
    assert batch == [Draw()(scores[2:3], alone).item() for _ in range(100)]


def test_half_precision_scores_are_drawn_from() -> None:
    scores = torch.tensor([[0.0, 1.0, -math.inf]])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert Draw()(scores.to(dtype), Fixed(0.9)).item() == 1
        assert Argmax()(scores.to(dtype), context()).item() == 1
