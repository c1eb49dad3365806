"""Hooks around a run: when they are called, and that a bad one is left out whole."""

from __future__ import annotations

import contextlib
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from decodekit import PluginBroken, generate, hookimpl, plan, stream
from decodekit.hooks import Hooks, hooks
from decodekit.registry import registry
from decodekit_plugins.commands.plugins import verdict


class Diary:
    def __init__(self) -> None:
        self.lines: list[str] = []

    @hookimpl
    def config_translated(self, settings: Any) -> None:
        self.lines.append(f"translated {settings.get('max_new_tokens')}")

    @hookimpl
    def pipeline_assembled(self, pipeline: Any) -> None:
        self.lines.append(f"assembled {pipeline.strategy_name}")

    @hookimpl
    def run_wrapped(self, pipeline: Any) -> Any:
        @contextlib.contextmanager
        def page() -> Iterator[None]:
            self.lines.append("open")
            try:
                yield
            except BaseException as error:
                self.lines.append(f"saw {type(error).__name__}")
                raise
            finally:
                self.lines.append("close")

        return page()

    @hookimpl
    def run_finished(self, pipeline: Any, output: Any) -> None:
        self.lines.append(f"finished {output.sequences.tolist()}")


@pytest.fixture
def diary(register: Any) -> Diary:
    made = Diary()
    register("hooks", "diary", made)
    return made


def test_each_hook_is_called_once_and_in_order(diary: Diary, parrot: Any) -> None:
    generate(parrot(), [[1]], max_new_tokens=2)
    assert diary.lines == ["translated 2", "assembled greedy", "open", "close", "finished [[1, 2, 3]]"]
    diary.lines.clear()
    plan(parrot(), [[1]], max_new_tokens=2)
    assert diary.lines == ["translated 2", "assembled greedy"]
    diary.lines.clear()
    assert len(list(stream(parrot(), [[1]], max_new_tokens=2))) == 2
    assert diary.lines[-3:] == ["open", "close", "finished [[1, 2, 3]]"]


def test_a_run_that_fails_or_is_closed_is_wrapped_up_but_not_finished(diary: Diary, parrot: Any) -> None:
    def broken(ids: Any, scores: Any) -> Any:
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        generate(parrot(), [[1]], logits_processor=[broken])
    assert diary.lines[-3:] == ["open", "saw GenerationError", "close"]
    steps = stream(parrot(), [[1]], max_new_tokens=9)
    next(iter(steps))
    steps.close()  # type: ignore[attr-defined]
    assert diary.lines[-1] == "close"
    assert not any(line.startswith("finished") for line in diary.lines)


def test_a_hook_can_refuse_a_pipeline(register: Any, parrot: Any) -> None:
    @hookimpl
    def pipeline_assembled(pipeline: Any) -> None:
        raise ValueError("not here")

    register("hooks", "guard", types.SimpleNamespace(pipeline_assembled=pipeline_assembled))
    with pytest.raises(ValueError, match="not here"):
        generate(parrot(), [[1]])


@pytest.mark.parametrize("fault", ["wrong argument", "misspelt hook"])
def test_a_bad_plugin_is_left_out_whole(diary: Diary, register: Any, parrot: Any, fault: str) -> None:
    seen: list[str] = []

    @hookimpl
    def config_translated(settings: Any) -> None:
        seen.append("translated")

    @hookimpl
    def run_finished(pipeline: Any, output: Any, mood: Any) -> None:
        seen.append("finished")

    @hookimpl
    def run_finnished(pipeline: Any, output: Any) -> None:
        seen.append("finished")

    bad = run_finished if fault == "wrong argument" else run_finnished
    name = "run_finished" if fault == "wrong argument" else "run_finnished"
    plugin = register("hooks", "half", types.SimpleNamespace(**{"config_translated": config_translated, name: bad}))
    with pytest.warns(UserWarning, match="hooks plugin local:half cannot be registered"):
        generate(parrot(), [[1]], max_new_tokens=1)
    assert seen == []
    assert diary.lines[-1] == "finished [[1, 2]]"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(parrot(), [[1]], max_new_tokens=1)  # said once
    with pytest.raises(PluginBroken, match="local") as caught:
        plugin.load()
    assert name in str(caught.value.__cause__)
    assert verdict(registry, plugin)[0] == "BROKEN"


def test_first_use_from_many_threads_registers_everything_once(diary: Diary, parrot: Any) -> None:
    fresh = Hooks()
    start, found, said = threading.Barrier(6), [], []

    def look() -> None:
        start.wait()
        with warnings.catch_warnings(record=True) as caught:
            found.append(len(fresh.call.config_translated.get_hookimpls()))
        said.extend(caught)

    threads = [threading.Thread(target=look) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert set(found) == {len(hooks.call.config_translated.get_hookimpls())}
    assert min(found) >= 1
    assert said == []


def test_hooks_follow_the_registry(register: Any, parrot: Any) -> None:
    diary = Diary()
    plugin = registry.register("hooks", "diary", diary)
    generate(parrot(), [[1]], max_new_tokens=1)
    count = len(diary.lines)
    registry.unregister(plugin)
    generate(parrot(), [[1]], max_new_tokens=1)
    assert len(diary.lines) == count > 0
