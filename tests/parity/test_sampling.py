"""Along a path that transformers sampled, every distribution equals ours: kept tokens and probabilities."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import plan
from decodekit.run import Run
from decodekit.shortlist import Shortlist

FAMILIES = ("llama", "gpt2", "gemma3")
EACH = 28


def settings(draw: random.Random) -> dict[str, Any]:
    """A random combination of everything that shapes the distribution."""
    keys: dict[str, Any] = {"top_k": draw.choice((0, 1, 2, 7, 50, 500))}
    if draw.random() < 0.6:
        keys["temperature"] = draw.choice((0.3, 0.7, 1.0, 1.6, 4.0))
    if draw.random() < 0.6:
        keys["top_p"] = draw.choice((0.05, 0.5, 0.9, 0.99, 1.0))
    if draw.random() < 0.4:
        keys["min_p"] = draw.choice((0.001, 0.05, 0.3))
    if draw.random() < 0.4:
        keys["repetition_penalty"] = draw.choice((0.8, 1.2, 2.0))
    if draw.random() < 0.3:
        keys["min_new_tokens"] = draw.randint(1, 6)
    return keys


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_distributions_equal_transformers(tiny: Callable[[str], Any], family: str) -> None:
    model = tiny(family)
    for number in range(EACH):
        draw = random.Random(f"{family}/{number}")
        keys = {**settings(draw), "do_sample": True, "max_new_tokens": 6}
        rows, width = draw.randint(1, 4), draw.randint(2, 9)
        tokens = torch.tensor([[draw.randrange(3, 83) for _ in range(width)] for _ in range(rows)])
        mask = torch.ones_like(tokens)
        mask[0, : width // 2] = 0
        tokens *= mask
        torch.manual_seed(number)
        theirs = model.generate(
            tokens, attention_mask=mask, output_scores=True, output_logits=True, return_dict_in_generate=True, **keys
        )
        run = Run(plan(model, tokens, attention_mask=mask, **keys))
        logits = run.prefill()
        for step, (raw, scores) in enumerate(zip(theirs.logits, theirs.scores, strict=True)):
            alive = [row for row in range(rows) if 2 not in theirs.sequences[row, width : width + step]]
            torch.testing.assert_close(logits[alive], raw[alive], rtol=1e-4, atol=1e-4)
            ours = run.process(raw)
            ours = ours.dense() if isinstance(ours, Shortlist) else ours
            where = f"case {number}, step {step}: {keys}"
            assert torch.equal(ours[alive].isinf(), scores[alive].isinf()), f"other tokens kept, {where}"
            off = (ours[alive].softmax(-1) - scores[alive].softmax(-1)).abs().max()
            assert off < 1e-6, f"probabilities are off by {off:.3g}, {where}"
            taken = theirs.sequences[:, width + step]
            run.accept(taken)
            if run.finished:
                break
            logits = run.forward(taken)
        assert run.steps == len(theirs.scores)
