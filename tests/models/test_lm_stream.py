"""`LM.stream`: the text in pieces, whatever bytes its tokens hold; what was begun can be left."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decodekit import LM, InputError, load
from tokenizers import Tokenizer

DRAWN: dict[str, Any] = {"do_sample": True, "seed": 11, "max_new_tokens": 14, "eos_token_id": None}
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 10, "eos_token_id": None}
MANY = ("吾輩は", "🤗", "party 👨‍👩‍👧 und", "Hello", "नमस्ते", "e\u0301")


@pytest.mark.parametrize("prompt", MANY)
@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_many_bytes(lm: LM, tokenizer: Tokenizer, prompt: str, seed: int) -> None:
    call = {**DRAWN, "seed": seed, "max_new_tokens": 40}
    [text], output = lm.details(prompt, **call)
    new = output.sequences[0, output.prompt_width :].tolist()
    # Random weights write random bytes: what is no character is U+FFFD, just where the tokenizer puts it.
    assert text == tokenizer.decode(new)
    assert lm.generate(prompt, **call) == text
    assert "".join(lm.stream(prompt, **call)) == text


def test_characters_come_whole(lm: LM, tokenizer: Tokenizer) -> None:
    said = "猫は🤗 👨‍👩‍👧。"
    single = {lm.tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.get_vocab_size()))}
    ids = [single[bytes([byte])] for byte in said.encode()]
    assert tokenizer.decode(ids) == said, "one token a byte"

    def script(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, ids[input_ids.shape[1] - begun]] = 0.0
        return forced

    call: dict[str, Any] = {**GREEDY, "max_new_tokens": len(ids), "logits_processor": [script]}
    begun = len(lm.tokens("Hello"))
    assert list(lm.stream("Hello", **call)) == list(said)
    assert lm.generate("Hello", **call) == said
    # A prompt that ends inside a character: its rest comes with the first new token.
    begun, prompt, rest = 2, ids[:2], ids[2:]
    ids = rest
    call["max_new_tokens"] = len(rest)
    assert list(lm.stream(prompt, **call)) == list(said)
    assert lm.generate(prompt, **call) == said


def test_stream_cancels(model: Any, tokenizer: Tokenizer) -> None:
    lm = load(model, tokenizer=tokenizer)
    call = {**GREEDY, "max_new_tokens": 100, "do_sample": True, "seed": 5}
    whole = lm.generate("Hello", **call)
    model.calls = 0
    stream = lm.stream("Hello", **call)
    assert model.calls == 0, "nothing runs before the first piece is wanted"
    begin = next(stream) + next(stream)
    ran = model.calls
    assert 2 <= ran < 20
    stream.close()  # type: ignore[attr-defined]
    assert list(stream) == []
    assert model.calls == ran
    assert whole.startswith(begin)
    lm.stream("Hello", **call).close()  # type: ignore[attr-defined]
    assert model.calls == ran
    assert lm.generate("Hello", **call) == whole, "and the next call is not disturbed"


def test_two_streams_at_once(lm: LM) -> None:
    want = [lm.generate(prompt, **DRAWN) for prompt in MANY[:2]]
    streams: list[Iterator[str]] = [lm.stream(prompt, **DRAWN) for prompt in MANY[:2]]
    got = ["", ""]
    for _ in range(60):
        for index, stream in enumerate(streams):
            got[index] += next(stream, "")
    assert got == want


def test_stream_takes_one_prompt(lm: LM) -> None:
    for several in (["Hello"], ["Hello", "party"], [[3, 4]]):
        with pytest.raises(InputError, match="stream takes one prompt"):
            lm.stream(several)
    with pytest.raises(InputError, match="not NoneType"):
        lm.stream(None)
    with pytest.raises(ValueError, match="top_p"):
        lm.stream("Hello", do_sample=True, top_p=7.0)
