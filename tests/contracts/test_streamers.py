"""Every installed streamer keeps the laws; streamers that lie fail exactly the test of their lie."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from decodekit.testing import StreamerContract, installed, results

CASES = installed("streamers", {})


def test_there_are_streamers_to_test() -> None:
    assert {"text", "iterator"} <= {case.plugin.name for case in CASES if case.own}


class TestEveryStreamer(StreamerContract):
    @pytest.fixture(autouse=True, params=CASES, ids=str)
    def _choose(self, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
        self.case, self.capsys = request.param, capsys

    def make(self) -> Any:
        return self.case.make()

    def received(self, streamer: Any) -> Any:
        if self.case.plugin.qualified == "decodekit:iterator":
            return "".join(streamer)
        return self.capsys.readouterr().out if self.case.own else None


class Honest:
    """Collects what it is given."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.out: list[Any] = []

    def put(self, value: Any, /) -> None:
        self.held.append(value.tolist())

    def end(self) -> None:
        self.out += self.held
        self.held.clear()


class WritesIntoTokens(Honest):
    def put(self, value: Any, /) -> None:
        super().put(value)
        value.add_(1)


class KeepsTheTensor(Honest):
    def put(self, value: Any, /) -> None:
        self.held.append(value)

    def end(self) -> None:
        self.out += [value.tolist() for value in self.held]
        self.held.clear()


class DropsEverything(Honest):
    def put(self, value: Any, /) -> None:
        pass


class NeedsATokenToEnd(Honest):
    def end(self) -> None:
        assert self.held[1:]
        super().end()


class ForgetsToForget(Honest):
    def end(self) -> None:
        self.out += self.held


class HidesTheError(Honest):
    def fail(self, error: BaseException, /) -> None:
        self.error = error

    def __iter__(self) -> Any:
        raise ValueError("something went wrong")


class WrapsNothing(Honest):
    """Honest about errors."""

    def fail(self, error: BaseException, /) -> None:
        self.error = error

    def __iter__(self) -> Any:
        yield from self.held
        raise self.error


LIES: dict[type, set[str]] = {
    Honest: set(),
    WrapsNothing: set(),
    WritesIntoTokens: {"test_arguments_stay"},
    KeepsTheTensor: {"test_tokens_are_taken_at_once"},
    DropsEverything: {"test_a_call_comes_out"},
    NeedsATokenToEnd: {"test_an_empty_call_ends"},
    ForgetsToForget: {"test_a_second_call_starts_clean"},
    HidesTheError: {"test_fail_passes_the_error_on"},
}


@pytest.mark.parametrize("liar", LIES, ids=lambda liar: liar.__name__)
def test_a_lying_streamer_fails_its_lie(liar: type) -> None:
    class Suite(StreamerContract):
        def make(self) -> Any:
            return liar()

        def received(self, streamer: Any) -> Any:
            out, streamer.out = streamer.out, []
            return out

    failed = {name for name, verdict in results(Suite()).items() if verdict not in ("ok", "skipped")}
    assert failed == LIES[liar]


def test_every_test_has_its_liar() -> None:
    tests = {name for name, _ in inspect.getmembers(StreamerContract) if name.startswith("test_")}
    assert tests == set().union(*LIES.values())
