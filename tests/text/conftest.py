"""Tiny tokenizers of every make, trained here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

torch.set_num_threads(1)

SENTENCES = (
    "Hello world, it's a test. Don't stop!\n\nUser: ok?",
    "吾輩は猫である。名前はまだ無い。",
    "你好，世界。这是一个测试。",
    "नमस्ते दुनिया, यह एक परीक्षण है।",
    "party 🤗 family 👨‍👩‍👧 flag 🇮🇳 face 🙂",
    "aa ab ba  bb   aab <END> a.b ,c",
)
SPECIAL = ["<s>", "</s>"]


def _train(model: Any, trainer: Any, pre: Any, decoder: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(model)
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return tokenizer


def byte_level() -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=380,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    pre = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return _train(models.BPE(), trainer, pre, decoders.ByteLevel())


def _fallback(decoder: Any) -> Tokenizer:
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=SPECIAL, limit_alphabet=30, show_progress=False)
    marks = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    small = _train(models.BPE(), trainer, None, None, marks)
    import json

    state = json.loads(small.to_str())
    vocab, merges = state["model"]["vocab"], [tuple(m) for m in state["model"]["merges"]]
    vocab |= {token: len(vocab) + n for n, token in enumerate(raw)}
    vocab["<unk>"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = marks
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.decoder = decoder
    return tokenizer


def llama() -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _fallback(decoders.Sequence(steps))


def gemma() -> Tokenizer:
    return _fallback(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def metaspace() -> Tokenizer:
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=[*SPECIAL, "<unk>"], unk_token="<unk>", show_progress=False
    )
    return _train(models.Unigram(), trainer, pre_tokenizers.Metaspace(), decoders.Metaspace())


def _wordpiece(decoder: Any) -> Tokenizer:
    trainer = trainers.WordPieceTrainer(vocab_size=260, special_tokens=[*SPECIAL, "[UNK]"], show_progress=False)
    return _train(models.WordPiece(unk_token="[UNK]"), trainer, pre_tokenizers.BertPreTokenizer(), decoder)


def wordpiece() -> Tokenizer:
    return _wordpiece(decoders.WordPiece(cleanup=True))


def bare() -> Tokenizer:
    return _wordpiece(None)


def suffix() -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=250, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    model = models.BPE(end_of_word_suffix="</w>")
    return _train(model, trainer, pre_tokenizers.Whitespace(), decoders.BPEDecoder())


MAKERS = {
    "byte_level": byte_level,
    "llama": llama,
    "gemma": gemma,
    "metaspace": metaspace,
    "wordpiece": wordpiece,
    "bare": bare,
    "suffix": suffix,
}


class Foreign:
    """Only encode and decode."""

    def __init__(self, inner: Tokenizer) -> None:
        self.inner = inner

    def encode(self, text: str) -> list[int]:
        return self.inner.encode(text).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)


@pytest.fixture(scope="session")
def made() -> dict[str, Tokenizer]:
    """Every make by name."""
    return {name: make() for name, make in MAKERS.items()}


@pytest.fixture(scope="session")
def foreign() -> type[Foreign]:
    return Foreign


@pytest.fixture(scope="session")
def sentences() -> tuple[str, ...]:
    return SENTENCES


@pytest.fixture
def context() -> Any:
    """A function that makes a bind context."""
    from decodekit.context import BindContext
    from decodekit.protocols import ModelSpec
    from decodekit.settings import Settings, Value

    def make(prompt: Any = ((0,),), tokenizer: Any = None, mask: Any = None, positions: Any = None, **keys: Any) -> Any:
        tokens = torch.as_tensor(prompt)
        values = {name: Value(name, value, "call", "test") for name, value in keys.items()}
        return BindContext(
            spec=ModelSpec(1000, torch.device("cpu"), torch.float32, max_positions=positions),
            settings=Settings(values, {}, {}, {}),
            tokens=tokens,
            mask=None if mask is None else torch.as_tensor(mask).bool(),
            prompt_width=tokens.shape[1],
            tokenizer=tokenizer,
        )

    return make
