"""Prompts read in chunks: the same text, no more than a chunk at a time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit import ConfigError, generate
from decodekit.testing import TinyLM
from decodekit_plugins.models.native.module import NativeConfig, NativeLM

PROMPTS = ([5, 9, 3, 22, 17, 8, 4, 11, 30], [7, 3, 21, 2, 2])
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "seed": 3},
    "beams": {"num_beams": 3},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
}


class Watched(NativeLM):
    """Knows how many tokens each pass got."""

    def forward(self, tokens: torch.Tensor, *args: Any, **keys: Any) -> Any:
        self.fed.append(tokens.shape[1])
        return super().forward(tokens, *args, **keys)


@pytest.fixture(scope="module")
def model() -> Watched:
    torch.manual_seed(2)
    config = NativeConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8,
    )  # fmt: skip
    made = Watched(config).eval()
    made.fed = []
    return made


@pytest.mark.parametrize("size", [1, 2, 4, 8, 9, 100])
@pytest.mark.parametrize("way", WAYS)
def test_the_text_is_the_same(way: str, size: int, model: Watched) -> None:
    keys = {**WAYS[way], "max_new_tokens": 8, "pad_token_id": 0, "return_dict_in_generate": True}
    whole: Any = generate(model, [list(p) for p in PROMPTS], output_hidden_states=True, **keys)
    model.fed.clear()
    parts: Any = generate(model, [list(p) for p in PROMPTS], output_hidden_states=True, prefill_chunk_size=size, **keys)
    assert torch.equal(whole.sequences, parts.sequences)
    width, fed = len(PROMPTS[0]), []
    while sum(fed) < width:
        fed.append(min(size, width - sum(fed)))
    assert model.fed[: len(fed)] == fed
    for one, other in zip(whole.hidden_states, parts.hidden_states, strict=True):
        for a, b in zip(one, other, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_behind_a_cache_that_holds_the_begin(model: Watched) -> None:
    keys: dict[str, Any] = {"max_new_tokens": 4, "return_dict_in_generate": True, "pad_token_id": 0}
    first: Any = generate(model, [list(PROMPTS[0])], **{**keys, "max_new_tokens": 1})
    held = first.cache.get_seq_length()
    longer = [[*PROMPTS[0], 6, 7, 8, 9, 10]]
    plain: Any = generate(model, longer, **keys)
    model.fed.clear()
    parts: Any = generate(model, longer, cache=first.cache, prefill_chunk_size=2, **keys)
    assert torch.equal(plain.sequences, parts.sequences)
    assert model.fed[:3] == [2, 2, len(longer[0]) - held - 4]


def test_transformers_models() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**shape, **heads)).eval()
    for keys in ({}, {"num_beams": 2}):
        more: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None, **keys}
        whole = generate(model, [list(p) for p in PROMPTS], **more)
        for size in (1, 3, 5):
            assert torch.equal(generate(model, [list(p) for p in PROMPTS], prefill_chunk_size=size, **more), whole)


def test_what_cannot_be() -> None:
    model = TinyLM().eval()
    with pytest.raises(ConfigError, match="prefill_chunk_size: must be at least 1"):
        generate(model, [[5, 9]], prefill_chunk_size=0, max_new_tokens=2)
    with pytest.warns(UserWarning, match="prefill_chunk_size: 2 has no effect with use_cache=False"):
        generate(model, [[5, 9]], prefill_chunk_size=2, use_cache=False, max_new_tokens=2)
