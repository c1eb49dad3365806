"""Hidden states of native models are those of the layers, before the final norm."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit import generate


def test_the_last_one_is_not_normed(model: Any, shape: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
    theirs.load_state_dict(model.state_dict())
    keys: dict[str, Any] = {"max_new_tokens": 2, "do_sample": False, "output_hidden_states": True}
    ours, want = (generate(each, [[5, 6, 7]], **keys).hidden_states for each in (model, theirs))
    for mine, other in zip(ours, want, strict=True):
        assert len(mine) == len(other) == shape["num_hidden_layers"] + 1
        for one, two in zip(mine[:-1], other[:-1], strict=True):
            assert torch.allclose(one, two, atol=1e-4)
        assert not torch.allclose(mine[-1], other[-1], atol=1e-2)
        assert torch.allclose(model.model.norm(mine[-1]), other[-1], atol=1e-4)
