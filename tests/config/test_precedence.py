"""Call over object over model over library: what was SET counts, not what differs from a default (B35)."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from decodekit import ConfigError, GenerationConfig, plan
from decodekit.settings import resolve

SAMPLING = {"do_sample": True, "temperature": 0.6, "top_k": 7}


@pytest.mark.filterwarnings("ignore:.*no effect")
@pytest.mark.parametrize(
    ("config", "call", "origin"),
    [
        (GenerationConfig(do_sample=False), {}, "config"),
        ({"do_sample": False}, {}, "config"),
        (None, {"do_sample": False}, "call"),
        (GenerationConfig(do_sample=False), {"do_sample": False}, "call"),
        ({"do_sample": True}, {"do_sample": False}, "call"),
        (GenerationConfig(do_sample=True), {"do_sample": False}, "call"),
    ],
)
def test_an_explicit_false_overrules_the_models_true(parrot: Any, config: Any, call: Any, origin: str) -> None:
    made = plan(parrot(**SAMPLING), [[1]], config, **call)
    assert made.settings.get("do_sample") is False
    assert made.settings.origin("do_sample") == origin
    assert made.strategy_name == "greedy"
    described = made.describe()
    assert described["settings"]["do_sample"] == {"value": False, "origin": origin, "owner": "decodekit:Choices"}
    # What the model said and cannot act now is named, not dropped without a word.
    assert set(described["left_out"]) == {"temperature", "top_k"}


def test_unless_told_otherwise_the_model_decides(parrot: Any) -> None:
    made = plan(parrot(**SAMPLING), [[1]], GenerationConfig(), top_p=0.5)
    origins = {name: value["origin"] for name, value in made.describe()["settings"].items()}
    assert origins == {
        "do_sample": "model",
        "temperature": "model",
        "top_k": "model",
        "top_p": "call",
        "max_new_tokens": "library",
    }
    assert made.strategy_name == "sample"


@pytest.mark.parametrize("sources", list(itertools.product([False, True], repeat=3)))
def test_the_strongest_source_that_speaks_wins(parrot: Any, sources: tuple[bool, ...]) -> None:
    """Every subset of model, object and call sets top_k; 50, the library's own value, counts like any other."""
    model, config, call = ({"top_k": k} if said else {} for said, k in zip(sources, (3, 50, 4), strict=True))
    settings = plan(parrot(do_sample=True, **model), [[1]], config, **call).settings
    strongest_first = zip(reversed(sources), [(4, "call"), (50, "config"), (3, "model")], strict=True)
    expected = next((pair for said, pair in strongest_first if said), (50, "library"))
    assert (settings.get("top_k"), settings.origin("top_k")) == expected


def test_none_takes_back_what_weaker_sources_said(parrot: Any) -> None:
    model = parrot(do_sample=True, temperature=0.6, top_k=7, max_new_tokens=3)

    def names(config: Any = None, **call: Any) -> set[str]:
        return {part.name for part in plan(model, [[1]], config, **call).chain.parts}

    assert names() == {"temperature", "top_k"}
    assert names(temperature=None) == {"top_k"}
    assert names(GenerationConfig(temperature=None)) == {"top_k"}
    # As in the reference: None means no top-k at all, not the library's 50.
    assert names(top_k=None) == {"temperature"}
    assert names({"top_k": None}) == {"temperature"}
    assert names(GenerationConfig(top_k=None), top_k=5) == {"temperature", "top_k"}
    assert plan(model, [[1]], do_sample=None).strategy_name == "greedy"
    # A run needs an end, so there the library's value comes back.
    settings = plan(model, [[1]], max_new_tokens=None).settings
    assert (settings.get("max_new_tokens"), settings.origin("max_new_tokens")) == (20, "library")


@pytest.mark.parametrize("off", [None, False])
def test_a_section_can_switch_a_plugin_off(parrot: Any, off: Any) -> None:
    model = parrot(do_sample=True, temperature=0.6, top_k=7)
    names = [part.name for part in plan(model, [[1]], processors={"temperature": off, "top_k": off}).chain.parts]
    assert names == []
    back = plan(model, [[1]], {"processors": {"top_k": off}}, top_k=3)
    assert [part.name for part in back.chain.parts] == ["temperature", "top_k"]
    assert back.settings.get("top_k") == 3


def test_flat_and_nested_forms_are_one(parrot: Any) -> None:
    flat = resolve([("call", {"temperature": 0.5, "repetition_penalty": 1.3, "top_k": 4})])
    section = {"temperature": {"temperature": 0.5}, "repetition_penalty": {"penalty": 1.3}, "top_k": {"top_k": 4}}
    nested = resolve([("call", {"processors": section})])
    assert flat.values == nested.values
    assert [a.options for a in flat.kind("processors")] == [a.options for a in nested.kind("processors")]
    # The same precedence holds across the forms, and two different words of one source are a contradiction.
    assert resolve([("model", {"processors": section}), ("call", {"top_k": 9})]).get("top_k") == 9
    assert resolve([("model", {"top_k": 9}), ("call", {"processors": section})]).get("top_k") == 4
    with pytest.raises(ConfigError, match=r"is 4, but top_k says 9|is 9, but processors.top_k.top_k says 4"):
        resolve([("call", {"top_k": 9, "processors": section})])


def test_true_and_an_empty_section_mean_the_plugins_defaults(parrot: Any) -> None:
    for given in (True, {}):
        (active,) = resolve([("call", {"strategies": {"greedy": given}})]).kind("strategies")
        assert active.plugin.name == "greedy"
    assert plan(parrot(do_sample=True), [[1]], strategies={"greedy": {}}).strategy_name == "greedy"


@pytest.mark.parametrize(
    ("model", "config", "call", "width"),
    [
        ({"max_length": 4}, {}, {"max_new_tokens": 5}, 7),
        ({"max_new_tokens": 9}, {}, {"max_length": 4}, 4),
        ({"max_new_tokens": 9}, {"max_length": 4}, {}, 4),
        ({"max_length": 4}, {"max_length": 5}, {"max_new_tokens": 1}, 3),
        ({"max_length": 6}, {}, {}, 6),
        ({}, {}, {}, 22),
    ],
)
def test_the_stronger_of_two_ways_to_say_the_length_wins(
    parrot: Any, model: dict[str, int], config: dict[str, int], call: dict[str, int], width: int
) -> None:
    made = plan(parrot(**model), [[1, 2]], config, **call)
    assert made.context.max_length == width


def test_a_key_that_cannot_act_is_named(parrot: Any) -> None:
    with pytest.warns(UserWarning, match="temperature: 0.7 has no effect without do_sample=True"):
        plan(parrot(), [[1]], temperature=0.7)
    with pytest.warns(UserWarning, match="top_p: 0.7 has no effect"):
        GenerationConfig(top_p=0.7).validate()
    with pytest.raises(ConfigError, match=r"top_p: 0\.7 has no effect"):
        GenerationConfig(top_p=0.7).validate(strict=True)
    GenerationConfig(top_p=0.7, do_sample=True).validate(strict=True)
