"""Hand the text to an event loop while it is generated."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from typing import Any

from .queued import End, QueueStreamer


class AsyncTextIteratorStreamer(QueueStreamer):
    """An asynchronous iterator over the text of a call that runs in another thread::

        streamer = AsyncTextIteratorStreamer(tokenizer)
        call = asyncio.create_task(asyncio.to_thread(decodekit.generate, model, ids, streamer=streamer))
        async for text in streamer:
            ...

    It may be made anywhere, an event loop need not run yet. An error of the call is raised to the consumer, after the
    text made before it. A consumer that goes away (leaves its ``async for`` loop, is cancelled there, drops its
    iterator, calls `close` or awaits `aclose`) ends the call: its next token raises `Cancelled` there. A streamer that
    was closed stays closed; after a normal end it serves another call.

    timeout: seconds to wait for the next piece; then TimeoutError is raised, and waiting again is fine. So it is after
        ``asyncio.wait_for(anext(streamer), ...)``, whereas an iterator whose item is cancelled went away.
    rows: take as many rows as a call has: the items are pairs (row, text), as they are made. The end of a row is a pair
        with an empty text. Rows are numbered as those of the output.
    The other arguments are those of `TextStreamer`.
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
        super().__init__(tokenizer, skip_prompt, timeout, rows=rows, **decode_kwargs)
        self._lock = threading.RLock()  # a reader may be collected, and close the stream, while it is held
        self._waiting: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = []

    def send(self, item: str | tuple[int, str] | End) -> None:
        """Make an item available, and wake whoever waits for one."""
        with self._lock:
            self.text_queue.put(item)
            waiting, self._waiting = self._waiting, []
        for loop, sign in waiting:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(_wake, sign)

    async def aclose(self) -> None:
        """`close`, for ``contextlib.aclosing``."""
        self.close()

    def __aiter__(self) -> AsyncIterator[Any]:
        """The text of one call. Dropping this iterator before its end is `close`."""
        return _Reader(self)

    async def __anext__(self) -> Any:
        """The next text. Raises StopAsyncIteration at the end, the call's error, or TimeoutError after `timeout`."""
        loop = asyncio.get_running_loop()
        latest = None if self.timeout is None else loop.time() + self.timeout
        while not self._closed.is_set():
            with self._lock:
                if not self.text_queue.empty():
                    found = self.text_queue.get_nowait()
                    break
                place = loop, loop.create_future()
                self._waiting.append(place)
            try:
                await asyncio.wait_for(place[1], None if latest is None else latest - loop.time())
            except asyncio.TimeoutError:
                raise TimeoutError(f"no text for {self.timeout} seconds; waiting again is fine") from None
            finally:
                with self._lock, contextlib.suppress(ValueError):
                    self._waiting.remove(place)
        else:
            raise StopAsyncIteration
        if not isinstance(found, End):
            return found
        if found.error is not None:
            raise found.error
        raise StopAsyncIteration


def _wake(sign: asyncio.Future[None]) -> None:
    if not sign.done():
        sign.set_result(None)


class _Reader:
    """One pass over a stream; the end of its life before the end of the text closes the stream."""

    __slots__ = ("_kept", "_stream")

    def __init__(self, stream: AsyncTextIteratorStreamer) -> None:
        self._stream = stream
        self._kept = False
        """The stream goes on without this reader: its text has ended, or waiting for it took too long."""

    def __aiter__(self) -> _Reader:
        return self

    async def __anext__(self) -> Any:
        self._kept = False
        try:
            return await self._stream.__anext__()
        except Exception:
            self._kept = True
            raise
        except BaseException:  # being cancelled is going away: the traceback may keep this reader alive
            self._stream.close()
            raise

    async def aclose(self) -> None:
        """No more text is wanted."""
        self._kept = True
        self._stream.close()

    def __del__(self) -> None:
        if not self._kept:
            self._stream.close()
