"""Whisper: what its text begins with, languages told and found, times, silence; against transformers' own generate."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from decodekit import ConfigError, InputError, PipelineError, generate, load, plan, stream
from decodekit.testing import Letters, TinyLM
from decodekit_plugins.models.transformers.whisper import WhisperAdapter

transformers = pytest.importorskip("transformers")

END, START, EN, DE, FR, TRANSLATE, TRANSCRIBE, PREVIOUS, SILENCE, MARK, VOCAB = (
    50,
    51,
    52,
    53,
    54,
    55,
    56,
    58,
    59,
    60,
    90,
)
FRAMES = 40
NOISE = torch.randn(3, 8, FRAMES, generator=torch.Generator().manual_seed(8)) * 2
KEYS: dict[str, Any] = {"max_new_tokens": 9, "return_dict_in_generate": True}


@functools.cache
def _made() -> Any:
    config = transformers.WhisperConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, num_mel_bins=8, init_std=0.4,
        max_source_positions=FRAMES // 2, max_target_positions=40, decoder_start_token_id=START, bos_token_id=END,
        eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        return transformers.WhisperForConditionalGeneration(config).eval()


def whisper(**told: Any) -> Any:
    """The same weights each time, with a generation configuration that says `told`."""
    model = copy.copy(_made())
    made: dict[str, Any] = {
        "decoder_start_token_id": START, "eos_token_id": END, "pad_token_id": END, "bos_token_id": END,
        "suppress_tokens": [3, SILENCE], "begin_suppress_tokens": [7, END], "no_timestamps_token_id": MARK,
        "prev_sot_token_id": PREVIOUS, "max_initial_timestamp_index": 5, "max_length": 40, "is_multilingual": True,
        "lang_to_id": {"<|en|>": EN, "<|de|>": DE, "<|fr|>": FR},
        "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE}, **told,
    }  # fmt: skip
    model.generation_config = transformers.GenerationConfig(
        **{name: value for name, value in made.items() if value is not None}
    )
    return model


def english(**told: Any) -> Any:
    return whisper(**{"is_multilingual": False, "lang_to_id": None, "task_to_id": None, **told})


def both(model: Any, features: Any = NOISE, **keys: Any) -> tuple[Any, Any]:
    """What transformers gives, and what decodekit gives."""
    theirs = model.generate(features, force_unique_generate_call=True, **{**KEYS, **keys})
    return theirs, generate(model, input_features=features, **{**KEYS, **keys})


def begins(ours: Any) -> list[list[int]]:
    return ours.sequences[:, : ours.prompt_width].tolist()


FORCED: dict[str, Any] = {"forced_decoder_ids": [[1, FR], [2, TRANSLATE], [3, MARK]]}
BEGINNINGS: dict[str, tuple[dict[str, Any], dict[str, Any], list[int]]] = {
    "english": ({"english": True}, {}, [START, MARK]),
    "english, as old files say it": ({"english": True, "forced_decoder_ids": [[1, MARK]]}, {}, [START, MARK]),
    "english, times": ({"english": True}, {"return_timestamps": True}, [START]),
    "language": ({}, {"language": "de"}, [START, DE, TRANSCRIBE, MARK]),
    "by name": ({}, {"language": "French"}, [START, FR, TRANSCRIBE, MARK]),
    "by token": ({}, {"language": "<|en|>"}, [START, EN, TRANSCRIBE, MARK]),
    "task": ({}, {"language": "de", "task": "translate"}, [START, DE, TRANSLATE, MARK]),
    "times": ({}, {"language": "de", "return_timestamps": True}, [START, DE, TRANSCRIBE]),
    "the file's own": ({"language": "fr", "task": "translate"}, {}, [START, FR, TRANSLATE, MARK]),
    "forced": (FORCED, {}, [START, FR, TRANSLATE, MARK]),
    "forced, times": (FORCED, {"return_timestamps": True}, [START, FR, TRANSLATE]),
    "forced, overruled": (FORCED, {"language": "en"}, [START, EN, TRANSCRIBE, MARK]),
    "no mark known": ({"no_timestamps_token_id": None}, {"language": "en"}, [START, EN, TRANSCRIBE]),
}  # fmt: skip


@pytest.mark.parametrize("way", [{}, {"num_beams": 3}, {"use_cache": False}], ids=["greedy", "beams", "no cache"])
@pytest.mark.parametrize("name", BEGINNINGS)
def test_beginnings(name: str, way: dict[str, Any]) -> None:
    told, keys, begun = BEGINNINGS[name]
    told = dict(told)
    model = english(**told) if told.pop("english", False) else whisper(**told)
    theirs, ours = both(model, **keys, **way)
    assert begins(ours) == [begun] * 3
    assert torch.equal(ours.sequences, theirs.sequences)
    if keys.get("return_timestamps"):
        first = ours.sequences[:, ours.prompt_width]
        assert bool((first > MARK).all()), "a text with times begins with one"
        assert bool((first <= MARK + 6).all()), "not later than max_initial_timestamp_index says"


def test_words_before_the_transcript() -> None:
    before = [PREVIOUS, 11, 12, 13]
    for given in (torch.tensor(before), before):
        theirs = whisper().generate(NOISE, prompt_ids=torch.tensor(before), language="en", **KEYS)
        ours: Any = generate(whisper(), input_features=NOISE, prompt_ids=given, language="en", **KEYS)
        assert begins(ours) == [[*before, START, EN, TRANSCRIBE, MARK]] * 3
        assert torch.equal(ours.sequences, theirs.sequences)


def test_languages_are_found_row_by_row() -> None:
    model = whisper(task="transcribe")
    features = torch.randn(12, 8, FRAMES, generator=torch.Generator().manual_seed(2)) * 4
    want = model.detect_language(features).tolist()
    assert len(set(want)) > 1, "all rows sound the same: choose other noise"
    theirs, ours = both(model, features)
    assert begins(ours) == [[START, language, TRANSCRIBE, MARK] for language in want]
    assert torch.equal(ours.sequences, theirs.sequences)
    for row in (0, 5):
        alone: Any = generate(model, input_features=features[row : row + 1], **KEYS)
        assert begins(alone) == begins(ours)[row : row + 1]


def test_languages_of_old_files_are_found() -> None:
    model = whisper(forced_decoder_ids=[[1, None], [2, TRANSLATE]])
    theirs, ours = both(model)
    assert begins(ours) == [[START, language, TRANSLATE, MARK] for language in model.detect_language(NOISE).tolist()]
    assert torch.equal(ours.sequences, theirs.sequences)
    model = whisper()
    model.config = copy.copy(model.config)
    model.config.forced_decoder_ids = [[1, None], [2, TRANSLATE]]  # where older checkpoints say it
    assert torch.equal(generate(model, input_features=NOISE, **KEYS).sequences, ours.sequences)


def test_a_found_language_is_transcribed() -> None:
    """transformers says no task where it found the language itself, and nobody set one."""
    model = whisper()
    theirs, ours = both(model)
    found = model.detect_language(NOISE).tolist()
    assert begins(ours) == [[START, language, TRANSCRIBE, MARK] for language in found]
    assert theirs.sequences[:, :3].tolist() == [[START, language, MARK] for language in found]


def test_a_language_for_each_prompt() -> None:
    model = whisper()
    theirs, ours = both(model, language=["de", "en", "french"])
    assert begins(ours) == [[START, language, TRANSCRIBE, MARK] for language in (DE, EN, FR)]
    assert torch.equal(ours.sequences, theirs.sequences)
    beams: Any = generate(model, input_features=NOISE, language=["de", "en", "french"], num_beams=2, **KEYS)
    assert begins(beams) == begins(ours)
    found = model.detect_language(NOISE).tolist()
    some: Any = generate(model, input_features=NOISE, language=["de", None, "fr"], **KEYS)
    assert begins(some) == [[START, language, TRANSCRIBE, MARK] for language in (DE, found[1], FR)]
    with pytest.raises(TypeError):
        model.generate(NOISE, language=["de", None, "fr"], **KEYS)
    copies: Any = generate(
        model, input_features=NOISE, language=["de", "en", "fr"], do_sample=True, num_return_sequences=2, seed=1, **KEYS
    )
    assert [row[1] for row in begins(copies)] == [DE, DE, EN, EN, FR, FR]


def test_the_encoder_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, runs = whisper(), []
    encoder = type(model.get_encoder())
    forward = encoder.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        runs.append(1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(encoder, "forward", counted)
    out: Any = generate(model, input_features=NOISE, no_speech_threshold=0.99, num_beams=2, **KEYS)
    assert len(runs) == 1, "to find the language, to hear silence and to write: one run"
    encoded = model.get_encoder()(NOISE)
    runs.clear()
    assert torch.equal(generate(model, encoder_outputs=encoded, num_beams=2, **KEYS).sequences, out.sequences)
    assert not runs
    used = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        asked = {**KEYS, "output_attentions": True, "output_hidden_states": True}
        told: Any = generate(model, input_features=NOISE, **asked, language="en")
        found: Any = generate(model, input_features=NOISE, **asked)
    finally:
        model.set_attn_implementation(used)
    for name in ("encoder_attentions", "encoder_hidden_states"):
        for one, other in zip(getattr(found, name), getattr(told, name), strict=True):
            assert torch.equal(one, other)


def test_times_are_read_on_by_transformers() -> None:
    """It goes on from the last time of a window as long as there are frames; one call here is one window."""
    model = whisper()
    keys = {"language": "en", "return_timestamps": True, "max_new_tokens": 9}
    theirs = model.generate(NOISE, **keys)
    ours = generate(model, input_features=NOISE, **keys)
    assert ours.shape[1] <= 3 + 9
    assert torch.equal(ours, both(model, **keys)[0].sequences)
    assert theirs.shape[1] > 9


def test_times_follow_the_rules_in_every_row() -> None:
    model = whisper()
    ours: Any = generate(model, input_features=NOISE, language="en", return_timestamps=True, **KEYS)
    for row in ours.sequences[:, ours.prompt_width :].tolist():
        times = [token for token in row if token > MARK]
        assert times == sorted(times)
        assert MARK not in row


def silence_of(model: Any, row: int, before: list[int]) -> float:
    with torch.no_grad():
        logits = model(input_features=NOISE[row : row + 1], decoder_input_ids=torch.tensor([[*before, START]])).logits
    return float(logits[0, -1].softmax(-1)[SILENCE])


@pytest.mark.parametrize("more", [{}, {"num_beams": 3}, {"return_timestamps": True}, {"prompt_ids": [PREVIOUS, 11]}])
def test_silent_prompts_get_no_text(more: dict[str, Any]) -> None:
    model = whisper()
    heard = [silence_of(model, row, more.get("prompt_ids", [])) for row in range(3)]
    order = sorted(range(3), key=heard.__getitem__)
    assert heard[order[1]] < heard[order[2]], "choose other noise"
    threshold = (heard[order[1]] + heard[order[2]]) / 2
    ours: Any = generate(model, input_features=NOISE, language="en", no_speech_threshold=threshold, **KEYS, **more)
    plain: Any = generate(model, input_features=NOISE, language="en", **KEYS, **more)
    assert ours.lengths[order[2]] == 1
    assert ours.sequences[order[2], ours.prompt_width :].unique().tolist() == [END]
    for row in order[:2]:
        assert ours.lengths[row] == plain.lengths[row] > 1
        assert torch.equal(ours.sequences[row, : plain.sequences.shape[1]], plain.sequences[row])
    loose: Any = generate(model, input_features=NOISE, language="en", no_speech_threshold=1, **KEYS, **more)
    assert torch.equal(loose.sequences, plain.sequences)


def test_transformers_needs_another_threshold_to_hear_silence() -> None:
    with pytest.raises(UnboundLocalError):
        whisper().generate(NOISE, language="en", no_speech_threshold=0.5)


def test_languages_and_tasks_that_are_not_there() -> None:
    def refused(words: str, model: Any, **keys: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            plan(model, input_features=NOISE, **keys)

    refused(r"language: 'klingon' is none of this model's; it has: de, en, fr", whisper(), language="klingon")
    refused(r"language: 'es' is none", whisper(), language=["de", "en", "es"])
    refused(r"language: has 2 values for 3 prompts", whisper(), language=["de", "en"])
    refused(r"task: is 'sing'; this model knows transcribe, translate", whisper(), task="sing")
    refused(r"task: is for multilingual models", english(), task="translate")
    refused(r"language: is for multilingual models", english(), language="en")
    refused(r"language: needs lang_to_id", whisper(lang_to_id=None), language="en")
    refused(r"is_multilingual", whisper(), is_multilingual="yes")
    refused(r"return_timestamps: no_timestamps_token_id is needed", whisper(no_timestamps_token_id=None), language="en",
            return_timestamps=True)  # fmt: skip
    refused(r"no_speech_threshold: needs no_timestamps", whisper(no_timestamps_token_id=None), language="en",
            no_speech_threshold=0.5)  # fmt: skip
    refused(r"no_speech_threshold: must be in \[0, 1\]", whisper(), no_speech_threshold=2.0)
    refused(r"forced_decoder_ids: must give a token for each step", whisper(forced_decoder_ids=[[2, FR]]))
    refused(r"logprob_threshold: not available", whisper(), logprob_threshold=-1.0)


def test_other_models_have_no_languages() -> None:
    with pytest.raises(ConfigError, match="language: is for whisper models, and this is a TinyLM"):
        generate(TinyLM(), [[1, 2]], language="en", max_new_tokens=2)
    with pytest.raises(ConfigError, match="no_speech_threshold: is for Whisper models"):
        generate(TinyLM(), [[1, 2]], no_speech_threshold=0.5, max_new_tokens=2)
    with pytest.raises(ConfigError, match="return_timestamps: no_timestamps_token_id is needed"):
        generate(TinyLM(), [[1, 2]], return_timestamps=True, max_new_tokens=2)


def test_audio_of_another_length() -> None:
    model = whisper()
    with pytest.raises(InputError, match=r"the audio has 41 frames, of which this model hears 40 at once"):
        generate(model, input_features=torch.zeros(1, 8, FRAMES + 1))
    with pytest.raises(InputError, match=r"features must be \[B, 8, frames\], got \(1, 7, 40\)"):
        generate(model, torch.zeros(1, 7, FRAMES))
    for features in (NOISE[:, :, :30], NOISE[:1, :, :2]):
        theirs, ours = both(model, features, language="en")
        assert torch.equal(ours.sequences, theirs.sequences), "shorter audio is filled up, as there"
    assert torch.equal(
        generate(model, NOISE, **KEYS).sequences, generate(model, input_features=NOISE, **KEYS).sequences
    )


def test_texts_longer_than_the_model_reads() -> None:
    model = whisper()
    with pytest.raises(ConfigError, match="max_new_tokens: is 37, but behind a prompt of 4 tokens .* room for 36"):
        plan(model, input_features=NOISE, language="en", max_new_tokens=37)
    with pytest.raises(ConfigError, match="max_length: is 41"):
        plan(model, input_features=NOISE, language="en", max_length=41)
    with pytest.raises(InputError, match="leaves no room in 40 positions"):
        plan(model, input_features=NOISE, language="en", prompt_ids=[PREVIOUS] * 36)
    whole: Any = generate(whisper(max_length=1000), input_features=NOISE, language="en", eos_token_id=-1)
    assert whole.shape[1] == 40, "what the file says beyond the model's positions means: all of them"


def test_lengths_count_the_beginning_here() -> None:
    """max_length is prompt and new tokens together, as everywhere; transformers' Whisper does not count the prompt."""
    keys = {"language": "en", "eos_token_id": -1, "max_length": 12}
    assert generate(whisper(), input_features=NOISE, **keys).shape[1] == 12
    theirs = whisper().generate(NOISE, return_dict_in_generate=True, force_unique_generate_call=True, **keys)
    assert theirs.sequences.shape[1] == 16


