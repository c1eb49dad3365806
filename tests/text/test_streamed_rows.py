"""Several rows at once: each row's pieces, joined, are its text, however rows are made and whenever they end."""

from __future__ import annotations

import threading
from typing import Any

import decodekit
import pytest
import torch
from decodekit.errors import InputError
from decodekit_plugins.streamers.iterator import TextIteratorStreamer
from decodekit_plugins.streamers.text import TextStreamer

PROMPTS = ("It was a fine day, and", "She", "My dear sister, I am")
CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"max_new_tokens": [5, 24, 11]},
    "greedy, stops": {"max_new_tokens": 40, "stop_strings": ["e ", ".", "ing"]},
    "drawn": {"do_sample": True, "seed": 3, "max_new_tokens": 30, "eos_token_id": [[11], [12, 30], [40]]},
    "drawn, several": {"do_sample": True, "seed": 3, "max_new_tokens": [4, 30, 9], "num_return_sequences": 3},
    "beams": {"num_beams": 3, "max_new_tokens": 20},
    "beams, stops": {"num_beams": 4, "max_new_tokens": 30, "stop_strings": [" the", "."], "length_penalty": 0.0},
    "beams, several": {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": [3, 18, 9]},
    "beams, several, stops": {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 16, "stop_strings": "a"},
    "beams, drawn": {"num_beams": 3, "num_return_sequences": 2, "do_sample": True, "seed": 5, "max_new_tokens": 14},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.8, "num_return_sequences": 3}
    | {"max_new_tokens": [3, 18, 9]},
    "constraints": {"num_beams": 4, "num_return_sequences": 2, "force_words_ids": [[40, 41]], "max_new_tokens": 12},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4, "do_sample": False, "max_new_tokens": [5, 24, 11]},
    "dola": {"dola_layers": "high", "do_sample": False, "max_new_tokens": [5, 24, 11]},
}


@pytest.fixture(scope="module")
def lm() -> Any:
    return decodekit.load("bundled")


def heard(lm: Any, prompts: Any, streamer: Any, **keys: Any) -> tuple[list[Any], list[str]]:
    """What the streamer gave, and the whole texts."""
    items: list[Any] = []
    reader = threading.Thread(target=lambda: items.extend(streamer))
    reader.start()
    texts, _ = lm.details(prompts, streamer=streamer, **keys)
    reader.join(10)
    assert not reader.is_alive()
    return items, texts


def joined(items: list[tuple[int, str]], rows: int) -> list[str]:
    return ["".join(text for at, text in items if at == row) for row in range(rows)]


@pytest.mark.parametrize("name", CALLS)
def test_pieces_of_every_row_are_its_text(lm: Any, name: str) -> None:
    streamer = TextIteratorStreamer(skip_prompt=True, rows=True, timeout=20, skip_special_tokens=True)
    for _ in range(2):
        items, texts = heard(lm, list(PROMPTS), streamer, **CALLS[name])
        assert joined(items, len(texts)) == texts
        # The end of a row: one empty text, behind everything else of it.
        ends = [row for row, text in items if not text]
        assert sorted(ends) == list(range(len(texts)))
        for row in range(len(texts)):
            assert [text for at, text in items if at == row][-1] == ""


@pytest.mark.parametrize("name", CALLS)
def test_one_prompt(lm: Any, name: str) -> None:
    call = {key: value[0] if key == "max_new_tokens" and isinstance(value, list) else value for key, value in
            CALLS[name].items()}  # fmt: skip
    if call.get("eos_token_id"):
        call["eos_token_id"] = call["eos_token_id"][0]
    streamer = TextIteratorStreamer(skip_prompt=True, rows=True, timeout=20, skip_special_tokens=True)
    items, texts = heard(lm, [PROMPTS[0]], streamer, **call)
    assert joined(items, len(texts)) == texts
    assert len([row for row, text in items if not text]) == len(texts)
    if len(texts) == 1:  # and the plain form, one row of text
        plain = TextIteratorStreamer(skip_prompt=True, timeout=20, skip_special_tokens=True)
        items, texts = heard(lm, [PROMPTS[0]], plain, **call)
        assert ["".join(items)] == texts
    else:
        with pytest.raises(InputError, match="rows=True"):
            lm.details(PROMPTS[0], streamer=TextStreamer(), **call)


