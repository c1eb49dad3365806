"""What messages say: whose fault, the fix, and nothing odd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit import LM, ConfigError, GenerationConfig, GenerationError, InputError, generate, load, plan
from decodekit.converter import type_name
from decodekit.errors import named
from decodekit.fields import between, greater_than
from decodekit.options import ARGUMENTS, MADE, REFERENCE
from decodekit.testing import TinyLM
from decodekit_plugins.commands.keys import describe
from decodekit_plugins.commands.main import main


@pytest.fixture(scope="module")
def lm() -> LM:
    return load("bundled")


def said(**keys: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        generate(TinyLM(), [[1, 2]], **{"max_new_tokens": 2, **keys})
    return str(caught.value)


# -- keys ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARGUMENTS.split())
def test_arguments_nobody_answers_to_are_no_typos(name: str) -> None:
    assert said(**{name: 5}).startswith(f"{name}: not available in this version")


@pytest.mark.parametrize("name", MADE.split())
def test_what_decodekit_makes_itself(name: str) -> None:
    assert said(**{name: 5}).endswith("leave it out")


def test_asking_for_nothing_is_no_mistake() -> None:
    want = generate(TinyLM(), [[1, 2]], max_new_tokens=2)
    for name in f"{REFERENCE} {ARGUMENTS} {MADE}".split():
        for value in (None, False):
            assert torch.equal(generate(TinyLM(), [[1, 2]], max_new_tokens=2, **{name: value}), want)
            assert torch.equal(generate(TinyLM(), [[1, 2]], GenerationConfig(max_new_tokens=2, **{name: value})), want)
    assert torch.equal(generate(TinyLM(), [[1, 2]], max_new_tokens=2, num_beams=1, num_beam_groups=1), want)


def test_unknown_keys_are_told_with_their_source(register: Any, parrot: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    passed = GenerationConfig.from_dict({"words_one": 3})
    with pytest.warns(
        UserWarning, match="^the passed generation config has keys that no installed plugin owns: words_o"
    ):
        plan(TinyLM(), [[1]], passed)
    with pytest.warns(UserWarning, match="^the model's generation config has keys that no .* owns: words_two"):
        plan(parrot(words_two=3), [[1]])
    from decodekit.registry import registry

    monkeypatch.setenv("DECODEKIT_DISABLE", "dry")
    registry.refresh()
    try:
        off = GenerationConfig.from_dict({"dry_multiplier": 0.5})
        with pytest.warns(UserWarning, match=r"^the passed .* belong to decodekit, which is switched off .*: dry_mult"):
            plan(TinyLM(), [[1]], off)
    finally:
        monkeypatch.delenv("DECODEKIT_DISABLE")
        registry.refresh()


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"processors": {"no_repeat_ngram_size": {}}}, "no_repeat_ngram_size: is required (owner: decodekit"),
        ({"cache_config": {"a": 1}, "cache_implementation": "dynamic"}, "cache_config.a: unknown option"),
        ({"cache_config": {"reserve": "x"}, "cache_implementation": "dynamic"}, "cache_config.reserve: expected a"),
        ({"max_new_tokens": 2**70}, "max_new_tokens: must fit into 64 bits"),
        ({"eos_token_id": 2**70}, "eos_token_id: must fit into 64 bits"),
        ({"num_beams": 2**70}, "num_beams: must fit into 64 bits"),
        ({"top_p": [0.1, 0.2], "do_sample": True}, "top_p: has 2 values for 1 prompt; give one number, or one each"),
        ({"eos_token_id": [[1], [2]]}, "eos_token_id: has 2 lists for 1 prompt; give"),
        ({"seed": [1, 2], "do_sample": True}, "seed: has 2 values for 1 prompt; give"),
        ({"guidance_scale": float("inf")}, "guidance_scale: must be finite, got inf"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty: must be finite, got nan"),
        ({"num_return_sequences": 2}, "num_return_sequences: is 2, but without do_sample=True"),
    ],
)
def test_problems(keys: dict[str, Any], words: str) -> None:
    assert said(**keys).startswith(words)


def test_a_bias_is_named_once(lm: LM) -> None:
    with pytest.raises(ConfigError, match="^logit_bias: 'zzzzqq' is 4 tokens"):
        generate(lm, [[1, 2]], logit_bias={"zzzzqq": 1.0})


def test_what_an_adapter_would_offer(lm: LM, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"model:attentions, .* these do: transformers \(set adapter\)"):
        generate(lm, [[1, 2]], output_attentions=True)
    assert main(["plugins", "--offers", "model:attentions"]) == 0
    assert "transformers" in capsys.readouterr().out
    assert main(["plugins", "--offers", "cache:cropp"]) == 1
    assert "no installed plugin offers 'cache:cropp'; did you mean cache:crop" in capsys.readouterr().err


def test_types_and_ranges_in_words() -> None:
    assert type_name(tuple[int, float] | tuple[tuple[int, float], ...]) == (
        "[a whole number, a number] or a list of [a whole number, a number]"
    )
    assert type_name(tuple[tuple[str, ...], ...]) == "a list of lists of strings"
    infinite = float("inf")
    assert str(between(-infinite, infinite, low_open=True, high_open=True)) == "finite"
    assert str(between(0, infinite, high_open=True)) == "at least 0 and finite"
    assert str(greater_than(2)) == "greater than 2"


def test_defaults_are_what_applies_unasked() -> None:
    from decodekit.keys import keys

    shown = {name: describe(keys.find(name))["default"] for name in keys.names() if keys.library(name)}
    alone = ("remove_invalid_values", "typical_p", "stop_strings", "renormalize_logits", "token_healing")
    assert {name: shown[name] for name in alone} == dict.fromkeys(alone)
    assert (shown["max_new_tokens"], shown["top_k"], shown["num_beams"], shown["use_cache"]) == (20, 50, 1, True)


def test_no_message_ends_in_nothing() -> None:
    assert str(named(ValueError(), "who")) == "who: ValueError"


# -- inputs and outputs ------------------------------------------------------------------------------


def test_what_a_tokenizer_returns_is_passed_as_keywords() -> None:
    encoded = {"input_ids": torch.tensor([[1, 2]]), "attention_mask": torch.ones(1, 2)}
    with pytest.raises(InputError, match=r"not dict: pass what a tokenizer returns as \*\*encoding"):
        generate(TinyLM(), encoded)
    assert generate(TinyLM(), **encoded, max_new_tokens=2).shape == (1, 4)


def test_a_token_id_above_64_bits() -> None:
    with pytest.raises(InputError, match="a number does not fit into 64 bits"):
        generate(TinyLM(), [[2**70]])


def test_more_room_than_there_is(lm: LM) -> None:
    with pytest.raises(GenerationError, match=r"no memory for a cache of 1000000000000 tokens: lower cache_config's"):
        generate(lm, [[1, 2]], cache_implementation="dynamic", cache_config={"reserve": 10**12}, max_new_tokens=2)


@pytest.mark.parametrize("key", ["return_dict_in_generate", "output_scores", "output_logits"])
def test_text_alone_says_where_the_rest_is(lm: LM, key: str) -> None:
    with pytest.raises(InputError, match=rf"{key}: this gives text only; LM.details\(...\) gives"):
        lm.generate("a", max_new_tokens=2, **{key: True})
    with pytest.raises(InputError, match="this gives text only"):
        lm.stream("a", max_new_tokens=2, **{key: True})
    texts, output = lm.details("a", max_new_tokens=2, **{key: True})
    assert len(texts) == len(output.sequences) == 1


def test_two_lengths_in_one_call() -> None:
    with pytest.warns(UserWarning, match="max_length: 30 has no effect beside max_new_tokens=5"):
        out = generate(TinyLM(), [[1, 2]], max_length=30, max_new_tokens=5, eos_token_id=None)
    assert out.shape == (1, 7)


def test_an_end_token_that_can_never_come() -> None:
    with pytest.warns(UserWarning, match="eos_token_id: 1000 can never come: the model's vocabulary has 37 tokens"):
        generate(TinyLM(), [[1, 2]], eos_token_id=[3, 1000], max_new_tokens=2)
