"""Diverse beam search against the paper's algorithm, written out slowly, and its own laws."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import decodekit
import pytest
import torch
from decodekit import ConfigError, generate
from decodekit.testing import TinyLM
from torch import Tensor

MODELS = [TinyLM(seed=seed).eval() for seed in range(4)]
KEYS: dict[str, Any] = {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 0.7, "pad_token_id": 0}


def search(model: Any, prompts: Any, **keys: Any) -> Any:
    keys = {**KEYS, "max_new_tokens": 8, "eos_token_id": None, **keys}
    return generate(model, prompts, return_dict_in_generate=True, output_scores=True, **keys)


def diverse(step: Callable[[list[int]], list[float]], keys: dict[str, Any]) -> list[tuple[float, list[int]]]:
    """Algorithm 1 of Vijayakumar et al. for one prompt, hypotheses ranked as beam search ranks them.

    step: log-probabilities after these new tokens.
    """
    groups, new, power = keys["num_beam_groups"], keys["max_new_tokens"], keys["length_penalty"]
    size = keys["num_beams"] // groups
    ends, early = keys["eos_token_id"] or [], keys["early_stopping"]
    live: list[list[tuple[float, list[int]]]] = [[(0.0, [])] for _ in range(groups)]
    done: list[list[tuple[float, list[int]]]] = [[] for _ in range(groups)]
    going = [True] * groups
    for length in range(1, new + 1):
        said: list[int] = []
        for group in range(groups):
            if not going[group]:
                continue
            options = [
                (total + value - keys["diversity_penalty"] * said.count(token), [*tokens, token])
                for total, tokens in live[group]
                for token, value in enumerate(step(tokens))
                if value > float("-inf")
            ]
            options.sort(key=lambda option: -option[0])
            live[group] = []
            for rank, (total, tokens) in enumerate(options):
                if len(live[group]) == size:
                    break
                if tokens[-1] not in ends and length < new:
                    live[group].append((total, tokens))
                elif rank < size:
                    said.append(tokens[-1])
                    done[group].append((total / length**power, tokens))
                    done[group] = sorted(done[group], key=lambda item: -item[0])[:size]
            said += [tokens[-1] for _, tokens in live[group]]
            full = len(done[group]) == size
            if not live[group] or (full and early is True):
                going[group] = False
            elif full:
                reach = new if early == "never" and power > 0 else length
                going[group] = live[group][0][0] / reach**power > done[group][-1][0]
    return sorted((item for group in done for item in group), key=lambda item: -item[0])


def case(number: int) -> tuple[Any, list[list[int]], dict[str, Any]]:
    draw = random.Random(f"groups/{number}")
    groups = draw.randint(1, 4)
    keys = {
        "num_beam_groups": groups,
        "num_beams": groups * draw.randint(1, 3),
        "diversity_penalty": draw.choice([0.1, 0.5, 1.0, 3.0, 30.0]),
        "length_penalty": draw.choice([-1.0, 0.0, 1.0, 2.0]),
        "early_stopping": draw.choice([True, False, "never"]),
        "max_new_tokens": draw.randint(1, 8),
        "eos_token_id": draw.choice([None, draw.sample(range(37), 1), draw.sample(range(37), 6)]),
    }
    prompts = [[draw.randrange(3, 37) for _ in range(draw.randint(1, 6))] for _ in range(draw.randint(1, 3))]
    return draw.choice(MODELS), prompts, keys


def following(model: Any, prompt: list[int]) -> Callable[[list[int]], list[float]]:
    def step(tokens: list[int]) -> list[float]:
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([prompt + tokens]))[0, -1]
        return logits.log_softmax(-1).tolist()

    return step


@pytest.mark.parametrize("part", range(5))
def test_the_algorithm_of_the_paper(part: int) -> None:
    for number in range(part * 50, (part + 1) * 50):
        model, prompts, keys = case(number)
        count = keys["num_beams"]
        found = search(model, prompts, strategy="group_beam", num_return_sequences=count, **keys)
        for row, prompt in enumerate(prompts):
            want = diverse(following(model, prompt), keys)[:count]
            for copy in range(count):
                at = row * count + copy
                new = found.sequences[at, found.prompt_width :][: found.lengths[at]].tolist()
                if copy >= len(want):
                    assert found.stop_reasons[at] == "no continuation"
                    continue
                assert float(found.sequences_scores[at]) == pytest.approx(want[copy][0], rel=2e-5, abs=1e-4), (
                    number,
                    keys,
                )
                ties = [tokens for score, tokens in want if abs(score - want[copy][0]) < 2e-5]
                assert new in ties, (number, keys)


def test_scores_add_up() -> None:
    found = search(MODELS[0], [[5, 9, 4], [7]], num_return_sequences=6, eos_token_id=[3, 9], length_penalty=0.5)
    for row, score in enumerate(found.sequences_scores.tolist()):
        length, rows = found.lengths[row], found.beam_indices[row].tolist()
        new = found.sequences[row, found.prompt_width :][:length].tolist()
        total = sum(float(found.scores[t][rows[t], token]) for t, token in enumerate(new))
        assert score == pytest.approx(total / length**0.5, abs=1e-4)


def test_a_great_penalty_makes_first_tokens_differ() -> None:
    found = search(MODELS[1], [[5, 9, 4]], num_beam_groups=6, num_return_sequences=6, diversity_penalty=1e4)
    for step in range(8):
        assert len(set(found.sequences[:, 3 + step].tolist())) == 6


def test_what_ended_costs_the_others_nothing_later() -> None:
    """One group ends at once. Its end token counts at that step, and what fills its rows never does.

    transformers leaves end tokens out, and goes on counting the filler of groups that are done.
    """
    likely = torch.full((37,), -20.0)
    likely[[2, 0, 5]] = torch.tensor([0.0, -1.0, -1.5])

    def steady(input_ids: Tensor, scores: Tensor) -> Tensor:
        return likely.expand_as(scores) if input_ids.shape[1] == 1 else likely.roll(-2).expand_as(scores)

    keys = {"num_beams": 2, "num_beam_groups": 2, "num_return_sequences": 2, "early_stopping": True}
    with pytest.warns(UserWarning, match="steady"):
        found = search(
            MODELS[0], [[5]], **keys, diversity_penalty=9.0, eos_token_id=2, max_new_tokens=4, logits_processor=[steady]
        )
    # The second group keeps away from the end and from what the first could have gone on with, once; then token 0, the
    # filler, is the likeliest.
    assert found.sequences[:, 1:].tolist() == [[2, 0, 0, 0], [5, 0, 0, 0]]
    assert found.sequences_scores.tolist() == pytest.approx([0.0, -1.5 / 4])


@pytest.mark.parametrize("keys", [{}, {"repetition_penalty": 1.3}, {"bad_words_ids": [[14], [21]]}])
def test_a_prompt_does_not_depend_on_its_neighbours(keys: dict[str, Any]) -> None:
    prompts = [[5, 9, 4, 7, 8], [11], [30, 31, 6]]
    keys |= {"eos_token_id": [3, 9, 14, 20], "max_new_tokens": 10, "num_return_sequences": 3}
    batch = search(MODELS[2], prompts, **keys)
    for row, prompt in enumerate(prompts):
        alone = search(MODELS[2], [prompt], **keys)
        for copy in range(3):
            length = alone.lengths[copy]
            assert batch.lengths[3 * row + copy] == length
            new = batch.sequences[3 * row + copy, 5 : 5 + length]
            assert torch.equal(new, alone.sequences[copy, len(prompt) : len(prompt) + length])


def test_processors_act_before_the_penalty() -> None:
    banned = [14, 21, 6]
    found = search(MODELS[0], [[5, 9, 4], [7]], num_return_sequences=6, bad_words_ids=[[token] for token in banned])
    assert not set(banned) & set(found.sequences[:, 3:].flatten().tolist())


def test_caches_give_what_no_cache_gives(exact_caches: list[str]) -> None:
    keys = {"num_return_sequences": 6, "max_new_tokens": 15, "eos_token_id": [3, 9]}
    want = search(MODELS[3], [[5, 9, 4], [7]], use_cache=False, **keys)
    for cache in exact_caches:
        got = search(MODELS[3], [[5, 9, 4], [7]], cache_implementation=cache, **keys)
        assert torch.equal(got.sequences, want.sequences), cache
        torch.testing.assert_close(got.sequences_scores, want.sequences_scores)


def test_stop_strings_end_hypotheses() -> None:
    lm = decodekit.load("bundled")
    keys: dict[str, Any] = {"num_return_sequences": 6, "max_new_tokens": 30, "stop_strings": [","]}
    texts, found = lm.details("It was a fine day, and", **KEYS, **keys)
    assert not [text for text in texts if "," in text]
    assert "stop_strings" in found.stop_reasons


class _Ear:
    def __init__(self) -> None:
        self.heard: list[Tensor] = []

    def put(self, value: Tensor, /) -> None:
        self.heard.append(value.clone())

    def end(self) -> None:
        pass

    def bind(self, ctx: Any, /) -> _Ear:
        return self


@pytest.mark.parametrize("prompts", [[[5, 9, 4]], [[5, 9, 4], [7], [8, 8]]])
@pytest.mark.parametrize("ends", [[3, 9, 14], None])
def test_what_is_streamed_is_what_is_returned(prompts: list[list[int]], ends: Any) -> None:
    for new in (1, 2, 12):
        ear = _Ear()
        found = search(MODELS[0], prompts, max_new_tokens=new, eos_token_id=ends, streamer=ear)
        heard = torch.cat([ear.heard[0], *(token[:, None] for token in ear.heard[1:])], 1)
        assert torch.equal(heard, found.sequences)


def test_one_group_is_beam_search() -> None:
    keys = {"num_return_sequences": 4, "eos_token_id": [3, 9], "num_beams": 4, "diversity_penalty": 0.0}
    groups = search(MODELS[0], [[5, 9, 4], [7]], strategy="group_beam", **keys, num_beam_groups=1)
    beams = search(MODELS[0], [[5, 9, 4], [7]], strategy="beam", **keys, num_beam_groups=1)
    assert torch.equal(groups.sequences, beams.sequences)
    assert decodekit.plan(MODELS[0], [[5]], **KEYS).strategy_name == "group_beam"


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"num_beam_groups": 4}, "num_beam_groups=4 must divide num_beams=6"),
        ({"num_beam_groups": 7}, "num_beam_groups=7 must divide num_beams=6"),
        ({"num_beam_groups": 0}, "at least 1"),
        ({"diversity_penalty": 0.0}, "diversity_penalty"),
        ({"diversity_penalty": -1.0}, "at least 0"),
        ({"diversity_penalty": float("nan")}, "diversity_penalty"),
        ({"do_sample": True}, "do_sample"),
        ({"num_return_sequences": 7}, "num_return_sequences=7 needs num_beams"),
    ],
)
def test_values_that_make_no_sense_are_refused(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        decodekit.plan(MODELS[0], [[5]], **{**KEYS, **keys})
