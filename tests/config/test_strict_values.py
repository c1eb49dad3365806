"""Values are checked by their owners, strictly, and every fault is reported at once."""

from __future__ import annotations

import copy
from typing import Any

import attrs
import pytest
from decodekit import ConfigError, GenerationConfig, InputError, greater_than, option, plan
from decodekit.keys import keys
from decodekit.settings import resolve


def problems(error: pytest.ExceptionInfo[ConfigError]) -> dict[str, str]:
    return {problem.key: problem.message for problem in error.value.problems}


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("top_k", "5", "expected a whole number or a list of whole numbers, got '5' (str)"),
        ("top_k", True, "expected a whole number or a list of whole numbers, got True (bool)"),
        ("top_k", 5.0, "expected a whole number or a list of whole numbers, got 5.0 (float)"),
        ("do_sample", "no", "expected True or False, got 'no' (str)"),
        ("do_sample", 1, "expected True or False, got 1 (int)"),
        ("temperature", "hot", "expected a number or a list of numbers, got 'hot' (str)"),
        ("temperature", True, "expected a number or a list of numbers, got True (bool)"),
        ("temperature", 10**400, "expected a number"),
        ("top_p", 1.7, "must be in [0, 1], got 1.7"),
        ("top_p", float("nan"), "must be in [0, 1], got nan"),
        ("min_p", -0.1, "must be in [0, 1], got -0.1"),
        ("num_return_sequences", 0, "must be at least 1, got 0"),
        ("eos_token_id", "2", "got '2' (str)"),
        ("eos_token_id", [2, "3"], "got [2, '3'] (list)"),
        ("eos_token_id", [True], "got [True] (list)"),
        ("strategy", 3, "expected a string, got 3 (int)"),
        ("cache_config", "big", "expected a dict, got 'big' (str)"),
        ("stop_strings", 5, "got 5 (int)"),
        ("seed", "1", "got '1' (str)"),
    ],
)
def test_a_wrong_value_names_key_value_and_what_is_expected(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        GenerationConfig(**{key: value}).validate()
    assert words in problems(error)[key]
    owner = keys.find(key)
    assert owner is not None
    assert f"(owner: {owner.owner})" in str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        ("temperature", 2, 2.0),
        ("top_p", 1, 1.0),
        ("eos_token_id", [2, 3], (2, 3)),
        ("stop_strings", ["a", "b"], ("a", "b")),
    ],
)
def test_what_loses_nothing_is_taken(key: str, value: Any, kept: Any) -> None:
    final = resolve([("call", {key: value})]).get(key)
    plain = tuple(final) if isinstance(final, list) else final
    assert plain == kept
    assert type(plain) is type(kept)


def test_numbers_of_numpy_and_torch_are_numbers() -> None:
    import numpy as np
    import torch

    given = {"top_k": np.int64(5), "temperature": torch.tensor(0.5), "eos_token_id": [torch.tensor(2), np.int32(3)]}
    settings = resolve([("call", given)])
    assert (settings.get("top_k"), settings.get("temperature")) == (5, 0.5)
    assert tuple(settings.get("eos_token_id")) == (2, 3)
    array = resolve([("call", {"eos_token_id": torch.tensor([2, 3])})])
    assert array.get("eos_token_id") == settings.get("eos_token_id")


def test_every_fault_is_reported_together_with_key_and_owner(parrot: Any) -> None:
    bad = {"top_kk": 5, "top_p": 1.7, "temperature": "hot", "num_return_sequences": 0, "processors": {"nope": {}}}
    with pytest.raises(ConfigError) as error:
        plan(parrot(), [[1]], **bad)
    found = problems(error)
    assert set(found) == {"top_kk", "top_p", "temperature", "num_return_sequences", "processors.nope"}
    assert "did you mean top_k" in found["top_kk"]
    assert "decodekit:top_p" in str(error.value)


def test_faults_of_call_object_and_model_come_together(parrot: Any) -> None:
    with pytest.raises(ConfigError) as error:
        plan(parrot(temperature="warm"), [[1]], GenerationConfig(top_p=3.0), top_k="many")
    assert set(problems(error)) == {"temperature", "top_p", "top_k"}


