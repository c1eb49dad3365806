"""What an encoder-decoder model reads: every form of input, what begins its text, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decodekit import ConfigError, InputError, PipelineError, generate, load, plan
from decodekit.testing import Letters

KEYS: dict[str, Any] = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_scores": True}
TEXTS = ((5, 9, 30, 2), (7, 8, 41, 12, 33, 2), (50, 2))


def counted(model: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Batch sizes of the encoder's runs from now on."""
    runs: list[int] = []
    encoder = model.get_encoder()
    forward = type(encoder).forward

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = next(v for v in (*args, *kwargs.values()) if isinstance(v, torch.Tensor))
        runs.append(len(given))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(encoder), "forward", call)
    return runs


@pytest.mark.parametrize("keys", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 4, "seed": 1}])
def test_the_encoder_runs_once(
    keys: dict[str, Any], small: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small("marian")
    runs = counted(model, monkeypatch)
    generate(model, [list(text) for text in TEXTS], max_new_tokens=6, **keys)
    assert runs == [3], "once, a row for each prompt whatever the beams"


@pytest.mark.parametrize("name", ["t5", "bart"])
@pytest.mark.parametrize("beams", [1, 3])
def test_rows_do_not_depend_on_each_other(name: str, beams: int, small: Callable[[str], Any]) -> None:
    model = small(name)
    together: Any = generate(model, [list(text) for text in TEXTS], num_beams=beams, **KEYS)
    for row, text in enumerate(TEXTS):
        alone: Any = generate(model, [list(text)], num_beams=beams, **KEYS)
        width = alone.sequences.shape[1]
        assert together.sequences[row, :width].tolist() == alone.sequences[0].tolist()
        assert set(together.sequences[row, width:].tolist()) <= {model.config.pad_token_id}


def test_outputs_of_the_encoder_may_be_passed(small: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = small("bart"), torch.tensor([TEXTS[0], TEXTS[0][::-1]])
    with torch.no_grad():
        encoded = model.get_encoder()(input_ids=ids, return_dict=True)
    whole = generate(model, ids, **KEYS)
    runs = counted(model, monkeypatch)
    for given in (encoded, (encoded.last_hidden_state,)):
        for beams in (1, 2):
            out: Any = generate(model, encoder_outputs=given, num_beams=beams, **KEYS)
            if beams == 1:
                assert torch.equal(out.sequences, whole.sequences)
    assert not runs
    with pytest.raises(InputError, match="encoder_outputs must hold last_hidden_state"):
        generate(model, encoder_outputs=(torch.zeros(3),), **KEYS)


def test_no_inputs_at_all(small: Callable[[str], Any]) -> None:
    model = small("bart")
    out: Any = generate(model, **KEYS)
    assert torch.equal(out.sequences, generate(model, [[model.config.bos_token_id]], **KEYS).sequences)
    assert len(out.sequences) == 1
    assert torch.equal(out.sequences, model.generate(**KEYS).sequences)
    with pytest.raises(InputError, match="reads pixel_values: pass pixel_values"):
        generate(small("vision"), **KEYS)


def test_start_tokens(small: Callable[[str], Any]) -> None:
    model = small("marian")
    ids = torch.tensor([TEXTS[0], TEXTS[0]])
    out = generate(model, ids, decoder_start_token_id=[7, 9], max_new_tokens=4)
    assert out[:, 0].tolist() == [7, 9]
    theirs = model.generate(ids, decoder_start_token_id=[7, 9], max_new_tokens=4)
    assert torch.equal(out, theirs)
    beams = generate(model, ids, decoder_start_token_id=[7, 9], num_beams=2, max_new_tokens=4)
    assert torch.equal(beams, model.generate(ids, decoder_start_token_id=[7, 9], num_beams=2, max_new_tokens=4))
    with pytest.raises(InputError, match="has 3 values for 2 rows"):
        generate(model, ids, decoder_start_token_id=[7, 9, 9], max_new_tokens=4)
    with pytest.raises(ConfigError, match="decoder_start_token_id"):
        generate(model, ids, decoder_start_token_id="</s>", max_new_tokens=4)


def test_the_decoders_own_prompt(small: Callable[[str], Any]) -> None:
    model = small("bart")
    ids, start = torch.tensor([TEXTS[0], TEXTS[0]]), model.config.decoder_start_token_id
    for given in ([[start, 9], [start, 8]], [[9], [8]]):
        theirs = model.generate(ids, decoder_input_ids=torch.tensor(given), max_new_tokens=5)
        ours = generate(model, ids, decoder_input_ids=torch.tensor(given), max_new_tokens=5)
        assert torch.equal(theirs, ours)
        assert ours[:, :2].tolist() == [[start, 9], [start, 8]], "the start token is added where it is missing"
        assert torch.equal(ours, generate(model, ids, decoder_input_ids=given, max_new_tokens=5))


@pytest.mark.parametrize("beams", [1, 2])
def test_ragged_prompts_of_a_decoder(beams: int, small: Callable[[str], Any]) -> None:
    """Where positions are relative a row is what it is alone; where they are counted from the left it is refused."""
    model, ids, given = small("t5"), torch.tensor([TEXTS[0], TEXTS[0]]), [[0, 9, 30, 17], [0, 8]]
    for more in ({}, {"use_cache": False}):
        keys = {"num_beams": beams, "max_new_tokens": 5, **more}
        rows = generate(model, ids, decoder_input_ids=given, **keys)
        for row, own in enumerate(given):
            alone = generate(model, ids[:1], decoder_input_ids=[own], **keys)[0].tolist()
            made = rows[row, 4 - len(own) :].tolist()
            assert made[: len(alone)] == alone
            assert set(made[len(alone) :]) <= {0}
    with pytest.raises(PipelineError, match="pass decoder_input_ids of one length"):
        generate(small("bart"), ids, decoder_input_ids=given, max_new_tokens=5)


@pytest.mark.parametrize("keys", [{}, {"num_beams": 2}, {"use_cache": False}])
def test_embeddings_for_the_decoder(keys: dict[str, Any], small: Callable[[str], Any]) -> None:
    model, ids = small("bart"), torch.tensor([TEXTS[0], TEXTS[0]])
    prompt = torch.tensor([[2, 9, 30], [2, 8, 11]])
    embeds = model.get_decoder().get_input_embeddings()(prompt)
    whole = generate(model, ids, decoder_input_ids=prompt, max_new_tokens=5, **keys)
    assert torch.equal(generate(model, ids, decoder_inputs_embeds=embeds, max_new_tokens=5, **keys), whole[:, 3:])
    both = generate(model, ids, decoder_inputs_embeds=embeds, decoder_input_ids=prompt, max_new_tokens=5, **keys)
    assert torch.equal(both, whole)


def test_embeddings_for_the_encoder(small: Callable[[str], Any]) -> None:
    model, ids = small("bart"), torch.tensor([TEXTS[0], TEXTS[0][::-1]])
    embeds = model.get_encoder().get_input_embeddings()(ids)
    assert torch.equal(generate(model, inputs_embeds=embeds, max_new_tokens=5), generate(model, ids, max_new_tokens=5))
    with pytest.raises(InputError, match="both the encoder's input"):
        generate(model, ids, inputs_embeds=embeds, max_new_tokens=5)


def test_going_on_with_a_cache(small: Callable[[str], Any]) -> None:
    model, ids = small("bart"), torch.tensor([TEXTS[0], TEXTS[0][::-1]])
    first: Any = generate(model, ids, **{**KEYS, "min_new_tokens": 3, "max_new_tokens": 3})
    again: Any = generate(model, ids, cache=first.cache, decoder_input_ids=first.sequences, **KEYS)
    whole: Any = generate(model, ids, **{**KEYS, "min_new_tokens": 3, "max_new_tokens": 9})
    assert torch.equal(again.sequences, whole.sequences)


@pytest.mark.parametrize(
    ("inputs", "keys", "words"),
    [
        ([[5, 99]], {}, "token id 99 is outside the model's vocabulary of 60"),
        ([[5, 9]], {"attention_mask": torch.ones(2, 2)}, "attention_mask must be"),
        ([[5, 9]], {"decoder_input_ids": [[2], [2]]}, "decoder_input_ids have 2 rows, the encoder's input has 1"),
        ([[5, 9]], {"decoder_input_ids": [[2, 600]]}, "token id 600 is outside"),
        ("text", {}, "text prompts need a tokenizer"),
        (torch.randn(2, 3), {}, "integer token ids"),
        ([[5, 9]], {"decoder_inputs_embeds": torch.randn(1, 2)}, "floating tensor .B, E, H."),
        ([[5, 9]], {"decoder_inputs_embeds": torch.randn(1, 2, 32), "decoder_input_ids": [[2]]}, "must be the same"),
    ],
)
def test_what_cannot_be_read(inputs: Any, keys: dict[str, Any], words: str, small: Callable[[str], Any]) -> None:
    with pytest.raises(InputError, match=words):
        generate(small("bart"), inputs, max_new_tokens=2, **keys)


def test_frames_and_waves_that_cannot_be_read(small: Callable[[str], Any]) -> None:
    model = small("speech")
    for value, words in ((torch.ones(2, 400, dtype=torch.long), "floating tensor"), ("a.wav", "must be a tensor")):
        with pytest.raises(InputError, match=words):
            generate(model, input_values=value, max_new_tokens=2)
    with pytest.raises(InputError, match="attention_mask has 3 rows, the encoder's input has 2"):
        generate(model, input_values=torch.randn(2, 400), attention_mask=torch.ones(3, 400), max_new_tokens=2)
    with pytest.raises(ConfigError, match="input_value"):
        generate(model, input_value=torch.randn(2, 400), max_new_tokens=2)
    with pytest.raises(InputError, match="goes with places in a prompt"):
        generate(small("llava"), pixel_values=torch.randn(2, 3, 8, 8), max_new_tokens=2)


def test_layers_of_the_decoder_are_the_decoders(small: Callable[[str], Any]) -> None:
    """Fewer layers in the decoder than in the encoder: transformers' own generate makes a cache for the latter."""
    model = small("t5-uneven")
    cached: Any = generate(model, [list(TEXTS[0])], **KEYS, output_hidden_states=True)
    plain: Any = generate(model, [list(TEXTS[0])], use_cache=False, **KEYS)
    assert torch.equal(cached.sequences, plain.sequences)
    assert len(cached.decoder_hidden_states[0]) == 3
    assert len(cached.encoder_hidden_states) == 4
    assert plan(model, [[5]], max_new_tokens=2).context.spec.num_layers == 2


def test_text_goes_to_the_encoder_whole(small: Callable[[str], Any], tmp_path: Path) -> None:
    """Texts that an encoder reads keep the token that ends them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    letters = {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz", 4)}
    raw = Tokenizer(models.WordLevel({"<pad>": 0, "</s>": 1, "<unk>": 2, **letters}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.add_special_tokens(["<pad>", "</s>", "<unk>"])
    raw.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    model = small("t5")
    ids = [letters["h"], letters["i"], 1]
    expected = generate(model, [ids], max_new_tokens=5)
    assert torch.equal(generate(model, "hi", tokenizer=raw, max_new_tokens=5), expected)
    lm = load(model, tokenizer=raw)
    assert lm.tokens("hi") == ids
    text, output = lm.details("hi", max_new_tokens=5, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert text == ["".join(lm.stream("hi", max_new_tokens=5))]
    assert len(lm.generate(["hi", "hello"], max_new_tokens=5)) == 2


def test_a_folder_is_opened(small: Callable[[str], Any], tmp_path: Path) -> None:
    for name in ("t5", "speech", "vision", "llava"):
        small(name).save_pretrained(tmp_path / name)
        lm = load(tmp_path / name)
        assert type(lm.model) is type(small(name))
    out = generate(load(tmp_path / "t5"), [list(TEXTS[0])], max_new_tokens=5)
    assert torch.equal(out, generate(small("t5"), [list(TEXTS[0])], max_new_tokens=5))


def test_letters_of_a_decoder(small: Callable[[str], Any]) -> None:
    """Stop strings and their reasons work on the decoder's text."""
    model = small("bart")
    tokenizer = Letters()
    plain: Any = generate(model, [[5, 9, 2]], **{**KEYS, "eos_token_id": None})
    stop = tokenizer.decode(plain.sequences[0, 2:4].tolist())
    out: Any = generate(model, [[5, 9, 2]], stop_strings=[stop], tokenizer=tokenizer, **{**KEYS, "eos_token_id": None})
    assert out.stop_reasons == ("stop_strings",)
    assert out.stop_details == (stop,)
