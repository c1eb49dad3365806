"""Needs and offers: the message names who needs what, what lacks it and what would do."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import pytest
from decodekit import ConfigError, Phase, Traits, option, plan
from decodekit.negotiate import Need, negotiate
from decodekit_plugins.advice.offers import would_do


def test_nothing_is_said_when_everything_is_there() -> None:
    needs = [Need("strategy beam", frozenset({"cache:reorder", "model:hidden"})), Need("top_k", frozenset())]
    offers = {"cache dynamic": ["cache:reorder", "cache:crop"], "model X": ["model:hidden"]}
    assert list(negotiate(needs, offers)) == []


def test_each_missing_capability_is_one_problem() -> None:
    needs = [Need("strategy beam", frozenset({"cache:fly", "model:hidden"})), Need("eye", frozenset({"tokenizer:see"}))]
    found = list(negotiate(needs, {"cache static": ["cache:crop"], "model X": []}))
    assert [(p.key, p.message.partition(",")[0]) for p in found] == [
        ("strategy beam", "needs cache:fly"),
        ("strategy beam", "needs model:hidden"),
        ("eye", "needs tokenizer:see"),
    ]
    assert "which cache static does not offer" in found[0].message
    assert "no installed plugin offers it" in found[0].message
    assert "which model X does not offer" in found[1].message
    assert "which no tokenizer does not offer" in found[2].message or "no tokenizer" in found[2].message
    assert "no installed plugin kind offers it" in found[2].message


def test_it_names_the_plugins_that_would_do(register: Any) -> None:
    class Flying:
        """A cache that claims an ability."""

        provides: ClassVar = frozenset({"cache:fly"})

    register("caches", "flying", Flying)
    assert would_do("cache:fly") == "these do: flying (set cache_implementation)"
    assert would_do("model:attentions") == "these do: transformers (set adapter)"


def test_a_pipeline_reports_missing_abilities_with_everything_else(parrot: Any) -> None:
    class Needy:
        traits: ClassVar = Traits(phase=Phase.BIAS, needs=frozenset({"cache:store"}), conflicts=("temperature",))

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores

    with pytest.raises(ConfigError) as caught:
        plan(parrot(), [[1]], logits_processor=[Needy()], do_sample=True, temperature=0.5)
    problems = {p.message.split(",")[0].split(";")[0] for p in caught.value.problems}
    assert problems == {"needs cache:store", "cannot run together with temperature"}


def test_strict_refuses_parts_that_say_nothing_about_themselves(parrot: Any) -> None:
    def mystery(ids: Any, scores: Any) -> Any:
        return scores

    plan(parrot(), [[1]], logits_processor=[mystery])
    with pytest.raises(ConfigError, match="mystery say nothing about themselves"):
        plan(parrot(), [[1]], logits_processor=[mystery], strict=True)


@attrs.frozen
class PlainCache:
    provides: ClassVar = frozenset()

    def bind(self, ctx: Any) -> None:
        return None


def test_a_section_chooses_where_a_run_has_one(parrot: Any, register: Any) -> None:
    register("caches", "plain", PlainCache)
    assert plan(parrot(), [[1]], caches={"plain": {}}).cache_name == "plain"
    assert plan(parrot(), [[1]], cache_implementation="plain").cache_name == "plain"
    assert plan(parrot(), [[1]], {"selectors": {"draw": {}}}).selector_name == "draw"
    with pytest.raises(ConfigError, match=r"cache_implementation says 'plain'|caches.dynamic says"):
        plan(parrot(), [[1]], caches={"dynamic": {}}, cache_implementation="plain")
    with pytest.raises(ConfigError, match="caches"):
        plan(parrot(), [[1]], caches={"dynamic": {}, "plain": {}})


@attrs.frozen
class Listener:
    loud: bool = option("Whether it shouts.", default=False)

    def put(self, value: Any, /) -> None:
        return None

    def end(self) -> None:
        return None


def test_a_streamer_named_in_a_section_reaches_the_pipeline(parrot: Any, register: Any) -> None:
    register("streamers", "listener", Listener)
    assert plan(parrot(), [[1]], {"streamers": {"listener": {"loud": True}}}).streamer == Listener(loud=True)
    assert plan(parrot(), [[1]], streamer="listener").streamer == Listener()
    assert plan(parrot(), [[1]]).streamer is None
    register("streamers", "second", Listener2)
    for both in ({"listener": {}, "second": {}}, {"listener": {}}):
        with pytest.raises(ConfigError, match="streamers: a run has one streamer"):
            plan(parrot(), [[1]], {"streamers": both}, **({} if len(both) > 1 else {"streamer": Listener()}))


@attrs.frozen
class Listener2(Listener):
    """Another class: a class is one plugin."""


def test_a_watermarker_with_nothing_to_do_is_named(parrot: Any, register: Any) -> None:
    @attrs.frozen
    class Shy:
        def bind(self, ctx: Any) -> None:
            return None

    register("watermarkers", "shy", Shy)
    made = plan(parrot(), [[1]], watermarkers={"shy": {}})
    assert made.left_out["shy"] == "has nothing to do with these values"
    assert len(made.chain) == 0
