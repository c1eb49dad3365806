"""Text for an event loop while it is generated in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from typing import Any

import decodekit
import pytest
import torch
from decodekit.errors import Cancelled
from decodekit_plugins.streamers.asynchronous import AsyncTextIteratorStreamer
from decodekit_plugins.streamers.iterator import TextIteratorStreamer

PROMPT = "It was a fine day, and"
LONG: dict[str, Any] = {"max_new_tokens": 2000, "do_sample": True, "seed": 1, "eos_token_id": None}


@pytest.fixture(scope="module")
def lm() -> Any:
    return decodekit.load("bundled")


def begin(lm: Any, streamer: Any, prompt: Any = PROMPT, **keys: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(asyncio.to_thread(lm.details, prompt, streamer=streamer, **keys))


def test_it_gives_the_text_as_it_is_made(lm: Any) -> None:
    streamer = AsyncTextIteratorStreamer(skip_prompt=True, timeout=10, skip_special_tokens=True)  # outside any loop

    async def main() -> None:
        for _ in range(2):
            call = begin(lm, streamer, max_new_tokens=20)
            pieces = [text async for text in streamer]
            texts, _ = await call
            assert "".join(pieces) == texts[0]
            assert len(pieces) > 5

    asyncio.run(main())
    asyncio.run(main())  # and with another loop


def test_the_loop_is_free_while_waiting(lm: Any) -> None:
    async def main() -> None:
        streamer, ticks = AsyncTextIteratorStreamer(lm.tokenizer), 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.001)

        clock = asyncio.create_task(tick())
        threading.Timer(0.2, streamer.end).start()
        assert [text async for text in streamer] == []
        assert ticks > 10
        clock.cancel()

    asyncio.run(main())


def test_rows(lm: Any) -> None:
    async def main() -> None:
        streamer = AsyncTextIteratorStreamer(skip_prompt=True, rows=True, timeout=10, skip_special_tokens=True)
        call = begin(lm, streamer, [PROMPT, "She"], max_new_tokens=[4, 12])
        items = [item async for item in streamer]
        texts, _ = await call
        assert ["".join(text for at, text in items if at == row) for row in range(2)] == texts

    asyncio.run(main())


def test_b32_an_error_of_the_call_reaches_the_consumer(lm: Any) -> None:
    def breaks(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > width + 3:
            raise ZeroDivisionError("step 4")
        return scores

    width = len(lm.tokens(PROMPT))

    async def main() -> None:
        streamer = AsyncTextIteratorStreamer(skip_prompt=True, timeout=10)
        pieces: list[str] = []
        call = begin(lm, streamer, max_new_tokens=9, logits_processor=[breaks])

        async def consume() -> None:
            async for text in streamer:
                pieces.append(text)

        with pytest.raises(ZeroDivisionError, match="step 4"):
            await consume()
        with pytest.raises(ZeroDivisionError):
            await call
        assert pieces
        call = asyncio.create_task(
            asyncio.to_thread(decodekit.generate, lm, [[5]], streamer=streamer, tokenizer=lm.tokenizer, top_p=7.0)
        )
        with pytest.raises(decodekit.ConfigError):  # before the first token
            await anext(aiter(streamer))
        with pytest.raises(decodekit.ConfigError):
            await call
        call = begin(lm, streamer, max_new_tokens=3)  # and it serves another call
        assert "".join([text async for text in streamer]) == (await call)[0][0]

    asyncio.run(main())


def test_b32_timeout() -> None:
    async def main() -> None:
        streamer = AsyncTextIteratorStreamer(decodekit.load("bundled").tokenizer, timeout=0.02)
        with pytest.raises(TimeoutError, match=r"0\.02 seconds"):
            await anext(streamer)
        reader = aiter(streamer)
        with pytest.raises(TimeoutError):
            await anext(reader)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(anext(streamer), 0.01)
        streamer.put(torch.tensor([[40, 41]]))  # waiting again is fine
        streamer.end()
        assert len([text async for text in reader]) == 1
        assert streamer._waiting == []

    asyncio.run(main())


@pytest.mark.parametrize(
    "way", ["break", "error", "cancel", "wait_for", "aclose", "aclosing", "close", "drop", "unread"]
)
def test_b32_a_consumer_that_goes_away_ends_the_call(lm: Any, way: str) -> None:
    async def main() -> None:
        streamer = AsyncTextIteratorStreamer(skip_prompt=True)
        call = begin(lm, streamer, **LONG)

        async def consume() -> None:
            async for _ in streamer:
                if way == "break":
                    break
                if way == "error":
                    raise ZeroDivisionError

        if way in ("break", "error"):
            with contextlib.suppress(ZeroDivisionError):
                await consume()
        elif way == "cancel":
            task = asyncio.create_task(consume())
            await asyncio.sleep(0.05)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        elif way == "wait_for":
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(consume(), 0.05)
        elif way == "aclose":
            reader: Any = aiter(streamer)
            await anext(reader)
            await reader.aclose()
        elif way == "aclosing":
            async with contextlib.aclosing(streamer):
                await anext(streamer)
        elif way == "close":
            await anext(streamer)
            streamer.close()
        else:
            reader = aiter(streamer)
            if way == "drop":
                await anext(reader)
            del reader
            gc.collect()
        _, output = await asyncio.wait_for(call, 5)
        assert output.stop_reasons == ("cancelled",)
        assert output.lengths[0] < LONG["max_new_tokens"]
        assert [text async for text in streamer] == []
        streamer.end()  # never waits, never fails
        with pytest.raises(Cancelled):
            streamer.put(torch.tensor([1]))

    asyncio.run(main())


def test_a_task_cancelled_while_it_waits() -> None:
    async def main() -> None:
        streamer = AsyncTextIteratorStreamer(decodekit.load("bundled").tokenizer)

        async def consume() -> None:
            async for _ in streamer:
                pass

        task = asyncio.create_task(consume())
        await asyncio.sleep(0.02)  # it waits, and there is no text
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(Cancelled):
            streamer.put(torch.tensor([[1]]))

    asyncio.run(main())


def test_close_from_another_thread_wakes_the_consumer() -> None:
    async def main() -> None:
        streamer = AsyncTextIteratorStreamer()
        threading.Timer(0.05, streamer.close).start()
        assert [text async for text in streamer] == []

    asyncio.run(main())


def test_a_loop_that_is_gone_does_not_harm_the_call() -> None:
    streamer = AsyncTextIteratorStreamer(decodekit.load("bundled").tokenizer, timeout=5)
    loop = asyncio.new_event_loop()
    waiting = loop.create_task(streamer.__anext__())
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    streamer.put(torch.tensor([[40]]))
    streamer.end()
    assert len(asyncio.run(_all(streamer))) == 1
    waiting.cancel  # noqa: B018
    gc.collect()


async def _all(streamer: Any) -> list[Any]:
    return [text async for text in streamer]


def test_ctrl_c_in_a_synchronous_consumer_ends_the_call(lm: Any) -> None:
    """Being interrupted while it waits is going away; running out of patience is not."""

    class Interrupted(TextIteratorStreamer):
        def __next__(self) -> Any:
            raise KeyboardInterrupt

    streamer = Interrupted(lm.tokenizer)
    with pytest.raises(KeyboardInterrupt):
        for _ in streamer:
            pass
    with pytest.raises(Cancelled):
        streamer.put(torch.tensor([[1]]))
