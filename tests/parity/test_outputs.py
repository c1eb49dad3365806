"""Output objects read as those of transformers: by name, by place, in the same order, with the same shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import generate
from torch import Tensor

transformers = pytest.importorskip("transformers")

PROMPTS = torch.tensor([[0, 9, 4], [30, 31, 6]])
MASK = (PROMPTS != 0).long()
OWN = ("stop_reasons", "stop_details", "lengths", "prompt_width")
"""Fields that only decodekit has; they come last."""
EVERYTHING = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 0},
    "sampled, several": {"do_sample": True, "top_k": 0, "num_return_sequences": 2},
    "beams": {"do_sample": False, "num_beams": 3},
    "beams, several": {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
}
RECORDS = [(), *((name,) for name in EVERYTHING), EVERYTHING]


def both(model: Any, name: str, records: tuple[str, ...], **keys: Any) -> tuple[Any, Any]:
    call = {**CALLS[name], "max_new_tokens": 5, "eos_token_id": None, "pad_token_id": 0, **keys}
    call |= {"return_dict_in_generate": True, "attention_mask": MASK, **dict.fromkeys(records, True)}
    torch.manual_seed(2)
    return model.generate(PROMPTS, **call), generate(model, PROMPTS, **call)


def shapes(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else tuple(shapes(item) for item in value)


@pytest.mark.parametrize("records", RECORDS, ids=lambda records: "+".join(records) or "nothing")
@pytest.mark.parametrize("name", CALLS)
def test_names_order_and_shapes(name: str, records: tuple[str, ...], tiny: Callable[[str], Any]) -> None:
    theirs, ours = both(tiny("llama-eager"), name, records)
    names = list(theirs.keys())
    assert type(ours).__name__ == type(theirs).__name__
    # The scores of sequences are there without having been asked for.
    free = ("sequences_scores",) if "output_scores" not in records else ()
    assert [field for field in ours if field not in (*OWN, *free)] == names
    if not (free and "beams" in name):
        assert list(ours.keys())[: len(names)] == names, "what only decodekit has comes last"
    for field in names:
        if field in ("cache", "past_key_values"):
            continue
        assert ours[list(ours).index(field)] is ours[field] is getattr(ours, field)
        assert field in ours
        assert shapes(ours[field]) == shapes(theirs[field]), field
    for field in ("scores", "logits", "attentions", "hidden_states"):
        if f"output_{field}" not in records:
            assert getattr(ours, field) is None
            assert field not in ours
            with pytest.raises(KeyError):
                ours[field]
    assert len(ours) == len(ours.to_tuple()) == len(ours.items())


@pytest.mark.parametrize("name", CALLS)
def test_slices_and_ends(name: str, tiny: Callable[[str], Any]) -> None:
    theirs, ours = both(tiny("llama-eager"), name, ("output_scores", "output_logits"))
    known = [field for field in theirs if field not in ("cache", "past_key_values")]
    for cut in (slice(None, 2), slice(1, 3), slice(0, len(known))):
        assert [shapes(item) for item in ours[cut]] == [shapes(item) for item in theirs[cut]]
        assert isinstance(ours[cut], tuple)
    assert ours[: len(known)] == ours.to_tuple()[: len(known)]
    assert ours[0] is ours.sequences
    with pytest.raises(IndexError):
        ours[99]


@pytest.mark.parametrize("name", ["greedy", "beams"])
@pytest.mark.parametrize("family", ["llama-eager", "gpt2-eager"])
def test_values(family: str, name: str, tiny: Callable[[str], Any]) -> None:
    theirs, ours = both(tiny(family), name, EVERYTHING)
    assert torch.equal(ours.sequences, theirs.sequences)
    if name == "beams":
        # Which row a beam has is nobody's promise, but for the first step.
        torch.testing.assert_close(ours.logits[0], theirs.logits[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores)
        return
    for field in ("logits", "scores"):
        for mine, yours in zip(ours[field], theirs[field], strict=True):
            torch.testing.assert_close(mine, yours, rtol=1e-4, atol=1e-4)
    for field in ("attentions", "hidden_states"):
        for step, (mine, yours) in enumerate(zip(ours[field], theirs[field], strict=True)):
            seen = MASK.bool() if step == 0 else torch.ones(2, 1, dtype=torch.bool)
            for one, other in zip(mine, yours, strict=True):
                # What padding attends to, and becomes, is nobody's.
                if field == "attentions":
                    one, other = one.transpose(1, 2), other.transpose(1, 2)
                torch.testing.assert_close(one[seen], other[seen], rtol=1e-4, atol=1e-5)


def test_the_cache_by_both_names(tiny: Callable[[str], Any]) -> None:
    theirs, ours = both(tiny("llama"), "greedy", ())
    assert ours.past_key_values is ours.cache is ours["cache"] is ours["past_key_values"]
    assert "past_key_values" in ours
    assert "past_key_values" in theirs
    assert ours.cache.get_seq_length() == PROMPTS.shape[1] + 4 == theirs.past_key_values.get_seq_length()
    _, without = both(tiny("llama"), "greedy", (), use_cache=False)
    assert without.past_key_values is None
    assert "cache" not in without
    assert "past_key_values" not in without


def test_a_copy(tiny: Callable[[str], Any]) -> None:
    _, ours = both(tiny("llama"), "beams", ("output_scores",))
    assert list(copy.copy(ours)) == list(ours)