@pytest.mark.parametrize("name", ["tempreature", "top_kk", "max_new_token", "do_samples"])
def test_a_typo_is_refused_wherever_it_is_made(name: str, parrot: Any) -> None:
    nearest = {"tempreature": "temperature", "top_kk": "top_k", "max_new_token": "max_new_tokens"}
    attempts = [
        lambda: GenerationConfig(**{name: 1}),
        lambda: setattr(GenerationConfig(), name, 1),
        lambda: plan(parrot(), [[1]], **{name: 1}),
        lambda: plan(parrot(), [[1]], {name: 1}),
        lambda: GenerationConfig.from_dict({}, **{name: 1}),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigError, match=f"did you mean {nearest.get(name, 'do_sample')}"):
            attempt()
    with pytest.raises(AttributeError, match="did you mean"):
        getattr(GenerationConfig(), name)


@pytest.mark.parametrize(("key", "value"), [("top_p", 1.7), ("top_k", -1), ("temperature", 0.0), ("min_p", 2.0)])
def test_a_value_out_of_range_is_refused_without_sampling_too(key: str, value: Any, parrot: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        plan(parrot(), [[1]], **{key: value})


def test_what_is_no_configuration_is_refused(parrot: Any) -> None:
    with pytest.raises(InputError, match="must be a GenerationConfig or a dict, not 'greedy'"):
        plan(parrot(), [[1]], "greedy")
    with pytest.raises(ConfigError, match="expected a dict of plugin name -> options, got 5"):
        plan(parrot(), [[1]], processors=5)
    with pytest.raises(ConfigError, match="expected a dict of options, got 2"):
        plan(parrot(), [[1]], processors={"temperature": 2})
    with pytest.raises(ConfigError, match=r"processors.temperature.heat: unknown option; it has: temperature"):
        plan(parrot(), [[1]], processors={"temperature": {"heat": 2}})


@attrs.frozen
class Pair:
    """Its check looks at both fields, as attrs' own decorator allows."""

    low: float = option("Low end.", default=0.0)
    high: float = attrs.field(default=1.0)

    @high.validator
    def _(self, attribute: Any, value: float) -> None:
        if value < self.low:
            raise ValueError(f"high must not lie below low = {self.low}")

    def __call__(self, input_ids: Any, scores: Any, /) -> Any:
        return scores


@attrs.frozen
class Picky:
    power: float = option("A number.", check=greater_than(0))
    mode: str = attrs.field(default="a", validator=attrs.validators.in_(["a", "b"]))
    count: int = attrs.field(default=1, validator=attrs.validators.instance_of(int))

    def __attrs_post_init__(self) -> None:
        assert self.count < 10, "no more than nine"

    def __call__(self, input_ids: Any, scores: Any, /) -> Any:
        return scores


def test_any_check_an_author_may_write_becomes_a_problem_in_its_own_words(register: Any) -> None:
    register("processors", "pair", Pair, low="low", high="high")
    register("processors", "picky", Picky, picky="power", picky_mode="mode", picky_count="count")
    resolve([("call", {"low": 0.1, "high": 0.2})])
    for given, key, words in (
        ({"low": 0.5, "high": 0.2}, "low, high", "high must not lie below low = 0.5"),
        ({"picky": 0.0}, "picky", "must be greater than 0, got 0.0"),
        ({"picky": 1.0, "picky_mode": "z"}, "picky_mode", "'mode' must be in ['a', 'b'] (got 'z')"),
        ({"picky": 1.0, "picky_count": 11}, "picky, picky_count", "no more than nine"),
        ({"picky_mode": "b"}, "picky", "is required"),
    ):
        with pytest.raises(ConfigError) as error:
            resolve([("call", given)])
        assert words in problems(error)[key]
        assert "local:" in str(error.value)


def test_nothing_that_was_passed_is_modified(parrot: Any) -> None:
    config = GenerationConfig(do_sample=True, eos_token_id=[30, 31], processors={"temperature": {"temperature": 0.5}})
    as_dict = {"top_k": 3, "eos_token_id": [30], "processors": {"min_p": {"min_p": 0.1}}}
    call = {"stop_strings": ["x"], "processors": {"repetition_penalty": {"penalty": 1.2}}}
    model = parrot(eos_token_id=[29, 28], top_p=0.9)
    before = copy.deepcopy((config.to_dict(), as_dict, call, model.defaults))
    for passed in (config, as_dict):
        plan(model, [[1]], passed, do_sample=True, processors=call["processors"])
    assert (config.to_dict(), as_dict, call, model.defaults) == before
    kept = config.set_keys["eos_token_id"]
    config.to_dict()["eos_token_id"].append(1)
    assert kept == [30, 31]
    given = [30]
    made = GenerationConfig(eos_token_id=given)
    given.append(31)
    assert made.eos_token_id == [30]
