"""Where decodekit differs from transformers on purpose: what each gives, and what shows that ours is right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import InputError, generate

pytestmark = pytest.mark.filterwarnings("ignore")
PAD, END = 0, 2


def padded(length: int = 4, pads: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, 83, (2, length + pads), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :pads] = 0
    return tokens * mask, mask


def test_min_length_does_not_count_padding(tiny: Callable[[str], Any]) -> None:
    """There a padded row may end `pads` tokens too early; ours gives each row what it gets alone."""
    model = tiny("llama")
    tokens, mask = padded()
    # Nearly every token ends the text, so a row ends as soon as it may.
    keys = {"eos_token_id": list(range(3, 83)), "min_length": 9, "max_new_tokens": 12}
    alone = model.generate(tokens[1:, 3:], do_sample=False, **keys)[0, 4:]
    theirs = model.generate(tokens, attention_mask=mask, do_sample=False, **keys)[1, 7:]
    ours = generate(model, tokens, attention_mask=mask, **keys)[1, 7:]
    assert not torch.equal(theirs[: len(alone)], alone)
    assert torch.equal(ours[: len(alone)], alone)


def test_max_length_does_not_count_padding(tiny: Callable[[str], Any]) -> None:
    """There a padded row gets fewer new tokens than alone; ours gives each row what it gets alone."""
    model = tiny("llama")
    tokens, mask = padded()
    keys = {"eos_token_id": None, "max_length": 12}
    alone = model.generate(tokens[1:, 3:], do_sample=False, **keys)[0]
    theirs = model.generate(tokens, attention_mask=mask, do_sample=False, **keys)[1, 3:]
    ours = generate(model, tokens, attention_mask=mask, **keys)[1, 3:]
    assert len(theirs) < len(alone) == 12
    assert torch.equal(ours, alone)


def test_rows_ended_by_something_else_are_filled_too(tiny: Callable[[str], Any]) -> None:
    """There a row ended by a criterion without end tokens goes on receiving real tokens until all rows have ended."""
    model = tiny("llama")
    tokens, _ = padded(pads=0)

    def first_row(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        return torch.tensor([ids.shape[1] >= 6, False])

    from transformers import StoppingCriteriaList

    keys = {"eos_token_id": None, "max_new_tokens": 8}
    theirs = model.generate(tokens, do_sample=False, stopping_criteria=StoppingCriteriaList([first_row]), **keys)
    ours = generate(model, tokens, stopping_criteria=[first_row], **keys)
    assert (theirs[0, 6:] != PAD).any()
    assert (ours[0, 6:] == PAD).all()
    assert torch.equal(ours[1], theirs[1])


def test_end_tokens_can_be_switched_off(tiny: Callable[[str], Any]) -> None:
    """`eos_token_id=None` in a call: nothing ends early, in both."""
    model = tiny("gpt2")
    tokens, _ = padded(pads=0)
    keys = {"eos_token_id": None, "max_new_tokens": 30}
    assert generate(model, tokens, **keys).shape == model.generate(tokens, do_sample=False, **keys).shape == (2, 34)


def test_token_outside_the_vocabulary_is_an_error(tiny: Callable[[str], Any]) -> None:
    """There it is an IndexError from inside the embedding (or, on a GPU, a broken device)."""
    with pytest.raises(InputError, match="token id 83 is outside the model's vocabulary of 83"):
        generate(tiny("gpt2"), torch.tensor([[5, 83]]), max_new_tokens=1)


def test_right_padding_is_moved(tiny: Callable[[str], Any]) -> None:
    """There generation goes on behind the padding, with a warning; ours goes on behind the last real token."""
    model = tiny("llama")
    tokens, mask = padded()
    right = torch.cat([tokens[1, 3:], tokens[1, :3]])[None]
    mask = torch.cat([mask[1, 3:], mask[1, :3]])[None]
    alone = model.generate(tokens[1:, 3:], do_sample=False, max_new_tokens=6)[0, 4:]
    theirs = model.generate(right, attention_mask=mask, do_sample=False, max_new_tokens=6)[0, 7:]
    ours = generate(model, right, attention_mask=mask, max_new_tokens=6)[0, 7:]
    assert not torch.equal(theirs, alone)
    assert torch.equal(ours, alone)