def test_texts_come_with_their_beginning() -> None:
    """transformers' Whisper returns the new tokens only, without the end; an output object has all of them."""
    model = whisper(suppress_tokens=list(range(MARK, VOCAB)))  # two times in a row, and it would read on
    theirs = model.generate(NOISE, language="en", max_new_tokens=9)
    ours: Any = generate(model, input_features=NOISE, language="en", max_new_tokens=9)
    assert begins(generate(model, input_features=NOISE, language="en", **KEYS)) == ours[:, :4].tolist()
    new = [[token for token in row if token != END] for row in ours[:, 4:].tolist()]
    assert new == [[token for token in row if token != END] for row in theirs.tolist()]


def test_sampling_is_not_only_for_those_who_name_a_temperature() -> None:
    keys = {**KEYS, "language": "en", "do_sample": True, "top_k": 0}
    ours = [generate(whisper(), NOISE, **keys, seed=seed).sequences for seed in (1, 2)]
    assert not torch.equal(*ours)
    greedy, theirs = (
        both(whisper(), language="en", **more)[0].sequences for more in ({}, {"do_sample": True, "top_k": 0})
    )
    assert torch.equal(greedy, theirs)


def test_who_says_the_beginning() -> None:
    model = whisper()
    own = [[START, FR, TRANSLATE, MARK]] * 3
    ours: Any = generate(model, input_features=NOISE, decoder_input_ids=own, **KEYS)
    assert torch.equal(
        ours.sequences, generate(model, input_features=NOISE, language="fr", task="translate", **KEYS).sequences
    )
    with pytest.raises(ConfigError, match="language: says how the text begins, and so do decoder_input_ids"):
        generate(model, input_features=NOISE, decoder_input_ids=own, language="fr", **KEYS)
    going = {"input_features": NOISE, "decoder_input_ids": ours.sequences, "cache": ours.cache}
    with pytest.raises(ConfigError, match="no_speech_threshold: cannot be told once the text has begun"):
        generate(model, **going, no_speech_threshold=0.5)


