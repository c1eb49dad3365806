"""Work on the shortlist gives bit for bit what work on the whole vocabulary gives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decodekit.chain import Chain, Part
from decodekit.shortlist import Shortlist
from decodekit.testing import context
from decodekit.traits import traits_of
from decodekit_processors import nucleus
from decodekit_processors.listing import largest
from decodekit_processors.scale import TemperatureLogitsWarper
from decodekit_processors.truncation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from .shared import rows_of_scores


def chain(*items: Any) -> Chain:
    ctx = context()
    bound = [(item, item.bind(ctx)) for item in items]
    return Chain([Part(type(o).__name__, "test", r, traits_of(o), "test") for o, r in bound if r is not None])


def dense(scores: Tensor | Shortlist) -> Tensor:
    return scores.dense() if isinstance(scores, Shortlist) else scores


some_scores = rows_of_scores([1, 2, 3, 20, 63, 64, 65, 300, 1024, 1500, 9001], 4)
temperatures = st.sampled_from([0.3, 1.0, 1.7])
ks = st.sampled_from([0, 1, 2, 5, 50, 100, 2000])
ps = st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.999, 1.0]) | st.floats(0, 1)
least = st.sampled_from([1, 1, 1, 2, 70])


@settings(max_examples=400, deadline=None)
@given(some_scores, temperatures, ks, ps, ps, least)
def test_chain_on_the_shortlist_equals_the_dense_chain(
    scores: Tensor, temperature: float, k: int, top_p: float, min_p: float, keep: int
) -> None:
    both = chain(
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(k, min_tokens_to_keep=keep),
        TopPLogitsWarper(top_p, min_tokens_to_keep=keep),
        MinPLogitsWarper(min_p, min_tokens_to_keep=keep),
    )
    ids = torch.zeros(scores.shape[0], 1, dtype=torch.long)
    before = scores.clone()
    got, want = both(ids, scores), both.dense(ids, scores)
    assert torch.equal(dense(got), want)
    assert torch.equal(scores, before)
    assert (want > -torch.inf).any(-1).all()


@settings(max_examples=200, deadline=None)
@given(some_scores, ps, least, st.sampled_from(["p", "m", "k"]))
def test_truncated_rows_do_not_depend_on_their_neighbours(scores: Tensor, p: float, keep: int, kind: str) -> None:
    make = {"p": TopPLogitsWarper, "m": MinPLogitsWarper, "k": lambda x, **kw: TopKLogitsWarper(int(x * 99), **kw)}
    item = make[kind](p, min_tokens_to_keep=keep)
    ids = torch.zeros(scores.shape[0], 1, dtype=torch.long)
    batch = item(ids, scores)
    for row in range(len(scores)):
        here = slice(row, row + 1)
        assert torch.equal(item(ids[here], scores[here]), batch[here])
        short = item.open_shortlist(ids[here], scores[here])
        assert short is None or torch.equal(short.dense(), batch[here])


@settings(max_examples=200, deadline=None)
@given(some_scores, ps, least)
def test_top_p_is_the_smallest_set_that_holds_p(scores: Tensor, p: float, keep: int) -> None:
    """Against the definition, by full sort in float64; equal scores share their fate."""
    got = TopPLogitsWarper(p, min_tokens_to_keep=keep)(scores.long(), scores) > -torch.inf
    if p == 1:
        return
    weight = (scores - scores.amax(-1, keepdim=True)).exp().double()
    ordered, place = scores.sort(-1, descending=True)
    sums = weight.gather(-1, place).cumsum(-1)
    for row in range(len(scores)):
        last = min(max(int((sums[row] < p * sums[row, -1]).sum()), keep - 1), scores.shape[-1] - 1)
        if not torch.equal(got[row], (scores[row] >= ordered[row, last]) & (scores[row] > -torch.inf)):
            # Sums in another order may round the other way where a sum meets p exactly.
            kept = (weight[row] * got[row]).sum() / weight[row].sum()
            assert math.isclose(kept, p, rel_tol=1e-9), (row, kept, p)


@pytest.mark.parametrize("vocab", [1, 5, 64, 1000, 4096, 32_001, 50_257])
@pytest.mark.parametrize("k", [1, 2, 64, 1024])
def test_the_largest_scores_are_found_block_by_block(vocab: int, k: int) -> None:
    random = torch.Generator().manual_seed(vocab + k)
    k = min(k, vocab)
    plain = torch.randn(3, vocab, generator=random)
    for scores in (plain, plain.round(), torch.zeros(3, vocab), plain.masked_fill(plain < 2, -torch.inf)):
        values, ids = largest(scores, k)
        assert torch.equal(values, scores.topk(k).values)
        assert torch.equal(scores.gather(-1, ids), values)
        assert all(len(set(row)) == k for row in ids.tolist())
    spoilt = plain.clone()
    spoilt[1, vocab // 2] = torch.nan
    assert largest(spoilt, k)[0].isnan().any(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9, 0.999999])
@pytest.mark.parametrize("spread", [0.0, 1e-6, 0.02, 1.0, 40.0])
def test_wide_nuclei_are_cut_where_a_full_sort_cuts(p: float, spread: float) -> None:
    random = torch.Generator().manual_seed(7)
    for half in (False, True):
        scores = torch.randn(2, 20_000, generator=random) * spread
        scores = scores.bfloat16().float() if half else scores
        values = scores.sort(-1, descending=True).values
        assert torch.equal(nucleus.dense_cut(scores, p, 1), nucleus.list_cut(values, p, 1))


def test_ties_with_the_last_kept_token_survive_in_every_form() -> None:
    scores = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0, 0.0]])
    assert (TopKLogitsWarper(3)(scores.long(), scores) > -torch.inf).tolist() == [[True, True, True, True, True, False]]
    even = torch.zeros(1, 4)
    assert (TopPLogitsWarper(0.5)(even.long(), even) > -torch.inf).all()
    assert (MinPLogitsWarper(1.0)(even.long(), even) > -torch.inf).all()


def test_ties_wider_than_the_shortlist_fall_back_to_the_dense_form() -> None:
    scores = torch.zeros(2, 9000)
    assert TopKLogitsWarper(50).open_shortlist(scores.long(), scores) is None
    scores[:, :70] = 1.0
    short = TopKLogitsWarper(50).open_shortlist(scores.long(), scores)
    assert short is not None
    assert int((short.values > -torch.inf).sum()) == 140


def test_a_finite_filter_value_works_on_dense_scores_only() -> None:
    item = TopPLogitsWarper(0.5, filter_value=-99.0)
    bound = item.bind(context())
    assert not hasattr(bound, "shorten")
    assert not hasattr(bound, "open_shortlist")
    scores = torch.tensor([[0.0, 5.0, 1.0]])
    assert bound(scores.long(), scores).tolist() == [[-99.0, 5.0, -99.0]]
    with pytest.raises(ValueError, match=r"filter_value=-99\.0"):
        item.shorten(scores.long(), Shortlist(scores, scores.long(), 3))
