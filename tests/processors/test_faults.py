"""Faults known from other implementations, by number, and the options each processor refuses."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decodekit.chain import Chain, Part
from decodekit.errors import ConfigError, Problem
from decodekit.settings import build
from decodekit.shortlist import Shortlist
from decodekit.testing import context
from decodekit.traits import traits_of
from decodekit_plugins.advice import failures
from decodekit_processors.lengths import MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor
from decodekit_processors.penalties import RepetitionPenaltyLogitsProcessor
from decodekit_processors.scale import TemperatureLogitsWarper
from decodekit_processors.truncation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper


def part(options: Any, runtime: Any = None) -> Part:
    return Part(type(options).__name__, "test:it", options if runtime is None else runtime, traits_of(options), "test")


# -- B02: padding is never history -------------------------------------------------------------------

B02_TOKENS = torch.tensor([[0, 0, 7, 9], [4, 5, 7, 9]])
B02_MASK = torch.tensor([[False, False, True, True], [True, True, True, True]])


@pytest.mark.parametrize("eos", [(2,), (0,)], ids=["pad is its own", "pad is eos"])
def test_b02_the_repetition_penalty_does_not_count_padding(eos: tuple[int, ...]) -> None:
    scores = torch.ones(2, 10)
    scores[:, 0] = 2.0
    bound = RepetitionPenaltyLogitsProcessor(1.3).bind(context(B02_TOKENS, B02_MASK, vocab_size=10, eos=eos))
    result = bound(B02_TOKENS, scores)
    assert result[0, 0] == 2.0
    assert (result[0] < scores[0]).nonzero()[:, 0].tolist() == [7, 9]
    assert (result[1] < scores[1]).nonzero()[:, 0].tolist() == [4, 5, 7, 9]


def test_b02_a_real_token_with_the_pad_id_is_penalised() -> None:
    tokens = torch.tensor([[0, 0, 7, 0]])
    bound = RepetitionPenaltyLogitsProcessor(1.3).bind(context(tokens, B02_MASK[:1], vocab_size=10))
    result = bound(tokens, torch.full((1, 10), 2.0))
    assert result[0, 0] == pytest.approx(2.0 / 1.3)
    assert (result < 2).sum() == 2


def test_b02_a_row_of_padding_alone_is_left_as_it_is() -> None:
    tokens, mask = torch.tensor([[9, 9], [3, 3]]), torch.tensor([[False, False], [False, True]])
    bound = RepetitionPenaltyLogitsProcessor(1.3).bind(context(tokens, mask, vocab_size=5, num_embeddings=20))
    result = bound(tokens, torch.full((2, 5), 2.0))
    assert (result[0] == 2).all()
    assert (result[1] < 2).nonzero()[:, 0].tolist() == [3]


@pytest.mark.parametrize("ignore", [2, (2, 3), torch.tensor([2, 3])], ids=str)
def test_b02_the_ignored_prompt_counts_columns(ignore: Any) -> None:
    bound = RepetitionPenaltyLogitsProcessor(1.3, ignore).bind(context(B02_TOKENS, B02_MASK, vocab_size=10))
    result = bound(B02_TOKENS, torch.full((2, 10), 2.0))
    assert (result[0] < 2).nonzero()[:, 0].tolist() == [7, 9]
    assert (result[1] < 2).nonzero()[:, 0].tolist() == ([9] if not isinstance(ignore, int) else [7, 9])


def test_b02_tokens_generated_after_padding_count() -> None:
    ctx = context(B02_TOKENS, B02_MASK, vocab_size=10)
    bound = RepetitionPenaltyLogitsProcessor(1.3).bind(ctx)
    grown = torch.cat([B02_TOKENS, torch.tensor([[0], [1]])], dim=-1)
    result = bound(grown, torch.full((2, 10), 2.0))
    assert (result[0] < 2).nonzero()[:, 0].tolist() == [0, 7, 9]


def test_b02_a_prompt_ignore_length_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="3 numbers for 2 rows"):
        RepetitionPenaltyLogitsProcessor(1.3, (1, 2, 3)).bind(context(B02_TOKENS))
    with pytest.raises(ValueError, match="3 numbers for 2 rows"):
        RepetitionPenaltyLogitsProcessor(1.3, (1, 2, 3))(B02_TOKENS, torch.zeros(2, 10))


# -- B03: negative scores ----------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [[0, 1], [0, 1, 1, 0, 1]], ids=["once", "often"])
def test_b03_a_penalty_lowers_negative_scores_too_and_counts_a_token_once(tokens: list[int]) -> None:
    ids, scores = torch.tensor([tokens]), torch.tensor([[-2.0, 1.0]])
    options = RepetitionPenaltyLogitsProcessor(1.5)
    for runtime in (options, options.bind(context(ids, vocab_size=2))):
        assert runtime(ids, scores)[0].tolist() == pytest.approx([-3.0, 2 / 3])


# -- B06: f(batch)[i] == f(row i) --------------------------------------------------------------------


@pytest.mark.parametrize("item", [TopPLogitsWarper(0.6), MinPLogitsWarper(0.3), TopKLogitsWarper(2)], ids=str)
def test_b06_the_shape_of_one_row_does_not_cut_another(item: Any) -> None:
    scores = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.85, 0.1, 0.03, 0.02]]).log()
    batch = item(scores.long(), scores)
    for row in (0, 1):
        assert torch.equal(item(scores.long()[row : row + 1], scores[row : row + 1])[0], batch[row])
    assert batch[1, 0] == scores[1, 0]


# -- B07: an emptied row is reported with its cause ----------------------------------------------------


def blamed(chain: Chain, input_ids: torch.Tensor, *said: Any) -> BaseException:
    pipeline: Any = SimpleNamespace(context=SimpleNamespace(input_ids=input_ids), chain=chain, selector_name="draw")
    return failures.nothing_left(pipeline, *said)


def test_b07_blame_names_processor_row_and_step() -> None:
    class Forbids:
        def __call__(self, input_ids: Any, scores: Any, /) -> Any:
            return scores.index_fill(0, torch.tensor([1]), -math.inf)

    chain = Chain([part(TemperatureLogitsWarper(0.5)), part(Forbids()), part(TopKLogitsWarper(3))])
    scores = torch.randn(2, 8)
    left = chain(torch.zeros(2, 1).long(), scores)
    assert isinstance(left, Shortlist)
    assert (left.values > -math.inf).any(-1).tolist() == [True, False]
    error = blamed(chain, torch.zeros(2, 1).long(), scores, 1, 3)
    assert all(word in str(error) for word in ("Forbids", "row 1", "step 3"))


def test_b07_a_minimum_that_bans_every_token_is_named() -> None:
    options = MinNewTokensLengthLogitsProcessor(None, 5)
    bound = options.bind(context(torch.tensor([[1, 1]]), vocab_size=2, eos=(0, 1)))
    error = blamed(Chain([part(options, bound)]), torch.tensor([[1, 1]]), torch.zeros(1, 2), 0, 0)
    assert "MinNewTokensLengthLogitsProcessor" in str(error)


# -- B08: raw logits stay as they are -------------------------------------------------------------------


def test_b08_raw_logits_are_never_written() -> None:
    class Writes:
        def __call__(self, input_ids: Any, scores: Any, /) -> Any:
            scores[:, 0] = -math.inf
            return scores

    ids = torch.tensor([[1, 2]])
    ctx = context(ids, vocab_size=8)
    ours = [
        RepetitionPenaltyLogitsProcessor(1.3),
        MinLengthLogitsProcessor(9),
        MinNewTokensLengthLogitsProcessor(None, 9),
        TopKLogitsWarper(2),
        TopPLogitsWarper(0.5),
        MinPLogitsWarper(0.5),
    ]
    chain = Chain(
        [part(o, o.bind(ctx)) for o in ours[:3]] + [part(Writes())] + [part(o, o.bind(ctx)) for o in ours[3:]]
    )
    logits = torch.randn(1, 8)
    before = logits.clone()
    for run in (chain, chain.dense):
        run(ids, logits)
        assert torch.equal(logits, before)
        assert logits.isfinite().all()


# -- B09: every call starts clean ------------------------------------------------------------------------


def test_b09_one_options_object_serves_prompts_of_different_lengths() -> None:
    options = MinNewTokensLengthLogitsProcessor(min_new_tokens=2)
    for width in (3, 5, 3):
        tokens = torch.full((1, width), 4)
        bound = options.bind(context(tokens))
        for new in range(4):
            ids = torch.cat([tokens, torch.full((1, new), 4)], dim=-1)
            assert (bound(ids, torch.zeros(1, 37))[0, 2] == -math.inf) == (new < 2)


# -- B35: what is out of range is refused ------------------------------------------------------------------

REFUSED = [
    (TopPLogitsWarper, {"top_p": 1.7}, r"must be in \[0, 1\], got 1\.7"),
    (TopPLogitsWarper, {"top_p": -0.1}, r"must be in \[0, 1\], got -0\.1"),
    (TopPLogitsWarper, {"top_p": math.nan}, r"must be in \[0, 1\], got nan"),
    (TopKLogitsWarper, {"top_k": -1}, r"must be at least 0 \(0: off\), got -1"),
    (TopKLogitsWarper, {"top_k": 2.5}, "whole number"),
    (TopKLogitsWarper, {"top_k": True}, "whole number"),
    (TopKLogitsWarper, {"top_k": 5, "min_tokens_to_keep": 0}, "at least 1, got 0"),
    (TopKLogitsWarper, {"top_k": 5, "filter_value": math.nan}, "got nan"),
    (MinPLogitsWarper, {"min_p": 1.5}, r"must be in \[0, 1\], got 1\.5"),
    (TemperatureLogitsWarper, {"temperature": 0}, "do_sample=False"),
    (TemperatureLogitsWarper, {"temperature": 0.0}, "do_sample=False"),
    (TemperatureLogitsWarper, {"temperature": -1.0}, r"got -1\.0"),
    (RepetitionPenaltyLogitsProcessor, {"penalty": 0}, "greater than 0, got 0"),
    (RepetitionPenaltyLogitsProcessor, {"penalty": -1.0}, "greater than 0"),
    (RepetitionPenaltyLogitsProcessor, {"penalty": 1.2, "prompt_ignore_length": -1}, "whole number"),
    (MinLengthLogitsProcessor, {"min_length": -1}, "at least 0, got -1"),
    (MinNewTokensLengthLogitsProcessor, {"min_new_tokens": -1}, "at least 0, got -1"),
    (MinNewTokensLengthLogitsProcessor, {"min_new_tokens": 1.5}, "whole number"),
]


@pytest.mark.parametrize(("cls", "options", "words"), REFUSED, ids=lambda x: getattr(x, "__name__", str(x)))
def test_b35_values_out_of_range_are_refused(cls: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cls(**options)
    problems: list[Problem] = []
    assert build(cls, options, "decodekit:it", problems) is None
    with pytest.raises(ConfigError):
        raise ConfigError(problems)


ACCEPTED = [
    TemperatureLogitsWarper(2),
    TopPLogitsWarper(1),
    TopPLogitsWarper(0),
    MinPLogitsWarper(0),
    RepetitionPenaltyLogitsProcessor(2),
    TopKLogitsWarper(0),
]


@pytest.mark.parametrize("options", ACCEPTED, ids=str)
def test_b35_whole_numbers_and_the_ends_of_ranges_are_accepted(options: Any) -> None:
    scores = torch.tensor([[0.0, 1.0, 2.0]])
    assert options(torch.tensor([[1]]), scores).shape == scores.shape


NOTHING = [
    TemperatureLogitsWarper(1.0),
    TopKLogitsWarper(0),
    TopPLogitsWarper(1.0),
    MinPLogitsWarper(0.0),
    RepetitionPenaltyLogitsProcessor(1.0),
    MinLengthLogitsProcessor(0),
    MinLengthLogitsProcessor(1),
    MinNewTokensLengthLogitsProcessor(None, 0),
]


@pytest.mark.parametrize("options", NOTHING, ids=str)
def test_what_changes_nothing_is_left_out(options: Any) -> None:
    assert options.bind(context()) is None
    scores = torch.tensor([[0.0, 1.0, 2.0]])
    if not isinstance(options, (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)):
        assert torch.equal(options(torch.tensor([[1]]), scores), scores)


# -- minimum lengths -----------------------------------------------------------------------------------------


def test_min_length_counts_real_tokens_of_each_row() -> None:
    tokens, mask = torch.full((2, 4), 5), B02_MASK
    bound = MinLengthLogitsProcessor(5).bind(context(tokens, mask))
    banned = []
    for new in range(5):
        ids = torch.cat([tokens, torch.full((2, new), 5)], dim=-1)
        banned.append((bound(ids, torch.zeros(2, 37))[:, 2] == -math.inf).tolist())
    assert banned == [[True, True], [True, False], [True, False], [False, False], [False, False]]


def test_after_the_minimum_scores_pass_untouched() -> None:
    scores = torch.zeros(1, 37)
    for options in (MinLengthLogitsProcessor(2), MinNewTokensLengthLogitsProcessor(None, 1)):
        bound = options.bind(context(torch.tensor([[5]])))
        assert bound(torch.tensor([[5, 5]]), scores) is scores


def test_without_an_end_token_there_is_nothing_to_forbid() -> None:
    for options in (MinLengthLogitsProcessor(9), MinNewTokensLengthLogitsProcessor(None, 9)):
        assert options.bind(context(eos=())) is None
        assert options.bind(context(eos=(99,))) is None
    with pytest.raises(ValueError, match="eos_token_id is needed"):
        MinLengthLogitsProcessor(9)(torch.tensor([[5]]), torch.zeros(1, 37))
    with pytest.raises(ValueError, match="prompt_length_to_skip is needed"):
        MinNewTokensLengthLogitsProcessor(None, 9, 2)(torch.tensor([[5]]), torch.zeros(1, 37))
