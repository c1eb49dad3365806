"""A small byte-level tokenizer, a tiny model, and prompts cut anywhere: for tests of token healing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import generate, load

TEXT = (
    "the link is http://example.org/linking and https://linked.example, the linen was lined with linear lines. "
    "She was a very amiable, amusing American woman of amber eyes. café cafés déjà naïve 日本語 日本 日曜日 "
)


def trained(special: list[str]) -> Any:
    """A byte-level tokenizer of a few hundred tokens; no token is a bare space but the byte's own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([TEXT * 20], trainer)
    return made


VOCAB = 420
"""Wider than any tokenizer here: logits often are."""


@pytest.fixture(scope="session")
def train() -> Callable[[list[str]], Any]:
    """``train(special)``: a tokenizer with these special tokens first."""
    return trained


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return trained(["<s>", "</s>", "<pad>"])


@pytest.fixture(scope="session")
def model() -> Any:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "vocab_size": VOCAB}
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_key_value_heads=2, initializer_range=0.3, max_position_embeddings=128, **shape, **ids
        )
    ).eval()


@pytest.fixture(scope="session")
def lm(model: Any, tokenizer: Any) -> Any:
    return load(model, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def heal(model: Any) -> Callable[..., Any]:
    """``heal(inputs, tokenizer)``: the tokens of a greedy call with token healing."""

    def call(inputs: Any, tokenizer: Any, count: int = 4, **keys: Any) -> Any:
        told = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "token_healing": True, **keys}
        return generate(model, inputs, tokenizer=tokenizer, **told)

    return call


@pytest.fixture(scope="session")
def cuts() -> Callable[..., list[str]]:
    """``cuts(count, seed)``: parts of the text, cut anywhere."""

    def made(count: int, seed: int = 0) -> list[str]:
        draw = random.Random(seed)
        starts = [draw.randrange(len(TEXT) - 30) for _ in range(count)]
        return [TEXT[start : start + draw.randint(1, 29)] for start in starts]

    return made
