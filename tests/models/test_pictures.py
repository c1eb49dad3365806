"""Decoders that see pictures: BLIP-2 behind its embeddings, LLaVA with places in the prompt."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from decodekit import ConfigError, InputError, generate, plan

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
SEES = {**SMALL, "image_size": 16, "patch_size": 8}
SPECIAL = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MARK = 39
PICTURES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@functools.cache
def blip() -> Any:
    text = {
        **SPECIAL, "model_type": "opt", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "ffn_dim": 32, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "init_std": 0.5,
    }  # fmt: skip
    config = transformers.Blip2Config(
        vision_config=SEES, qformer_config={**SMALL, "encoder_hidden_size": 32, "vocab_size": 40}, text_config=text,
        num_query_tokens=3, image_token_index=MARK,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.Blip2ForConditionalGeneration(config).eval()


@functools.cache
def llava() -> Any:
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SEES), image_token_id=MARK, vision_feature_layer=-1,
        text_config=transformers.LlamaConfig(**SPECIAL, **SMALL, initializer_range=0.5),
        vision_feature_select_strategy="default",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.LlavaForConditionalGeneration(config).eval()


PROMPT = torch.tensor([[MARK] * 3 + [1, 5], [MARK] * 3 + [1, 9]])
SEEN = torch.tensor([[1, *[MARK] * 4, 5, 6]])


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"sequence_bias": {(MARK,): 100.0}},
        {"sequence_bias": {(MARK,): 100.0}, "num_beams": 3},
        {"use_cache": False},
    ],
)
def test_blip_writes_what_transformers_writes(keys: dict[str, Any]) -> None:
    """Also the token of a picture: only the places of the prompt are pictures."""
    more: dict[str, Any] = {"attention_mask": torch.ones_like(PROMPT), "max_new_tokens": 6, **keys}
    theirs = blip().generate(pixel_values=PICTURES, input_ids=PROMPT, do_sample=False, **more)
    assert torch.equal(theirs, generate(blip(), PROMPT, pixel_values=PICTURES, **more))


def test_blip_describes_pictures_without_a_prompt() -> None:
    theirs = blip().generate(pixel_values=PICTURES, do_sample=False, max_new_tokens=6)
    assert torch.equal(theirs, generate(blip(), pixel_values=PICTURES, max_new_tokens=6))


def test_blip_has_what_its_decoder_has() -> None:
    out: Any = generate(blip(), PROMPT, pixel_values=PICTURES, max_new_tokens=4, output_hidden_states=True)
    assert len(out.hidden_states) == 4
    for low_memory in (True, False):
        keys: dict[str, Any] = {"penalty_alpha": 0.6, "top_k": 3, "low_memory": low_memory, "max_new_tokens": 4}
        assert generate(blip(), PROMPT, pixel_values=PICTURES, **keys).shape[0] == 2
    rows = generate(blip(), [PROMPT[0].tolist(), [*PROMPT[1].tolist(), 7, 8]], pixel_values=PICTURES, max_new_tokens=4)
    alone = generate(blip(), PROMPT[:1], pixel_values=PICTURES[:1], max_new_tokens=4)[0].tolist()
    assert rows[0, 2:].tolist()[: len(alone)] == alone


@pytest.mark.parametrize(
    ("inputs", "keys", "words"),
    [
        (PROMPT, {}, "reads pictures: pass pixel_values"),
        (PROMPT, {"pixel_values": PICTURES[0]}, r"pass pixel_values .* got \(3, 16, 16\)"),
        ([[1, 5]], {"pixel_values": PICTURES[:1]}, "have 0 places for pictures"),
        (PROMPT, {"pixel_values": PICTURES[:1]}, "have 6 places for pictures .* 1 pictures take 3 each"),
        (PROMPT, {"pixel_values": torch.randn(2, 4, 16, 16)}, r"given pixel_values \(2, 4, 16, 16\)"),
        (PROMPT, {"pixel_values": PICTURES, "prefill_chunk_size": 2}, "prefill_chunk_size: .* at once"),
    ],
)
def test_what_blip_cannot_read(inputs: Any, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        plan(blip(), inputs, max_new_tokens=2, **keys)


def test_blip_has_its_decoders_table_of_positions() -> None:
    with pytest.raises(ConfigError, match="has room for 60"):
        plan(blip(), PROMPT, pixel_values=PICTURES, max_new_tokens=61)


def test_places_and_pictures_go_together() -> None:
    with pytest.raises(InputError, match="has places for pictures, but there are none"):
        plan(llava(), SEEN)
    for inputs, pixels in (([[1, 5]], PICTURES[:1]), (SEEN, PICTURES)):
        with pytest.raises(
            InputError, match="LlavaForConditionalGeneration, given pixel_values .* places for pictures"
        ):
            generate(llava(), inputs, pixel_values=pixels, max_new_tokens=2)


def test_pictures_are_read_with_the_first_chunk() -> None:
    whole = generate(llava(), SEEN, pixel_values=PICTURES[:1], max_new_tokens=5)
    for size in (5, 6, 7):
        keys: dict[str, Any] = {"prefill_chunk_size": size, "max_new_tokens": 5}
        assert torch.equal(whole, generate(llava(), SEEN, pixel_values=PICTURES[:1], **keys))
    with pytest.raises(InputError, match="prefill_chunk_size: .* set it to 5 or more"):
        plan(llava(), SEEN, pixel_values=PICTURES[:1], prefill_chunk_size=4)
    assert generate(llava(), [[1, 5, 6, 7]], prefill_chunk_size=2, max_new_tokens=2).shape == (1, 6)
