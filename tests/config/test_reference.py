"""`GenerationConfig` next to the one of transformers."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from decodekit import ConfigError, GenerationConfig
from decodekit.config import mode_of


def test_the_mode_is_that_of_transformers_for_random_key_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr(transformers.GenerationConfig, "validate", lambda *_, **__: None)
    transformers.logging.set_verbosity_error()
    choices = {
        "do_sample": [None, True, False],
        "num_beams": [None, 1, 2],
        "num_beam_groups": [None, 1, 2],
        "penalty_alpha": [None, 0.0, 0.6],
        "top_k": [None, 0, 1, 4],
        "dola_layers": [None, "high", [1, 3]],
        "constraints": [*[None] * 7, ["c"]],
        "force_words_ids": [*[None] * 7, [[1]]],
        "prompt_lookup_num_tokens": [None, None, None, 3],
        "assistant_early_exit": [None, None, None, None, 2],
        "use_mtp": [None, False, None, False, True],
    }
    draw = random.Random(7)
    seen: dict[str, int] = {}
    for number in range(600):
        count = draw.randint(0, 9)
        given = {name: draw.choice(options) for name, options in draw.sample(sorted(choices.items()), count)}
        given = {name: value for name, value in given.items() if value is not None}
        assistant = object() if number % 9 == 0 else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = transformers.GenerationConfig(**given).get_generation_mode(assistant)
        ours = mode_of(given, assistant)
        assert ours.value == theirs.value, given
        seen[ours.value] = seen.get(ours.value, 0) + 1
    assert len(seen) == 9
    assert min(seen.values()) >= 3


def test_get_generation_mode_reads_the_set_keys() -> None:
    assert GenerationConfig().get_generation_mode() == "greedy_search"
    assert GenerationConfig(do_sample=True).get_generation_mode() == "sample"
    assert GenerationConfig(do_sample=False).get_generation_mode(assistant_model=object()) == "assisted_generation"


@pytest.mark.parametrize("form", ["dict", "object"])
def test_from_model_config_takes_generations_own_keys(form: str) -> None:
    data = {
        "vocab_size": 32000,
        "dtype": "float16",
        "processors": "not a section of ours",
        "eos_token_id": 2,
        "pad_token_id": None,
        "output_hidden_states": True,
        "text_config": {"eos_token_id": 3, "bos_token_id": 1, "hidden_size": 8, "temperature": 0.7},
    }
    given: Any = data if form == "dict" else SimpleNamespace(to_dict=lambda: data)
    config = GenerationConfig.from_model_config(given)
    assert config.to_dict() == {
        "eos_token_id": 2,
        "bos_token_id": 1,
        "temperature": 0.7,
        "output_hidden_states": True,
        "return_dict_in_generate": True,
    }
    assert data["pad_token_id"] is None


def test_from_model_config_agrees_with_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaConfig(vocab_size=10, eos_token_id=[2, 3], bos_token_id=1, pad_token_id=0)
    theirs = transformers.GenerationConfig.from_model_config(model)
    ours = GenerationConfig.from_model_config(model)
    for name in ("eos_token_id", "bos_token_id", "pad_token_id", "temperature", "do_sample"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_update_returns_the_rest_and_changes_nothing_on_failure() -> None:
    config = GenerationConfig(top_k=5, do_sample=True)
    rest = {"foo": 1, "top_k": 6}
    assert config.update(**rest) == {"foo": 1}
    assert rest == {"foo": 1, "top_k": 6}
    assert config.top_k == 6
    assert config.update(defaults_only=True, top_k=7, top_p=0.5) == {"top_k": 7}
    assert (config.top_k, config.top_p) == (6, 0.5)
    assert config.update(allow_custom_entries=True, foo=[1]) == {}
    assert config.unknown_keys == {"foo": [1]}
    before = config.to_dict()
    with pytest.raises(ConfigError, match="top_p"):
        config.update(allow_custom_entries=True, top_k=8, top_p=4.0, bar=2)
    assert config.to_dict() == before


def test_a_config_of_transformers_can_be_passed(parrot: Any) -> None:
    transformers = pytest.importorskip("transformers")
    from decodekit import plan

    theirs = transformers.GenerationConfig(do_sample=True, top_k=3, temperature=0.5, max_new_tokens=4)
    settings = plan(parrot(top_k=9, top_p=0.4), [[1]], theirs).settings
    assert (settings.get("top_k"), settings.origin("top_k")) == (3, "config")
    assert (settings.get("top_p"), settings.origin("top_p")) == (0.4, "model")
    assert settings.get("max_new_tokens") == 4


def test_attributes_read_none_until_set_and_forget_when_deleted() -> None:
    config = GenerationConfig()
    assert config.temperature is None
    config.temperature = 0.5
    assert list(config) == ["temperature"]
    del config.temperature
    assert config.temperature is None
    with pytest.raises(AttributeError):
        del config.temperature
    assert not hasattr(config, "tempreature")
