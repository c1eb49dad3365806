"""Greedy tokens equal those of transformers' own generate, case by case, token by token.

Cases are drawn with a fixed seed. What is left out is what "Differences from transformers" lists, each with its test.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import generate
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

FAMILIES = ("llama", "llama-eager", "gpt2", "gpt2-eager", "qwen3", "mistral", "gemma2", "gemma3")
EACH = 32


def case(family: str, number: int) -> dict[str, Any]:
    """One random call: prompts, mask, keys."""
    draw = random.Random(f"{family}/{number}")
    rows, width = draw.randint(1, 4), draw.randint(1, 12)
    ragged = rows > 1 and width > 1 and draw.random() < 0.7
    tokens = [[draw.randrange(3, 83) for _ in range(width)] for _ in range(rows)]
    pads = [draw.randint(0, width - 1) if ragged else 0 for _ in range(rows)]
    if ragged:
        pads[draw.randrange(rows)] = 0
    for row, pad in zip(tokens, pads, strict=True):
        row[:pad] = [0] * pad
    new = draw.randint(1, 16)
    keys: dict[str, Any] = {}
    keys["max_new_tokens" if draw.random() < 0.6 else "max_length"] = new
    if "max_length" in keys:
        keys["max_length"] += width
    ends = draw.choice(("model", "one", "several", "none"))
    if ends == "one":
        keys["eos_token_id"] = draw.randrange(3, 83)
    if ends == "several":
        keys["eos_token_id"] = draw.sample(range(3, 83), 12)
    if ends == "none":
        keys["eos_token_id"] = None
    if draw.random() < 0.5:
        keys["repetition_penalty"] = draw.choice((0.7, 1.1, 1.3, 2.5))
    if draw.random() < 0.3:
        keys["min_new_tokens"] = draw.randint(1, new)
    elif draw.random() < 0.3:
        keys["min_length"] = draw.randint(1, width + new)
    if draw.random() < 0.2:
        keys["use_cache"] = False
    mask = [[0] * pad + [1] * (width - pad) for pad in pads]
    return {"tokens": torch.tensor(tokens), "mask": torch.tensor(mask) if ragged else None, "keys": keys}


def expected(model: Any, tokens: Tensor, mask: Tensor | None, keys: dict[str, Any]) -> Tensor:
    """What transformers generates; for padded rows with a total length, which counts padding there, row by row."""
    if mask is None or not {"min_length", "max_length"} & keys.keys():
        return model.generate(tokens, attention_mask=mask, do_sample=False, **keys)
    rows = []
    for row, real in zip(tokens, mask.bool(), strict=True):
        alone = model.generate(row[real][None], do_sample=False, **keys)[0]
        rows.append(torch.cat([row, alone[int(real.sum()) :]]))
    return pad_sequence(rows, batch_first=True, padding_value=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_equals_transformers(tiny: Callable[[str], Any], family: str) -> None:
    model, wrong, lengths = tiny(family), [], set()
    for number in range(EACH):
        given = case(family, number)
        tokens, mask, keys = given["tokens"], given["mask"], given["keys"]
        want = expected(model, tokens, mask, keys)
        # The model's default cache and decodekit's own by turns.
        chosen = {} if number % 2 or keys.get("use_cache") is False else {"cache_implementation": "dynamic"}
        got = generate(model, tokens, attention_mask=mask, **keys, **chosen)
        if got.shape != want.shape or not torch.equal(got, want):
            wrong.append((number, chosen, keys, got.tolist(), want.tolist()))
        lengths.add(want.shape[1] - tokens.shape[1])
    assert not wrong, f"{len(wrong)} of {EACH} differ, the first: {wrong[0]}"
    assert len(lengths) > 5
