"""Log-probabilities: in place where the scores are the chain's own, and on lists."""

from __future__ import annotations

import pytest
import torch
from decodekit.shortlist import Shortlist
from decodekit.testing import score_cases
from decodekit_processors.normalize import LogitNormalization
from torch import Tensor

VOCABS = [1, 7, 37, 8192, 50_257]


def rows(vocab: int, *deviations: float) -> Tensor:
    random = torch.Generator().manual_seed(vocab)
    return torch.stack([torch.randn(vocab, generator=random) * deviation for deviation in deviations])


def normal(scores: Tensor, own: bool = False) -> Tensor:
    return LogitNormalization().edit(torch.zeros(len(scores), 1, dtype=torch.long), scores, own)


@pytest.mark.parametrize("vocab", VOCABS)
def test_they_are_log_probabilities_with_the_same_bits_in_place(vocab: int) -> None:
    for scores in (rows(vocab, 0.0, 0.1, 1.0, 3.0, 6.0, 30.0, 1e30), rows(vocab, 3.0)):
        before = scores.clone()
        got, exact = normal(scores), scores.double().log_softmax(-1)
        assert torch.equal(scores, before)
        torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=5e-6)
        assert (got <= 0).all()
        assert normal(scores, True) is scores
        assert torch.equal(scores, got)
        for row in range(len(before)):
            assert torch.equal(normal(before[row : row + 1])[0], got[row]), "it depends on its neighbours"


@pytest.mark.parametrize(
    "strided", [lambda s: s.t().contiguous().t(), lambda s: torch.cat([s, s], -1)[:, : s.shape[-1]]]
)
def test_in_place_however_rows_lie_in_memory(strided: object) -> None:
    want = normal(rows(8192, 1.0, 3.0, 6.0))
    scores = strided(rows(8192, 1.0, 3.0, 6.0))  # type: ignore[operator]
    assert torch.equal(normal(scores, True), want)
    assert torch.equal(scores, want)


def test_what_no_sum_can_be_taken_of() -> None:
    scores = rows(8192, 1.0, 1.0, 1.0, 1.0)
    scores[0], scores[1, 5], scores[2, 5] = -torch.inf, torch.nan, torch.inf
    for got in (normal(scores), normal(scores.clone(), True)):
        assert got[:3].isnan().any(-1).all()
        assert torch.equal(got[3:], normal(scores[3:]))


def test_one_token_alone_is_certain() -> None:
    scores = torch.full((2, 8192), -torch.inf)
    scores[0, 7], scores[1, 9] = 0.1, -31.7
    got = normal(scores)
    assert got[0, 7] == got[1, 9] == 0
    assert int((got > -torch.inf).sum()) == 2


@pytest.mark.parametrize("vocab", VOCABS)
def test_a_list_keeps_the_same_tokens_with_the_same_log_probabilities(vocab: int) -> None:
    for scores in score_cases(3, vocab).values():
        for size in (1, 50, 1024):
            values, ids = scores.topk(min(size, vocab))
            short = Shortlist(values, ids, vocab)
            got, want = LogitNormalization().shorten(ids, short).dense(), normal(short.dense())
            assert torch.equal(got > -torch.inf, want > -torch.inf)
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6, equal_nan=True)
