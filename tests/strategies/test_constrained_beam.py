"""Constrained beam search: against a slow bank-based search, against all texts there are, and its own laws."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import decodekit
import pytest
import torch
from decodekit import ConfigError, GenerationError, generate
from decodekit.testing import TinyLM
from decodekit_strategies.constraints import Constraint, DisjunctiveConstraint, PhrasalConstraint
from torch import Tensor

MODELS = [TinyLM(seed=seed).eval() for seed in range(4)]
Words = list[list[list[int]]]
"""For each constraint the phrases any of which will do."""


def search(model: Any, prompts: Any, **keys: Any) -> Any:
    keys = {"num_beams": 4, "pad_token_id": 0, "max_new_tokens": 8, "eos_token_id": None, **keys}
    return generate(model, prompts, return_dict_in_generate=True, output_scores=True, **keys)


def within(phrase: list[int], tokens: list[int]) -> bool:
    return any(tokens[i : i + len(phrase)] == phrase for i in range(len(tokens)))


def met(words: Words, tokens: list[int]) -> bool:
    return all(any(within(phrase, tokens) for phrase in phrases) for phrases in words)


def begun(phrases: list[list[int]], tokens: list[int]) -> int:
    """Length of the longest end of the text that begins a phrase, none of which has appeared."""
    return max(n for n in range(len(tokens) + 1) if any(tokens[len(tokens) - n :] == p[:n] for p in phrases))


def banked(step: Callable[[list[int]], list[float]], words: Words, keys: dict[str, Any]) -> list[tuple[float, Any]]:
    """Search with banks for one prompt, from the tokens alone: no state is kept but them."""
    size, new, power = keys["num_beams"], keys["max_new_tokens"], keys["length_penalty"]
    ends, early = keys["eos_token_id"] or [], keys["early_stopping"]
    many = max(2, 1 + len(ends)) * size

    def bank(tokens: list[int]) -> int:
        have = [any(within(phrase, tokens) for phrase in phrases) for phrases in words]
        whole = sum(max(map(len, phrases)) for phrases, yes in zip(words, have, strict=True) if yes)
        return whole + max((begun(p, tokens) for p, yes in zip(words, have, strict=True) if not yes), default=0)

    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, new + 1):
        options: dict[int, list[tuple[float, list[int]]]] = {}
        for total, tokens in live:
            values = step(tokens)
            ways = sorted(range(len(values)), key=lambda token: -values[token])[:many]
            for phrases in words:
                if not any(within(phrase, tokens) for phrase in phrases):
                    at = begun(phrases, tokens)
                    ways += [p[at] for p in phrases if p[:at] == tokens[len(tokens) - at :]]
            for token in dict.fromkeys(ways):
                if values[token] > float("-inf"):
                    options.setdefault(bank([*tokens, token]), []).append((total + values[token], [*tokens, token]))
        for candidates in options.values():
            candidates.sort(key=lambda option: -option[0])
        banks = [options[key] for key in sorted(options, reverse=True)]
        order = [b[turn] for turn in range(max(map(len, banks))) for b in banks if turn < len(b)][:many]
        whole = [option for option in itertools.chain(*banks) if met(words, option[1])][:size]
        for option in whole:
            if option[1][-1] in ends or length == new:
                done = sorted([*done, (option[0] / length**power, option[1])], key=lambda item: -item[0])[:size]
        order += [option for option in whole if option not in order]
        finished = [option[1][-1] in ends or length == new for option in order]
        live = [option for option, over in zip(order, finished, strict=True) if not over][:size]
        full = len(done) == size
        if not live or (full and early is True):
            break
        if full:
            reach = new if early == "never" and power > 0 else length
            if max(live)[0] / reach**power <= done[-1][0]:
                break
    return done


def case(number: int) -> tuple[Any, list[list[int]], Words, dict[str, Any]]:
    draw = random.Random(f"constraints/{number}")
    few = draw.sample(range(3, 37), 4)  # phrases of a few tokens overlap often

    def phrase() -> list[int]:
        return [draw.choice(few) for _ in range(draw.randint(1, 3))]

    words = [[phrase() for _ in range(draw.choice([1, 1, 2, 3]))] for _ in range(draw.randint(1, 3))]
    keys = {
        "num_beams": draw.randint(1, 6),
        "length_penalty": draw.choice([-1.0, 0.0, 1.0, 2.0]),
        "early_stopping": draw.choice([True, False, "never"]),
        "max_new_tokens": sum(max(map(len, phrases)) for phrases in words) + draw.randint(0, 4),
        "eos_token_id": draw.choice([None, [2], [0, 1, 2]]),
    }
    prompts = [[draw.randrange(3, 37) for _ in range(draw.randint(1, 6))] for _ in range(draw.randint(1, 3))]
    return draw.choice(MODELS), prompts, words, keys


def following(model: Any, prompt: list[int]) -> Callable[[list[int]], list[float]]:
    known: dict[tuple[int, ...], list[float]] = {}

    def step(tokens: list[int]) -> list[float]:
        with torch.no_grad():
            if tuple(tokens) not in known:
                known[tuple(tokens)] = model(torch.tensor([prompt + tokens]))[0, -1].log_softmax(-1).tolist()
        return known[tuple(tokens)]

    return step


def asked(words: Words) -> list[Any]:
    return [phrases[0] if len(phrases) == 1 else phrases for phrases in words]


@pytest.mark.parametrize("part", range(5))
def test_the_search_with_banks(part: int) -> None:
    for number in range(part * 50, (part + 1) * 50):
        model, prompts, words, keys = case(number)
        count = keys["num_beams"]
        found = search(model, prompts, num_return_sequences=count, force_words_ids=asked(words), **keys)
        for row, prompt in enumerate(prompts):
            want = banked(following(model, prompt), words, keys)
            assert want, (number, "the oracle found nothing")
            for copy in range(count):
                at = row * count + copy
                new = found.sequences[at, found.prompt_width :][: found.lengths[at]].tolist()
                if copy >= len(want):
                    assert found.stop_reasons[at] == "no continuation", (number, keys)
                    continue
                assert met(words, new), (number, new)
                score = pytest.approx(want[copy][0], rel=2e-5, abs=1e-4)
                assert float(found.sequences_scores[at]) == score, (number, keys, words)
                ties = [tokens for score, tokens in want if abs(score - want[copy][0]) < 2e-5]
                assert new in ties, (number, keys)


class Table(torch.nn.Module):
    """A model of which the logits of the next token follow from the last token alone."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits, requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.logits[input_ids]


