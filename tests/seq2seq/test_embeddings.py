"""Prompts of a decoder that come as embeddings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit import InputError, generate

transformers = pytest.importorskip("transformers")

EMBEDS = torch.randn(2, 6, 32, generator=torch.Generator().manual_seed(4))
HOLES = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def model() -> Any:
    shape = {"vocab_size": 60, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    more = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.5}
    special = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 1}
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, **more, **special)).eval()


WAYS = [{}, {"num_beams": 3}, {"use_cache": False}, {"num_beams": 2, "use_cache": False}, {"repetition_penalty": 1.5}]


@pytest.mark.parametrize("keys", WAYS)
@pytest.mark.parametrize("mask", [None, HOLES])
def test_new_tokens_come_back(mask: Any, keys: dict[str, Any], model: Any) -> None:
    given = {"inputs_embeds": EMBEDS, **({} if mask is None else {"attention_mask": mask})}
    theirs = model.generate(**given, max_new_tokens=7, **keys)
    assert torch.equal(generate(model, **given, max_new_tokens=7, **keys), theirs)


@pytest.mark.parametrize("keys", WAYS)
def test_beside_their_tokens(keys: dict[str, Any], model: Any) -> None:
    """They are fed in place of the tokens, which processors see and the output holds."""
    ids = torch.tensor([[5, 9, 31, 7], [8, 8, 12, 40]])
    plain = generate(model, ids, max_new_tokens=7, **keys)
    embeds = model.get_input_embeddings()(ids)
    assert torch.equal(generate(model, ids, inputs_embeds=embeds, max_new_tokens=7, **keys), plain)
    other = generate(model, ids, inputs_embeds=embeds.flip(1), max_new_tokens=7, **keys)
    assert torch.equal(other[:, :4], ids)
    assert not torch.equal(other, plain), "the embeddings were not fed"


def test_lengths_count_what_comes_back(model: Any) -> None:
    out: Any = generate(model, inputs_embeds=EMBEDS, max_length=4, eos_token_id=None, return_dict_in_generate=True)
    assert out.sequences.shape == (2, 4)
    assert out.stop_reasons == ("max_length",) * 2


@pytest.mark.parametrize(
    ("inputs", "keys", "words"),
    [
        (None, {"inputs_embeds": EMBEDS[0]}, "floating tensor .B, E, H., got torch.float32 .6, 32."),
        (None, {"inputs_embeds": [[1.0]]}, "got list"),
        (None, {"inputs_embeds": EMBEDS, "attention_mask": torch.ones(2, 5)}, "must be .B, E. = .2, 6."),
        (None, {"inputs_embeds": EMBEDS, "attention_mask": HOLES.flip(1)}, "padded on the right"),
        ([[5, 9]], {"inputs_embeds": EMBEDS}, "must be the same, or leave them out"),
        (None, {"inputs_embeds": EMBEDS, "prefill_chunk_size": 2}, "embeddings are read at once"),
    ],
)
def test_what_cannot_be(inputs: Any, keys: dict[str, Any], words: str, model: Any) -> None:
    with pytest.raises(InputError, match=words):
        generate(model, inputs, max_new_tokens=3, **keys)
