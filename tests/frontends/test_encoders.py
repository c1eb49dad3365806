"""Custom loops both ways with encoder-decoder models, and with embeddings in place of tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit import as_custom_generate, attach
from torch import Tensor

transformers = pytest.importorskip("transformers")


@pytest.fixture
def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=83,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        initializer_factor=3.0,
        decoder_start_token_id=0,
        pad_token_id=0,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return transformers.T5ForConditionalGeneration(config).eval()


@pytest.fixture
def text() -> dict[str, Tensor]:
    ids = torch.tensor([[5, 6, 7, 0], [9, 8, 7, 6]])
    return {"inputs": ids, "attention_mask": (ids != 0).long()}


def same(one: Tensor, other: Tensor) -> bool:
    """Equal but for what fills the ends."""
    width = min(one.shape[1], other.shape[1])
    return torch.equal(one[:, :width].masked_fill(one[:, :width] == 2, 0), other[:, :width].masked_fill(
        other[:, :width] == 2, 0))  # fmt: skip


@pytest.mark.parametrize("keys", [{}, {"num_beams": 3, "num_return_sequences": 2}], ids=["greedy", "beams"])
def test_an_encoder_decoder_model(t5: Any, text: Any, keys: dict[str, Any]) -> None:
    call = {"max_new_tokens": 7, "do_sample": False, **keys}
    want = t5.generate(**text, **call)
    loop = as_custom_generate("beam" if keys else "greedy")
    assert same(t5.generate(**text, **call, custom_generate=loop), want)
    with attach(t5) as model:
        assert same(model.generate(**text, **call), want)
        assert same(model.generate(**text, **call, custom_generate=loop), want)
    assert type(t5) is transformers.T5ForConditionalGeneration


@pytest.mark.parametrize("n", [1, 2])
def test_transformers_own_loop_with_an_encoder(t5: Any, text: Any, n: int) -> None:
    call: dict[str, Any] = {"max_new_tokens": 7, "custom_generate": type(t5)._sample}
    want = t5.generate(**text, do_sample=False, max_new_tokens=7)
    with attach(t5) as model:
        if n == 1:
            assert same(model.generate(**text, **call), want)
        else:
            got = model.generate(**text, **call, do_sample=True, top_k=1, num_return_sequences=2)
            assert same(got, want.repeat_interleave(2, 0))


def test_embeddings(llama: Any, padded: Any) -> None:
    embeds = llama.get_input_embeddings()(padded["inputs"])
    for rows, mask in ((slice(None), padded["attention_mask"]), (slice(1, 2), None)):
        call: dict[str, Any] = {"inputs_embeds": embeds[rows], "attention_mask": mask, "max_new_tokens": 6}
        want = llama.generate(**call, do_sample=False)
        assert same(llama.generate(**call, do_sample=False, custom_generate=as_custom_generate("greedy")), want)
        with attach(llama) as model:
            assert same(model.generate(**call), want)
            assert same(model.generate(**call, custom_generate=type(llama)._sample), want)


def test_a_loop_that_continues_a_cache(llama: Any, padded: Any) -> None:
    """New tokens behind a cache that holds the others: the mask covers both."""
    ids = padded["inputs"][1:]
    seen: list[Any] = []

    def loop(model: Any, input_ids: Tensor, attention_mask: Tensor, **kwargs: Any) -> Tensor:
        seen.append((tuple(input_ids.shape), tuple(attention_mask.shape)))
        return input_ids

    with attach(llama) as model:
        cache = transformers.DynamicCache(config=model.config)
        model.generate(ids, cache=cache, max_new_tokens=2)
        held = cache.get_seq_length()
        mask = torch.ones(1, held + 1, dtype=torch.long)
        model.generate(ids[:, :1], attention_mask=mask, cache=cache, max_new_tokens=2, custom_generate=loop)
    assert seen == [((1, 1), (1, held + 1))]


@pytest.mark.parametrize("keys", [{}, {"num_beams": 2}], ids=["greedy", "beams"])
def test_text_streamers(t5: Any, llama: Any, text: Any, padded: Any, keys: dict[str, Any]) -> None:
    """What is streamed of an encoder-decoder model is the decoder's; embeddings have no text."""
    from decodekit import generate
    from decodekit.testing import Letters
    from decodekit_plugins.streamers.iterator import TextIteratorStreamer

    embeds = llama.get_input_embeddings()(padded["inputs"])
    calls: list[tuple[Any, dict[str, Any]]] = [
        (t5, text),
        (llama, {"inputs_embeds": embeds, "attention_mask": padded["attention_mask"]}),
    ]
    for model, given in calls:
        streamer = TextIteratorStreamer(Letters(), rows=True, timeout=5)
        out: Any = generate(model, **given, **keys, max_new_tokens=5, streamer=streamer, return_dict_in_generate=True)
        heard = list(streamer)
        for row, length in enumerate(out.lengths):
            said = "".join(piece for at, piece in heard if at == row)
            assert said == Letters().decode(out.sequences[row, : out.prompt_width + length].tolist())