@pytest.mark.parametrize("words", [[[[3, 0]]], [[[0, 0]], [[3]]], [[[1, 3], [3, 3, 3]]], [[[0]], [[1]], [[3]]]])
@pytest.mark.parametrize("penalty", [0.0, 1.0])
def test_enough_beams_find_the_best_of_all(words: Words, penalty: float) -> None:
    model = Table(torch.randn(4, 4, generator=torch.Generator().manual_seed(5)) * 2)
    steps = model.logits.log_softmax(-1)
    scores = {}
    for length in range(1, 6):
        for new in itertools.product(range(4), repeat=length):
            if 2 in new[:-1] or (length < 5 and new[-1] != 2) or not met(words, list(new)):
                continue
            total = sum(float(steps[a, b]) for a, b in itertools.pairwise((1, *new)))
            scores[new] = total / length**penalty
    best = sorted(scores, key=lambda new: -scores[new])[:3]
    found = search(
        model,
        [[3, 1]],
        num_beams=400,
        num_return_sequences=3,
        max_new_tokens=5,
        eos_token_id=2,
        force_words_ids=asked(words),
        length_penalty=penalty,
        early_stopping="never",
    )
    for row, new in enumerate(best):  # the same steps in another order are as good
        mine = tuple(found.sequences[row, 2 : 2 + found.lengths[row]].tolist())
        assert float(found.sequences_scores[row]) == pytest.approx(scores[new], abs=1e-5)
        assert scores[mine] == pytest.approx(scores[new], abs=1e-5)


