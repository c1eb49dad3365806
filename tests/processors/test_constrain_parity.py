"""The same scores as transformers' classes for the same constructor arguments, on many random rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit.testing import score_cases
from decodekit_processors.decay import ExponentialDecayLengthPenalty
from decodekit_processors.forced import ForcedBOSTokenLogitsProcessor, ForcedEOSTokenLogitsProcessor
from decodekit_processors.normalize import InfNanRemoveLogitsProcessor, LogitNormalization
from decodekit_processors.prefix import PrefixConstrainedLogitsProcessor
from decodekit_processors.suppress import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor
from torch import Tensor

reference = pytest.importorskip("transformers.generation.logits_process")

ROWS = 32
SIZES = (7, 50, 5000)
WIDTHS = (1, 2, 5, 11)


def ids_of(width: int, vocab: int = 7) -> Tensor:
    return torch.randint(0, vocab, (ROWS, width), generator=torch.Generator().manual_seed(width))


def both(ours: type, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    return ours(*args, **kwargs), getattr(reference, ours.__name__)(*args, **kwargs)


def assert_equal(mine: Any, theirs: Any, vocab: int) -> int:
    """Compare on all kinds of scores; the number of results that differ from what went in."""
    changed = 0
    for seed in range(2):
        for scores in score_cases(ROWS, vocab, seed).values():
            for width in WIDTHS:
                ids = ids_of(width, vocab)
                want, got = theirs(ids, scores.clone()), mine(ids, scores)
                assert torch.equal(got, want)
                changed += not torch.equal(got, scores)
    return changed


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize(
    "ids", [[3], [0, 6, 3, 3], [2, 9999], [-1, 4], (1, 2), range(6), torch.tensor([1, 5])], ids=str
)
def test_suppress(vocab: int, ids: Any) -> None:
    assert assert_equal(*both(SuppressTokensLogitsProcessor, ids), vocab)


def test_suppress_nothing() -> None:
    assert assert_equal(*both(SuppressTokensLogitsProcessor, [-1]), 50) == 0
    assert assert_equal(SuppressTokensLogitsProcessor([]), lambda ids, scores: scores, 50) == 0


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("begin", [1, 2, 5])
def test_suppress_at_begin(vocab: int, begin: int) -> None:
    assert assert_equal(*both(SuppressTokensAtBeginLogitsProcessor, [0, 3, 6, 600], begin), vocab)


@pytest.mark.parametrize("vocab", SIZES)
def test_forced_bos(vocab: int) -> None:
    assert assert_equal(*both(ForcedBOSTokenLogitsProcessor, 5), vocab)


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("eos", [2, [2], [5, 0], torch.tensor([3, 4])], ids=str)
@pytest.mark.parametrize("length", [2, 6, 12, 40])
def test_forced_eos(vocab: int, eos: Any, length: int) -> None:
    assert (assert_equal(*both(ForcedEOSTokenLogitsProcessor, length, eos), vocab) > 0) == (length < 40)


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("eos", [2, [2], [5, 0], torch.tensor([3, 4])], ids=str)
@pytest.mark.parametrize("rule", [(0, 1.5), (3, 1.01), (1, 0.5), (1, 2), (10, 1.5)])
@pytest.mark.parametrize("prompt", [0, 1, 4])
def test_decay(vocab: int, eos: Any, rule: tuple[int, float], prompt: int) -> None:
    last = rule[0] + prompt >= max(WIDTHS)
    assert (assert_equal(*both(ExponentialDecayLengthPenalty, rule, eos, prompt), vocab) > 0) == (not last)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_remove_invalid_values(dtype: torch.dtype) -> None:
    mine, theirs = both(InfNanRemoveLogitsProcessor)
    for scores in score_cases(ROWS, 50).values():
        scores = scores.to(dtype)
        scores[0, 1], scores[1, 2], scores[2, 3] = torch.nan, torch.inf, -torch.inf
        got = mine(ids_of(3), scores)
        assert torch.equal(got, theirs(ids_of(3), scores))
        assert got.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("vocab", SIZES)
def test_normalization(vocab: int, dtype: torch.dtype) -> None:
    mine, theirs = both(LogitNormalization)
    for scores in score_cases(ROWS, vocab).values():
        got, want = mine(ids_of(3), scores.to(dtype)), theirs(ids_of(3), scores.to(dtype))
        assert got.dtype == dtype
        if dtype in (torch.float32, torch.float64):
            torch.testing.assert_close(got, want)
            assert (got.double().exp().sum(-1) - 1).abs().max() < 1e-5
        else:
            # There a half-precision row is summed in half precision; ours rounds once, at the end.
            exact = scores.to(dtype).double().log_softmax(-1)
            torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=1e-5)


def allowed(prompt: int, ids: Tensor) -> list[int]:
    """A few tokens, of which some rows find all forbidden already."""
    return [(int(ids.sum()) + prompt * k) % 7 for k in range(1 + prompt % 3)]


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("beams", [1, 2, 4])
def test_prefix_constrained(vocab: int, beams: int) -> None:
    """With the rows in which everything allowed is forbidden already, where a score of 0 keeps the constraint."""
    assert assert_equal(*both(PrefixConstrainedLogitsProcessor, allowed, beams), vocab)


def test_prefix_constrained_saves_only_groups_in_which_all_are_dead() -> None:
    mine, theirs = both(PrefixConstrainedLogitsProcessor, lambda prompt, ids: [3], 2)
    scores = torch.zeros(4, 7)
    scores[0, 3] = scores[2, 3] = scores[3, 3] = -torch.inf
    got = mine(ids_of(2)[:4], scores)
    assert torch.equal(got, theirs(ids_of(2)[:4], scores))
    assert got.isneginf().all(-1).tolist() == [True, False, False, False]


def test_what_needs_the_run_says_so_alone() -> None:
    ids, scores = ids_of(3), torch.zeros(ROWS, 7)
    for item, word in [
        (SuppressTokensAtBeginLogitsProcessor([3]), "begin_index"),
        (ForcedEOSTokenLogitsProcessor(eos_token_id=3), "max_length"),
        (ExponentialDecayLengthPenalty((0, 1.5)), "eos_token_id"),
    ]:
        with pytest.raises(ValueError, match=word):
            item(ids, scores)
    for item in (ForcedBOSTokenLogitsProcessor(99), ForcedEOSTokenLogitsProcessor(2, 99)):
        with pytest.raises(ValueError, match="cannot force token 99: the vocabulary has 7"):
            item(ids[:, :1], scores)
