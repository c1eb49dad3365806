"""Beam search gives the sequences and scores of transformers' own generate, case by case."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import generate
from torch import Tensor

FAMILIES = ("llama", "gpt2", "qwen3", "mistral", "gemma3", "t5", "bart", "marian")
ENCODERS = ("t5", "bart", "marian")
EACH = 128


def case(family: str, number: int) -> dict[str, Any]:
    """One random call: prompts, mask, keys."""
    draw = random.Random(f"beams/{family}/{number}")
    rows, width = draw.randint(1, 4), draw.randint(1, 8)
    pads = [draw.randint(0, width - 1) for _ in range(rows)]
    pads[draw.randrange(rows)] = 0
    texts = [[draw.randrange(3, 83) for _ in range(width - pad)] for pad in pads]
    beams = draw.randint(1, 6)
    keys: dict[str, Any] = {
        "num_beams": beams,
        "num_return_sequences": draw.randint(1, beams),
        "max_new_tokens": draw.randint(1, 14),
        "eos_token_id": draw.choice([None, draw.randrange(3, 83), draw.sample(range(3, 83), 8)]),
        "pad_token_id": 1,
    }
    if beams > 1:
        keys["length_penalty"] = draw.choice([-1.0, 0.0, 0.5, 1.0, 2.0])
        keys["early_stopping"] = draw.choice([True, False, "never"])
    else:
        keys["num_return_sequences"] = 1
    if draw.random() < 0.4:
        keys["repetition_penalty"] = draw.choice((0.7, 1.1, 1.3))
    if draw.random() < 0.3:
        keys["min_new_tokens"] = draw.randint(1, keys["max_new_tokens"])
    if draw.random() < 0.2:
        keys["use_cache"] = False
    if draw.random() < 0.2:
        keys["no_repeat_ngram_size"] = draw.randint(1, 3)
    if draw.random() < 0.2:
        keys["bad_words_ids"] = [[draw.randrange(3, 83)], [draw.randrange(3, 83), draw.randrange(3, 83)]]
    # The pad token is history for transformers, and would be penalised: here it is never made.
    keys["suppress_tokens"] = [1, *draw.sample(range(3, 83), draw.randint(0, 3))]
    real = [[1] * len(text) for text in texts]
    # Encoders count positions from the left.
    rows, mask = (
        [pad_to(row, width, fill, family in ENCODERS) for row in given] for given, fill in ((texts, 1), (real, 0))
    )
    return {"tokens": torch.tensor(rows), "mask": torch.tensor(mask), "keys": keys}


def pad_to(row: list[int], width: int, fill: int, right: bool) -> list[int]:
    rest = [fill] * (width - len(row))
    return row + rest if right else rest + row


def same(theirs: Tensor, ours: Tensor) -> bool:
    """Equal but for what fills the ends: transformers writes -1 where no eos is known, and may be wider."""
    theirs = theirs.masked_fill(theirs == -1, 1)
    width = max(theirs.shape[1], ours.shape[1])
    padded = [torch.nn.functional.pad(t, (0, width - t.shape[1]), value=1) for t in (theirs, ours)]
    return torch.equal(*padded)


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_beams_equal_transformers(family: str, part: int, tiny: Callable[[str], Any]) -> None:
    model, wrong = tiny(family), []
    for number in range(part * EACH // 4, (part + 1) * EACH // 4):
        one = case(family, number)
        asked = {"attention_mask": one["mask"], "return_dict_in_generate": True, "output_scores": True, **one["keys"]}
        theirs = model.generate(one["tokens"], do_sample=False, **asked)
        ours: Any = generate(model, one["tokens"], **asked)
        if not same(theirs.sequences, ours.sequences):
            wrong.append((number, one["keys"], theirs.sequences.tolist(), ours.sequences.tolist()))
        if one["keys"]["num_beams"] > 1:
            torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-6, atol=1e-5)
    assert not wrong, wrong[0]
