"""Order of processors: phase, then before/after by name, then as given."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from decodekit import ConfigError, Phase, PipelineError, Traits, plan
from decodekit.chain import Part, order
from hypothesis import given
from hypothesis import strategies as st


def part(name: str, phase: Phase = Phase.CUSTOM, **traits: Any) -> Part:
    return Part(name, f"test:{name}", lambda ids, scores: scores, Traits(phase=phase, **traits), "test")


def names(parts: list[Part], override: list[str] | None = None) -> list[str]:
    return [p.name for p in order(parts, override)]


def test_phases_come_in_their_order_whatever_was_given() -> None:
    parts = [part(phase.name, phase) for phase in Phase]
    for seed in range(20):
        shuffled = random.Random(seed).sample(parts, len(parts))
        assert names(shuffled) == [phase.name for phase in Phase]
    assert [p.name for p in Phase] == [
        "GUIDE", "BIAS", "PENALTY", "CONSTRAIN", "CUSTOM", "SCALE", "TRUNCATE", "WATERMARK", "NORMALIZE",
    ]  # fmt: skip


def test_ties_keep_the_given_order() -> None:
    for given_ in itertools.permutations("abcd"):
        assert names([part(name) for name in given_]) == list(given_)


def test_before_and_after_hold_and_move_nothing_else() -> None:
    assert names([part("b", after=("a",)), part("x"), part("a"), part("y")]) == ["x", "a", "b", "y"]
    assert names([part("x"), part("b"), part("a", before=("x",))]) == ["b", "a", "x"]
    assert names([part("c", after=("b",)), part("b", after=("a",)), part("a")]) == ["a", "b", "c"]
    # A neighbour that is not there does not matter.
    assert names([part("a", after=("nobody",)), part("b")]) == ["a", "b"]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=8), st.permutations(range(7)))
def test_random_constraints_are_met(edges: list[tuple[int, int]], given_: list[int]) -> None:
    edges = [(a, b) for a, b in edges if a < b]  # no circle
    parts = {n: part(str(n), after=tuple(str(a) for a, b in edges if b == n)) for n in range(7)}
    placed = names([parts[n] for n in given_])
    assert sorted(placed) == [str(n) for n in range(7)]
    assert all(placed.index(str(a)) < placed.index(str(b)) for a, b in edges)
    if not edges:
        assert placed == [str(n) for n in given_]


def test_a_circle_names_who_is_in_it() -> None:
    parts = [part("free"), part("a", after=("b",)), part("b", after=("c",)), part("c", after=("a",))]
    with pytest.raises(PipelineError, match=r"each want to run before the other: a, b, c; set processor_order"):
        order(parts)


def test_an_override_moves_only_what_it_names() -> None:
    parts = [part("a"), part("b", Phase.SCALE), part("c", Phase.TRUNCATE), part("d", Phase.NORMALIZE)]
    assert names(parts, ["c", "a"]) == ["c", "b", "a", "d"]
    assert names(parts, ["d", "c", "b", "a"]) == ["d", "c", "b", "a"]
    assert names(parts, ["b"]) == ["a", "b", "c", "d"]
    with pytest.raises(PipelineError, match="names 'cc', which is not active"):
        order(parts, ["cc"])
    with pytest.raises(PipelineError, match="did you mean temperature"):
        order([part("temperature")], ["tempratur"])


def test_processor_order_is_a_config_key(parrot: Any) -> None:
    keys = {"do_sample": True, "temperature": 0.5, "top_k": 5, "top_p": 0.9}
    default = [p.name for p in plan(parrot(), [[1]], **keys).chain.parts]
    assert default[0] == "temperature"
    turned = [p.name for p in plan(parrot(), [[1]], processor_order=["top_p", "temperature"], **keys).chain.parts]
    assert turned.index("top_p") < turned.index("temperature")
    with pytest.raises(PipelineError, match="top_pp"):
        plan(parrot(), [[1]], processor_order=["top_pp"], **keys)
    with pytest.raises(ConfigError, match="processor_order"):
        plan(parrot(), [[1]], processor_order="top_p", **keys)


def test_the_order_of_passed_objects_is_kept_and_they_run_in_their_phase(parrot: Any) -> None:
    def first(ids: Any, scores: Any) -> Any:
        return scores

    def second(ids: Any, scores: Any) -> Any:
        return scores

    for pair in ([first, second], [second, first]):
        made = plan(parrot(), [[1]], logits_processor=pair, repetition_penalty=1.2, do_sample=True, temperature=0.5)
        placed = [p.name for p in made.chain.parts]
        assert placed[:4] == ["repetition_penalty", *(p.__name__ for p in pair), "temperature"]
        assert made.chain.parts[1].owner == "caller"
