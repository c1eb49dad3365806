"""The conformance suite of streamers: a prompt, tokens one by one, an end, and the same again."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor

from decodekit.context import BindContext

from .support import Letters, context

PATIENCE = 10.0
"""Seconds for a consumer to hear of an error."""


class StreamerContract:
    """Subclass it in a file that pytest collects, and name what to test::

        class TestMine(StreamerContract):
            def make(self):
                return MyStreamer()

    Override `received` to say what came out, so that it can be compared; `rows` where several are taken; `context`
    where more is needed than a tokenizer of one letter a token.
    """

    rows = 1
    steps = 8

    def make(self) -> Any:
        """Return a fresh streamer. It is called many times."""
        raise NotImplementedError(f"{type(self).__name__} must define make()")

    def received(self, streamer: Any) -> Any:
        """Return what came out since this was last asked; None where it cannot be seen."""
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
        if not isinstance(bound, Iterable):
            return
        heard: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

        def consume() -> None:
            try:
                for _ in bound:
                    pass
            except BaseException as found:
                heard.put(found)
            else:
                heard.put(None)

        # In a thread: a streamer that forgets its consumer must fail this test, not hang it.
        threading.Thread(target=consume, daemon=True).start()
        try:
            got = heard.get(timeout=PATIENCE)
        except queue.Empty:
            raise AssertionError(f"fail was called, and the consumer still waits after {PATIENCE:.0f} s") from None
        assert got is error, f"the consumer got {got!r}, not the error of the call"
