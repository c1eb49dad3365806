"""Sums and weights at the ends of what numbers hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decodekit import GenerationError, generate
from decodekit.testing import TinyLM
from torch import Tensor

PROMPT = torch.tensor([[5, 9, 4]])


def search(model: Any, **keys: Any) -> Any:
    keys = {"num_beams": 4, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0, **keys}
    return generate(model, PROMPT, return_dict_in_generate=True, **keys)


@pytest.mark.parametrize("keys", [{}, {"do_sample": True}, {"num_beam_groups": 2, "diversity_penalty": 0.5}])
def test_infinite_scores_are_told_from_nan(keys: dict[str, Any]) -> None:
    """Sums need finite numbers. Greedy decoding takes such a token, and drawing, too."""

    class Endless(TinyLM):
        value = math.inf

        def forward(self, input_ids: Tensor) -> Tensor:
            logits = super().forward(input_ids).clone()
            if input_ids.shape[1] == 5:
                logits[..., 7] = self.value
                logits[..., :7] = logits[..., 8:] = -math.inf
            return logits

    with pytest.raises(GenerationError, match=r"the model gave \+inf \(row \d, step 2\).*make it finite"):
        search(Endless().eval(), **keys)
    nowhere = Endless().eval()
    nowhere.value = -math.inf
    with pytest.raises(GenerationError, match=r"the model leaves no token to choose \(row \d, step 2\)"):
        search(nowhere, **keys)

    def eager(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([5]), math.inf)

    with pytest.warns(UserWarning, match="eager"), pytest.raises(GenerationError, match=r"eager.* gave \+inf"):
        search(TinyLM().eval(), logits_processor=[eager], **keys)


@pytest.mark.parametrize("penalty", [1000.0, -1000.0, 130.0])
def test_a_penalty_beyond_what_numbers_hold_loses_nothing(penalty: float) -> None:
    found = search(TinyLM().eval(), length_penalty=penalty, max_new_tokens=240, num_return_sequences=2)
    assert not torch.isnan(found.sequences_scores).any()
    assert found.lengths == (240, 240)
