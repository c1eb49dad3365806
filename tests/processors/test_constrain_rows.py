"""Forcing, forbidding and minimum lengths inside a run: every row as if it were alone, and what options are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decodekit import GenerationConfig, generate
from decodekit.errors import ConfigError
from decodekit.testing import ProcessorContract, TinyLM, context
from decodekit_processors.decay import ExponentialDecayLengthPenalty
from decodekit_processors.forced import ForcedBOSTokenLogitsProcessor, ForcedEOSTokenLogitsProcessor
from decodekit_processors.lengths import MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor
from decodekit_processors.normalize import InfNanRemoveLogitsProcessor, LogitNormalization
from decodekit_processors.suppress import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor
from hypothesis import given
from hypothesis import strategies as st

PADDED = torch.tensor([[0, 0, 0, 5], [0, 0, 5, 6], [3, 4, 5, 6]])
MASK = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1], [1, 1, 1, 1]]).bool()
VOCAB = 11


def steps(options: Any, count: int, rows: int | None = None, **more: Any) -> list[torch.Tensor]:
    """Scores after each of `count` steps that append token 9, for all three rows or for one of them alone."""
    if rows is None:
        tokens, mask = PADDED, MASK
    else:
        tokens, mask = PADDED[rows : rows + 1, 4 - int(MASK[rows].sum()) :], None
    ctx = context(tokens, mask, vocab_size=VOCAB, **more)
    runtime = options.bind(ctx)
    found = []
    for _ in range(count):
        scores = torch.linspace(-2, 3, VOCAB).expand(ctx.rows, VOCAB).contiguous()
        found.append(scores if runtime is None else runtime(ctx.input_ids, scores))
        ctx.reserve(ctx.length + 1)
        ctx.tokens[:, ctx.length] = 9
        ctx.length += 1
        if hasattr(runtime, "accept"):
            runtime.accept(torch.full((ctx.rows,), 9), None)
    return found


OPTIONS = [
    MinLengthLogitsProcessor(5),
    MinNewTokensLengthLogitsProcessor(None, 2),
    SuppressTokensLogitsProcessor([1, 2]),
    SuppressTokensAtBeginLogitsProcessor([1, 2]),
    SuppressTokensAtBeginLogitsProcessor([1, 2], begin_index=4),
    ForcedBOSTokenLogitsProcessor(7),
    ForcedEOSTokenLogitsProcessor(6, 2),
    ForcedEOSTokenLogitsProcessor(6, [2, 3]),
    ExponentialDecayLengthPenalty((1, 1.5)),
    InfNanRemoveLogitsProcessor(),
    LogitNormalization(),
]


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_every_row_is_as_if_alone(options: Any) -> None:
    together = steps(options, 7)
    for row in range(3):
        for step, (batch, alone) in enumerate(zip(together, steps(options, 7, row), strict=True)):
            assert torch.equal(batch[row : row + 1], alone), (row, step)


# -- where they act ------------------------------------------------------------------------------------


def acts(options: Any, count: int, **more: Any) -> list[list[int]]:
    """The steps at which each row is changed."""
    plain = torch.linspace(-2, 3, VOCAB)
    found = steps(options, count, **more)
    return [[i for i, scores in enumerate(found) if not torch.equal(scores[row], plain)] for row in range(3)]


def test_forced_tokens_come_at_their_place_in_every_row() -> None:
    assert acts(ForcedBOSTokenLogitsProcessor(7), 4) == [[0], [], []]
    assert acts(ForcedEOSTokenLogitsProcessor(6, 2), 8) == [[4], [3], [1]]
    scores = steps(ForcedEOSTokenLogitsProcessor(6, [2, 3]), 5)[4][0]
    assert scores[[2, 3]].tolist() == [0, 0]
    assert scores.isneginf().sum() == VOCAB - 2
    assert ForcedBOSTokenLogitsProcessor(7).bind(context(PADDED, vocab_size=VOCAB)) is None


def test_the_last_token_is_that_of_each_row() -> None:
    """max_length counts real tokens, so rows end at different widths; max_new_tokens may be one for each prompt."""
    forced = ForcedEOSTokenLogitsProcessor(None, 2)
    assert acts(forced, 9, max_length=9) == [[4], [4], [4]]
    for keys, limit, want in [
        ({"max_length": 6}, 9, [[4], [3], [1]]),
        ({"max_new_tokens": 3}, 7, [[2], [2], [2]]),
        ({"max_new_tokens": (3, 1, 2)}, 7, [[2], [0], [1]]),
        ({"max_length": (6, 3, 8)}, 9, [[4], [0], [3]]),
        # Replaced by a rule that was passed: only the run's limit is known.
        ({"max_new_tokens": 3}, 12, [[7], [7], [7]]),
        # Another rule ends all rows earlier.
        ({"max_new_tokens": (3, 1, 5)}, 6, [[1], [0], [1]]),
    ]:
        ctx = context(PADDED, MASK, vocab_size=VOCAB, **{k: v for k, v in keys.items() if k != "max_length"})
        if "max_length" in keys:
            from decodekit.settings import Value

            ctx.settings.values["max_length"] = Value("max_length", keys["max_length"], "call", "test")
        ctx.max_length = limit
        runtime, found = forced.bind(ctx), [[], [], []]
        for step in range(9):
            scores = runtime(torch.cat([PADDED, torch.full((3, step), 9)], 1), torch.ones(3, VOCAB))
            for row in range(3):
                if not scores[row].isfinite().all():
                    found[row].append(step)
        assert found == want, keys


def test_forced_tokens_that_cannot_come_are_refused() -> None:
    ctx = context(PADDED, MASK, vocab_size=VOCAB, max_length=9, suppress_tokens=(2, 3))
    with pytest.raises(ConfigError, match="token 11 is outside the model's vocabulary of 11"):
        ForcedEOSTokenLogitsProcessor(None, 11).bind(ctx)
    with pytest.raises(ConfigError, match="token 99 is outside"):
        ForcedBOSTokenLogitsProcessor(99).bind(ctx)
    with pytest.raises(ConfigError, match="forced_eos_token_id: forces 2, 3, which suppress_tokens forbids"):
        ForcedEOSTokenLogitsProcessor(None, (2, 3)).bind(ctx)
    assert ForcedEOSTokenLogitsProcessor(None, (2, 4)).bind(ctx) is not None
    ctx.max_length = None
    with pytest.raises(ConfigError, match="nothing limits the length"):
        ForcedEOSTokenLogitsProcessor(None, 4).bind(ctx)


def test_the_beginning_is_that_of_each_row() -> None:
    assert acts(SuppressTokensAtBeginLogitsProcessor([1]), 3) == [[0], [0], [0]]
    assert acts(SuppressTokensAtBeginLogitsProcessor([1]), 3, forced_bos_token_id=7) == [[1], [0], [0]]
    assert acts(SuppressTokensAtBeginLogitsProcessor([1], 4), 5) == [[3], [2], [0]]
    for options in (
        SuppressTokensAtBeginLogitsProcessor([1], 0),
        SuppressTokensAtBeginLogitsProcessor([99]),
        SuppressTokensLogitsProcessor([99, -1]),
        SuppressTokensLogitsProcessor([]),
    ):
        assert options.bind(context(PADDED, MASK, vocab_size=VOCAB)) is None


def test_what_is_off_is_left_out() -> None:
    ctx, silent = context(PADDED, vocab_size=VOCAB), context(PADDED, vocab_size=VOCAB, eos=())
    assert InfNanRemoveLogitsProcessor(False).bind(ctx) is None
    assert LogitNormalization(False).bind(ctx) is None
    assert ExponentialDecayLengthPenalty((1, 1.0)).bind(ctx) is None
    assert ExponentialDecayLengthPenalty((1, 1.5)).bind(silent) is None
    assert ExponentialDecayLengthPenalty((1, 1.5)).bind(ctx) is not None
    assert MinNewTokensLengthLogitsProcessor(None, (0, 0, 0)).bind(ctx) is None
    assert MinLengthLogitsProcessor((1, 2, 4)).bind(context(PADDED, MASK, vocab_size=VOCAB)) is None


# -- some for each prompt ------------------------------------------------------------------------------


def test_lists_for_each_prompt_reach_their_rows() -> None:
    """Copies of a prompt share its own; called alone, rows are counted."""
    model = TinyLM().eval()
    ids = torch.tensor([[5, 6], [7, 8]])
    keys: dict[str, Any] = {"max_new_tokens": 3, "eos_token_id": 2, "output_scores": True, "num_return_sequences": 2}
    lists = {"suppress_tokens": [[3, 4], [5]], "begin_suppress_tokens": [[], [6]]}
    decay = {"exponential_decay_length_penalty": [[0, 1.5], [1, 2.0]], "do_sample": True, "seed": 0}
    for config in (GenerationConfig(**lists, **decay), GenerationConfig.from_dict(GenerationConfig(**lists).to_dict())):
        first, second, *_ = generate(model, ids, config, return_dict_in_generate=True, do_sample=True, **keys).scores
        gone = [[token for token in range(2, 8) if row[token] == -torch.inf] for row in first]
        assert gone == [[3, 4], [3, 4], [5, 6], [5, 6]]
        assert [int(row.isneginf().sum()) for row in second] == [2, 2, 1, 1]
    scores = torch.zeros(2, VOCAB)
    got = SuppressTokensLogitsProcessor(lists["suppress_tokens"])(ids, scores)
    assert got.isneginf().nonzero().tolist() == [[0, 3], [0, 4], [1, 5]]
    got = SuppressTokensAtBeginLogitsProcessor(lists["begin_suppress_tokens"], 2)(ids, scores)
    assert got.isneginf().nonzero().tolist() == [[1, 6]]
    got = ExponentialDecayLengthPenalty([[0, 1.5], [1, 2.0]], 2, 1)(torch.zeros(2, 3).long(), scores - 1)
    assert got[:, 2].tolist() == [-1 + 1.5**2 - 1, -1 + 2 - 1]


def test_lists_that_do_not_fit_are_refused() -> None:
    for cls in (SuppressTokensLogitsProcessor, SuppressTokensAtBeginLogitsProcessor):
        with pytest.raises(ValueError, match="or one such list for each prompt, got 4"):
            cls([[3], 4])
        with pytest.raises(ValueError, match="or one such list for each prompt, got 'a'"):
            cls([[3], ["a"]])
        with pytest.raises(ValueError, match="has 2 lists for 3 rows"):
            cls([[3], [4]], 4)(PADDED, torch.zeros(3, VOCAB))
    for wrong in ([[1, 1.5], 3], [[1, 1.5], [1]], [], [[1, 1.5, 3]]):
        with pytest.raises(ValueError, match="or a list with such a pair for each prompt"):
            ExponentialDecayLengthPenalty(wrong)
    with pytest.raises(ValueError, match="has 2 values for 3 rows"):
        ExponentialDecayLengthPenalty([[1, 1.5], [1, 1.5]], 2, 1)(PADDED, torch.zeros(3, VOCAB))
    with pytest.raises(ConfigError, match="suppress_tokens forbids"):
        generate(TinyLM().eval(), PADDED[:2, :1], suppress_tokens=[[3], [5]], forced_bos_token_id=5, max_new_tokens=1)


# -- B03: negative scores ------------------------------------------------------------------------------


def test_b03_the_end_becomes_likelier_where_its_score_is_negative() -> None:
    scores = torch.full((1, 4), -3.0)
    result = ExponentialDecayLengthPenalty((0, 1.5), 2, 1)(torch.zeros(1, 3).long(), scores)
    assert result[0].tolist() == pytest.approx([-3, -3, -3 + 3 * (1.5**2 - 1), -3])


def test_decay_stays_a_number_however_long_the_text() -> None:
    """There factor ** steps is an OverflowError after some thousand tokens."""
    for factor, sign in ((2.0, 1), (1e300, 1), (1e-9, 1)):
        options = ExponentialDecayLengthPenalty((0, factor), 2, 1)
        result = options(torch.zeros(1, 5000).long(), torch.full((1, 4), 2.0))
        assert not result.isnan().any()
        assert (result[0, 2] >= 2) == (factor > 1) == (sign * factor > 1)


def test_infinite_ends_stay_as_they_are() -> None:
    scores = torch.tensor([[0.0, -math.inf, math.inf, 1.0]])
    result = ExponentialDecayLengthPenalty((0, 1.5), [1, 2], 1)(torch.zeros(1, 5).long(), scores)
    assert torch.equal(result, scores)


# -- one value, or end tokens, for each prompt ---------------------------------------------------------


@given(
    least=st.tuples(*[st.integers(0, 9)] * 3),
    key=st.sampled_from(
        [MinLengthLogitsProcessor, lambda n, eos=None: MinNewTokensLengthLogitsProcessor(None, n, eos)]
    ),
    eos=st.sampled_from([None, (3, 4), 5]),
)
def test_a_minimum_for_each_row_is_that_rows_own(least: tuple[int, ...], key: Any, eos: Any) -> None:
    together = steps(key(least, eos), 10)
    for row in range(3):
        for batch, alone in zip(together, steps(key(least[row], eos), 10, row), strict=True):
            assert torch.equal(batch[row : row + 1], alone)


@given(order=st.lists(st.integers(0, 2), min_size=3, max_size=3), when=st.integers(0, 4))
def test_minima_move_with_their_rows(order: list[int], when: int) -> None:
    ctx = context(PADDED, MASK, vocab_size=VOCAB, eos=(2, 3), eos_token_id=((2,), (3,), (2, 3)))
    rows = torch.tensor(order)
    for options in (
        MinLengthLogitsProcessor((3, 5, 6)),
        MinNewTokensLengthLogitsProcessor(None, (1, 3, 2)),
        ExponentialDecayLengthPenalty((0, 2.0)),
    ):
        runtime = options.bind(ctx)
        ids = torch.cat([PADDED, torch.full((3, when), 9)], 1)
        before = runtime(ids, torch.ones(3, VOCAB))
        runtime.reorder(rows)
        assert torch.equal(runtime(ids[rows], torch.ones(3, VOCAB)), before[rows])


def test_end_tokens_of_each_prompt_are_forbidden_in_its_rows_only() -> None:
    ctx = context(PADDED, MASK, vocab_size=VOCAB, eos=(2, 3, 4), eos_token_id=((2,), (3, 4), ()))
    result = MinNewTokensLengthLogitsProcessor(None, 3).bind(ctx)(PADDED, torch.ones(3, VOCAB))
    assert [row.isneginf().nonzero()[:, 0].tolist() for row in result] == [[2], [3, 4], []]
    result = ExponentialDecayLengthPenalty((0, 2.0)).bind(ctx)(torch.cat([PADDED, PADDED[:, :1]], 1), torch.ones(3, 11))
    assert [(row > 1).nonzero()[:, 0].tolist() for row in result] == [[2], [3, 4], []]
    # Several rows of one prompt share its list.
    ctx.slots = (0, 0, 1)
    ctx.settings.values.clear()
    ctx = context(PADDED, MASK, vocab_size=VOCAB, eos=(2, 3), eos_token_id=((2,), (3,)))
    ctx.slots = (0, 0, 1)
    result = MinNewTokensLengthLogitsProcessor(None, 3).bind(ctx)(PADDED, torch.ones(3, VOCAB))
    assert [row.isneginf().nonzero()[:, 0].tolist() for row in result] == [[2], [2], [3]]


def test_minima_alone_count_columns() -> None:
    for options in (MinLengthLogitsProcessor((4, 5), 2), MinNewTokensLengthLogitsProcessor(1, (3, 4), 2)):
        result = options(torch.zeros(2, 4).long(), torch.ones(2, VOCAB))
        assert result.isneginf().any(-1).tolist() == [False, True]
        with pytest.raises(ValueError, match="2 values for 3 rows"):
            options(torch.zeros(3, 4).long(), torch.ones(3, VOCAB))
    with pytest.raises(ValueError, match="2 values for 3 prompts"):
        MinLengthLogitsProcessor((4, 5)).bind(context(PADDED))


# -- what is refused -----------------------------------------------------------------------------------

REFUSED = [
    (SuppressTokensLogitsProcessor, {"suppress_tokens": "abc"}, "list of token ids"),
    (SuppressTokensLogitsProcessor, {"suppress_tokens": [1, 2.5]}, "got 2.5"),
    (SuppressTokensLogitsProcessor, {"suppress_tokens": [True]}, "got True"),
    (SuppressTokensAtBeginLogitsProcessor, {"begin_suppress_tokens": [1], "begin_index": -1}, "at least 0"),
    (ForcedBOSTokenLogitsProcessor, {"bos_token_id": -1}, "at least 0"),
    (ForcedBOSTokenLogitsProcessor, {"bos_token_id": 1.5}, "whole number"),
    (ForcedEOSTokenLogitsProcessor, {"max_length": 5, "eos_token_id": -1}, "0 or more"),
    (ForcedEOSTokenLogitsProcessor, {"max_length": 5, "eos_token_id": []}, "one token id or several"),
    (ForcedEOSTokenLogitsProcessor, {"max_length": 0, "eos_token_id": 2}, "at least 1"),
    (ExponentialDecayLengthPenalty, {"exponential_decay_length_penalty": 3}, "pair"),
    (ExponentialDecayLengthPenalty, {"exponential_decay_length_penalty": (1.5, 2.0)}, "number of tokens"),
    (ExponentialDecayLengthPenalty, {"exponential_decay_length_penalty": (-1, 2.0)}, "number of tokens"),
    (ExponentialDecayLengthPenalty, {"exponential_decay_length_penalty": (1, 0.0)}, "factor above 0"),
    (ExponentialDecayLengthPenalty, {"exponential_decay_length_penalty": (1, math.inf)}, "factor above 0"),
    (MinLengthLogitsProcessor, {"min_length": (3, -1)}, "at least 0, got -1"),
    (MinLengthLogitsProcessor, {"min_length": ()}, "empty"),
]


@pytest.mark.parametrize(("cls", "options", "words"), REFUSED, ids=lambda x: getattr(x, "__name__", str(x)))
def test_b35_values_out_of_range_are_refused(cls: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cls(**options)


# -- what has nothing to do in the kit's usual context --------------------------------------------------


class TestForcedBos(ProcessorContract):
    prompt_width = 1
    width = 1

    def make(self) -> Any:
        return ForcedBOSTokenLogitsProcessor(7)


class TestForcedBosBehindPadding(ProcessorContract):
    prompt_width = 4
    width = 4

    def make(self) -> Any:
        return ForcedBOSTokenLogitsProcessor(7)
