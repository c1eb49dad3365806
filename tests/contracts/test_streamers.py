"""Every installed streamer keeps the laws; streamers that lie fail exactly the test of their lie."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from decodekit.errors import Cancelled
from decodekit.testing import StreamerContract, installed, results

CASES = installed("streamers", {})
QUEUED = ("decodekit:iterator", "decodekit:async_iterator")


def test_there_are_streamers_to_test() -> None:
    assert {"text", "iterator", "async_iterator"} <= {case.plugin.name for case in CASES if case.own}


class TestEveryStreamer(StreamerContract):
    @pytest.fixture(autouse=True, params=CASES, ids=str)
    def _choose(self, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
        self.case, self.capsys = request.param, capsys

    def make(self) -> Any:
        return self.case.make()

    def make_rows(self) -> Any:
        return self.case.plugin.load()(rows=True) if self.case.own else None

    def received(self, streamer: Any) -> Any:
        if self.case.plugin.qualified in QUEUED:
            return "".join(self._read(streamer))
        return self.capsys.readouterr().out if self.case.own else None

    def received_rows(self, streamer: Any) -> Any:
        if self.case.plugin.qualified in QUEUED:
            pairs = self._read(streamer)
            rows = {row for row, _ in pairs}
            for row in rows:  # the end of a row, once, behind its text
                assert [text for at, text in pairs if at == row].index("") == sum(at == row for at, _ in pairs) - 1
            return {row: "".join(text for at, text in pairs if at == row) for row in rows}
        return dict(enumerate(self.capsys.readouterr().out.splitlines()))


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


class WrapsNothing(Honest):
    """Honest about errors, and about a reader that left."""

    read: Any = None

    def put(self, value: Any, /) -> None:
        if self.read is not None and self.read.gi_frame is None:
            raise Cancelled
        super().put(value)

    def fail(self, error: BaseException, /) -> None:
        self.error = error

    def __iter__(self) -> Any:
        self.read = self.items()
        return iter_of(self.read)

    def items(self) -> Any:
        yield from self.held
        raise self.error


def iter_of(generator: Any) -> Any:
    try:
        yield from generator
    finally:
        generator.close()


class Asynchronous(WrapsNothing):
    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> Any:
        self.read = self.items()
        try:
            for item in self.read:
                await asyncio.sleep(0)
                yield item
        finally:
            self.read.close()


class HidesTheError(WrapsNothing):
    def items(self) -> Any:
        yield from self.held
        raise ValueError("something went wrong")


class FillsUp(WrapsNothing):
    def put(self, value: Any, /) -> None:
        Honest.put(self, value)


class Rows(Honest):
    """Keeps the tokens of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[int, list[int]] = {}

    def put(self, value: Any, /) -> None:
        self.lines = dict(enumerate(value.tolist()))

    def put_rows(self, tokens: Any, rows: Any, /) -> None:
        for row, token in zip(rows, tokens.tolist(), strict=True):
            self.lines[row] = [*self.lines[row], token]

    def end_row(self, row: int, /) -> None:
        pass

    def end(self) -> None:
        pass


class TakesRowsInOrder(Rows):
    """As if every row got a token at every step; one after another is fine."""

    def put_rows(self, tokens: Any, rows: Any, /) -> None:
        mixed = len(set(rows)) > 1
        super().put_rows(tokens, range(len(rows)) if mixed else rows)


class TakesOneTokenOfARow(Rows):
    def put_rows(self, tokens: Any, rows: Any, /) -> None:
        last = dict(zip(rows, tokens.tolist(), strict=True))
        super().put_rows(type(tokens)(list(last.values())).long(), list(last))


LIES: dict[type, set[str]] = {
    Honest: set(),
    WrapsNothing: set(),
    Asynchronous: set(),
    FillsUp: {"test_a_consumer_that_leaves_ends_the_call"},
    Rows: set(),
    TakesRowsInOrder: {"test_a_row_comes_out_as_alone"},
    TakesOneTokenOfARow: {"test_rows_keep_no_pace"},
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
            return Honest() if issubclass(liar, Rows) else liar()

        def received(self, streamer: Any) -> Any:
            out, streamer.out = streamer.out, []
            return out

        def make_rows(self) -> Any:
            return liar() if issubclass(liar, Rows) else None

        def received_rows(self, streamer: Any) -> Any:
            return streamer.lines

    failed = {name for name, verdict in results(Suite()).items() if verdict not in ("ok", "skipped")}
    assert failed == LIES[liar]


def test_every_test_has_its_liar() -> None:
    tests = {name for name, _ in inspect.getmembers(StreamerContract) if name.startswith("test_")}
    assert tests == set().union(*LIES.values())
