"""What an encoder reads or has read is checked before it runs; what only the encoder knows is named by its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import ConfigError, InputError, generate, plan

IDS = torch.tensor([[5, 9, 30, 2], [7, 8, 41, 2]])


def encoded(model: Any) -> Any:
    with torch.no_grad():
        return model.get_encoder()(input_ids=IDS, return_dict=True)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(2, 9), "covers 9 tokens, but the encoder's input has 4"),
        (torch.tensor([[1] * 8 + [0], [1] * 9]), "covers 9 tokens, but the encoder's input has 4"),
        (torch.full((2, 4), 5), "must hold 1 or True"),
        (torch.tensor([[0] * 4, [1] * 4]), "hides a whole row"),
    ],
)
@pytest.mark.parametrize("name", ["bart", "t5"])
def test_masks_say_which_tokens_are_real(
    name: str, mask: torch.Tensor, words: str, small: Callable[[str], Any]
) -> None:
    model = small(name)
    embeds = model.get_encoder().get_input_embeddings()(IDS)
    for given in ({"encoder_outputs": encoded(model)}, {"input_ids": IDS}, {"inputs_embeds": embeds}):
        with pytest.raises(InputError, match=words):
            plan(model, attention_mask=mask, **given)
    whole = generate(model, IDS, max_new_tokens=4)
    kept = generate(model, encoder_outputs=encoded(model), attention_mask=torch.ones(2, 4), max_new_tokens=4)
    assert torch.equal(whole, kept)


def test_masks_of_waves(small: Callable[[str], Any]) -> None:
    model, waves = small("speech"), torch.randn(2, 400)
    for mask, words in (
        (torch.ones(2, 200), "covers 200 tokens, but the encoder's input has 400"),
        (torch.zeros(2, 400), "hides a whole row"),
        (torch.full((2, 400), 0.5), "must hold 1 or True"),
        (torch.ones(2), "has 2 rows, of shape"),
    ):
        with pytest.raises(InputError, match=words):
            plan(model, input_values=waves, attention_mask=mask)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_outputs_and_embeddings_of_another_encoder(name: str, small: Callable[[str], Any]) -> None:
    for value, words in (
        (torch.randn(2, 4, 31), "must be .B, S, 32."),
        (torch.zeros(2, 0, 32), "empty"),
        (torch.zeros(2, 4, 32).long(), "floating"),
    ):
        with pytest.raises(InputError, match=f"encoder_outputs .*{words}"):
            plan(small(name), encoder_outputs=(value,))
        with pytest.raises(InputError, match=f"inputs_embeds .*{words}"):
            plan(small(name), inputs_embeds=value)
    with pytest.raises(InputError, match="inputs_embeds must be .B, S, 32."):
        plan(small(name), inputs_embeds=torch.randn(2, 32))


def test_an_encoders_own_errors_are_named(small: Callable[[str], Any]) -> None:
    with pytest.raises(InputError, match=r"the encoder of VisionEncoderDecoderModel, given pixel_values \(3, 8, 8\)"):
        generate(small("vision"), pixel_values=torch.randn(3, 8, 8), max_new_tokens=2)
    with pytest.raises(InputError, match=r"the encoder of SpeechEncoderDecoderModel, given input_values \(2, 3\)"):
        generate(small("speech"), input_values=torch.randn(2, 3), max_new_tokens=2)
    with pytest.raises(InputError, match="none of them empty"):
        plan(small("speech"), input_values=torch.zeros(2, 0))


def test_tokens_beside_what_was_made_of_them(small: Callable[[str], Any]) -> None:
    """Processors look at them, as in transformers; others than those that were read are refused."""
    model = small("bart")
    keys: dict[str, Any] = {"encoder_repetition_penalty": 3.0, "max_new_tokens": 5}
    ours = generate(model, IDS, encoder_outputs=encoded(model), **keys)
    assert torch.equal(ours, generate(model, IDS, **keys))
    assert torch.equal(ours, model.generate(IDS, encoder_outputs=encoded(model), **keys))
    for other in (torch.ones(3, 4).long(), torch.ones(2, 5).long()):
        with pytest.raises(InputError, match=r"encoder_outputs were made of \(2, 4\) tokens"):
            plan(model, other, encoder_outputs=encoded(model))
    with pytest.raises(InputError, match="encoder_outputs and inputs_embeds both say"):
        plan(model, inputs_embeds=torch.randn(2, 4, 32), encoder_outputs=encoded(model))
    with pytest.raises(InputError, match="encoder_outputs and inputs both say"):
        plan(small("vision"), IDS, encoder_outputs=(torch.randn(2, 4, 32),))


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_a_decoder_prompt_without_tokens_is_none(name: str, small: Callable[[str], Any]) -> None:
    model = small(name)
    plain = generate(model, IDS, max_new_tokens=4)
    for empty in (torch.zeros(2, 0, dtype=torch.long), [[], []]):
        assert torch.equal(plain, generate(model, IDS, decoder_input_ids=empty, max_new_tokens=4))
    with pytest.raises(InputError, match="decoder_input_ids have 3 rows, the encoder's input has 2"):
        plan(model, IDS, decoder_input_ids=torch.zeros(3, 0, dtype=torch.long))


@pytest.mark.parametrize("name", ["bart", "t5", "marian"])
def test_encoders_need_something_to_read(name: str, small: Callable[[str], Any]) -> None:
    for empty in (torch.zeros(2, 0, dtype=torch.long), [[5], []], [[]]):
        with pytest.raises(InputError, match="a row of the encoder's input is empty"):
            plan(small(name), empty)


def test_without_inputs_and_bos_there_is_nothing_to_read(small: Callable[[str], Any]) -> None:
    with pytest.raises(InputError, match="pass inputs .* for the encoder to read"):
        plan(small("t5"))


def test_guidance_without_the_prompt_is_refused(small: Callable[[str], Any]) -> None:
    for more in ({}, {"negative_prompt_ids": [[2, 5], [2, 5]]}):
        with pytest.raises(ConfigError, match="guidance_scale: is for models without an encoder"):
            plan(small("bart"), IDS, guidance_scale=2.0, **more)
    assert plan(small("bart"), IDS, guidance_scale=1.0).left_out


def test_whisper_without_audio_and_prompts_without_their_mark(small: Callable[[str], Any]) -> None:
    model = small("whisper")
    with pytest.raises(InputError, match="there is no audio"):
        plan(model, input_features=torch.zeros(2, 8, 0))
    keys: dict[str, Any] = {"input_features": torch.randn(1, 8, 40), "prev_sot_token_id": 8, "max_new_tokens": 2}
    with pytest.raises(ConfigError, match="prompt_ids: begin with 20, not with .* .8.: put that in front"):
        plan(model, prompt_ids=[20, 21], **keys)
    assert plan(model, prompt_ids=[8, 20], **keys).prompt.tokens[0, :2].tolist() == [8, 20]
