"""Bark's processors next to transformers' own, on random inputs."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from decodekit import ConfigError, GenerationConfig
from decodekit.testing import score_cases
from decodekit.testing.support import context
from decodekit_processors.families.bark import AlternatingCodebooksLogitsProcessor, BarkEosPrioritizerLogitsProcessor

from .shared import SIZES, both, ids_of, scores_of

reference = pytest.importorskip("transformers.generation.logits_process")


@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize("eos", [3, [3], [2, 10], torch.tensor([4, 5])], ids=str)
@pytest.mark.parametrize("least", [None, 1e-4, 0.02, 0.3, 1.0])
def test_bark_takes_a_likely_end(vocab: int, eos: Any, least: float | None) -> None:
    mine, theirs = both(BarkEosPrioritizerLogitsProcessor, eos, least)
    taken = 0
    for seed in range(4):
        for scores in scores_of(64, vocab, seed):
            before = scores.clone()
            got, want = mine(ids_of(64, 3), scores), theirs(ids_of(64, 3), scores.clone())
            off = (got != want).any(-1)
            odds = scores[off].softmax(-1)[:, torch.as_tensor(eos).reshape(-1)]
            assert ((odds - (least or 0)).abs() < 1e-6).any(-1).all(), "only rounding may decide otherwise"
            assert torch.equal(scores, before)
            taken += int((got != scores).any(-1).sum())
    if (least, vocab) != (0.3, 1000):
        assert bool(taken) == (least in (1e-4, 0.02, 0.3))


def test_bark_takes_one_number_for_each_prompt() -> None:
    scores = score_cases(4, 11, 3)["random"].half()
    numbers = (1e-4, 1.0, 0.05, 2)
    options = BarkEosPrioritizerLogitsProcessor(3, numbers)
    alone = [BarkEosPrioritizerLogitsProcessor(3, n)(ids_of(1, 2), scores[i : i + 1]) for i, n in enumerate(numbers)]
    bound = options.bind(context(ids_of(4, 2)))
    assert bound is not None
    for form in (options, bound):
        assert torch.equal(form(ids_of(4, 2), scores), torch.cat(alone))
    assert torch.equal(torch.cat(alone)[1], scores[1])
    assert not torch.equal(torch.cat(alone)[0], scores[0])
    rows = torch.tensor([3, 0, 0, 2])
    bound.reorder(rows)
    assert torch.equal(bound(ids_of(4, 2), scores[rows]), torch.cat(alone)[rows])
    with pytest.raises(ValueError, match="4 values for 3 rows"):
        options(ids_of(3, 2), scores[:3])
    with pytest.raises(ValueError, match="4 values for 3 prompts"):
        options.bind(context(ids_of(3, 2)))


def test_bark_says_what_is_wrong_and_when_there_is_nothing_to_do() -> None:
    for wrong in (0, -0.1):
        with pytest.raises(ValueError, match="greater than 0"):
            BarkEosPrioritizerLogitsProcessor(3, wrong)
    for ids in (-1, [3, -1], torch.tensor([1.5])):
        with pytest.raises(ValueError, match="whole numbers of 0 or more"):
            BarkEosPrioritizerLogitsProcessor(ids, 0.1)
    with pytest.raises(ValueError, match="eos_token_id is needed"):
        BarkEosPrioritizerLogitsProcessor(min_eos_p=0.1)(ids_of(1, 1), torch.zeros(1, 11))
    ctx = context(ids_of(2, 2))
    assert BarkEosPrioritizerLogitsProcessor(3, None).bind(ctx) is None
    assert BarkEosPrioritizerLogitsProcessor(500, 0.1).bind(ctx) is None
    assert BarkEosPrioritizerLogitsProcessor(None, 0.1).bind(context(ids_of(2, 2), eos=())) is None
    with pytest.raises(ConfigError, match="min_eos_p: must be greater than 0"):
        GenerationConfig(processors={"bark_eos": {"min_eos_p": 0.0}}).validate()


@pytest.mark.parametrize(("semantic", "size"), [(4, 3), (0, 5), (20, 20), (999, 1), (60, 0), (2000, 7)])
def test_codebooks_take_turns(semantic: int, size: int) -> None:
    for start, vocab in itertools.product((0, 3, 8), SIZES):
        mine, theirs = both(AlternatingCodebooksLogitsProcessor, start, semantic, size)
        for width in (3, 4, 8, 9):
            for scores in scores_of(8, vocab, width):
                assert torch.equal(mine(ids_of(8, width), scores), theirs(ids_of(8, width), scores))


def test_codebooks_know_where_a_run_begins() -> None:
    options = AlternatingCodebooksLogitsProcessor(semantic_vocab_size=4, codebook_size=3)
    bound = options.bind(context(ids_of(2, 5)))
    for width in (5, 6, 7):
        kept = (bound(ids_of(2, width), torch.zeros(2, 11)) == 0)[0].nonzero()[:, 0].tolist()
        assert kept == ([4, 5, 6] if width % 2 else [7, 8, 9, 10])
    told = AlternatingCodebooksLogitsProcessor(4, 4, 3)
    assert told.bind(context(ids_of(2, 5))) is told
    with pytest.raises(ValueError, match="input_start_len is needed"):
        options(ids_of(2, 5), torch.zeros(2, 11))
    with pytest.raises(ValueError, match="must be at least 0"):
        AlternatingCodebooksLogitsProcessor(-1, 4, 3)
    assert (AlternatingCodebooksLogitsProcessor().semantic_vocab_size, options.codebook_size) == (10_000, 3)
