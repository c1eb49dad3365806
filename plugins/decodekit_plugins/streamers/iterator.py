"""Hand the text to another thread while it is generated."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from decodekit.errors import Cancelled
from torch import Tensor

from .text import TextStreamer


class _End:
    """Ends the text of a call, well or by an error."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


class TextIteratorStreamer(TextStreamer):
    """An iterator over the text of a call that runs in another thread.

    An error of the call is raised to the consumer, after the text made before it. A consumer that goes away (leaves its
    ``for`` loop, drops its iterator, calls `close`) ends the call: its next token raises `Cancelled` there. A closed
    streamer stays closed; after a normal end it serves another call.

    timeout: seconds to wait for the next piece; then `queue.Empty` is raised, and waiting again is fine.
    The other arguments are those of `TextStreamer`.
    """

    def __init__(
        self, tokenizer: Any = None, skip_prompt: bool = False, timeout: float | None = None, **decode_kwargs: Any
    ) -> None:
        super().__init__(tokenizer, skip_prompt, **decode_kwargs)
        self.timeout = timeout
        self.text_queue: queue.SimpleQueue[str | _End] = queue.SimpleQueue()
        self._closed = threading.Event()

    def put(self, value: Tensor | Sequence[int], /) -> None:
        """As in `TextStreamer`; never waits. Raises Cancelled where the consumer went away."""
        if self._closed.is_set():
            raise Cancelled("the consumer of this stream went away")
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Queue the text for the consumer."""
        if text:
            self.text_queue.put(text)
        if stream_end:
            self.text_queue.put(_End())

    def fail(self, error: BaseException, /) -> None:
        """Deliver the text made so far, then `error` itself."""
        self.on_finalized_text(self._rest())
        self.text_queue.put(_End(error))

    def close(self) -> None:
        """No more text is wanted: the call that makes it ends with its next token."""
        self._closed.set()
        self.text_queue.put(_End())  # wakes a consumer that waits in another thread

    def __iter__(self) -> Iterator[str]:
        """The text of one call. Dropping this iterator before its end is `close`."""
        return _Reader(self)

    def __next__(self) -> str:
        """The next text. Raises StopIteration at the end, the call's error, or queue.Empty after `timeout`."""
        if self._closed.is_set():
            raise StopIteration
        found = self.text_queue.get(timeout=self.timeout)
        if isinstance(found, str):
            return found
        if found.error is not None:
            raise found.error
        raise StopIteration


class _Reader:
    """One pass over a stream; the end of its life before the end of the text closes the stream."""

    __slots__ = ("_kept", "_stream")

    def __init__(self, stream: TextIteratorStreamer) -> None:
        self._stream = stream
        self._kept = False
        """The stream goes on without this reader: its text has ended, or waiting for it took too long."""

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> str:
        self._kept = True
        text = next(self._stream)
        self._kept = False
        return text

    def __del__(self) -> None:
        if not self._kept:
            self._stream.close()
