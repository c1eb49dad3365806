"""The same numbers as transformers' classes for the same constructor arguments, on thousands of random rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit.testing import score_cases
from decodekit_processors.lengths import MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor
from decodekit_processors.penalties import RepetitionPenaltyLogitsProcessor
from decodekit_processors.scale import TemperatureLogitsWarper
from decodekit_processors.truncation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from torch import Tensor

reference = pytest.importorskip("transformers.generation.logits_process")

ROWS = 64
SIZES = (2, 7, 50, 400, 5000)


def scores_of(vocab: int, seed: int) -> list[Tensor]:
    """Finite and -inf-heavy scores without ties; ties have their own tests."""
    cases = score_cases(ROWS, vocab, seed)
    return [cases[name] for name in ("random", "flat", "peaked", "negative", "mostly -inf", "one token")]


def ids_of(vocab: int, seed: int, width: int = 12) -> Tensor:
    return torch.randint(0, vocab, (ROWS, width), generator=torch.Generator().manual_seed(seed))


def both(ours: type, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return ours(*args, **kwargs), getattr(reference, ours.__name__)(*args, **kwargs)


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 1.9, 50.0])
def test_temperature(vocab: int, temperature: float) -> None:
    mine, theirs = both(TemperatureLogitsWarper, temperature)
    for scores in scores_of(vocab, 0):
        assert torch.equal(mine(ids_of(vocab, 1), scores), theirs(ids_of(vocab, 1), scores))


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("k", [1, 2, 5, 50, 399, 10_000])
@pytest.mark.parametrize("more", [{}, {"min_tokens_to_keep": 3}, {"filter_value": -123.0}], ids=str)
def test_top_k_keeps_the_same_tokens(vocab: int, k: int, more: dict[str, Any]) -> None:
    mine, theirs = both(TopKLogitsWarper, k, **more)
    for seed in range(2):
        tied = list(score_cases(ROWS, vocab, seed).values())
        for scores in tied:
            assert torch.equal(mine(ids_of(vocab, 1), scores), theirs(ids_of(vocab, 1), scores))


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("p", [0.0, 0.01, 0.3, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("more", [{}, {"min_tokens_to_keep": 4}, {"filter_value": -123.0}], ids=str)
def test_top_p_keeps_the_same_tokens(vocab: int, p: float, more: dict[str, Any]) -> None:
    mine, theirs = both(TopPLogitsWarper, p, **more)
    for seed in range(2):
        for scores in scores_of(vocab, seed):
            got, want = mine(ids_of(vocab, 1), scores), theirs(ids_of(vocab, 1), scores)
            differs = (got != want).any(-1)
            if not differs.any():
                continue
            # Both may only differ where float32 cannot tell whether the mass before a token reaches p, or where
            # tokens tie at the cut (ours keeps all of those).
            exact = scores[differs].double().softmax(-1)
            doubtful = (got != want)[differs] & scores[differs].isfinite()
            ordered = exact.sort(-1, descending=True)
            before = (ordered.values.cumsum(-1) - ordered.values).gather(-1, ordered.indices.argsort(-1))
            cut = scores.masked_fill(got != scores, torch.inf).amin(-1, keepdim=True)
            tied = scores == cut
            ties = (tied & (tied.sum(-1, keepdim=True) > 1))[differs]
            fine = (before - p).abs() < 2e-6 * (1 + vocab / 1000)
            assert (fine | ties)[doubtful].all(), (vocab, p, before[doubtful])


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("p", [0.0, 0.001, 0.05, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("more", [{}, {"min_tokens_to_keep": 4}, {"filter_value": -123.0}], ids=str)
def test_min_p_keeps_the_same_tokens(vocab: int, p: float, more: dict[str, Any]) -> None:
    mine, theirs = both(MinPLogitsWarper, p, **more)
    for seed in range(2):
        for scores in scores_of(vocab, seed):
            got, want = mine(ids_of(vocab, 1), scores), theirs(ids_of(vocab, 1), scores)
            if torch.equal(got, want):
                continue
            odds = (scores.double() - scores.double().amax(-1, keepdim=True)).exp()
            rounding = (odds - p).abs() < 2e-6 * p
            # -inf tokens among the kept ones are ranked by nothing but chance: masking one changes no choice.
            nothing = (scores == -torch.inf) & (len(more) > 0)
            assert (rounding | nothing)[got != want].all(), (vocab, p)


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 7.0])
@pytest.mark.parametrize("ignore", [None, 0, 3, 50])
def test_repetition_penalty(vocab: int, penalty: float, ignore: int | None) -> None:
    mine, theirs = both(RepetitionPenaltyLogitsProcessor, penalty, ignore)
    for seed in range(2):
        for scores in scores_of(vocab, seed):
            for extra in (0, 5):  # ids above the head are ignored
                ids = ids_of(vocab + extra, seed)
                assert torch.equal(mine(ids, scores), theirs(ids, scores))


def test_repetition_penalty_with_a_length_for_each_row() -> None:
    ignore = torch.arange(ROWS) % 12
    mine, theirs = both(RepetitionPenaltyLogitsProcessor, 1.7, ignore)
    for scores in scores_of(50, 3):
        assert torch.equal(mine(ids_of(50, 3), scores), theirs(ids_of(50, 3), scores))


def test_repetition_penalty_with_one_token_for_each_row() -> None:
    mine, theirs = both(RepetitionPenaltyLogitsProcessor, 1.7)
    scores, ids = score_cases(ROWS, 50)["random"], ids_of(50, 0)[:, 0]
    assert torch.equal(mine(ids, scores), theirs(ids, scores))


@pytest.mark.parametrize("eos", [2, [2], [2, 5], [2, 400], torch.tensor([3, 4])], ids=str)
@pytest.mark.parametrize("least", [0, 5, 12, 13])
def test_minimum_lengths(eos: Any, least: int) -> None:
    pairs = [both(MinLengthLogitsProcessor, least, eos), both(MinNewTokensLengthLogitsProcessor, 4, least, eos, "cpu")]
    for mine, theirs in pairs:
        for scores in scores_of(50, 1):
            assert torch.equal(mine(ids_of(50, 1), scores), theirs(ids_of(50, 1), scores))
