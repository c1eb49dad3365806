"""Streamers: whole text, no stop text, errors and departures reach the other side."""

from __future__ import annotations

import gc
import queue
import threading
import time
from typing import Any

import pytest
import torch
from decodekit.errors import Cancelled, InputError
from decodekit_plugins.streamers.iterator import TextIteratorStreamer
from decodekit_plugins.streamers.text import BaseStreamer, TextStreamer
from hypothesis import given, settings
from hypothesis import strategies as st

MAKES = ["byte_level", "llama", "metaspace", "wordpiece", "suffix"]


class Recording(TextStreamer):
    """Keeps what it is told."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.texts: list[str] = []
        self.ends = 0

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.texts.append(text)
        self.ends += stream_end


def run(streamer: Any, prompt: list[int], new: list[int]) -> None:
    streamer.put(torch.tensor([prompt]))
    for token in new:
        streamer.put(torch.tensor([token]))
    streamer.end()


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("skip", [False, True])
def test_streamed_text_is_the_whole_text(name: str, skip: bool, made: Any, sentences: Any) -> None:
    tokenizer = made[name]
    for sentence in sentences:
        ids = tokenizer.encode(sentence).ids
        prompt, new = ids[:1], ids[1:]
        if tokenizer.decode(prompt).endswith("\ufffd"):
            continue
        streamer = Recording(tokenizer, skip_prompt=skip)
        for _ in range(2):  # it serves one call after another
            streamer.texts.clear()
            run(streamer, prompt, new)
            whole = tokenizer.decode(ids, skip_special_tokens=False)
            shown = whole[len(tokenizer.decode(prompt)) :] if skip else whole
            assert "".join(streamer.texts) == shown
        assert streamer.ends == 2


def test_special_tokens_as_in_the_reference(made: Any) -> None:
    ids = made["byte_level"].encode("ab</s>").ids
    shown, hidden = Recording(made["byte_level"]), Recording(made["byte_level"], skip_special_tokens=True)
    for streamer in (shown, hidden):
        run(streamer, ids[:1], ids[1:])
    assert ("".join(shown.texts), "".join(hidden.texts)) == ("ab</s>", "ab")


def test_prints(made: Any, capsys: Any) -> None:
    ids = made["byte_level"].encode("猫 Hello").ids
    run(TextStreamer(made["byte_level"]), ids[:3], ids[3:])
    assert capsys.readouterr().out == "猫 Hello\n"


def test_characters_come_at_once_without_spaces(made: Any) -> None:
    tokenizer = made["byte_level"]
    streamer = Recording(tokenizer, skip_prompt=True)
    ids = tokenizer.encode("你好，世界").ids
    streamer.put(torch.tensor([[0]]))
    for k, token in enumerate(ids):
        streamer.put(torch.tensor([token]))
        assert "".join(streamer.texts) == tokenizer.decode(ids[: k + 1]).rstrip("\ufffd")


@pytest.mark.parametrize("kind", [Recording, TextIteratorStreamer])
def test_b17_streamed_text_ends_before_the_stop(kind: Any, made: Any, context: Any) -> None:
    tokenizer = made["byte_level"]
    for stops in ("<END>", ["zz", "<END>"], ("<END>",)):
        streamer = kind(skip_prompt=True).bind(context([[5, 6]], tokenizer=tokenizer, stop_strings=stops))
        run(streamer, [5, 6], tokenizer.encode("Hello<END>tail").ids)
        assert "".join(streamer.texts if kind is Recording else streamer) == "Hello"
        streamer = streamer.bind(context([[5, 6]], tokenizer=tokenizer, stop_strings=stops))
        if kind is Recording:
            streamer.texts.clear()
        run(streamer, [5, 6], tokenizer.encode("Hello<EN").ids)
        assert "".join(streamer.texts if kind is Recording else streamer) == "Hello<EN"


def test_without_bind_there_is_no_stop(made: Any) -> None:
    streamer = Recording(made["byte_level"], skip_prompt=True)
    run(streamer, [5], made["byte_level"].encode("Hello<END>tail").ids)
    assert "".join(streamer.texts) == "Hello<END>tail"


def test_several_rows_are_refused(made: Any, context: Any) -> None:
    streamer = TextStreamer(made["byte_level"])
    with pytest.raises(InputError, match="one row, got 2"):
        streamer.bind(context([[1], [2]]))
    with pytest.raises(InputError, match="one row, got 3"):
        streamer.put(torch.zeros(3, 4, dtype=torch.long))


def test_a_tokenizer_is_needed(made: Any, context: Any) -> None:
    with pytest.raises(InputError, match="tokenizer="):
        TextStreamer().bind(context())
    with pytest.raises(InputError, match="needs a tokenizer"):
        TextStreamer().put(torch.tensor([[1]]))
    with pytest.raises(NotImplementedError):
        BaseStreamer().put(torch.tensor([1]))


def test_padding_of_the_prompt_is_not_shown(made: Any, context: Any) -> None:
    tokenizer = made["byte_level"]
    prompt = [0, 0, *tokenizer.encode("ab").ids]
    mask = torch.tensor([[False, False, *[True] * (len(prompt) - 2)]])
    streamer = Recording(tokenizer).bind(context([prompt], mask=mask))
    run(streamer, prompt, tokenizer.encode(" c").ids)
    assert "".join(streamer.texts) == "ab c"


def test_clean_up_can_be_asked_for(made: Any) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made["wordpiece"])
    ids = tokenizer.encode("it ' s a . b")
    streamer = Recording(tokenizer, clean_up_tokenization_spaces=True)
    run(streamer, ids[:1], ids[1:])
    assert "".join(streamer.texts) == tokenizer.decode(ids, clean_up_tokenization_spaces=True)


# -- another thread --------------------------------------------------------------------------------


class Producer(threading.Thread):
    """Feeds a streamer as a call of generate does."""

    def __init__(self, streamer: Any, tokens: Any, error: BaseException | None = None, pause: float = 0.0) -> None:
        super().__init__(daemon=True)
        self.streamer, self.tokens, self.error, self.pause = streamer, tokens, error, pause
        self.raised: BaseException | None = None
        self.count = 0
        self.start()

    def run(self) -> None:
        try:
            self.streamer.put(torch.tensor([[5]]))
            for token in self.tokens:
                self.streamer.put(torch.tensor([token]))
                self.count += 1
                time.sleep(self.pause)
            if self.error is not None:
                self.streamer.fail(self.error)
            else:
                self.streamer.end()
        except BaseException as error:
            self.raised = error


@given(st.text("ab 猫🤗\n", max_size=20))
@settings(max_examples=20, deadline=None)
def test_iterator_gives_the_whole_text(text: str) -> None:
    tokenizer = _tokenizer()
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=5)
    for _ in range(2):
        Producer(streamer, tokenizer.encode(text).ids)
        assert "".join(streamer) == text


_made: list[Any] = []


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    if not _made:
        tokenizer = Tokenizer(models.BPE({c: n for n, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        _made.append(tokenizer)
    return _made[0]


def test_b32_the_original_error_comes_after_the_text(made: Any, context: Any) -> None:
    tokenizer, error = made["byte_level"], RuntimeError("step 3")
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=5)
    streamer.bind(context([[5]], stop_strings="bcd"))
    Producer(streamer, tokenizer.encode("aab").ids, error)
    seen: list[str] = []
    with pytest.raises(RuntimeError) as caught:
        seen.extend(streamer)
    assert caught.value is error
    assert "".join(seen) == "aab"  # text held back for a possible stop included
    streamer.timeout = 0.01
    with pytest.raises(queue.Empty):
        next(streamer)
    streamer.timeout = 5
    Producer(streamer, tokenizer.encode("next").ids)
    assert "".join(streamer) == "next"


def test_b32_failing_before_any_token() -> None:
    streamer = TextIteratorStreamer(_tokenizer(), timeout=5)
    streamer.fail(ValueError("step 0"))
    with pytest.raises(ValueError, match="step 0"):
        next(iter(streamer))


def test_b32_timeout(made: Any) -> None:
    streamer = TextIteratorStreamer(made["byte_level"], timeout=0.02)
    with pytest.raises(queue.Empty):
        next(streamer)
    reader = iter(streamer)
    with pytest.raises(queue.Empty):
        next(reader)
    # Waiting again is fine, with the same reader or a new one: nothing was closed or lost.
    run(streamer, made["byte_level"].encode("a").ids, made["byte_level"].encode("b").ids)
    assert next(reader) == "a"
    assert list(reader) == ["b"]
    with pytest.raises(queue.Empty):
        list(streamer)
    run(streamer, made["byte_level"].encode("a").ids, [])
    assert list(streamer) == ["a"]


@pytest.mark.parametrize("timeout", ["1", -1, float("nan"), float("inf"), True])
def test_a_timeout_that_is_none_is_refused_at_once(timeout: Any) -> None:
    with pytest.raises(InputError, match="timeout must be seconds"):
        TextIteratorStreamer(_tokenizer(), timeout=timeout)


def test_a_timeout_says_what_it_waited_for() -> None:
    with pytest.raises(queue.Empty, match=r"no text for 0.01 seconds; waiting again is fine"):
        next(iter(TextIteratorStreamer(_tokenizer(), timeout=0.01)))


def _forever() -> Any:
    token = _tokenizer().encode("a").ids[0]
    while True:
        yield token


@pytest.mark.parametrize("way", ["break", "close", "drop", "error", "never read"])
def test_b32_a_consumer_that_goes_away_stops_the_producer(way: str) -> None:
    streamer = TextIteratorStreamer(_tokenizer(), timeout=5)
    producer = Producer(streamer, _forever(), pause=0.001)
    if way == "break":
        for _ in streamer:
            break
    elif way == "close":
        assert next(streamer)
        streamer.close()
    elif way == "drop":
        reader = iter(streamer)
        next(reader)
        del reader
        gc.collect()
    elif way == "error":
        with pytest.raises(ZeroDivisionError):
            [1 // len(text[:0]) for text in streamer]
    else:
        iter(streamer)
        gc.collect()
    producer.join(1)
    assert not producer.is_alive()
    assert isinstance(producer.raised, Cancelled)
    assert list(streamer) == []
    streamer.end()  # never waits, never fails
    streamer.fail(RuntimeError())
    assert list(streamer) == []


def test_b32_close_wakes_a_waiting_consumer() -> None:
    streamer = TextIteratorStreamer(_tokenizer())
    threading.Timer(0.05, streamer.close).start()
    assert list(streamer) == []


def test_a_reader_that_finished_closes_nothing(made: Any) -> None:
    streamer = TextIteratorStreamer(made["byte_level"], timeout=5)
    for _ in range(2):
        run(streamer, made["byte_level"].encode("a").ids, made["byte_level"].encode("b").ids)
        assert [text for text in streamer] == ["a", "b"]  # noqa: C416
        gc.collect()
