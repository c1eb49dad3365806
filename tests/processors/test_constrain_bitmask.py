"""Packed bits do what a dense bool mask does, whatever the vocabulary, dense or on a shortlist."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs
import pytest
import torch
from decodekit import GenerationError, generate
from decodekit.shortlist import Shortlist
from decodekit.testing import ProcessorContract, ScriptedLM, context, score_cases
from decodekit.traits import Traits
from decodekit_processors.bitmask import BitmaskConstraint, apply, pack, shorten, unpack, words
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor


def mask_of(rows: int, vocab: int, seed: int, share: float = 0.5) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(rows, vocab, generator=random) < share


@given(
    vocab=st.integers(1, 300), rows=st.integers(1, 4), seed=st.integers(0, 99), share=st.sampled_from([0, 0.1, 0.9, 1])
)
def test_packed_equals_dense(vocab: int, rows: int, seed: int, share: float) -> None:
    allowed = mask_of(rows, vocab, seed, share)
    bits = pack(allowed)
    assert bits.dtype == torch.int32
    assert bits.shape == (rows, words(vocab)) == (rows, math.ceil(vocab / 32))
    assert torch.equal(unpack(bits, vocab), allowed)
    assert torch.equal(unpack(bits[0], vocab), allowed[0])
    for scores in score_cases(rows, vocab, seed).values():
        before = scores.clone()
        assert torch.equal(apply(scores, bits), scores.masked_fill(~allowed, -torch.inf))
        assert torch.equal(scores, before)
        values, ids = scores.topk(min(vocab, 9))
        short = shorten(Shortlist(values, ids, vocab), bits)
        assert torch.equal(short.dense(), Shortlist(values, ids, vocab).dense().masked_fill(~allowed, -torch.inf))
        assert (short.values[:, 1:] <= short.values[:, :-1]).all()


@pytest.mark.parametrize("vocab", [32, 33, 1000, 32000, 50257, 151936])
def test_bits_stand_where_the_documentation_says(vocab: int) -> None:
    for token in {0, 31 % vocab, vocab // 2, vocab - 1}:
        bits = torch.zeros(1, words(vocab), dtype=torch.int32)
        # 1 << 31 as an int32 is its lowest number.
        bits[0, token // 32] = 1 << token % 32 if token % 32 < 31 else -(1 << 31)
        assert unpack(bits, vocab).nonzero().tolist() == [[0, token]]
        assert torch.equal(pack(unpack(bits, vocab)), bits)


def test_bits_beyond_the_vocabulary_and_views_do_not_matter() -> None:
    full = torch.full((2, 6), -1, dtype=torch.int32)
    assert unpack(full[:, ::2], 70).all()
    assert unpack(full[:, ::2], 70).shape == (2, 70)


@pytest.mark.parametrize("bits", [torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int64)])
def test_words_that_do_not_fit_are_refused(bits: Tensor) -> None:
    with pytest.raises(ValueError, match="bitmask must"):
        apply(torch.zeros(2, 70), bits) if bits.dtype == torch.int64 else shorten(
            Shortlist(torch.zeros(2, 4), torch.arange(4).expand(2, 4), 70), bits
        )
    with pytest.raises(ValueError, match=r"int32 \[..., 3\] for a vocabulary of 70"):
        apply(torch.zeros(2, 70), bits)


# -- the class ------------------------------------------------------------------------------------------


class Turns:
    """A rule with state: after token t the tokens t + 1 .. t + 3 may come, modulo the vocabulary."""

    def __init__(self, last: list[int], vocab: int) -> None:
        self.last, self.vocab, self.past = last, vocab, []

    def fill(self, bits: Tensor, row: int, /) -> None:
        allowed = torch.zeros(self.vocab, dtype=torch.bool)
        allowed[[(self.last[row] + step) % self.vocab for step in (1, 2, 3)]] = True
        bits.copy_(pack(allowed))

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        self.past.append(list(self.last))
        for place, new in zip(range(len(self.last)) if rows is None else rows.tolist(), tokens.tolist(), strict=True):
            self.last[place] = new[-1] if isinstance(new, list) else new

    def rollback(self, steps: int, /) -> None:
        for _ in range(steps):
            self.last = self.past.pop()

    def reorder(self, rows: Tensor, /) -> None:
        self.last = [self.last[i] for i in rows.tolist()]


@attrs.frozen
class TakeTurns:
    """What a third party writes."""

    traits: ClassVar[Traits] = BitmaskConstraint.traits

    def bind(self, ctx: Any, /) -> BitmaskConstraint:
        return BitmaskConstraint(Turns(ctx.input_ids[:, -1].tolist(), ctx.spec.vocab_size), ctx)


class TestConstraint(ProcessorContract):
    def make(self) -> Any:
        return TakeTurns()


class Nothing:
    def fill(self, bits: Tensor, row: int, /) -> None:
        if row == 0:
            bits.fill_(-1)


def test_abilities_are_those_of_the_rule() -> None:
    ctx = context(rows=2)
    assert all(hasattr(BitmaskConstraint(Turns([1, 2], 37), ctx), name) for name in ("accept", "rollback", "reorder"))
    assert not any(hasattr(BitmaskConstraint(Nothing(), ctx), name) for name in ("accept", "rollback", "reorder"))
    bits = BitmaskConstraint(Turns([1, 35], 37), ctx).filled()
    assert [row.nonzero()[:, 0].tolist() for row in unpack(bits, 37)] == [[2, 3, 4], [0, 1, 36]]


def test_it_steers_a_run_and_an_empty_row_is_named() -> None:
    model = ScriptedLM(torch.arange(37.0)[None])
    keys = {"max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0}
    assert generate(model, [[3], [5]], logits_processor=[TakeTurns()], **keys)[:, 1:].tolist() == [
        [6, 9, 12, 15],
        [8, 11, 14, 17],
    ]

    @attrs.frozen
    class Empty:
        traits: ClassVar[Traits] = BitmaskConstraint.traits

        def bind(self, ctx: Any, /) -> BitmaskConstraint:
            return BitmaskConstraint(Nothing(), ctx)

    with pytest.raises(GenerationError, match=r"'Empty' .* leaves no token to choose \(row 1, step 0\)"):
        generate(model, [[3], [5]], logits_processor=[Empty()], **keys)
