"""The conformance suite of streamers: a prompt, tokens one by one, an end, and the same again."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterable, Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from decodekit.context import BindContext
from decodekit.errors import Cancelled

from .support import Letters, context

PATIENCE = 10.0
"""Seconds for a consumer to hear of an error."""
ENOUGH = 1000
"""Tokens after which a consumer that went away must have been noticed."""


class StreamerContract:
    """Subclass it in a file that pytest collects, and name what to test::

        class TestMine(StreamerContract):
            def make(self):
                return MyStreamer()

    Override `received` to say what came out, so that it can be compared; `rows` where several are taken by `put`;
    `make_rows` and `received_rows` where rows may end at different times (`put_rows`); `context` where more is needed
    than a tokenizer of one letter a token.
    """

    rows = 1
    steps = 8

    def make(self) -> Any:
        """Return a fresh streamer. It is called many times."""
        raise NotImplementedError(f"{type(self).__name__} must define make()")

    def received(self, streamer: Any) -> Any:
        """Return what came out since this was last asked; None where it cannot be seen."""
        return None

    def make_rows(self) -> Any:
        """Return a fresh streamer for several rows that has `put_rows`; None where there is none."""
        return None

    def received_rows(self, streamer: Any) -> Mapping[int, Any] | None:
        """Return what came out of each row since this was last asked; None where it cannot be seen."""
        return None

    def context(self, tokens: Tensor) -> BindContext:
        """Return the context to bind in; `tokens` [B, T] is the prompt."""
        return context(tokens, tokenizer=Letters())

    # -- helpers -----------------------------------------------------------------------------------

    def tokens(self, seed: int = 1) -> list[Tensor]:
        """What `put` gets: the prompt int64 [rows, 4], then int64 [rows] for each step."""
        random = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 37, (self.rows, 4 + self.steps), generator=random)
        return [ids[:, :4].clone(), *(column.clone() for column in ids[:, 4:].unbind(1))]

    def start(self, streamer: Any, tokens: list[Tensor]) -> Any:
        """The streamer, bound as for a call with this prompt."""
        return streamer.bind(self.context(tokens[0])) if hasattr(streamer, "bind") else streamer

    def call(self, streamer: Any, seed: int = 1) -> Any:
        """One whole call; returns what came out."""
        tokens = self.tokens(seed)
        bound = self.start(streamer, tokens)
        for value in tokens:
            bound.put(value)
        bound.end()
        return self.received(bound)

    def call_rows(self, prompts: Tensor, steps: Sequence[tuple[list[int], list[int], list[int]]]) -> Mapping[int, Any]:
        """One whole call of several rows: for each step the rows, their tokens, and the rows that end with them."""
        streamer = self.make_rows()
        if streamer is None:
            self._skip("it takes one row: override make_rows if it takes more")
        bound = self.start(streamer, [prompts])
        bound.put(prompts.clone())
        for rows, tokens, ended in steps:
            given = torch.tensor(tokens, dtype=torch.long)
            bound.put_rows(given, rows)
            given.fill_(3)
            for row in ended:
                bound.end_row(row)
        bound.end()
        came = self.received_rows(bound)
        if came is None:
            self._skip("nothing to see: override received_rows to compare what comes out")
        return came

    def _ragged(self) -> tuple[Tensor, list[list[int]]]:
        """Prompts of three rows, and the new tokens of each: the second ends first, the third last."""
        random = torch.Generator().manual_seed(3)
        ids = torch.randint(3, 37, (3, 4 + self.steps), generator=random)
        return ids[:, :4].clone(), [ids[row, 4 : 4 + n].tolist() for row, n in enumerate((5, 2, self.steps))]

    def _alone(self, prompts: Tensor, new: list[list[int]]) -> dict[int, Any]:
        """What comes out of each row in a call of its own."""
        alone = {}
        for row, tokens in enumerate(new):
            steps = [([0], [token], [0] if at == len(tokens) - 1 else []) for at, token in enumerate(tokens)]
            alone[row] = self.call_rows(prompts[row : row + 1], steps)[0]
        return alone

    @staticmethod
    def _in_thread(work: Callable[[], Any]) -> Any:
        """What `work` returns, or the error it raises, from a thread: who forgets the consumer fails, not hangs."""
        heard: queue.SimpleQueue[Any] = queue.SimpleQueue()

        def consume() -> None:
            try:
                heard.put(work())
            except BaseException as error:
                heard.put(error)

        threading.Thread(target=consume, daemon=True).start()
        try:
            return heard.get(timeout=PATIENCE)
        except queue.Empty:
            raise AssertionError(f"the consumer still waits after {PATIENCE:.0f} s") from None

    @staticmethod
    def _iterates(streamer: Any) -> bool:
        return isinstance(streamer, (Iterable, AsyncIterable))

    @staticmethod
    def _read(streamer: Any, most: int | None = None) -> list[Any]:
        """What iteration gives, up to `most` items; then the iterator is dropped."""

        async def read() -> list[Any]:
            items = []
            async for item in streamer:
                items.append(item)
                if len(items) == most:
                    break
            return items

        if isinstance(streamer, AsyncIterable):
            return asyncio.run(read())
        items = []
        for item in streamer:
            items.append(item)
            if len(items) == most:
                break
        return items

    @staticmethod
    def _skip(why: str) -> NoReturn:
        import pytest

        pytest.skip(why)

    # -- the tests ---------------------------------------------------------------------------------

    def test_a_call_comes_out(self) -> None:
        """Prompt, tokens and end are taken, and where it can be seen, something comes out."""
        came = self.call(self.make())
        if came is None:
            self._skip("nothing to see: override received to compare what comes out")
        assert len(came), "nothing came out of a call of eight tokens"

    def test_an_empty_call_ends(self) -> None:
        """`end` right after the prompt is fine."""
        tokens = self.tokens()
        bound = self.start(self.make(), tokens)
        bound.put(tokens[0])
        bound.end()
        self.received(bound)

    def test_arguments_stay(self) -> None:
        """`put` does not write to what it is given."""
        tokens = self.tokens()
        bound = self.start(self.make(), tokens)
        for value in tokens:
            before = value.clone()
            bound.put(value)
            assert torch.equal(value, before), "put wrote into the tokens"
        bound.end()
        self.received(bound)

    def test_tokens_are_taken_at_once(self) -> None:
        """What is written into a tensor after `put` does not come out: the loop uses its buffers again."""
        want, tokens = self.call(self.make()), self.tokens()
        if want is None:
            self._skip("nothing to see: override received to compare what comes out")
        bound = self.start(self.make(), tokens)
        for value in tokens:
            bound.put(value)
            value.fill_(3)
        bound.end()
        assert self.received(bound) == want, "tokens written over after put came out"

    def test_a_second_call_starts_clean(self) -> None:
        """After `end` the same streamer serves another call, and nothing of the first is in it."""
        streamer, want = self.make(), self.call(self.make(), seed=2)
        self.call(streamer, seed=1)
        assert self.call(streamer, seed=2) == want, "the second call came out otherwise than a first"

    def test_fail_passes_the_error_on(self) -> None:
        """`fail(error)` raises nothing itself; whoever iterates gets that very error."""
        tokens = self.tokens()
        bound = self.start(self.make(), tokens)
        if not hasattr(bound, "fail"):
            self._skip("no fail")
        error = RuntimeError("the model broke")
        for value in tokens[:3]:
            bound.put(value)
        bound.fail(error)
        if not self._iterates(bound):
            return
        got = self._in_thread(lambda: self._read(bound))
        assert got is error, f"the consumer got {got!r}, not the error of the call"

    def test_a_consumer_that_leaves_ends_the_call(self) -> None:
        """Once whoever iterates has dropped the iterator, `put` raises `Cancelled`: nobody would fetch the tokens."""
        tokens = self.tokens()
        bound = self.start(self.make(), tokens)
        if not self._iterates(bound):
            self._skip("nobody iterates over it")
        for value in tokens:
            bound.put(value)
        got = self._in_thread(lambda: self._read(bound, most=1))
        assert isinstance(got, list), f"the consumer got {got!r}, not what was put"
        try:
            for _ in range(ENOUGH):
                bound.put(tokens[-1])
        except Cancelled:
            return
        raise AssertionError(f"the consumer went away, and {ENOUGH} more tokens were taken")

    def test_a_row_comes_out_as_alone(self) -> None:
        """Rows that end at different times give what each gives alone, end or not."""
        prompts, new = self._ragged()
        steps = []
        for at in range(self.steps):
            going = [row for row in range(3) if at < len(new[row])]
            ended = [row for row in going if at == len(new[row]) - 1]
            steps.append((going, [new[row][at] for row in going], ended))
        came = self.call_rows(prompts, steps)
        assert came == self._alone(prompts, new), "rows came out otherwise than alone"

    def test_rows_keep_no_pace(self) -> None:
        """One row may be complete before another begins, and one `put_rows` hold several tokens of a row."""
        prompts, new = self._ragged()
        steps = [([row] * len(new[row]), new[row], [row]) for row in (1, 2)]
        steps.append(([0], new[0][:1], []))
        steps.append(([0] * len(new[0][1:]), new[0][1:], []))  # `end` ends what nobody ended
        came = self.call_rows(prompts, steps)
        assert came == self._alone(prompts, new), "rows came out otherwise than alone"
