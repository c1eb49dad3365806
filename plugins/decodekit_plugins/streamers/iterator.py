"""Hand the text to another thread while it is generated."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from typing import Any

from .queued import End, QueueStreamer


class TextIteratorStreamer(QueueStreamer):
    """An iterator over the text of a call that runs in another thread.

    An error of the call is raised to the consumer, after the text made before it. A consumer that goes away (leaves its
    ``for`` loop, drops its iterator, calls `close`) ends the call: its next token raises `Cancelled` there. A closed
    streamer stays closed; after a normal end it serves another call.

    timeout: seconds to wait for the next piece; then `queue.Empty` is raised, and waiting again is fine.
    rows: take as many rows as a call has: the items are pairs (row, text), as they are made. The end of a row is a pair
        with an empty text. Rows are numbered as those of the output.
    The other arguments are those of `TextStreamer`.
    """

    def __iter__(self) -> Iterator[Any]:
        """The text of one call. Dropping this iterator before its end is `close`."""
        return _Reader(self)

    def __next__(self) -> Any:
        """The next text. Raises StopIteration at the end, the call's error, or queue.Empty after `timeout`."""
        if self._closed.is_set():
            raise StopIteration
        try:
            found = self.text_queue.get(timeout=self.timeout)
        except queue.Empty:
            raise queue.Empty(f"no text for {self.timeout} seconds; waiting again is fine") from None
        if not isinstance(found, End):
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

    def __next__(self) -> Any:
        self._kept = False
        try:
            return next(self._stream)
        except Exception:
            self._kept = True
            raise
        except BaseException:  # Ctrl-C is going away: the traceback may keep this reader alive
            self._stream.close()
            raise

    def __del__(self) -> None:
        if not self._kept:
            self._stream.close()
