"""Token healing: rows of a batch, padding, passed caches, and the sorted vocabulary."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from decodekit import InputError, load
from decodekit.context import BindContext
from decodekit.testing import ProcessorContract
from decodekit.text import as_tokenizer
from decodekit_processors import healing
from decodekit_processors.healing import TokenHealing, Vocabulary, vocabulary
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

VOCAB = 420
"""Of the model: wider than any tokenizer here, as logits often are."""


# -- rows --------------------------------------------------------------------------------------------


def rows_of(tokenizer: Any) -> list[list[int]]:
    """Rows of several lengths: some can be healed, one ends in a special token, one cannot grow."""
    texts = ["the lin", "She was a very am", "https://linked.ex", "of amber eyes. caf"]
    rows = [list(tokenizer.encode(text).ids) for text in texts]
    return [*rows, [*rows[0], 1], [*rows[1], VOCAB - 1]]


def test_a_row_gets_what_it_gets_alone(tokenizer: Any, heal: Any) -> None:
    rows = rows_of(tokenizer)
    alone = [heal([row], tokenizer)[0].tolist() for row in rows]
    assert sum(len(made) < len(row) + 4 for made, row in zip(alone, rows, strict=True)) == 4
    for order in ([0, 1, 2, 3], [0, 4, 1, 5], [4, 5], [2, 2, 5]):
        batch = heal([rows[i] for i in order], tokenizer, return_dict_in_generate=True)
        for place, i in enumerate(order):
            row = batch.sequences[place].tolist()
            assert row[len(row) - len(alone[i]) :] == alone[i]
            assert set(row[: len(row) - len(alone[i])]) <= {2}, "what stands before the row is padding"
    copies = heal([rows[0], rows[4]], tokenizer, num_return_sequences=2, do_sample=True, seed=4)
    wrapped = as_tokenizer(tokenizer)
    for row in copies[:2, -4].tolist():
        assert wrapped.token_bytes(row).startswith(b" lin")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_with_a_mask(tokenizer: Any, side: str, heal: Any) -> None:
    rows = rows_of(tokenizer)
    width = max(map(len, rows)) + 1
    for order in ([0, 1], [0, 4], [3, 5, 2]):
        ids, mask = torch.full((len(order), width), 77), torch.zeros(len(order), width, dtype=torch.long)
        for place, i in enumerate(order):
            here = slice(width - len(rows[i]), None) if side == "left" else slice(len(rows[i]))
            ids[place, here], mask[place, here] = torch.tensor(rows[i]), 1
        given = ids.clone()
        batch = heal(ids, tokenizer, attention_mask=mask)
        assert torch.equal(ids, given)
        for place, i in enumerate(order):
            want = heal([rows[i]], tokenizer)[0].tolist()
            assert batch[place].tolist()[-len(want) :] == want


def test_with_a_passed_cache(model: Any, tokenizer: Any, heal: Any) -> None:
    transformers = pytest.importorskip("transformers")
    rows = rows_of(tokenizer)
    ids = torch.tensor([rows[1], rows[1]])

    def cached(width: int) -> Any:
        cache = transformers.DynamicCache(config=model.config)
        model(ids[:, :width], cache=cache, use_cache=True)
        return cache

    want = heal(ids, tokenizer)
    for width in (1, ids.shape[1] - 2):
        assert torch.equal(heal(ids, tokenizer, cache=cached(width)), want)
        fresh = heal(ids[:, width:], tokenizer, cache=cached(width), attention_mask=torch.ones_like(ids))
        assert torch.equal(fresh, want[:, width:])
    # One token is left to feed: it must stay.
    width = ids.shape[1] - 1
    off = heal(ids, tokenizer, token_healing=False)
    assert torch.equal(heal(ids, tokenizer, cache=cached(width)), off)
    mixed = torch.stack([ids[0], torch.cat([ids[0, :-1], torch.tensor([1])])])
    with pytest.raises(InputError, match="pass the prompts one by one, or no cache"):
        heal(mixed, tokenizer, cache=cached(2))


class TestTokenHealing(ProcessorContract):
    """The suite with a context in which the prompt's last token was dropped."""

    def make(self) -> Any:
        return TokenHealing()

    def context(self, tokens: Tensor, mask: Tensor | None, **more: Any) -> BindContext:
        ctx = super().context(tokens, mask, tokenizer=Doubles(), **more)
        ctx.dropped = torch.full((len(tokens),), 3)
        return ctx

    width = 6


