"""Faults of a running call: B07, B08, B17, B32, and what finished rows hold."""

from __future__ import annotations

import queue
import threading
import time
from typing import Any

import attrs
import pytest
import torch
from decodekit import LM, GenerationError, InputError, generate, load, stream
from decodekit.errors import ConfigError
from decodekit.testing import ScriptedLM, TinyLM
from decodekit_plugins.streamers.iterator import TextIteratorStreamer
from torch import Tensor, nn

INF = float("inf")


class Letters:
    """Token i is the i-th piece of text."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def encode(self, text: str) -> list[int]:
        return [self.pieces.index(char) for char in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.pieces[i] for i in ids)

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token].encode()


def script(*tokens: int, vocab: int = 8) -> ScriptedLM:
    """A model that says these tokens, then stays with the last."""
    table = torch.zeros(len(tokens), vocab)
    for place, token in enumerate(tokens):
        table[place, token] = 5.0
    return ScriptedLM(table)


# -- B07 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [False, True])
def test_b07_an_emptied_row_names_processor_row_and_step(sample: bool) -> None:
    def picky(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] == 4:
            scores[1] = -INF
        return scores

    with pytest.raises(GenerationError, match=r"'picky' \(caller\).*row 1, step 3"):
        generate(script(1, 2, 3, 4), [[1], [2]], max_new_tokens=6, do_sample=sample, logits_processor=[picky])


def test_b07_a_row_that_ended_may_be_empty() -> None:
    def picky(input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] > 2:
            scores[0] = -INF
        return scores

    model = ScriptedLM(torch.stack([torch.eye(8)[[3]] * 9, torch.eye(8)[[4]] * 9]))
    out = generate(model, [[0], [1]], max_new_tokens=4, eos_token_id=3, pad_token_id=0, logits_processor=[picky])
    assert out.tolist() == [[0, 3, 0, 0, 0], [1, 4, 4, 4, 4]]


@pytest.mark.parametrize("sample", [False, True])
def test_b07_several_processors_that_ban_everything_together(sample: bool) -> None:
    def low(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, :4] = -INF
        return scores

    def high(input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 4:] = -INF
        return scores

    with pytest.raises(GenerationError, match="'high'.*no token"):
        generate(script(1), [[1]], max_new_tokens=2, do_sample=sample, logits_processor=[low, high])


@pytest.mark.parametrize("sample", [False, True])
def test_b07_nan_logits_are_blamed_on_the_model(sample: bool) -> None:
    model = ScriptedLM(torch.tensor([[1.0, 2.0], [float("nan"), 1.0]]))
    with pytest.raises(GenerationError, match=r"model gave NaN.*row 0, step 1"):
        generate(model, [[1]], max_new_tokens=4, do_sample=sample, eos_token_id=None)


def test_b07_nan_of_a_processor_is_blamed_on_it() -> None:
    with pytest.raises(GenerationError, match="'<lambda>'.*NaN"):
        generate(script(1), [[1]], max_new_tokens=2, logits_processor=[lambda ids, scores: scores * float("nan")])


def test_a_processor_that_returns_another_shape_is_named() -> None:
    with pytest.raises(GenerationError, match=r"'<lambda>'.*shape \(1, 8\), got \(1, 7\)"):
        generate(script(1), [[1]], max_new_tokens=2, logits_processor=[lambda ids, scores: scores[:, 1:]])
    with pytest.raises(GenerationError, match="got NoneType"):
        generate(script(1), [[1]], max_new_tokens=2, logits_processor=[lambda ids, scores: None])


def test_a_criterion_that_returns_another_shape_is_named() -> None:
    with pytest.raises(GenerationError, match="stopping criterion '<lambda>'"):
        generate(
            script(1), [[1]] * 3, max_new_tokens=2, stopping_criteria=[lambda ids, scores: torch.tensor([True] * 2)]
        )


# -- B08 --------------------------------------------------------------------------------------------


def spoil(input_ids: Tensor, scores: Tensor) -> Tensor:
    scores[:, 0] = -INF
    return scores


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("bad", [[], [spoil]])
def test_b08_raw_logits_stay_raw(sample: bool, bad: list[Any]) -> None:
    model = TinyLM(vocab_size=8)
    out = generate(
        model,
        [[1, 2, 3]],
        max_new_tokens=5,
        do_sample=sample,
        seed=1,
        top_k=2 if sample else None,
        logits_processor=bad,
        output_logits=True,
        output_scores=True,
    )
    assert len(out.logits) == len(out.scores) == 5
    for step in range(5):
        direct = model(out.sequences[:, : 3 + step])[:, -1]
        assert torch.allclose(out.logits[step], direct, atol=1e-5)
        removed = int((out.scores[step] == -INF).sum())
        assert removed == (6 if sample else len(bad))
        assert bool(out.scores[step].isfinite().any())


def test_b08_a_model_that_hands_out_its_own_table_is_not_written_to() -> None:
    model = script(1, 2, 3)
    before = model.table.clone()
    generate(model, [[1]], max_new_tokens=4, logits_processor=[spoil])
    assert torch.equal(before, model.table)


# -- rows that end ------------------------------------------------------------------------------------


def test_rows_say_why_they_ended_and_on_which_string() -> None:
    words = Letters("<", "a", "b", "END", "?", ".", "x", "y")
    one_hot = torch.eye(8) * 5
    table = torch.stack([one_hot[[1, 3, 6, 6, 6]], one_hot[[2, 5, 6, 6, 6]], one_hot[[7, 7, 7, 7, 7]]])
    out = generate(
        ScriptedLM(table),
        [[0], [1], [2]],
        max_new_tokens=4,
        eos_token_id=5,
        pad_token_id=0,
        stop_strings=["ND", "??"],
        tokenizer=words,
        return_dict_in_generate=True,
    )
    assert out.stop_reasons == ("stop_strings", "eos", "max_length")
    assert out.stop_details == ("ND", None, None)
    assert out.lengths == (2, 2, 4)
    assert out.sequences[:, 1:].tolist() == [[1, 3, 0, 0], [2, 5, 0, 0], [7, 7, 7, 7]]
    assert out[0] is out.sequences
    assert out["sequences"] is out.sequences
    assert "scores" not in out


@pytest.mark.parametrize("pad", [None, 0, 6])
def test_finished_rows_are_filled_even_without_pad_and_eos(pad: int | None) -> None:
    model = ScriptedLM(torch.stack([torch.eye(8)[[3, 4, 4]], torch.eye(8)[[4, 4, 4]]]))
    out = generate(
        model,
        [[0], [1]],
        max_new_tokens=3,
        pad_token_id=pad,
        stopping_criteria=[lambda ids, scores: ids[:, -1] == 3],
    )
    assert out.tolist() == [[0, 3, pad or 0, pad or 0], [1, 4, 4, 4]]


# -- B17 end to end -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pieces", "stop", "text"),
    [
        (("He", "llo", "<", "END", ">tail"), "<END>", "Hello"),
        (("He", "llo", "<EN"), "<END>", "Hello<EN"),
        (("in ", "Paris", "!"), "Pari", "in "),
    ],
)
def test_b17_streamed_text_equals_text_and_stops_where_it_should(pieces: tuple[str, ...], stop: str, text: str) -> None:
    lm = LM(load(script(*range(1, len(pieces) + 1), vocab=len(pieces) + 1)).adapter, Letters("^", *pieces))
    call = {"max_new_tokens": len(pieces), "stop_strings": stop}
    streamed = list(lm.stream([0], **call))
    assert "".join(streamed) == lm.generate([0], **call) == text
    assert all(streamed)


# -- B32 --------------------------------------------------------------------------------------------


class Fragile(nn.Module):
    vocab_size = 8

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] == self.at + 1:
            raise ZeroDivisionError("the model broke")
        return torch.eye(8)[tokens.clamp(max=6) + 1]


WORDS = Letters("^", "a", "b", "c", "d", "e", "f", "g")


def consume(streamer: TextIteratorStreamer) -> tuple[list[str], BaseException | None]:
    pieces: list[str] = []
    try:
        for piece in streamer:
            pieces.append(piece)
    except Exception as error:
        return pieces, error
    return pieces, None


def in_background(call: Any, streamer: TextIteratorStreamer) -> tuple[list[str], BaseException | None, float]:
    raised: list[BaseException] = []

    def work() -> None:
        try:
            call(streamer)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    start = time.monotonic()
    thread.start()
    pieces, error = consume(streamer)
    waited = time.monotonic() - start
    thread.join(10)
    assert not thread.is_alive()
    assert error is None or error in raised
    return pieces, error, waited


@pytest.mark.parametrize("at", [0, 3])
def test_b32_the_models_own_error_reaches_the_consumer_after_the_text(at: int) -> None:
    streamer = TextIteratorStreamer(WORDS, skip_prompt=True, timeout=10)
    pieces, error, _ = in_background(lambda s: generate(Fragile(at), [[0]], max_new_tokens=6, streamer=s), streamer)
    assert "".join(pieces) == "abc"[:at]
    assert isinstance(error, ZeroDivisionError)
    pieces, error, _ = in_background(lambda s: generate(Fragile(9), [[0]], max_new_tokens=3, streamer=s), streamer)
    assert ("".join(pieces), error) == ("abc", None)


def test_b32_so_does_an_error_of_a_processor_and_of_the_settings() -> None:
    def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyError("processor")

    streamer = TextIteratorStreamer(WORDS, timeout=10)
    calls = [({"logits_processor": [broken]}, KeyError), ({"repetition_penalty": 0.0}, ConfigError)]
    for extra, kind in calls:
        _, error, waited = in_background(
            lambda s, extra=extra: generate(Fragile(9), [[0]], max_new_tokens=3, streamer=s, **extra), streamer
        )
        assert isinstance(error, kind)
        assert waited < 5


def test_b32_an_abandoned_stream_stops_its_worker() -> None:
    streamer = TextIteratorStreamer(WORDS, skip_prompt=True, timeout=10)
    done: list[Any] = []

    def slowly(input_ids: Tensor, scores: Tensor) -> Tensor:
        time.sleep(0.005)
        return scores

    def work() -> None:
        done.append(
            generate(
                Fragile(10**6),
                [[0]],
                max_new_tokens=2000,
                streamer=streamer,
                logits_processor=[slowly],
                return_dict_in_generate=True,
            )
        )

    thread = threading.Thread(target=work)
    thread.start()
    for _ in streamer:
        break
    thread.join(10)
    assert not thread.is_alive()
    assert done[0].stop_reasons == ("cancelled",)
    assert done[0].lengths[0] < 2000


def test_b32_a_consumer_waits_only_as_long_as_it_said() -> None:
    with pytest.raises(queue.Empty):
        next(TextIteratorStreamer(WORDS, timeout=0.01))


def test_closing_a_stream_cancels_the_run_and_closes_the_strategy(register: Any) -> None:
    closed: list[bool] = []

    @attrs.frozen
    class Endless:
        needs = frozenset()
        samples = False

        def decode(self, run: Any) -> Any:
            try:
                logits = run.prefill()
                while True:
                    step = run.accept(run.select(run.process(logits)))
                    yield step
                    logits = run.forward(step.tokens)
            finally:
                closed.append(True)

    steps = stream(TinyLM(), [[1]], strategy=Endless(), max_new_tokens=50)
    assert next(steps).tokens.shape == (1,)
    steps.close()
    assert closed == [True]


def test_gradients_are_off_inside_and_untouched_outside() -> None:
    seen: list[bool] = []

    def look(input_ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(torch.is_grad_enabled())
        return scores

    for _ in stream(TinyLM(), [[1]], max_new_tokens=3, logits_processor=[look]):
        seen.append(torch.is_grad_enabled())
    assert seen == [False, True] * 3


# -- inputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "extra", "words"),
    [
        ([[1, 99]], {}, "99 is outside"),
        ([[1, -1]], {}, "-1 is outside"),
        ([], {}, "no prompt"),
        ([[]], {}, "bos_token_id"),
        (torch.zeros(2, 3), {}, "integer token ids"),
        (torch.zeros(0, 3, dtype=torch.long), {}, "no prompt"),
        (torch.zeros(1, 2, 3, dtype=torch.long), {}, r"\[B, T\]"),
        (torch.ones(1, 3, dtype=torch.long), {"attention_mask": torch.ones(1, 4)}, "covers 4 tokens"),
        (torch.ones(2, 3, dtype=torch.long), {"attention_mask": torch.tensor([[1, 1, 1], [0, 0, 0]])}, "whole row"),
        ("text", {}, "tokenizer"),
        ([[1.5]], {}, "whole numbers"),
        ({"a": 1}, {}, "inputs must be"),
        ([[1, 2], [3]], {"attention_mask": torch.ones(2, 2)}, "different length"),
        (["text"], {"attention_mask": torch.ones(1, 2)}, "text and rows of different length take no attention_mask"),
        ([[1, 2.5]], {"attention_mask": torch.ones(1, 2)}, "integer token ids"),
    ],
)
def test_bad_inputs_are_refused_in_words(inputs: Any, extra: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        generate(TinyLM(), inputs, max_new_tokens=2, **extra)


def test_a_lone_prompt_may_be_a_list_of_ids_or_a_vector() -> None:
    model = TinyLM()
    want = generate(model, [[1, 2, 3]], max_new_tokens=3)
    assert torch.equal(want, generate(model, [1, 2, 3], max_new_tokens=3))
    assert torch.equal(want, generate(model, torch.tensor([1, 2, 3]), max_new_tokens=3))
    hidden = {"attention_mask": [0, 1, 1], "max_new_tokens": 3}
    assert torch.equal(generate(model, [1, 2, 3], **hidden), generate(model, torch.tensor([1, 2, 3]), **hidden))
    assert torch.equal(want, generate(model, input_ids=torch.tensor([[1, 2, 3]]), max_new_tokens=3))
    assert torch.equal(generate(model, [[7]], max_new_tokens=3), generate(model, bos_token_id=7, max_new_tokens=3))
