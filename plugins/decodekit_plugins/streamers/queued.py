"""What streamers have in common that hand the text to somebody elsewhere."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from typing import Any

from decodekit.errors import Cancelled, InputError
from torch import Tensor

from .text import TextStreamer

LONGEST = 1e9
"""Seconds; the systems' clocks count no further than some times that."""


class End:
    """Ends the text of a call, well or by an error."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class QueueStreamer(TextStreamer):
    """Keeps the text until it is fetched; ends the call where nobody is going to.

    With `rows` what is kept are pairs (row, text), and at the end of a row a pair with an empty text.
    """

    def __init__(
        self,
        tokenizer: Any = None,
        skip_prompt: bool = False,
        timeout: float | None = None,
        *,
        rows: bool = False,
        **decode_kwargs: Any,
    ) -> None:
        super().__init__(tokenizer, skip_prompt, rows=rows, **decode_kwargs)
        fits = isinstance(timeout, (int, float)) and not isinstance(timeout, bool) and 0 <= timeout <= LONGEST
        if timeout is not None and not fits:
            raise InputError(
                f"timeout must be seconds from 0 to {LONGEST:g}, or None to wait for ever; got {timeout!r}"
            )
        self.timeout = timeout
        self.text_queue: queue.SimpleQueue[str | tuple[int, str] | End] = queue.SimpleQueue()
        self._closed = threading.Event()

    def put(self, value: Tensor | Sequence[int], /) -> None:
        """As in `TextStreamer`; never waits. Raises Cancelled where the consumer went away."""
        self._look()
        super().put(value)

    def put_rows(self, tokens: Tensor, rows: Sequence[int], /) -> None:
        """As in `TextStreamer`; never waits. Raises Cancelled where the consumer went away."""
        self._look()
        super().put_rows(tokens, rows)

    def _look(self) -> None:
        if self._closed.is_set():
            raise Cancelled("the consumer of this stream went away")

    def send(self, item: str | tuple[int, str] | End) -> None:
        """Make an item available to the consumer."""
        self.text_queue.put(item)

    def end(self) -> None:
        """Deliver the rest, and be ready for another call."""
        super().end()
        if self.rows:
            self.send(End())

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Queue the text for the consumer."""
        if text:
            self.send(text)
        if stream_end:
            self.send(End())

    def on_finalized_row(self, row: int, text: str, row_end: bool = False) -> None:
        """Queue the text of a row for the consumer, and word of its end."""
        if text:
            self.send((row, text))
        if row_end:
            self.send((row, ""))

    def fail(self, error: BaseException, /) -> None:
        """Deliver the text made so far, then `error` itself."""
        self._flush()
        self.send(End(error))

    def close(self) -> None:
        """No more text is wanted: the call that makes it ends with its next token."""
        self._closed.set()
        self.send(End())  # wakes a consumer that waits elsewhere