def test_configurations_and_settings_all_mean_the_same() -> None:
    model = whisper()
    want: Any = generate(model, input_features=NOISE, language="de", task="translate", **KEYS).sequences
    theirs = copy.deepcopy(model.generation_config)
    theirs.language, theirs.task = "de", "translate"
    for config in (theirs, {"language": "de", "task": "translate"}):
        assert torch.equal(generate(model, NOISE, config, **KEYS).sequences, want)
    assert torch.equal(
        generate(model, input_features=NOISE, language=("de",) * 3, task="translate", **KEYS).sequences, want
    )
    first = next(iter(stream(model, input_features=NOISE, language="de", task="translate", max_new_tokens=3)))
    assert first.tokens.tolist() == want[:, 4].tolist()

    class Wrapped:  # as preparers wrap adapters
        def __getattr__(self, name: str) -> Any:
            return getattr(WhisperAdapter(model), name)

    assert torch.equal(generate(Wrapped(), NOISE, language="de", task="translate", **KEYS).sequences, want)
    times = {"processors": {"whisper_timestamps": {}}, "language": "de"}
    named: Any = generate(model, input_features=NOISE, **times, **KEYS)
    assert torch.equal(
        named.sequences, generate(model, input_features=NOISE, language="de", return_timestamps=True, **KEYS).sequences
    )


