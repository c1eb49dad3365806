"""Truncations on dense rows and on shortlists keep the same tokens, whatever the rows look like."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decodekit.chain import Chain, Part
from decodekit.shortlist import Shortlist
from decodekit.testing import context
from decodekit.traits import traits_of
from decodekit_processors.cutoffs import EpsilonLogitsWarper, EtaLogitsWarper
from decodekit_processors.mirostat import MirostatLogitsWarper
from decodekit_processors.scale import TemperatureLogitsWarper
from decodekit_processors.sigma import TopNSigmaLogitsWarper
from decodekit_processors.toph import TopHLogitsWarper
from decodekit_processors.truncation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from decodekit_processors.typical import TypicalLogitsWarper
from decodekit_processors.xtc import XTCLogitsWarper
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from .shared import rows_of_scores

WIDE = 151_936


some_scores = rows_of_scores([1, 2, 3, 20, 64, 65, 300, 1024, 1500, 9001] * 4 + [WIDE], 3, WIDE)
shares = st.sampled_from([0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.999]) | st.floats(0.001, 0.999)
keeps = st.sampled_from([1, 1, 1, 2, 70])


@st.composite
def truncations(draw: st.DrawFn) -> Any:
    """One of them, with options that are neither off nor usual."""
    share, keep = draw(shares), draw(keeps)
    return draw(
        st.sampled_from(
            [
                TypicalLogitsWarper(share, min_tokens_to_keep=keep),
                TopHLogitsWarper(share),
                EpsilonLogitsWarper(share, min_tokens_to_keep=keep),
                EpsilonLogitsWarper(share / 1000, min_tokens_to_keep=keep),
                EtaLogitsWarper(share, min_tokens_to_keep=keep),
                EtaLogitsWarper(share / 1000, min_tokens_to_keep=keep),
                TopNSigmaLogitsWarper(share * 5, min_tokens_to_keep=keep),
                XTCLogitsWarper(1.0, share / 2),
                MirostatLogitsWarper(share * 6),
                TopPLogitsWarper(share, min_tokens_to_keep=keep),
                MinPLogitsWarper(share, min_tokens_to_keep=keep),
                TopKLogitsWarper(int(share * 99) + 1, min_tokens_to_keep=keep),
            ]
        )
    )


def chain(scores: Tensor, *items: Any) -> Chain:
    ctx = context(torch.zeros(scores.shape[0], 1, dtype=torch.long))
    bound = [(item, item.bind(ctx)) for item in items]
    return Chain([Part(type(o).__name__, "test", r, traits_of(o), "test") for o, r in bound if r is not None])


def dense(scores: Tensor | Shortlist) -> Tensor:
    return scores.dense() if isinstance(scores, Shortlist) else scores


@settings(max_examples=400, deadline=None)
@given(some_scores, truncations(), truncations(), st.sampled_from([0.4, 1.0, 2.5]))
def test_two_truncations_on_the_shortlist_equal_the_dense_ones(
    scores: Tensor, first: Any, second: Any, temperature: float
) -> None:
    both = chain(scores, TemperatureLogitsWarper(temperature), first, second)
    ids, before = torch.zeros(scores.shape[0], 1, dtype=torch.long), scores.clone()
    got, want = both(ids, scores), both.dense(ids, scores)
    assert torch.equal(dense(got), want)
    assert torch.equal(scores, before)
    assert (want > -torch.inf).any(-1).all(), "a filter emptied a row"
    if isinstance(got, Shortlist):
        assert (got.values[:, 1:] <= got.values[:, :-1]).all()
        assert all(len(set(row)) == len(row) for row in got.ids.tolist())


@settings(max_examples=150, deadline=None)
@given(some_scores, truncations())
def test_rows_do_not_depend_on_their_neighbours(scores: Tensor, item: Any) -> None:
    ids = torch.zeros(scores.shape[0], 1, dtype=torch.long)
    batch = chain(scores, item)(ids, scores)
    for row in range(len(scores)):
        here = slice(row, row + 1)
        assert torch.equal(dense(chain(scores[here], item)(ids[here], scores[here])), dense(batch)[here])


@settings(max_examples=150, deadline=None)
@given(some_scores, truncations(), st.sampled_from([math.nan, math.inf, -math.inf]), st.booleans())
def test_broken_rows_pass_and_leave_the_others_alone(scores: Tensor, item: Any, bad: float, whole: bool) -> None:
    spoilt = torch.cat([scores, scores[:1]])
    if whole or bad == -math.inf:
        spoilt[-1] = bad
    else:
        spoilt[-1, scores.shape[-1] // 2] = bad
    ids = torch.zeros(len(spoilt), 1, dtype=torch.long)
    both = chain(spoilt, item)
    want = chain(scores, item).dense(ids[:-1], scores)
    for got in (dense(both(ids, spoilt)), both.dense(ids, spoilt)):
        assert torch.equal(got[:-1], want)
        if math.isnan(bad):
            assert got[-1].isnan().any()
        elif bad == math.inf:
            assert (got[-1] == math.inf).any()
        else:
            assert (got[-1] == -math.inf).all()


@pytest.mark.parametrize("spread", [0.02, 1.0, 3.0, 6.0])
def test_wide_rows_by_the_definition(spread: float) -> None:
    """Against full sorts in float64, where no token is so near to the cut that rounding decides."""
    scores = torch.randn(2, WIDE, generator=torch.Generator().manual_seed(3)) * spread
    p = scores.double().softmax(-1)
    h = torch.special.entr(p).sum(-1, keepdim=True)
    ids = scores.long()[:, :1]

    def kept(item: Any) -> Tensor:
        return item(ids, scores) > -math.inf

    far = (-p.log() - h).abs()
    order = far.sort(-1)
    sums = p.gather(-1, order.indices).cumsum(-1)
    for mass in (0.2, 0.9):
        last = (sums < mass).sum(-1, keepdim=True)
        assert (kept(TypicalLogitsWarper(mass)) != (far <= order.values.gather(-1, last))).sum() <= 4
    for epsilon in (3e-4, 0.1):
        best = p == p.amax(-1, keepdim=True)
        assert torch.equal(kept(EpsilonLogitsWarper(epsilon)), (p >= epsilon) | best)
        eta = (math.sqrt(epsilon) * (-h).exp()).clamp(max=epsilon)
        assert torch.equal(kept(EtaLogitsWarper(epsilon)), (p >= eta) | best)
    std = scores.double().std(-1, correction=0, keepdim=True)
    assert torch.equal(kept(TopNSigmaLogitsWarper(1.5)), scores >= scores.amax(-1, keepdim=True) - 1.5 * std)


def test_a_sum_that_meets_the_mass_exactly_ends_the_typical_set() -> None:
    """Three quarters of the weight at one score, one quarter at another: a mass of 0.75 is the first group alone."""
    low = next(x for i in range(-8, 9) if (x := torch.tensor(-math.log(4)) + i * 2**-23).exp() == 0.25)
    for scale in (1, 4096):  # narrow rows are sorted, wide ones searched in buckets
        scores = torch.cat([torch.zeros(1, 3 * scale), low.repeat(1, 4 * scale)], dim=-1)
        ids = scores.long()
        for mass, want in ((0.75, 3), (0.76, 7), (0.1, 3)):
            assert (TypicalLogitsWarper(mass)(ids, scores) > -math.inf).sum() == want * scale


def test_light_tokens_on_the_far_side_may_be_nearer_to_the_entropy_than_the_best_one() -> None:
    """One token surprises too little, 3,000 about as expected, 6,000 somewhat too much: the best one goes first."""
    groups = ((1, 0.11), (3000, 0.86), (6000, 0.03))
    scores = torch.cat([torch.full((1, count), math.log(share / count)) for count, share in groups], dim=-1)
    kept = TypicalLogitsWarper(0.875)(scores.long(), scores) > -math.inf
    assert kept[0, :1].tolist() == [False]
    assert kept[0, 1:].all()
    assert torch.equal(dense(chain(scores, TypicalLogitsWarper(0.875))(scores.long(), scores)) > -math.inf, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("vocab", [37, 9000])
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_other_dtypes_work_and_stay(dtype: torch.dtype, vocab: int, spread: float) -> None:
    scores = (torch.randn(3, vocab, generator=torch.Generator().manual_seed(1)) * spread).to(dtype)
    ids = torch.zeros(3, 1, dtype=torch.long)
    for item in (
        TypicalLogitsWarper(0.7), TypicalLogitsWarper(0.7, min_tokens_to_keep=3), TopHLogitsWarper(0.6),
        EpsilonLogitsWarper(1e-3), EtaLogitsWarper(1e-3), TopNSigmaLogitsWarper(1.0), XTCLogitsWarper(1.0, 0.02),
        MirostatLogitsWarper(3.0), TopPLogitsWarper(0.8), MinPLogitsWarper(0.2), TopKLogitsWarper(9),
    ):  # fmt: skip
        both = chain(scores, item)
        got, want = dense(both(ids, scores)), both.dense(ids, scores)
        assert torch.equal(got, want)
        assert got.dtype == dtype
        assert (want > -math.inf).any(-1).all()
        assert ((want == scores) | (want == -math.inf)).all()
        if dtype is torch.float64:  # float32 keeps the same but for what it cannot tell
            narrow = chain(scores, item).dense(ids, scores.float())
            assert ((narrow > -math.inf) != (want > -math.inf)).sum() <= 3
    warm = TemperatureLogitsWarper(0.8, 0.5)(ids, scores)
    assert warm.dtype == dtype
    assert warm.isfinite().all()
