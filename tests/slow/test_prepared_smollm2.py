"""Real weights, prepared: SmolLM2-135M-Instruct gives the same tokens, and logits within what each type rounds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit import LM, generate, load, release

from .test_smollm2 import STORY, gguf, lm, plain, saved

__all__ = ["gguf", "lm", "plain", "saved"]

pytestmark = pytest.mark.slow

MOST = {"float32": 2e-4, "bfloat16": 0.8, "float16": 0.15}
"""The greatest difference of any logit; they range over about 40."""
FREED = {"preparers": {"packed": {"layout": "blocks", "free": True}}}
WAYS: dict[str, dict[str, Any]] = {
    "kernels": {},
    "measured": {"layout": "measured"},
    "blocks": {"layout": "blocks"},
    "columns": {"layout": "columns"},
}


def asked(way: str, **options: Any) -> dict[str, Any]:
    """A section of options for a preparer."""
    return {"preparers": {"kernels" if way == "kernels" else "packed": {**WAYS[way], **options}}}


@pytest.fixture(scope="module", params=["native", "transformers"])
def either(request: pytest.FixtureRequest, lm: LM) -> LM:
    if request.param == "transformers":
        return lm
    return load(request.getfixturevalue("plain"), adapter="native")


def greedy(lm: LM, new: int, **keys: Any) -> list[int]:
    ids = [lm.tokens(STORY)]
    return generate(lm, ids, max_new_tokens=new, do_sample=False, eos_token_id=None, **keys)[0].tolist()


def logits(lm: LM, **keys: Any) -> torch.Tensor:
    ids = [lm.tokens(STORY)]
    more: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True, "do_sample": False}
    force = torch.tensor(greedy(lm, 32, prepare=None)[len(ids[0]) :])
    step = iter(force.tolist())

    def teach(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([next(step)]), 0.0)

    out = generate(lm, ids, max_new_tokens=32, eos_token_id=None, logits_processor=[teach], **more, **keys)
    return torch.stack(out.logits)


@pytest.mark.parametrize("way", WAYS)
def test_the_same_tokens(either: LM, way: str) -> None:
    want = greedy(either, 128, prepare=None)
    assert greedy(either, 128, **asked(way)) == want
    release(either)


@pytest.mark.parametrize("way", ["kernels", "blocks"])
@pytest.mark.parametrize("dtype", MOST)
def test_logits_of_each_type(either: LM, dtype: str, way: str) -> None:
    want = logits(either, prepare=None)
    got = logits(either, **asked(way, dtype=dtype))
    off = float((got - want).abs().max())
    print(f"\n{type(either.adapter).__name__}, {way}, {dtype}: logits differ by {off:.3g} at most")
    assert off <= MOST[dtype]
    release(either)


def test_freed_and_given_back(either: LM) -> None:
    want = greedy(either, 32, prepare=None)
    assert greedy(either, 32, **FREED) == want
    assert release(either)
    assert greedy(either, 32, prepare=None) == want