class Doubles:
    """Token t is the letter t mod 6, once below 6, and so on."""

    def encode(self, text: str) -> list[int]:
        raise AssertionError("not needed")

    def decode(self, ids: Any) -> str:
        return "".join("abcdef"[t % 6] * (t // 6 + 1) for t in ids)

    def token_bytes(self, token: int) -> bytes:
        return self.decode([token]).encode()


# -- the sorted vocabulary ---------------------------------------------------------------------------


class Bytes:
    """A tokenizer made of nothing but what its tokens add."""

    def __init__(self, data: list[bytes]) -> None:
        self.data = data
        self.asked = 0

    def token_bytes(self, token: int) -> bytes:
        self.asked += 1
        return self.data[token] if token < len(self.data) else b""

    def is_special(self, token: int) -> bool:
        return False


@given(st.lists(st.binary(max_size=3) | st.text("ab\xff", max_size=4).map(lambda t: t.encode("latin-1")), min_size=1))
def test_extensions_are_the_tokens_with_that_begin(data: list[bytes]) -> None:
    known = Vocabulary(Bytes(data), len(data) + 2)  # type: ignore[arg-type]
    for token, piece in enumerate([*data, b"", b""]):
        want = {i for i, other in enumerate(data) if other.startswith(piece)} if piece else set()
        found = known.extensions(token)
        assert set(found) == want
        assert len(found) == len(want)
    assert known.extensions(-1) == known.extensions(len(data) + 9) == []


def test_the_vocabulary_is_made_once_and_goes_with_the_tokenizer(train: Any) -> None:
    tokenizer: Any = Bytes([b"a", b"ab"])
    first = vocabulary(tokenizer, 2)
    asked = tokenizer.asked
    assert vocabulary(tokenizer, 2) is first
    assert tokenizer.asked == asked
    assert vocabulary(tokenizer, 3) is not first
    before = len(healing._known)
    del tokenizer, first
    gc.collect()
    assert len(healing._known) == before - 1
    # Every call wraps a bare tokenizer anew: what is inside counts.
    bare = train([])
    assert vocabulary(as_tokenizer(bare), 50) is vocabulary(as_tokenizer(bare), 50)

    class Unhashable(Bytes):
        __hash__ = None  # type: ignore[assignment]

    assert vocabulary(Unhashable([b"a", b"ab"]), 2).extensions(0) == [0, 1]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["pieces", "words"])
def test_vocabularies_of_pieces(model: Any, kind: str) -> None:
    """Tokens with a mark for the space before them, and tokens with a mark for no space before them."""
    from tokenizers import Tokenizer, decoders, models

    names = {
        "pieces": ["<unk>", "▁the", "▁lin", "▁link", "lin", "link", "▁", "<0x6C>", "▁l", "<0xE6>", "日"],
        "words": ["[UNK]", "the", "lin", "link", "##lin", "##link", "##s"],
    }[kind]
    ids = {name: i for i, name in enumerate(names)}
    if kind == "pieces":
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token="<unk>", byte_fallback=True))
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
        want = {"▁lin": ["▁lin", "▁link"], "lin": ["lin", "link"], "▁l": ["▁l", "▁lin", "▁link"]}
        want |= {"<0x6C>": ["<0x6C>", "lin", "link"], "<0xE6>": ["<0xE6>", "日"], "日": ["日"]}
        want |= {"▁": ["▁", "▁l", "▁lin", "▁link", "▁the"]}
    else:
        tokenizer = Tokenizer(models.WordPiece(vocab=ids, unk_token="[UNK]"))
        tokenizer.decoder = decoders.WordPiece("##", False)
        want = {"lin": ["lin", "link"], "##lin": ["##lin", "##link"], "##s": ["##s"]}
    tokenizer.add_special_tokens(names[:1])  # it is the model's bos
    wrapped = as_tokenizer(tokenizer)
    known = Vocabulary(wrapped, VOCAB)
    for name, longer in want.items():
        assert sorted(names[i] for i in known.extensions(ids[name])) == sorted(longer)
    lm = load(model, tokenizer=tokenizer)
    for last in (name for name, longer in want.items() if len(longer) > 1 and "<" not in name):
        for prompt in ([ids[names[1]], ids[last]], [ids[last]]):
            keys = {"token_healing": True, "max_new_tokens": 1, "eos_token_id": None, "seed": 1, "do_sample": True}
            (text,), output = lm.details(prompt, **keys)
            assert wrapped.decode(prompt) + text == wrapped.decode(output.sequences[0].tolist())