def test_objects_mean_what_the_key_means_and_stay_as_they_are() -> None:
    mine = [PhrasalConstraint([8, 1]), DisjunctiveConstraint([[3], [4, 4]])]
    want = search(MODELS[0], [[5, 9, 4]], force_words_ids=[[8, 1], [[3], [4, 4]]])
    for _ in range(2):
        got = search(MODELS[0], [[5, 9, 4]], constraints=mine)
        assert torch.equal(got.sequences, want.sequences)
    both = search(MODELS[0], [[5, 9, 4]], constraints=mine[:1], force_words_ids=[[[3], [4, 4]]])
    assert torch.equal(both.sequences, want.sequences)
    assert not any(constraint.completed for constraint in mine)


def test_a_constraint_of_your_own() -> None:
    class Thrice(Constraint):
        """A token three times, anywhere."""

        def __init__(self, token: int, count: int = 0) -> None:
            self.token, self.count, self.seqlen = token, count, 3

        @property
        def completed(self) -> bool:  # type: ignore[override]
            return self.count >= 3

        def advance(self) -> int | None:
            return None if self.completed else self.token

        def does_advance(self, token_id: int) -> bool:
            return token_id == self.token

        def update(self, token_id: int) -> tuple[bool, bool, bool]:
            self.count += token_id == self.token
            return token_id == self.token, self.completed, False

        def remaining(self) -> int:
            return 3 - self.count

        def copy(self, stateful: bool = False) -> Thrice:
            return Thrice(self.token, self.count if stateful else 0)

    found = search(MODELS[0], [[5, 9, 4], [7]], constraints=[Thrice(25)], num_return_sequences=4)
    assert all(row.count(25) >= 3 for row in found.sequences[:, 3:].tolist())


# -- laws ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.3}, {"bad_words_ids": [[14], [21]]}])
def test_a_prompt_does_not_depend_on_its_neighbours(more: dict[str, Any]) -> None:
    prompts = [[5, 9, 4, 7, 8], [11], [30, 31, 6]]
    keys = {"eos_token_id": [3, 9, 20], "max_new_tokens": 10, "num_return_sequences": 3, **more}
    keys["force_words_ids"] = [[30, 31], [[8], [1, 2]]]
    batch = search(MODELS[2], prompts, **keys)
    for row, prompt in enumerate(prompts):
        alone = search(MODELS[2], [prompt], **keys)
        for copy in range(3):
            length = alone.lengths[copy]
            assert batch.lengths[3 * row + copy] == length
            new = batch.sequences[3 * row + copy, 5 : 5 + length]
            assert torch.equal(new, alone.sequences[copy, len(prompt) : len(prompt) + length])


def test_the_prompt_does_not_count() -> None:
    found = search(MODELS[0], [[5, 30, 31]], force_words_ids=[[30, 31]], num_return_sequences=4)
    assert all(within([30, 31], row) for row in found.sequences[:, 3:].tolist())


def test_caches_give_what_no_cache_gives(exact_caches: list[str]) -> None:
    keys = {"num_return_sequences": 4, "max_new_tokens": 15, "eos_token_id": [3, 9], "force_words_ids": [[30, 31], [8]]}
    want = search(MODELS[3], [[5, 9, 4], [7]], use_cache=False, **keys)
    for cache in exact_caches:
        got = search(MODELS[3], [[5, 9, 4], [7]], cache_implementation=cache, **keys)
        assert torch.equal(got.sequences, want.sequences), cache
        torch.testing.assert_close(got.sequences_scores, want.sequences_scores)


def test_scores_add_up() -> None:
    found = search(MODELS[0], [[5, 9, 4], [7]], num_return_sequences=4, eos_token_id=[3, 9], force_words_ids=[[8, 1]])
    for row, score in enumerate(found.sequences_scores.tolist()):
        length, rows = found.lengths[row], found.beam_indices[row].tolist()
        new = found.sequences[row, found.prompt_width :][:length].tolist()
        total = sum(float(found.scores[t][rows[t], token]) for t, token in enumerate(new))
        assert score == pytest.approx(total / length, abs=1e-4)


class _Ear:
    def __init__(self) -> None:
        self.heard: list[Tensor] = []

    def put(self, value: Tensor, /) -> None:
        self.heard.append(value.clone())

    def end(self) -> None:
        pass

    def bind(self, ctx: Any, /) -> _Ear:
        return self