def test_a_folder_is_opened_as_whisper(tmp_path: Any) -> None:
    model = whisper(task="transcribe")
    model.save_pretrained(tmp_path)
    for adapter in (None, "transformers", "whisper"):
        lm = load(tmp_path, adapter=adapter)
        assert isinstance(lm.adapter, WhisperAdapter)
        assert torch.equal(
            generate(lm, input_features=NOISE, **KEYS).sequences, generate(model, NOISE, **KEYS).sequences
        )
    plain = load(model, adapter="transformers")
    assert not isinstance(plain.adapter, WhisperAdapter)
    with pytest.raises(ConfigError, match="language: is for whisper models"):
        generate(plain, input_features=NOISE, language="de", **KEYS)


def test_texts_of_a_speech_model() -> None:
    """`LM` reads features by their name, and gives the new text."""
    lm, keys = load(whisper(), tokenizer=Letters()), {"language": "en", "max_new_tokens": 9, "eos_token_id": -1}
    new = generate(whisper(), NOISE, **keys)[:, 4:].tolist()
    texts = lm.generate(input_features=NOISE, **keys)
    assert texts == [Letters().decode(row) for row in new]
    assert lm.generate(input_features=NOISE[:1], **keys) == texts[0]
    assert "".join(lm.stream(input_features=NOISE[:1], **keys)) == texts[0]
    with pytest.raises((InputError, PipelineError)):
        lm.generate(language="en")
