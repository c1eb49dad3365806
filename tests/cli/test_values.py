"""How words of a command line become values of config keys."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
from decodekit.errors import ConfigError
from decodekit_plugins.commands import options, values


@pytest.mark.parametrize(
    ("words", "wanted", "value"),
    [
        (["5"], int, 5),
        (["5"], float, 5),
        ([".5"], float, 0.5),
        (["1e-3"], float | None, 1e-3),
        (["-1"], int | list[int], -1),
        (["5"], str, "5"),
        (["none"], str, "none"),
        (["none"], str | None, None),
        (["none"], int, None),
        (["true"], bool, True),
        (["False"], bool | None, False),
        (["never"], bool | str, "never"),
        (["true"], bool | str, True),
        (["END"], str | tuple[str, ...], "END"),
        (["END", "5"], str | tuple[str, ...], ["END", "5"]),
        (["5"], tuple[str, ...], ["5"]),
        (['["a", "b"]'], str | list[str], ["a", "b"]),
        (["["], str | list[str], "["),
        ([""], str, ""),
        (["1", "2"], int | list[int], [1, 2]),
        (["[1, 2]", "[3]"], list[list[int]], [[1, 2], [3]]),
        (["[1, 2]"], list[list[int]], [[1, 2]]),
        (['{"a": {"b": 2}}'], dict[str, Any], {"a": {"b": 2}}),
        ([True], bool | None, True),
    ],
)
def test_read(words: list[Any], wanted: Any, value: Any) -> None:
    got = values.read(words, wanted)
    assert got == value
    assert type(got) is type(value) or wanted is float


@pytest.mark.parametrize(
    ("words", "wanted", "message"),
    [
        (["x"], int, "expected a whole number, got 'x'"),
        (["1.5"], int, "expected a whole number, got 1.5"),
        (["yes"], bool, "expected True or False"),
        (["1"], bool, "expected True or False"),
        (["0.9", "0.8"], float, "given 2 times"),
        (["{bad"], dict[str, Any], "not valid JSON"),
        ([""], float, "expected a number"),
    ],
)
def test_read_is_strict(words: list[Any], wanted: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        values.read(words, wanted)


def parse(*words: str) -> tuple[argparse.Namespace, dict[str, Any]]:
    return options.read(options.parser("x", "d", "e"), list(words))


def test_options_and_prompts_mix() -> None:
    args, keys = parse("one", "--top-p", "0.9", "two", "--do-sample", "three", "--model", "m", "--top_k=5", "-1")
    assert args.prompts == ["one", "two", "three", "-1"]
    assert args.model == "m"
    assert keys == {"top_p": 0.9, "do_sample": True, "top_k": 5}


def test_switches() -> None:
    assert parse("--no-do-sample", "a")[1] == {"do_sample": False}
    args, keys = parse("--do-sample", "false", "--no-use-cache", "--", "--top-p", "true")
    assert keys == {"do_sample": False, "use_cache": False}
    assert args.prompts == ["--top-p", "true"]


def test_repeated_and_qualified() -> None:
    keys = parse("--eos-token-id", "1", "--eos-token-id", "2", "--decodekit:top-k", "3", "--stop-strings=--x")[1]
    assert keys == {"eos_token_id": [1, 2], "decodekit:top_k": 3, "stop_strings": "--x"}


def test_sections() -> None:
    assert parse("--processors", '{"top_k": {"top_k": 2}}')[1] == {"processors": {"top_k": {"top_k": 2}}}


def test_unknown_options_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--tpo-p", "1", "--modle", "x")
    assert [problem.key for problem in caught.value.problems] == ["--tpo-p", "--modle"]
    assert "--top-p" in str(caught.value)
    assert "--model" in str(caught.value)


def test_wrong_values_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("--top-p", "3", "--temperature", "x", "--no-top-k", "--config", "/no/file", "--top-k")
    told = {problem.key: problem.message for problem in caught.value.problems}
    assert told.keys() == {"top_p", "temperature", "--no-top-k", "--config", "--top-k"}
    assert told["top_p"] == "must be in [0, 1], got 3.0"
    assert "none unsets it" in told["--no-top-k"]
    assert told["--top-k"] == "needs a value"