def test_prompts_are_shown_without_padding(lm: Any) -> None:
    streamer = TextIteratorStreamer(rows=True, timeout=20, skip_special_tokens=True)
    for keys in ({}, {"num_beams": 2, "num_return_sequences": 2}):
        items, texts = heard(lm, list(PROMPTS), streamer, max_new_tokens=6, **keys)
        each = len(texts) // len(PROMPTS)
        assert joined(items, len(texts)) == [PROMPTS[row // each] + text for row, text in enumerate(texts)]


def test_a_healed_prompt_says_its_last_token_once(lm: Any) -> None:
    streamer = TextIteratorStreamer(rows=True, skip_prompt=True, timeout=20, skip_special_tokens=True)
    items, texts = heard(lm, ["It was a fine da", "She wa"], streamer, max_new_tokens=6, token_healing=True)
    assert joined(items, 2) == texts


def test_the_end_of_a_row_is_heard_while_others_go_on(lm: Any) -> None:
    order: list[tuple[int, bool]] = []

    class Noting(TextIteratorStreamer):
        def on_finalized_row(self, row: int, text: str, row_end: bool = False) -> None:
            order.append((row, row_end))

    lm.details(list(PROMPTS), streamer=Noting(rows=True, skip_prompt=True), max_new_tokens=[20, 3, 8])
    assert [row for row, end in order if end] == [1, 2, 0]
    assert {row for row, _ in order[order.index((1, True)) + 1 :]} == {0, 2}
    assert {row for row, _ in order[order.index((2, True)) + 1 :]} == {0}


def test_rows_are_printed_one_after_another(lm: Any, capsys: Any) -> None:
    class Timed(TextStreamer):
        calls = 0

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            self.calls += 1
            super().on_finalized_text(text.replace("\n", " "), stream_end)

    streamer = Timed(rows=True, skip_prompt=True, skip_special_tokens=True)
    texts, _ = lm.details(list(PROMPTS), streamer=streamer, max_new_tokens=[12, 3, 8])
    assert capsys.readouterr().out == "".join(text.replace("\n", " ") + "\n" for text in texts)
    assert streamer.calls > 8, "the first row is printed as it is made"


def test_a_row_of_beams_is_heard_before_the_others_are_sure(lm: Any) -> None:
    """Each prompt goes at its own pace; a streamer of whole columns waits for the slowest."""
    seen: list[set[int]] = []

    class Noting(TextIteratorStreamer):
        def put_rows(self, tokens: torch.Tensor, rows: Any, /) -> None:
            seen.append(set(rows))
            super().put_rows(tokens, rows)

    lm.details(list(PROMPTS), streamer=Noting(rows=True), num_beams=3, max_new_tokens=30)
    assert any(rows != {0, 1, 2} for rows in seen)


class Columns:
    """A streamer of whole columns, as the plain protocol has it."""

    def __init__(self) -> None:
        self.heard: list[torch.Tensor] = []

    def bind(self, ctx: Any, /) -> Columns:
        return self

    def put(self, value: torch.Tensor, /) -> None:
        self.heard.append(value if value.dim() == 2 else value[:, None])

    def end(self) -> None:
        pass


@pytest.mark.parametrize("name", CALLS)
def test_columns_are_the_sequences(lm: Any, name: str) -> None:
    ear = Columns()
    _, output = lm.details(list(PROMPTS), streamer=ear, **CALLS[name])
    assert torch.equal(torch.cat(ear.heard, 1), output.sequences)


def test_fewer_hypotheses_than_sequences_wanted(lm: Any) -> None:
    """Where only one continuation is allowed there is nothing behind it, and nothing of it is heard in other rows."""
    allowed = lm.tokens(" the house of")

    def only(row: int, ids: torch.Tensor) -> list[int]:
        at = len(ids) - start
        return [allowed[at]] if at < len(allowed) - 1 else [allowed[-1], 0][:1]

    start = len(lm.tokens(PROMPTS[0]))
    streamer = TextIteratorStreamer(skip_prompt=True, rows=True, timeout=20, skip_special_tokens=True)
    items, texts = heard(
        lm,
        [PROMPTS[0]],
        streamer,
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=len(allowed),
        prefix_allowed_tokens_fn=only,
    )
    assert joined(items, 3) == texts


def test_unbound_in_transformers_it_takes_batches(lm: Any) -> None:
    """In a loop that knows nothing of rows, what fills ended ones is shown like any other token."""
    streamer = TextIteratorStreamer(lm.tokenizer, rows=True, skip_prompt=True, timeout=5)
    ids = [lm.tokens(" one two"), lm.tokens(" six ten")]
    streamer.put(torch.tensor([[5], [6]]))
    for column in zip(*ids, strict=False):
        streamer.put(torch.tensor(column))
    streamer.end()
    width = min(map(len, ids))
    assert joined(list(streamer), 2) == [lm.tokenizer.decode(row[:width], False) for row in ids]


def test_failing_gives_the_text_of_all_rows_first(lm: Any) -> None:
    calls = 0

    def breaks(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise ZeroDivisionError
        return scores

    streamer = TextIteratorStreamer(rows=True, skip_prompt=True, timeout=5)
    with pytest.raises(ZeroDivisionError):
        lm.details(list(PROMPTS), streamer=streamer, max_new_tokens=9, logits_processor=[breaks])
    items: list[Any] = []
    with pytest.raises(ZeroDivisionError):
        items.extend(streamer)
    assert {row for row, _ in items} == {0, 1, 2}
    assert not [row for row, text in items if not text], "no row has come to its end"
