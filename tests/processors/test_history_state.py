"""What is kept from step to step equals what a search through the whole text finds, whatever the run did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit.context import BindContext
from decodekit.testing import context
from decodekit_processors.dry import LONGEST, DRYLogitsProcessor
from decodekit_processors.ngrams import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor
from decodekit_processors.penalties import RepetitionPenaltyLogitsProcessor
from decodekit_processors.repeats import (
    EncoderRepetitionPenaltyLogitsProcessor,
    FrequencyPenaltyLogitsProcessor,
    PresencePenaltyLogitsProcessor,
)
from decodekit_processors.words import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

VOCAB, PROMPT = 11, 4
KINDS: dict[str, Callable[..., Any]] = {
    "no_repeat": NoRepeatNGramLogitsProcessor,
    "encoder_no_repeat": EncoderNoRepeatNGramLogitsProcessor,
    "repetition": RepetitionPenaltyLogitsProcessor,
    "encoder_repetition": EncoderRepetitionPenaltyLogitsProcessor,
    "frequency": FrequencyPenaltyLogitsProcessor,
    "presence": PresencePenaltyLogitsProcessor,
    "dry": lambda value: DRYLogitsProcessor(value, dry_allowed_length=1, dry_sequence_breakers=(2,)),
    "dry, near": lambda value: DRYLogitsProcessor(
        value, dry_allowed_length=2, dry_penalty_last_n=5, dry_sequence_breakers=()
    ),
    "bias": lambda value: SequenceBiasLogitsProcessor({(1, 2): value, (3, 1, 2): 1.0, (0,): -1.0}),
    "bad words": lambda value: NoBadWordsLogitsProcessor([[1, 1], [0, 3, 2], [3, 3]]),
}
VALUES: dict[str, tuple[Any, Any, Any]] = {
    "no_repeat": (1, 2, 3), "encoder_no_repeat": (1, 0, 3), "repetition": (1.5, 1.0, 0.5),
    "encoder_repetition": (1.5, 1.0, 0.5), "frequency": (0.5, 0.0, -1.0), "presence": (0.5, 0.0, -1.0),
    "dry": (0.5, 0.0, 2.0), "dry, near": (0.5, 0.0, 2.0),
}  # fmt: skip


class Rows:
    """A run as plain lists: for each row its prompt and its steps."""

    def __init__(self, prompts: list[list[int]], values: list[Any]) -> None:
        self.prompts, self.steps, self.values = prompts, [[] for _ in prompts], values  # type: ignore[var-annotated]

    def fresh(self, kind: str, row: int) -> Tensor:
        """What a runtime made for this row alone, unpadded, gives after all of its steps."""
        made = [token for step in self.steps[row] for token in step]
        ids = torch.tensor([self.prompts[row] + made])
        ctx = context(ids, vocab_size=VOCAB, prompt_width=len(self.prompts[row]), eos=())
        runtime = KINDS[kind](self.values[row]).bind(ctx)
        scores = base()
        return scores if runtime is None else runtime(ids, scores)  # type: ignore[no-any-return]


def base() -> Tensor:
    return torch.linspace(-2, 3, VOCAB)[None]


def grow(ctx: BindContext, new: Tensor) -> None:
    width = ctx.length
    ctx.reserve(width + new.shape[1])
    ctx.tokens[:, width : width + new.shape[1]] = new
    ctx.length = width + new.shape[1]


@pytest.mark.parametrize(
    ("kind", "per_row"),
    [(kind, False) for kind in KINDS] + [(kind, True) for kind in VALUES],
    ids=lambda x: {False: "one value", True: "each its own"}.get(x, x),
)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_schedule_equals_a_fresh_search(kind: str, per_row: bool, data: st.DataObject) -> None:
    """Accepts of one or several tokens, rollbacks across rows that traded places (and were copied), padded prompts."""
    number = st.integers(0, 4)
    prompts = [data.draw(st.lists(number, min_size=1, max_size=PROMPT)) for _ in range(3)]
    pad = data.draw(st.integers(0, 4))
    pads = [PROMPT - len(prompt) for prompt in prompts]
    ids = torch.tensor([[pad] * n + prompt for n, prompt in zip(pads, prompts, strict=True)])
    mask = torch.arange(PROMPT) >= torch.tensor(pads)[:, None]
    first = VALUES.get(kind, (1.5,))[0]
    values = VALUES[kind] if per_row else (first,) * 3
    plain = Rows(prompts, list(values))
    ctx = context(ids, mask if any(pads) else None, vocab_size=VOCAB, eos=(), pad=pad)
    runtime = KINDS[kind](values if per_row else first).bind(ctx)
    done: list[int] = []
    for _ in range(data.draw(st.integers(1, 10))):
        what = data.draw(st.sampled_from(["accept", "accept", "several", "back", "reorder"]))
        if what == "back" and done:
            steps = data.draw(st.integers(1, len(done)))
            ctx.length -= sum(done[len(done) - steps :])
            del done[len(done) - steps :]
            plain.steps = [row[: len(row) - steps] for row in plain.steps]
            if hasattr(runtime, "rollback"):
                runtime.rollback(steps)
        elif what == "reorder":
            order = data.draw(st.lists(st.integers(0, 2), min_size=3, max_size=3))
            plain.prompts = [plain.prompts[i] for i in order]
            plain.steps, plain.values = [list(plain.steps[i]) for i in order], [plain.values[i] for i in order]
            ctx.reorder(torch.tensor(order))
            if hasattr(runtime, "reorder"):
                runtime.reorder(torch.tensor(order))
        elif what in ("accept", "several"):
            count = 1 if what == "accept" else 3
            new = torch.tensor(data.draw(st.lists(st.lists(number, min_size=count, max_size=count),
                                                  min_size=3, max_size=3)))  # fmt: skip
            grow(ctx, new)
            done.append(count)
            for row, step in zip(plain.steps, new.tolist(), strict=True):
                row.append(step)
            if hasattr(runtime, "accept"):
                runtime.accept(new[:, 0] if count == 1 else new, None)
        got = runtime(ctx.input_ids.clone(), base().expand(3, -1).clone())
        for row in range(3):
            torch.testing.assert_close(got[row], plain.fresh(kind, row)[0], msg=lambda m: f"{what}, row {row}: {m}")  # noqa: B023


STATEFUL = ["no_repeat", "frequency", "presence", "dry"]


@pytest.mark.parametrize("kind", STATEFUL)
def test_named_rows_and_missing_tokens(kind: str) -> None:
    """Tokens of some rows only, and -1 where a row got fewer: rows go on by themselves."""
    ids = torch.tensor([[1, 3, 1], [3, 1, 3], [1, 1, 1]])
    value = 2 if kind == "no_repeat" else VALUES[kind][2]
    runtime = KINDS[kind](value).bind(context(ids, vocab_size=VOCAB))
    runtime.accept(torch.tensor([[3, 1], [1, -1]]), torch.tensor([2, 0]))
    scores = base().expand(3, -1).clone()
    got = runtime(ids, scores)
    for row, made in enumerate(([1], [], [3, 1])):
        whole = torch.tensor([ids[row].tolist() + made])
        want = KINDS[kind](value).bind(context(whole, vocab_size=VOCAB, prompt_width=3))(whole, base())
        torch.testing.assert_close(got[row], want[0])
    runtime.rollback(1)
    before = KINDS[kind](value).bind(context(ids, vocab_size=VOCAB))(ids, scores)
    assert torch.equal(runtime(ids, scores), before)


@pytest.mark.parametrize("kind", STATEFUL)
def test_copies_of_a_row_go_back_each_by_itself(kind: str) -> None:
    """One of them repeats an n-gram, the other makes a new one: what is undone must be its own."""
    value = 2 if kind == "no_repeat" else VALUES[kind][2]
    ids = torch.tensor([[1, 3, 1]])
    runtime = KINDS[kind](value).bind(context(ids, vocab_size=VOCAB))
    runtime.reorder(torch.tensor([0, 0]))
    for first, second in ((3, 4), (4, 1), (3, 3)):
        runtime.accept(torch.tensor([first, second]), None)
    for made in (([3, 4], [4, 1]), ([3], [4]), ([], [])):
        runtime.rollback(1)
        for row, own in enumerate(made):
            whole = torch.tensor([ids[0].tolist() + own])
            got = runtime(whole.expand(2, -1), base().expand(2, -1).clone())
            want = KINDS[kind](value).bind(context(whole, vocab_size=VOCAB, prompt_width=3))(whole, base())
            torch.testing.assert_close(got[row], want[0])


@pytest.mark.parametrize("kind", STATEFUL)
def test_more_steps_back_than_there_were_is_an_error(kind: str) -> None:
    runtime = KINDS[kind](VALUES[kind][2]).bind(context(torch.tensor([[1, 3]]), vocab_size=VOCAB))
    runtime.accept(torch.tensor([1]), None)
    with pytest.raises(ValueError, match="cannot take 2 steps back: there were 1"):
        runtime.rollback(2)


@pytest.mark.parametrize("kind", ["frequency", "presence", "no_repeat"])
def test_tokens_without_scores_are_passed_over(kind: str) -> None:
    """Ids above the head exist where the embedding is larger."""
    ids = torch.tensor([[3, 1]])
    ctx = context(ids, vocab_size=VOCAB, num_embeddings=99)
    runtime = KINDS[kind](VALUES[kind][0]).bind(ctx)
    for token in (98, 3):
        grow(ctx, torch.tensor([[token]]))
        runtime.accept(torch.tensor([token]), None)
    changed = (runtime(ctx.input_ids, base()) != base())[0].nonzero()[:, 0].tolist()
    assert changed == ([1, 3] if kind == "no_repeat" else [3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_other_dtypes(kind: str, dtype: torch.dtype) -> None:
    """The dtype stays, and the result is that of float64 but for rounding."""
    ids = torch.tensor([[1, 3, 1, 2, 3, 1]])
    exact = KINDS[kind](VALUES.get(kind, (1.5,))[0]).bind(context(ids, vocab_size=VOCAB, prompt_width=2, eos=()))
    scores = base().double().round(decimals=1)
    want, got = exact(ids, scores), exact(ids, scores.to(dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=1e-2)


def test_dry_of_endless_runs_stays_a_number() -> None:
    ids = torch.full((1, 3 * LONGEST), 4)
    for base_ in (1.75, 1e12):
        options = DRYLogitsProcessor(1.0, dry_base=base_, dry_sequence_breakers=())
        for got in (options(ids, base()), options.bind(context(ids, vocab_size=VOCAB))(ids, base())):
            assert got.isfinite().all()
            assert (got != base())[0].nonzero()[:, 0].tolist() == [4]
    # The cap: longer texts cost no more.
    options = DRYLogitsProcessor(1.0, dry_sequence_breakers=())
    assert torch.equal(options(ids, base()), options(ids[:, : 2 * LONGEST], base()))
