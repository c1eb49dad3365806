"""The same tokens as transformers' own generate with the keys that forbid, force or normalise, alone and together."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from decodekit import GenerationConfig, generate, plan

transformers = pytest.importorskip("transformers")
VOCAB = 61


@functools.cache
def model() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.3, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(9)
        return transformers.LlamaForCausalLM(config).double().eval()


def allow(prompt: int, ids: torch.Tensor) -> list[int]:
    return [2, *((int(ids[-1]) * 7 + prompt + step * 11) % VOCAB for step in range(9))]


def keys_of(draw: random.Random, new: int) -> dict[str, Any]:
    """Some of the keys; `new` tokens are made at most."""
    ids = draw.sample(range(VOCAB), 20)
    every: dict[str, Any] = {
        "suppress_tokens": [*ids[:8], 999],
        "begin_suppress_tokens": ids[8:],
        "forced_bos_token_id": ids[9],
        "forced_eos_token_id": draw.choice([ids[10], ids[10:12]]),
        "exponential_decay_length_penalty": (draw.randint(0, 3), draw.choice([1.1, 1.7, 0.8])),
        "remove_invalid_values": True,
        "renormalize_logits": True,
        "prefix_allowed_tokens_fn": allow,
        "min_new_tokens": draw.randint(1, new),
        "guidance_scale": draw.choice([0.5, 1.5, 3.0]),
        "repetition_penalty": 1.2,
    }
    return {key: every[key] for key in draw.sample(sorted(every), draw.randint(1, 5))}


@pytest.mark.filterwarnings("ignore")
def test_greedy_equals_transformers() -> None:
    lengths, used = set(), set()
    for number in range(60):
        draw = random.Random(number)
        rows, width, new = draw.randint(1, 3), draw.choice([1, 1, 2, 4, 6]), draw.randint(2, 9)
        ids = torch.randint(3, VOCAB, (rows, width), generator=torch.Generator().manual_seed(number))
        keys = {"max_new_tokens": new, **keys_of(draw, new)}
        if draw.random() < 0.5:
            keys["eos_token_id"] = draw.sample(range(3, VOCAB), 9)
        want = model().generate(ids, do_sample=False, **keys)
        got = generate(model(), ids, **keys)
        # A row that everything is forbidden in takes token 0 there, and is an error here: none of these cases is one.
        assert got.shape == want.shape, (number, keys)
        assert torch.equal(got, want), (number, keys)
        lengths.add(got.shape[1] - width)
        used |= keys.keys()
    assert len(lengths) > 5
    assert len(used) == 13


@pytest.mark.filterwarnings("ignore")
def test_scores_equal_those_of_transformers() -> None:
    """What is recorded, with renormalize_logits last and over a shortlist: log-probabilities of what is left."""
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    keys: dict[str, Any] = {
        "max_new_tokens": 1, "renormalize_logits": True, "suppress_tokens": [3, 4], "do_sample": True, "top_k": 5,
        "temperature": 0.7, "output_scores": True, "return_dict_in_generate": True,
    }  # fmt: skip
    want = model().generate(ids, **keys).scores[0]
    got = generate(model(), ids, **keys).scores[0]
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(got.exp().sum(-1), torch.ones(2))


def test_order_is_that_of_the_reference_with_cleaning_first() -> None:
    names = [
        "remove_invalid_values", "guidance_scale", "repetition_penalty", "min_length", "min_new_tokens",
        "prefix_allowed_tokens_fn", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
        "suppress_tokens", "begin_suppress_tokens", "temperature", "top_k", "renormalize_logits",
    ]  # fmt: skip
    keys: dict[str, Any] = {
        "guidance_scale": 2.0, "repetition_penalty": 1.2, "remove_invalid_values": True, "min_length": 9,
        "min_new_tokens": 4, "prefix_allowed_tokens_fn": allow, "forced_bos_token_id": 5, "forced_eos_token_id": 6,
        "exponential_decay_length_penalty": (1, 1.2), "suppress_tokens": [7], "begin_suppress_tokens": [8],
        "renormalize_logits": True, "do_sample": True, "temperature": 0.5,
    }  # fmt: skip
    assert [part.name for part in plan(model(), [[5]], **keys).chain.parts] == names


def test_what_is_forbidden_stays_forbidden_when_values_are_cleaned() -> None:
    """There forbidden tokens become finite before later processors, and a row without any token takes token 0."""
    keys: dict[str, Any] = {"max_new_tokens": 1, "remove_invalid_values": True, "eos_token_id": None, "pad_token_id": 0}
    one = {"prefix_allowed_tokens_fn": lambda prompt, ids: [3], "output_scores": True, "return_dict_in_generate": True}
    scores = generate(model(), [[5]], **keys, **one).scores[0]
    assert scores.isfinite().nonzero().tolist() == [[0, 3]]
    with pytest.raises(Exception, match="'suppress_tokens' .* leaves no token to choose"):
        generate(model(), [[5]], suppress_tokens=list(range(VOCAB)), **keys)

    class Spoilt(torch.nn.Module):
        vocab_size = 5

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            row = torch.tensor([1.0, float("nan"), float("inf"), 4.0, -float("inf")])
            return row.expand(*tokens.shape, 5)

    assert generate(Spoilt(), [[1]], **keys).tolist() == [[1, 2]]
    with pytest.raises(Exception, match="NaN"):
        generate(Spoilt(), [[1]], **{**keys, "remove_invalid_values": False})


def test_keys_go_through_files_where_json_can_hold_them(tmp_path: Any) -> None:
    keys = {
        "suppress_tokens": [3, 4], "begin_suppress_tokens": [5], "forced_bos_token_id": 5, "forced_eos_token_id": [6],
        "exponential_decay_length_penalty": (1, 1.2), "remove_invalid_values": True, "renormalize_logits": True,
        "guidance_scale": 1.5, "min_length": (3, 4), "eos_token_id": [[2], [5, 7]], "max_new_tokens": [4, 5],
    }  # fmt: skip
    GenerationConfig(**keys).save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    prompts = [[5, 6], [7, 8]]
    assert torch.equal(generate(model(), prompts, loaded), generate(model(), prompts, **keys))
    with pytest.raises(Exception, match="prefix_allowed_tokens_fn"):
        GenerationConfig(prefix_allowed_tokens_fn=allow).to_json_string()
