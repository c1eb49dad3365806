"""The constraints themselves: what they follow, token by token, is what a search in the whole text finds."""

from __future__ import annotations

import random
from typing import Any

import pytest
from decodekit_strategies.constraints import DisjunctiveConstraint, PhrasalConstraint


def within(phrase: list[int], tokens: list[int]) -> bool:
    return any(tokens[i : i + len(phrase)] == phrase for i in range(len(tokens)))


def begun(phrases: list[list[int]], tokens: list[int]) -> int:
    """Length of the longest end of the text that begins a phrase, none of which has appeared."""
    return max(n for n in range(len(tokens) + 1) if any(tokens[len(tokens) - n :] == p[:n] for p in phrases))


def test_a_phrase_that_breaks_off_may_have_begun_again() -> None:
    """1, 1, 2 has the phrase 1, 2 in it. transformers forgets the second 1 and goes on looking."""
    constraint = PhrasalConstraint([1, 2])
    assert constraint.advance() == 1
    assert constraint.update(1) == (True, False, False)
    assert constraint.update(1) == (False, False, True)
    assert constraint.fulfilled_idx == 0
    assert constraint.advance() == 2
    assert constraint.update(2) == (True, True, False)
    assert (constraint.completed, constraint.remaining(), constraint.advance()) == (True, 0, None)


def test_states_follow_any_text() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        phrases = [[draw.randrange(3) for _ in range(draw.randint(1, 4))] for _ in range(draw.randint(1, 3))]
        constraint: Any = PhrasalConstraint(phrases[0]) if len(phrases) == 1 else DisjunctiveConstraint(phrases)
        tokens: list[int] = []
        while not constraint.completed and len(tokens) < 12:
            at = begun(phrases, tokens)
            assert constraint.remaining() == constraint.seqlen - at
            ways = {p[at] for p in phrases if p[:at] == tokens[len(tokens) - at :]}
            step = constraint.advance()
            assert ({step} if isinstance(step, int) else set(step)) == ways
            token = draw.randrange(3)
            assert constraint.does_advance(token) == (token in ways)
            before = constraint.copy(stateful=True)
            constraint.update(token)
            tokens.append(token)
            assert before.remaining() == before.seqlen - at, "the copy moved along"
            assert constraint.completed == any(within(phrase, tokens) for phrase in phrases)
        assert constraint.copy().remaining() == constraint.seqlen
        constraint.reset()
        assert not constraint.completed


def test_one_alternative_may_contain_another() -> None:
    """transformers refuses this."""
    constraint = DisjunctiveConstraint([[1, 2, 3], [2]])
    constraint.update(1)
    assert constraint.current_seq == [1]
    assert constraint.update(2) == (True, True, False)


@pytest.mark.parametrize("given", [[], [-1], [1.5], ["a"], 3, None, [True], "words"])
def test_phrases_are_lists_of_ids(given: Any) -> None:
    with pytest.raises(ValueError, match="token ids"):
        PhrasalConstraint(given)
    with pytest.raises(ValueError, match="phrase"):
        DisjunctiveConstraint([[1], given])
    with pytest.raises(ValueError, match="phrase"):
        DisjunctiveConstraint([])
