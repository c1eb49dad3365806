"""Models with an encoder give what transformers' own generate gives: tokens, scores, everything that is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import generate

NOISE = torch.Generator().manual_seed(5)
WAVES = torch.randn(2, 400, generator=NOISE)
HEARD = torch.tensor([[1] * 400, [1] * 300 + [0] * 100])
FRAMES = torch.randn(2, 40, 8, generator=NOISE)
PICTURES = torch.randn(2, 3, 8, 8, generator=NOISE)
SEEN = torch.tensor([[2, 50, 50, 50, 50, 7, 8], [2, 50, 50, 50, 50, 9, 8]])


def read(model: Any) -> dict[str, Any]:
    """Two rows for a text encoder, the second shorter."""
    ids = torch.randint(3, 58, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2])
    return {"input_ids": ids.masked_fill(mask == 0, model.config.pad_token_id), "attention_mask": mask}


INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "t5": read,
    "bart": read,
    "marian": read,
    "whisper": lambda _: {"input_features": FRAMES.transpose(1, 2)},
    "speech2text": lambda _: {"inputs": FRAMES, "attention_mask": torch.ones(2, 40, dtype=torch.long)},
    "speech": lambda _: {"input_values": WAVES, "attention_mask": HEARD},
    "vision": lambda _: {"pixel_values": PICTURES},
    "llava": lambda _: {"input_ids": SEEN, "pixel_values": PICTURES},
}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "length_penalty": 0.3, "num_return_sequences": 2},
    "no cache": {"use_cache": False},
    "beams, no cache": {"num_beams": 2, "use_cache": False},
    "likeliest draws": {"do_sample": True, "top_k": 1, "num_return_sequences": 2},
    "its own cache": {"cache_implementation": "model"},
    "processors": {"min_new_tokens": 5, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "bad_words_ids": [[7]]},
}  # fmt: skip
ONLY = ("cache_implementation",)
RECORDED = {"return_dict_in_generate": True, "output_scores": True, "max_new_tokens": 8}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", INPUTS)
def test_tokens_and_scores(name: str, way: str, small: Callable[[str], Any]) -> None:
    model, keys = small(name), WAYS[way]
    inputs = INPUTS[name](model)
    theirs = model.generate(**inputs, **RECORDED, **{k: v for k, v in keys.items() if k not in ONLY})
    ours: Any = generate(model, **inputs, **RECORDED, **keys)
    if name == "whisper" and way == "beams":  # transformers returns the best sequence of each prompt twice
        theirs.sequences, theirs.sequences_scores = theirs.sequences[::2], theirs.sequences_scores[::2]
        ours.sequences, ours.sequences_scores = ours.sequences[::2], ours.sequences_scores[::2]
    assert torch.equal(theirs.sequences, ours.sequences)
    if "num_beams" in keys:  # beams may sit in other rows meanwhile
        torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores, rtol=1e-6, atol=1e-5)
    elif not (name == "whisper" and "num_return_sequences" in keys):  # of which transformers returns one row's only
        for mine, other in zip(ours.scores, theirs.scores, strict=True):
            torch.testing.assert_close(mine, other.to(mine.dtype), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("name", ["t5", "bart", "marian"])
def test_what_is_recorded(name: str, beams: int, small: Callable[[str], Any]) -> None:
    model = small(name)
    asked = {**RECORDED, "output_hidden_states": True, "output_attentions": True, "output_logits": True}
    used = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        theirs = model.generate(**read(model), num_beams=beams, **asked)
        ours: Any = generate(model, **read(model), num_beams=beams, **asked)
    finally:
        model.set_attn_implementation(used)
    assert type(ours).__name__ == type(theirs).__name__
    names = list(theirs.keys())
    assert ours.keys()[: len(names)] == names, "the reference's order"
    for field in names:
        if field == "cache":
            continue
        same(getattr(ours, field), theirs[field], field)
    assert ours.attentions is None
    assert ours.hidden_states is None


def same(mine: Any, other: Any, field: str) -> None:
    if isinstance(other, torch.Tensor):
        assert mine.shape == other.shape, field
        torch.testing.assert_close(mine.to(other.dtype), other, rtol=1e-4, atol=1e-4)
        return
    assert len(mine) == len(other), field
    for a, b in zip(mine, other, strict=True):
        same(a, b, field)


@pytest.mark.parametrize("beams", [1, 3])
def test_encoder_penalties(beams: int, small: Callable[[str], Any]) -> None:
    """They look at what the encoder reads, of which padding is no part."""
    model = small("bart")
    ids = torch.tensor([[9, 31, 9, 5, 9, 2], [9, 9, 31, 5, 31, 2]])
    asked = {**RECORDED, "num_beams": beams, "encoder_repetition_penalty": 3.0, "encoder_no_repeat_ngram_size": 2}
    theirs = model.generate(ids, **asked)
    ours: Any = generate(model, ids, **asked)
    assert torch.equal(theirs.sequences, ours.sequences)
    plain: Any = generate(model, ids, **{**RECORDED, "num_beams": beams})
    assert not torch.equal(plain.sequences, ours.sequences), "the penalties changed nothing"


@pytest.mark.parametrize(
    "keys", [{"forced_bos_token_id": 17}, {"forced_eos_token_id": 3}, {"begin_suppress_tokens": [17, 21]}]
)
def test_forced_tokens(keys: dict[str, Any], small: Callable[[str], Any]) -> None:  # fmt: skip
    model = small("marian")
    theirs = model.generate(**read(model), max_new_tokens=5, **keys)
    assert torch.equal(theirs, generate(model, **read(model), max_new_tokens=5, **keys))