@pytest.mark.parametrize("ends", [[3, 9, 14], None])
def test_what_is_streamed_is_what_is_returned(ends: Any) -> None:
    ear, prompts = _Ear(), [[5, 9, 4], [7], [8, 8]]
    found = search(MODELS[0], prompts, force_words_ids=[[30, 31]], eos_token_id=ends, streamer=ear)
    heard = torch.cat([ear.heard[0], *(token[:, None] for token in ear.heard[1:])], 1)
    assert torch.equal(heard, found.sequences)


def test_stop_strings_end_only_what_has_everything() -> None:
    lm = decodekit.load("bundled")
    words = [lm.tokenizer.encode(" carriage"), lm.tokenizer.encode(" sister")]
    keys: dict[str, Any] = {"num_beams": 5, "max_new_tokens": 30, "stop_strings": [","], "force_words_ids": words}
    texts, found = lm.details("It was a fine day and", num_return_sequences=3, **keys)
    for text in texts:
        assert "carriage" in text
        assert "sister" in text
        assert "," not in text
    assert "stop_strings" in found.stop_reasons


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"force_words_ids": [[3, 37]]}, "outside the model's vocabulary of 37"),
        ({"constraints": [PhrasalConstraint([99])]}, "outside the model's vocabulary of 37"),
        ({"force_words_ids": [[3, -1]]}, "0 or greater"),
        ({"force_words_ids": [[]]}, "one or more token ids"),
        ({"force_words_ids": [[[]]]}, "one or more token ids|each phrase"),
        ({"force_words_ids": []}, "is empty"),
        ({"constraints": []}, "one or more constraints"),
        ({"constraints": PhrasalConstraint([3])}, "one or more constraints"),
        ({"force_words_ids": [3, 4]}, "expected a list of"),
        ({"force_words_ids": [["a"]]}, "expected a list of"),
        ({"force_words_ids": [[2, 5]], "eos_token_id": 2}, "goes on behind 2, which ends every text"),
        ({"constraints": ["words"]}, "must be objects with advance"),
        ({"constraints": [PhrasalConstraint]}, "must be objects with advance"),
        ({"force_words_ids": [[3]], "do_sample": True}, "do_sample"),
        ({"force_words_ids": [[3]], "num_beam_groups": 2, "diversity_penalty": 1.0}, "num_beam_groups"),
        ({"strategy": "constrained_beam"}, "needs force_words_ids or constraints"),
    ],
)
def test_values_that_make_no_sense_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decodekit.plan(MODELS[0], [[5]], num_beams=4, **keys)


@pytest.mark.parametrize(
    ("words", "need"), [([[1, 2, 3, 4, 5]], 5), ([[1, 1], [2, 2]], 4), ([[[1, 2, 3, 4], [1, 2, 3, 5]]], 4)]
)
def test_phrases_longer_than_the_text_are_refused_before_anything_runs(words: Any, need: int) -> None:
    with pytest.raises(decodekit.InputError, match=f"need {need} new tokens, but there are 3 at most"):
        search(MODELS[0], [[5, 9]], force_words_ids=words, max_new_tokens=3)


def test_forbidden_words_are_an_error_at_the_end() -> None:
    with pytest.raises(GenerationError, match="no text of prompt 0 has everything"):
        search(MODELS[0], [[5, 9]], force_words_ids=[[7, 8]], bad_words_ids=[[8]])


def test_nan_is_an_error_that_names_the_part() -> None:
    def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] < 5 else scores * torch.nan

    with pytest.warns(UserWarning, match="broken"), pytest.raises(GenerationError, match="broken"):
        search(MODELS[0], [[5, 9, 4]], force_words_ids=[[7, 8]], logits_processor=[broken])


def test_a_cancelled_run_gives_the_beams_it_has() -> None:
    plan = decodekit.plan(MODELS[0], [[5]], num_beams=3, max_new_tokens=9, force_words_ids=[[7, 8]], eos_token_id=None)
    run = decodekit.Run(plan)
    steps = iter(run)
    for _ in range(4):
        next(steps)
    steps.close()  # type: ignore[attr-defined]
    assert run.output().stop_reasons == ("cancelled",)
