"""A tiny model with a tokenizer of many bytes, as objects and as a checkpoint with a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decodekit import LM, load
from decodekit_plugins.models.native.module import NativeConfig, NativeLM
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SENTENCES = (
    "Hello world, it is a test.",
    "吾輩は猫である。名前はまだ無い。",
    "你好，世界。",
    "party 🤗 family 👨‍👩‍👧 🇮🇳",
)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class Counted(NativeLM):
    """Knows how often it was run."""

    calls = 0

    def forward(self, *args: Any, **keys: Any) -> Any:
        self.calls += 1
        return super().forward(*args, **keys)


@pytest.fixture(scope="session")
def shape(tokenizer: Tokenizer) -> dict[str, Any]:
    """What config.json says."""
    return shape_of(tokenizer.get_vocab_size())


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        SENTENCES,
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, min_frequency=1
        ),
    )
    return made


def shape_of(size: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "vocab_size": size,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


@pytest.fixture(scope="session")
def model(tokenizer: Tokenizer) -> Counted:
    torch.manual_seed(0)
    made = Counted(NativeConfig.from_hf(shape_of(tokenizer.get_vocab_size()))).eval()
    for weight in made.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    return made


@pytest.fixture(scope="session")
def lm(model: Counted, tokenizer: Tokenizer) -> LM:
    return load(model, tokenizer=tokenizer)


@pytest.fixture(scope="session")
def folder(model: Counted, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a checkpoint, with a chat template."""
    from safetensors.torch import save_file

    made = tmp_path_factory.mktemp("chat")
    save_file(model.state_dict(), made / "model.safetensors")
    tokenizer.save(str(made / "tokenizer.json"))
    (made / "config.json").write_text(json.dumps(shape_of(tokenizer.get_vocab_size())))
    (made / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made
