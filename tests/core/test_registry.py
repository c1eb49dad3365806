"""Plugins of this process: adding, taking back, finding, switching off."""

from __future__ import annotations

import sys
import threading
import types
from typing import Any, ClassVar

import attrs
import decodekit
import pytest
from decodekit import ConfigError, GenerationConfig, Phase, PluginClash, PluginNotFound, Traits, option, plan
from decodekit.keys import KeyTable, keys
from decodekit.registry import Registry, Switches, registry
from decodekit_plugins.commands.keys import describe


@attrs.frozen
class Louder:
    traits: ClassVar = Traits(phase=Phase.BIAS, pure=True)
    volume: float = option("Factor.", default=2.0)

    def __call__(self, input_ids: Any, scores: Any, /) -> Any:
        return scores * self.volume


@attrs.frozen
class Softer(Louder):
    pass


def test_what_is_registered_takes_part_and_what_is_unregistered_is_gone(parrot: Any) -> None:
    plugin = registry.register("processors", "louder", Louder, keys={"volume": "volume"})
    try:
        made = plan(parrot(), [[1]], volume=3.0)
        assert [(p.name, p.owner, p.runtime.volume) for p in made.chain.parts] == [("louder", "local:louder", 3.0)]
        assert describe(next(k for k in keys.all() if k.name == "volume"))["doc"] == "Factor."
    finally:
        registry.unregister(plugin)
    assert "louder" not in registry.names("processors")
    with pytest.raises(ConfigError, match="volume: unknown key"):
        plan(parrot(), [[1]], volume=3.0)


def test_unregistering_one_of_two_leaves_the_other() -> None:
    one = registry.register("processors", "louder", Louder, keys={"volume": "volume"})
    two = registry.register("processors", "loudest", Louder)
    other = registry.register("processors", "softer", Softer, keys={"softness": "volume"})
    try:
        registry.unregister(two)
        assert {"louder", "softer"} <= set(registry.names("processors"))
        assert "loudest" not in registry.names("processors")
        assert "volume" in keys
        registry.unregister(one)
        assert "volume" not in keys
        assert "softness" in keys
    finally:
        for plugin in (one, two, other):
            registry.unregister(plugin)


def test_a_module_or_an_object_can_be_registered() -> None:
    module = types.ModuleType("my_hooks")
    for target in (module, types.SimpleNamespace()):
        plugin = registry.register("hooks", "mine", target)
        try:
            assert registry.load("hooks", "mine") is target
        finally:
            registry.unregister(plugin)


def test_a_local_name_that_decodekit_has_is_a_clash(register: Any) -> None:
    register("processors", "top_k", Louder)
    with pytest.raises(PluginClash, match=r"decodekit:top_k, local:top_k"):
        registry.find("processors", "top_k")
    assert registry.find("processors", "local:top_k").load() is Louder
    assert registry.find("processors", "decodekit:top_k").distribution == "decodekit"


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        ("processors", "top_kk", "no processors plugin is named 'top_kk'; did you mean top_k"),
        ("strategies", "gredy", "did you mean greedy"),
        ("processor", "top_k", "there is no plugin kind 'processor'; did you mean processors"),
        ("schedulers", "zzzz", "installed: "),
    ],
)
def test_a_wrong_name_or_kind_gets_the_nearest(kind: str, name: str, words: str) -> None:
    with pytest.raises(PluginNotFound) as caught:
        registry.find(kind, name) if kind in ("processors", "strategies", "schedulers") else registry.plugins(kind)
    assert words in str(caught.value)
    with pytest.raises(PluginNotFound, match="no plugin kind"):
        registry.register("gadgets", "x", Louder)


@pytest.mark.parametrize("entry", ["decodekit:top_k", "processors:top_k", "top_k"])
def test_off_switches_match_by_name_qualified_name_and_kind(entry: str) -> None:
    source = Registry(Switches(disable=(entry,)))
    assert "top_k" not in source.names("processors")
    assert "top_p" in source.names("processors")
    with pytest.raises(PluginNotFound, match="switched off"):
        source.load("processors", "top_k")
    table = KeyTable(source)
    assert "top_k" not in table
    assert "belongs to decodekit, which is switched off (DECODEKIT_DISABLE has" in table.unknown("top_k")


def test_a_whole_kind_can_be_switched_off() -> None:
    source = Registry(Switches(disable=("processors",)))
    assert source.names("processors") == []
    assert source.names("strategies")


def test_the_environment_is_read_in_full() -> None:
    environ = {"DISABLE": " a, b ,", "ALLOW": "c", "PREFER": "d:e", "STRICT": "1"}
    full = {f"DECODEKIT_{name}": value for name, value in environ.items()}
    assert Switches.from_environment(full) == Switches(("a", "b"), ("c",), ("d:e",), True)
    assert Switches.from_environment({"DECODEKIT_STRICT": "0"}) == Switches()


@pytest.mark.parametrize("field", ["allow", "prefer"])
def test_a_switch_that_matches_nothing_is_an_error_every_time(field: str) -> None:
    source = Registry(Switches(**{field: ("decodekitt",)}))
    for _ in range(2):
        with pytest.raises(PluginNotFound, match=r"'decodekitt'.*did you mean decodekit"):
            source.plugins()


def test_threads_that_look_up_while_the_registry_changes_always_find() -> None:
    wrong: list[BaseException] = []
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            try:
                assert registry.find("strategies", "greedy").name == "greedy"
                assert keys.find("top_k") is not None
            except BaseException as error:
                wrong.append(error)
                return

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        registry.unregister(registry.register("processors", "louder", Louder))
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_key_that_points_to_no_plugin_says_so(register: Any) -> None:
    registry._local.append(type(register("processors", "louder", Louder))("keys", "lost", "a:B.c", "local", "0"))
    registry.refresh()
    try:
        with pytest.raises(ConfigError, match="lost: belongs to local, which has no plugin a:B"):
            GenerationConfig(lost=1)
    finally:
        registry._local.pop()
        registry.refresh()


def test_public_names_exist_and_arrive_lazily() -> None:
    for name in decodekit.__all__:
        assert getattr(decodekit, name) is not None
    assert set(decodekit.__all__) <= set(dir(decodekit))
    with pytest.raises(AttributeError):
        _ = decodekit.generates  # type: ignore[attr-defined]
    assert "decodekit" in sys.modules
