"""Guidance over a doubled batch (MusicGen, Dia) next to transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit.testing import ProcessorContract, score_cases
from decodekit_processors.families.dia import (
    DiaClassifierFreeGuidanceLogitsProcessor,
)
from decodekit_processors.families.musicgen import ClassifierFreeGuidanceLogitsProcessor
from torch import Tensor

from .shared import SIZES, both, ids_of, scores_of

reference = pytest.importorskip("transformers.generation.logits_process")


class _Doubled(ProcessorContract):
    """The suite with two rows of scores for each row of tokens; a row of the result is not one of the scores."""

    def cases(self) -> dict[str, Tensor]:
        return score_cases(2 * self.rows, self.vocab_size)

    def test_shape_and_dtype_stay(self) -> None:
        for name, scores in self.cases().items():
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                result = self.run(self.tokens(), scores.to(dtype))
                assert (result.shape, result.dtype) == ((self.rows, self.vocab_size), dtype), name
                assert not result.isnan().any(), f"{name}: NaN made of numbers"

    def test_nan_rows_do_not_crash(self) -> None:
        scores = self.cases()["random"]
        scores[1, 3] = torch.nan
        scores[self.rows, 4] = torch.nan
        scores[2] = -torch.inf
        result = self.run(self.tokens(), scores)
        assert result[1, 3].isnan()
        assert result[0, 4].isnan()

    def test_padding_is_never_history(self) -> None:
        """It reads no tokens, so no padding either; one row alone has another batch of scores."""
        assert not self.traits.reads_history

    def test_reorder_moves_rows(self) -> None:
        scores, rows = self.cases()["random"], torch.tensor([3, 1, 1, 0])
        moved = scores[torch.cat([rows, rows + self.rows])]
        assert torch.equal(self.run(self.tokens(), moved), self.run(self.tokens(), scores)[rows])

    def test_a_row_depends_on_its_two_rows_only(self) -> None:
        for scores in self.cases().values():
            whole = self.run(self.tokens(), scores)
            for row in range(self.rows):
                pair = scores[[row, row + self.rows]]
                assert torch.equal(self.run(self.tokens()[row : row + 1], pair), whole[row : row + 1])


class TestBatchedGuidance(_Doubled):
    def make(self) -> Any:
        return ClassifierFreeGuidanceLogitsProcessor(3.0)


class TestDiaGuidance(_Doubled):
    def make(self) -> Any:
        return DiaClassifierFreeGuidanceLogitsProcessor(3.0)


class TestDiaGuidanceTopK(_Doubled):
    def make(self) -> Any:
        return DiaClassifierFreeGuidanceLogitsProcessor(2.0, 5)


FINITE = ("random", "flat", "peaked", "negative")


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("scale", [1.1, 2, 3.0, 15.5])
def test_guidance_on_random_scores(vocab: int, scale: float) -> None:
    pairs = [both(ClassifierFreeGuidanceLogitsProcessor, scale)]
    pairs += [both(DiaClassifierFreeGuidanceLogitsProcessor, scale, k) for k in (None, 1, 3, vocab)]
    for seed in range(8):
        for scores in scores_of(64, vocab, seed, FINITE):
            before = scores.clone()
            for mine, theirs in pairs:
                assert torch.equal(mine(ids_of(32, 3), scores), theirs(ids_of(32, 3), scores))
            assert torch.equal(scores, before)


def test_guidance_where_a_token_is_ruled_out() -> None:
    """transformers makes NaN of a token that both halves rule out, and +inf of the other half's doing."""
    inf = torch.inf
    scores = torch.tensor([[1.0, -inf, -inf, 2.0], [0.5, -inf, 1.0, -inf]])
    one = ids_of(1, 2)
    assert reference.ClassifierFreeGuidanceLogitsProcessor(3)(one, scores).isnan().any()
    assert ClassifierFreeGuidanceLogitsProcessor(3)(one, scores).tolist() == [[2.0, -inf, -inf, 2.0]]
    assert DiaClassifierFreeGuidanceLogitsProcessor(3)(one, scores).tolist() == [[2.5, -inf, -inf, 2.0]]
    assert DiaClassifierFreeGuidanceLogitsProcessor(3, 1)(one, scores).tolist() == [[1.0, -inf, -inf, -inf]]
    # Ties at the k-th place stay together, and a k above the vocabulary keeps it all.
    flat = torch.zeros(2, 4)
    assert DiaClassifierFreeGuidanceLogitsProcessor(3, 2)(one, flat).tolist() == [[0.0] * 4]
    assert DiaClassifierFreeGuidanceLogitsProcessor(3, 99)(one, scores)[0, 3] == 2.0


@pytest.mark.parametrize("kind", [ClassifierFreeGuidanceLogitsProcessor, DiaClassifierFreeGuidanceLogitsProcessor])
def test_guidance_says_what_is_wrong(kind: Any) -> None:
    for scale in (1, 1.0, 0.3, -2):
        with pytest.raises(ValueError, match="greater than 1"):
            kind(scale)
    for rows in (1, 3, 4):
        with pytest.raises(
            ValueError, match=f"two rows for each of the 1 rows of tokens.*got {rows if rows > 2 else 1}"
        ):
            kind(2.0)(ids_of(1, 2), torch.zeros(rows, 5))
    with pytest.raises(ValueError, match="at least 1"):
        DiaClassifierFreeGuidanceLogitsProcessor(2.0, 0)
