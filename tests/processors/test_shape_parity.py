"""typical_p, top_h, epsilon_cutoff and eta_cutoff keep the tokens that transformers' classes keep."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decodekit.testing import score_cases
from decodekit_processors.cutoffs import EpsilonLogitsWarper, EtaLogitsWarper
from decodekit_processors.toph import TopHLogitsWarper
from decodekit_processors.typical import TypicalLogitsWarper
from torch import Tensor

reference = pytest.importorskip("transformers.generation.logits_process")

ROWS = 48
SIZES = (2, 7, 50, 400, 9000)
MORE = [{}, {"min_tokens_to_keep": 4}, {"filter_value": -123.0}]


def scores_of(vocab: int) -> list[tuple[str, Tensor]]:
    """Scores of all kinds; in the larger vocabularies fewer rows."""
    rows = ROWS if vocab < 9000 else 4
    return [(name, scores) for seed in range(2) for name, scores in score_cases(rows, vocab, seed).items()]


def both(ours: type, *args: Any, **more: Any) -> tuple[Any, Any]:
    return ours(*args, **more), getattr(reference, ours.__name__)(*args, **more)


def differing(mine: Any, theirs: Any, scores: Tensor) -> Tensor:
    """Where two results differ: bool [B, V]."""
    ids = torch.zeros(len(scores), 1, dtype=torch.long)
    got, want = mine(ids, scores), theirs(ids, scores)
    assert got.dtype == want.dtype
    kept = got == scores
    assert ((got == scores) | (got == mine.filter_value)).all()
    assert (kept & (scores > -math.inf)).any(-1).all()
    return (got != want) & ~(got.isnan() & want.isnan())


def exact(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities and entropies [B, 1] in float64."""
    p = scores.double().softmax(-1)
    return p, torch.special.entr(p).sum(-1, keepdim=True)


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("epsilon", [1e-6, 3e-4, 0.01, 0.2, 0.9])
@pytest.mark.parametrize("more", MORE, ids=str)
def test_epsilon_cutoff(vocab: int, epsilon: float, more: dict[str, Any]) -> None:
    mine, theirs = both(EpsilonLogitsWarper, epsilon, **more)
    for name, scores in scores_of(vocab):
        off = differing(mine, theirs, scores)
        p, _ = exact(scores)
        assert ((p / epsilon - 1).abs() < 2e-5)[off].all(), name


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("epsilon", [1e-6, 3e-4, 0.01, 0.2, 0.9])
@pytest.mark.parametrize("more", MORE, ids=str)
def test_eta_cutoff(vocab: int, epsilon: float, more: dict[str, Any]) -> None:
    mine, theirs = both(EtaLogitsWarper, epsilon, **more)
    for name, scores in scores_of(vocab):
        off = differing(mine, theirs, scores)
        p, h = exact(scores)
        eta = (math.sqrt(epsilon) * (-h).exp()).clamp(max=epsilon)
        assert ((p / eta - 1).abs() < 1e-4)[off].all(), name


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("share", [0.01, 0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("more", [{}, {"filter_value": -123.0}], ids=str)
def test_top_h(vocab: int, share: float, more: dict[str, Any]) -> None:
    mine, theirs = both(TopHLogitsWarper, share, **more)
    for name, scores in scores_of(vocab):
        off = differing(mine, theirs, scores)
        if not off.any():
            continue
        # Differences are ties at the cut, all of which stay here; sums that float32 cannot tell from the goal; and
        # tokens without weight: of those transformers drops what is 0 in float32.
        best = scores.topk(min(100, vocab))
        p, h = exact(best.values)
        sums = torch.special.entr(p).cumsum(-1)
        before = torch.zeros_like(scores, dtype=torch.float64).scatter(-1, best.indices, sums)
        doubtful = (before - share * h).abs() < 1e-5 * h.clamp(min=1)
        own = scores.double().sub(scores.amax(-1, keepdim=True)) < -80
        cut = scores.masked_fill(mine(scores.long(), scores) != scores, math.inf).amin(-1, keepdim=True)
        assert (doubtful | own | (scores == cut))[off].all(), name


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("mass", [0.01, 0.2, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("more", MORE, ids=str)
def test_typical_p(vocab: int, mass: float, more: dict[str, Any]) -> None:
    mine, theirs = both(TypicalLogitsWarper, mass, **more)
    for name, scores in scores_of(vocab):
        off = differing(mine, theirs, scores)
        if not off.any():
            continue
        # Float32 rounds distances to about 1e-6 and their order with it: a token may be kept or dropped for another
        # that is as far away, or where the mass before it is the goal.
        p, h = exact(scores)
        far = (-p.log() - h).abs()
        here = far.masked_fill(~off, 0.0)
        rounding = 4e-6 * (1 + h + scores.double().abs().masked_fill(scores == -math.inf, 0).amax(-1, keepdim=True))
        order = far.sort(-1)
        before = p.gather(-1, order.indices).cumsum(-1) - p.gather(-1, order.indices)
        edge = order.values.masked_fill((before - mass).abs() > 1e-5, math.nan)
        kept = far.masked_fill(mine(scores.long(), scores) != scores, -math.inf).amax(-1, keepdim=True)
        near_edge = ((here - kept).abs() <= rounding) | _near(here, edge, rounding)
        nothing = (p == 0) & (len(more) > 0)
        assert (near_edge | nothing)[off].all(), (name, vocab, mass)


def _near(far: Tensor, edges: Tensor, rounding: Tensor) -> Tensor:
    """Whether each distance [B, V] is within the rounding of one between the least and greatest edge of its row."""
    low = edges.nan_to_num(nan=math.inf).amin(-1, keepdim=True)
    high = edges.nan_to_num(nan=-math.inf).amax(-1, keepdim=True)
    return (far >= low - rounding) & (far <= high + rounding)


def test_the_comparison_would_notice_another_option() -> None:
    scores = score_cases(ROWS, 400)["random"]
    for ours, one, other in (
        (TypicalLogitsWarper, 0.5, 0.52),
        (TopHLogitsWarper, 0.5, 0.52),
        (EpsilonLogitsWarper, 0.01, 0.011),
        (EtaLogitsWarper, 0.01, 0.011),
    ):
        assert differing(ours(one), getattr(reference, ours.__name__)(other), scores).any()


# -- differences on purpose --------------------------------------------------------------------------


def test_all_tokens_that_tie_at_the_cut_of_top_h_stay() -> None:
    scores = torch.zeros(1, 6)
    kept = TopHLogitsWarper(0.5)(scores.long(), scores) == 0
    assert kept.all()
    theirs = reference.TopHLogitsWarper(0.5)(scores.long(), scores) == 0
    assert 0 < theirs.sum() < 6
    # The kept set does not depend on the order of the ids.
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    scores = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0, -1.0]])
    straight = TopHLogitsWarper(0.6)(scores.long(), scores)
    assert torch.equal(TopHLogitsWarper(0.6)(scores.long(), scores[:, order]), straight[:, order])


def test_top_h_of_all_the_entropy_keeps_all_of_the_hundred() -> None:
    """In transformers the rounding of a sum can drop the last one."""
    scores = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    assert ((TopHLogitsWarper(1.0)(scores.long(), scores) > -math.inf).sum(-1) == 100).all()


@pytest.mark.parametrize("off", [TypicalLogitsWarper(1.0), EpsilonLogitsWarper(0.0), EtaLogitsWarper(0)], ids=str)
def test_the_values_that_mean_off_are_accepted(off: Any) -> None:
    """They are the defaults of a configuration; transformers' constructors refuse them."""
    scores = torch.randn(2, 9)
    assert off(scores.long(), scores) is scores
    with pytest.raises(ValueError, match="has to be"):
        getattr(reference, type(off).__name__)(getattr(off, off.knob))
