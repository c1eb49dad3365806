"""`compute_transition_scores` gives what transformers' gives for the same recorded scores, and for calls of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import compute_transition_scores, generate

PROMPTS = torch.tensor([[5, 9, 4], [30, 31, 6]])
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "greedy, processed": {"do_sample": False, "repetition_penalty": 1.3},
    "sampled": {"do_sample": True, "top_k": 0, "temperature": 1.5},
    "sampled, several": {"do_sample": True, "top_k": 0, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3},
    "beams, several": {"do_sample": False, "num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.0},
}


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("eos", [None, [7, 8, 19, 20, 33, 41, 60, 61, 62, 70]])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_same_as_transformers(
    family: str, name: str, eos: Any, normalize: bool, tiny: Callable[[str], Any]
) -> None:
    model = tiny(family)
    call = {**CALLS[name], "max_new_tokens": 8, "eos_token_id": eos, "pad_token_id": 0}
    torch.manual_seed(3)
    recorded = {"output_scores": True, "return_dict_in_generate": True}
    mask = torch.ones_like(PROMPTS)
    theirs = model.generate(PROMPTS, attention_mask=mask, **call, **recorded)
    given = (theirs.sequences, theirs.scores, getattr(theirs, "beam_indices", None))
    want = model.compute_transition_scores(*given, normalize_logits=normalize)
    torch.testing.assert_close(compute_transition_scores(*given, normalize_logits=normalize)[:, : want.shape[1]], want)
    # And theirs of ours.
    ours: Any = generate(model, PROMPTS, **call, **recorded)
    given = (ours.sequences, ours.scores, getattr(ours, "beam_indices", None))
    found = compute_transition_scores(*given, normalize_logits=normalize)
    kept = ours.beam_indices.long() if "beams" in name else None
    want = model.compute_transition_scores(ours.sequences, ours.scores, kept, normalize_logits=normalize)
    torch.testing.assert_close(found[:, : want.shape[1]], want)


@pytest.mark.parametrize("name", ["beams", "beams, several"])
def test_their_sum_is_the_score_of_the_sequence(name: str, tiny: Callable[[str], Any]) -> None:
    ours: Any = generate(tiny("llama"), PROMPTS, **CALLS[name], max_new_tokens=8, output_scores=True)
    found = compute_transition_scores(ours.sequences, ours.scores, ours.beam_indices).sum(1)
    lengths = torch.tensor(ours.lengths) ** CALLS[name].get("length_penalty", 1.0)
    torch.testing.assert_close(found / lengths, ours.sequences_scores)
