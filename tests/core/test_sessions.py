"""A processor works the same the second time, in two threads, and for interleaved calls (B09)."""

from __future__ import annotations

import threading
from typing import Any

import attrs
import pytest
import torch
from decodekit import PipelineError, generate, plan, stream
from decodekit.pipeline import session

SCRIPT = (3, 4, 5)


class Counting:
    """Forces tokens 3, 4, 5 by a counter of its own: no bind, no reset."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[int] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forced = torch.full_like(scores, -torch.inf)
        forced[:, SCRIPT[self.calls % 3]] = 0
        self.calls += 1
        self.seen.append(input_ids.shape[1])
        return forced


def test_a_second_call_starts_clean(parrot: Any) -> None:
    force = Counting()
    # Two tokens each: carried over, the counter would make the second call begin with 5.
    for prompt in ([[1]], [[1, 2, 9]], [[7], [8]]):
        out = generate(parrot(), prompt, logits_processor=[force], max_new_tokens=2)
        assert out[:, -2:].tolist() == [[3, 4]] * len(prompt)
    assert force.calls == 0
    assert force.seen == []


def test_interleaved_streams_do_not_share_state(parrot: Any) -> None:
    force = Counting()
    first = stream(parrot(), [[1]], logits_processor=[force], max_new_tokens=3)
    second = stream(parrot(), [[2]], logits_processor=[force], max_new_tokens=3)
    woven = [(int(a.tokens[0]), int(b.tokens[0])) for a, b in zip(first, second, strict=True)]
    assert woven == [(3, 3), (4, 4), (5, 5)]


def test_threads_that_share_an_object_get_the_same_answer(parrot: Any) -> None:
    force, results = Counting(), []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(5):
            results.append(generate(parrot(), [[1]], logits_processor=[force], max_new_tokens=4).tolist())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 20
    assert {str(result) for result in results} == {str([[1, 3, 4, 5, 3]])}


def test_a_criterion_with_state_starts_clean_too(parrot: Any) -> None:
    class Twice:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, input_ids: Any, scores: Any) -> torch.Tensor:
            self.calls += 1
            return torch.full((input_ids.shape[0],), self.calls >= 2)

    stop = Twice()
    for _ in range(2):
        assert generate(parrot(), [[1]], stopping_criteria=[stop], max_new_tokens=9).shape == (1, 3)


def test_what_cannot_be_copied_is_refused_with_the_way_out(parrot: Any) -> None:
    class Locked(Counting):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

    with pytest.raises(PipelineError, match=r"Locked keeps state and cannot be copied.*give it bind\(ctx\)"):
        generate(parrot(), [[1]], logits_processor=[Locked()], max_new_tokens=2)


def test_bind_decides_for_itself(parrot: Any) -> None:
    class Shared(Counting):
        def bind(self, ctx: Any) -> Any:
            return self

    class Fresh(Counting):
        def __init__(self, lock: Any) -> None:
            super().__init__()
            self.lock = lock

        def bind(self, ctx: Any) -> Any:
            return Fresh(self.lock)

    shared, fresh = Shared(), Fresh(threading.Lock())
    out = [generate(parrot(), [[1]], logits_processor=[shared], max_new_tokens=2)[0, 1:].tolist() for _ in range(2)]
    assert out == [[3, 4], [5, 3]]
    out = [generate(parrot(), [[1]], logits_processor=[fresh], max_new_tokens=2)[0, 1:].tolist() for _ in range(2)]
    assert out == [[3, 4], [3, 4]]
    assert fresh.calls == 0

    class Absent:
        def bind(self, ctx: Any) -> None:
            return None

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            raise AssertionError

    made = plan(parrot(), [[1]], logits_processor=[Absent()])
    assert len(made.chain) == 0
    assert "Absent" in made.left_out


def test_models_and_tokenizers_are_shared_and_values_are_used_as_they_are() -> None:
    class Tokenizer:
        def encode(self, text: str) -> list[int]:
            return []

    class Guided:
        def __init__(self) -> None:
            self.model, self.tokenizer, self.seen = torch.nn.Linear(2, 2), Tokenizer(), [1]

        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return scores

    guided = Guided()
    copied = session(guided, "processors")
    assert copied is not guided
    assert copied.model is guided.model
    assert copied.tokenizer is guided.tokenizer
    assert copied.seen is not guided.seen

    @attrs.frozen
    class Value:
        x: int = 1

    value = Value()
    assert session(value, "processors") is value
    assert session(len, "processors") is len


def test_the_same_object_twice_in_one_call_acts_twice(parrot: Any) -> None:
    force = Counting()
    made = plan(parrot(), [[1]], logits_processor=[force, force])
    one, two = (part.runtime for part in made.chain.parts)
    assert one is not two
