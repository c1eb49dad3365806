"""What the reference's page says of `GenerationConfig`, sentence by sentence; the Hub is in test_hub.py."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
from decodekit import ConfigError, GenerationConfig, plan
from decodekit.config import GenerationMode, mode_of
from decodekit.keys import keys

# -- the class ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "mode"),
    [
        ({"num_beams": 1, "do_sample": False}, "greedy_search"),
        ({"num_beams": 1, "do_sample": True}, "sample"),
        ({"num_beams": 4, "do_sample": False}, "beam_search"),
        ({"num_beams": 4, "do_sample": True}, "beam_sample"),
        ({"prompt_lookup_num_tokens": 3}, "assisted_generation"),
    ],
)
def test_the_keys_choose_the_method(given: dict[str, Any], mode: str) -> None:
    assert mode_of(given) is GenerationMode(mode)
    if all(name in keys for name in given):
        assert GenerationConfig(**given).get_generation_mode() == mode


def test_an_assistant_model_makes_it_assisted() -> None:
    for given in ({}, {"do_sample": True}):
        assert GenerationConfig(**given).get_generation_mode(assistant_model=object()) == "assisted_generation"
        assert GenerationConfig(**given).get_generation_mode() != "assisted_generation"


def test_what_is_unset_is_none_and_gets_its_value_when_generating(parrot: Any) -> None:
    """Only then, and only there: the object stays as it is; what was set explicitly is kept."""
    config = GenerationConfig()
    assert all(getattr(config, name) is None for name in keys.names())
    settings = plan(parrot(), [[1]], config, do_sample=True).settings
    assert {name: settings.get(name) for name in ("max_new_tokens", "top_k")} == {"max_new_tokens": 20, "top_k": 50}
    assert config == GenerationConfig()
    settings = plan(parrot(), [[1]], GenerationConfig(max_new_tokens=3, top_k=0), do_sample=True).settings
    assert {name: settings.get(name) for name in ("max_new_tokens", "top_k")} == {"max_new_tokens": 3, "top_k": 0}


# -- from_pretrained and save_pretrained --------------------------------------------------------------


def test_a_saved_configuration_is_loaded_again(tmp_path: Path) -> None:
    folder = tmp_path / "test" / "saved_model"  # made where it is missing
    config = GenerationConfig(top_k=5, do_sample=True)
    config.save_pretrained(f"{folder}/")
    assert [file.name for file in folder.iterdir()] == ["generation_config.json"]
    assert GenerationConfig.from_pretrained(f"{folder}/") == config
    GenerationConfig(top_k=6, do_sample=True).save_pretrained(folder, config_file_name="my_configuration.json")
    assert GenerationConfig.from_pretrained(folder, "my_configuration.json").top_k == 6
    assert GenerationConfig.from_pretrained(folder, config_file_name=None) == config


def test_arguments_replace_loaded_values_and_the_rest_comes_back(tmp_path: Path) -> None:
    GenerationConfig(top_k=5, do_sample=True).save_pretrained(tmp_path)
    load = GenerationConfig.from_pretrained
    config, unused = load(tmp_path, top_k=1, foo=False, do_sample=False, return_unused_kwargs=True)
    assert (config.top_k, config.do_sample, unused) == (1, False, {"foo": False})
    assert not hasattr(config, "foo")
    config, unused = load(tmp_path, return_unused_kwargs=True)
    assert (config.top_k, unused) == (5, {})
    assert load(tmp_path, top_k=2, return_unused_kwargs=False).top_k == 2
    # Where the rest does not come back it is refused, not ignored: it may be a typo.
    with pytest.raises(ConfigError, match="top_kk: unknown key; did you mean top_k"):
        load(tmp_path, top_kk=1)


def test_the_arguments_stand_in_the_pages_order(tmp_path: Path) -> None:
    import inspect

    page = "pretrained_model_name config_file_name cache_dir force_download local_files_only token revision"
    found = inspect.signature(GenerationConfig.from_pretrained).parameters
    assert list(found)[:7] == page.split()
    defaults = [found[name].default for name in page.split()[1:]]
    assert defaults == [None, None, False, False, None, "main"]
    assert found["subfolder"].default == ""
    found = inspect.signature(GenerationConfig.save_pretrained).parameters
    assert list(found)[1:4] == ["save_directory", "config_file_name", "push_to_hub"]
    assert [found[name].default for name in list(found)[2:4]] == [None, False]
    found = inspect.signature(GenerationConfig.update).parameters
    assert [(name, p.default) for name, p in list(found.items())[1:3]] == [
        ("defaults_only", False), ("allow_custom_entries", False),
    ]  # fmt: skip
    found = inspect.signature(GenerationConfig.validate).parameters
    assert [(name, p.default) for name, p in list(found.items())[1:]] == [
        ("strict", False),
        ("user_set_attributes", None),
    ]


# -- from_model_config --------------------------------------------------------------------------------


def _models() -> list[Any]:
    t = pytest.importorskip("transformers")
    bert, decoder = t.BertConfig(), t.BertConfig(is_decoder=True, pad_token_id=5, bos_token_id=7, eos_token_id=8)
    pair = t.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(t.Wav2Vec2Config(), t.GPT2Config(eos_token_id=77))
    music = {"text_encoder": t.T5Config(), "audio_encoder": t.EncodecConfig(), "decoder": t.MusicgenDecoderConfig()}
    return [
        t.LlamaConfig(eos_token_id=[2, 3], bos_token_id=1, pad_token_id=0),
        t.T5Config(),
        t.BartConfig(),
        t.WhisperConfig(),
        t.GPT2Config(output_attentions=True),
        t.EncoderDecoderConfig.from_encoder_decoder_configs(bert, decoder),
        t.LlavaConfig(text_config=t.LlamaConfig(eos_token_id=9, bos_token_id=4)),
        t.Gemma3Config(),
        pair,
        t.MusicgenConfig(**music),
    ]


def test_a_models_configuration_gives_what_transformers_takes_from_it() -> None:
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    for model in _models():
        for given in (model, model.to_dict()):
            theirs = transformers.GenerationConfig.from_model_config(given)
            ours = GenerationConfig.from_model_config(given)
            names = [name for name in theirs.to_dict() if name in keys]
            differs = {
                n: (getattr(theirs, n), getattr(ours, n)) for n in names if getattr(theirs, n) != getattr(ours, n)
            }
            assert differs == {}, type(model).__name__


def test_the_result_stands_on_its_own() -> None:
    data = {"eos_token_id": [1, 2], "temperature": 0.5, "hidden_size": 8, "text_config": {"pad_token_id": 3}}
    before = dict(data)
    config = GenerationConfig.from_model_config(data)
    assert config.to_dict() == {"eos_token_id": [1, 2], "temperature": 0.5, "pad_token_id": 3}
    config.eos_token_id.append(9)
    config.pad_token_id = 4
    assert data == before
    assert data["eos_token_id"] == [1, 2]


# -- update --------------------------------------------------------------------------------------------


def test_update_takes_what_matches_and_returns_the_rest() -> None:
    config = GenerationConfig(top_k=5, do_sample=True)
    given = {"top_k": 7, "temperature": 0.5, "foo": 1}
    assert config.update(**given) == {"foo": 1}
    assert given == {"top_k": 7, "temperature": 0.5, "foo": 1}
    assert config.to_dict() == {"top_k": 7, "temperature": 0.5, "do_sample": True}
    # defaults_only: what is set stays, an explicit False included.
    config = GenerationConfig(top_k=5, do_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert config.update(defaults_only=True, top_k=9, top_p=0.5, do_sample=True) == {"top_k": 9, "do_sample": True}
    assert config.to_dict() == {"top_k": 5, "top_p": 0.5, "do_sample": False}


def test_update_may_take_entries_of_your_own() -> None:
    config = GenerationConfig()
    assert config.update(foo=1) == {"foo": 1}
    assert not hasattr(config, "foo")
    assert config.update(allow_custom_entries=True, foo=1, top_k=3, do_sample=True) == {}
    assert (config.foo, config.top_k) == (1, 3)
    assert config.update(allow_custom_entries=True, foo=2) == {}
    assert config.to_dict() == {"foo": 2, "top_k": 3, "do_sample": True}


# -- validate ------------------------------------------------------------------------------------------


def test_wrong_values_raise_and_idle_ones_warn_unless_strict() -> None:
    for strict in (False, True):
        with pytest.raises(ConfigError, match="top_p: must be in"):
            GenerationConfig(top_p=1.7, do_sample=True).validate(strict=strict)
    idle = GenerationConfig(temperature=0.7, do_sample=False)
    with pytest.warns(UserWarning, match=r"temperature: 0\.7 has no effect"):
        idle.validate()
    with pytest.raises(ConfigError, match=r"temperature: 0\.7 has no effect"):
        idle.validate(strict=True)
    with pytest.raises(ValueError, match=r"temperature: 0\.7 has no effect"):
        idle.validate(True)


NAMES = ("temperature", "top_p", "do_sample")


@pytest.mark.parametrize("named", [set(c) for n in range(4) for c in itertools.combinations(NAMES, n)], ids=str)
@pytest.mark.parametrize("strict", [False, True])
def test_only_what_the_caller_set_is_warned_about(named: set[str], strict: bool) -> None:
    """What was inherited from a model's file is no fault of the caller; without names, all is the caller's."""
    config = GenerationConfig(temperature=0.7, top_p=0.5, do_sample=False)
    wanted = named & {"temperature", "top_p"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config.validate(strict, user_set_attributes=named)
            found = {name for name in NAMES if any(f"{name}: " in str(w.message) for w in caught)}
        except ConfigError as error:
            assert strict
            found = {problem.key for problem in error.problems}
    assert found == wanted


def test_what_depends_on_the_call_is_checked_by_the_call(parrot: Any) -> None:
    config = GenerationConfig(max_length=2)
    config.validate(strict=True)
    with pytest.raises(ValueError, match="max_length"):
        plan(parrot(), [[1, 2, 3]], config)
