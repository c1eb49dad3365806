"""`prefix_allowed_tokens_fn`: what it is asked, what it may answer, and what an empty answer means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit import GenerationError, generate
from decodekit.errors import DecodekitError
from decodekit.testing import ScriptedLM, TinyLM, context
from decodekit_processors import prefix as module
from decodekit_processors.prefix import PrefixConstrainedLogitsProcessor as Prefix

VOCAB = 11
RISING = ScriptedLM(torch.arange(float(VOCAB))[None])
KEYS: dict[str, Any] = {"max_new_tokens": 5, "eos_token_id": 2, "pad_token_id": 0}


def answer(given: Any) -> list[int]:
    """Tokens that stay when the function answers `given`."""
    scores = Prefix(lambda prompt, ids: given)(torch.ones(1, 3).long(), torch.ones(1, VOCAB))
    return scores[0].isfinite().nonzero()[:, 0].tolist()


@pytest.mark.parametrize(
    "given",
    [
        [3, 5],
        (5, 3),
        {3, 5},
        frozenset([3, 5]),
        [3, 3, 5],
        torch.tensor([3, 5]),
        torch.tensor([5, 3], dtype=torch.int32),
    ],
    ids=repr,
)
def test_token_ids_in_any_form(given: Any) -> None:
    assert answer(given) == [3, 5]
    assert answer(range(3, 6, 2)) == [3, 5]
    assert answer(token for token in (3, 5)) == [3, 5]


@pytest.mark.parametrize(
    "given", [None, range(VOCAB), list(range(VOCAB)), torch.arange(VOCAB), [*range(VOCAB), 3]], ids=repr
)
def test_all_tokens_cost_nothing(given: Any) -> None:
    scores = torch.randn(2, VOCAB)
    assert Prefix(lambda prompt, ids: given)(torch.ones(2, 3).long(), scores) is scores


def test_some_rows_may_be_free() -> None:
    scores = torch.randn(3, VOCAB)
    got = Prefix(lambda prompt, ids: None if prompt == 1 else [4])(torch.ones(3, 3).long(), scores)
    assert torch.equal(got[1], scores[1])
    assert [row.isfinite().sum().item() for row in got] == [1, VOCAB, 1]


def test_a_long_list_that_changes_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LONG", 2)
    allowed = [3, 4, 5]
    bound = Prefix(lambda prompt, ids: allowed).bind(context(torch.ones(1, 3).long(), vocab_size=VOCAB))
    seen = []
    for new in (3, 3, 7):
        allowed[0] = new
        seen.append(bound(torch.ones(1, 3).long(), torch.ones(1, VOCAB))[0].isfinite().nonzero()[:, 0].tolist())
    assert seen == [[3, 4, 5], [3, 4, 5], [4, 5, 7]]


@pytest.mark.parametrize("bad", [[99], [-1], torch.tensor([0.5]), [1.5], "ab", 3, [True], [[1], [2, 3]]], ids=repr)
def test_what_is_no_token_is_refused_with_the_row(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"\(row 1\)"):
        Prefix(lambda prompt, ids: bad if prompt else [1])(torch.ones(2, 3).long(), torch.ones(2, VOCAB))


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(ValueError, match="must be a function of"):
        Prefix([1, 2])
    with pytest.raises(DecodekitError, match="prefix_allowed_tokens_fn: must be a function"):
        generate(RISING, [[1]], prefix_allowed_tokens_fn=3, **KEYS)


def test_it_gets_prompt_numbers_and_real_tokens() -> None:
    asked: list[Any] = []

    def allow(prompt: int, ids: torch.Tensor) -> list[int]:
        asked.append((prompt, ids.tolist()))
        ids.fill_(-5)  # it is the function's own copy
        return [7, 8]

    out = generate(RISING, [[4], [5, 6]], prefix_allowed_tokens_fn=allow, **{**KEYS, "max_new_tokens": 2})
    assert asked == [(0, [4]), (1, [5, 6]), (0, [4, 8]), (1, [5, 6, 8])]
    assert out.tolist() == [[0, 4, 8, 8], [5, 6, 8, 8]]
    asked.clear()
    generate(
        RISING,
        [[4], [5]],
        prefix_allowed_tokens_fn=allow,
        do_sample=True,
        num_return_sequences=2,
        **{**KEYS, "seed": 1},
    )
    assert [prompt for prompt, _ in asked[:4]] == [0, 0, 1, 1]


def test_rows_that_ended_are_not_asked() -> None:
    trie = {(4,): [5], (4, 5): [2], (9,): [8], (9, 8): [8], (9, 8, 8): [7], (9, 8, 8, 7): [2]}
    out = generate(RISING, [[4], [9]], prefix_allowed_tokens_fn=lambda prompt, ids: trie[tuple(ids.tolist())], **KEYS)
    assert out.tolist() == [[4, 5, 2, 0, 0], [9, 8, 8, 7, 2]]


def test_a_row_that_another_rule_ended_may_be_allowed_nothing() -> None:
    """It needs no token. Row 0 ends by its own length, without an end token."""

    def allow(prompt: int, ids: torch.Tensor) -> list[int]:
        return [] if prompt == 0 and len(ids) > 2 else [7]

    keys = {**KEYS, "max_new_tokens": (2, 5)}
    assert generate(RISING, [[4], [9]], prefix_allowed_tokens_fn=allow, **keys)[1].tolist() == [9, 7, 7, 7, 7, 7]


@pytest.mark.parametrize(
    "more", [{}, {"do_sample": True, "seed": 3}, {"do_sample": True, "top_k": 2, "seed": 1}], ids=str
)
def test_b07_an_empty_set_names_row_step_and_prefix(more: dict[str, Any]) -> None:
    def allow(prompt: int, ids: torch.Tensor) -> list[int]:
        return [] if prompt == 1 and len(ids) == 5 else [3]

    with pytest.raises(GenerationError) as caught:
        generate(RISING, [[0, 4], [5, 6]], prefix_allowed_tokens_fn=allow, **KEYS, **more)
    assert isinstance(caught.value, ValueError)
    for words in ("allows no token at all (row 1, step 3, prefix [5, 6, 3, 3, 3] of 5 tokens)", "return the end token"):
        assert words in str(caught.value)


def test_b07_alone_it_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match=r"row 1, prefix \[1, 1, 1\] of 3 tokens"):
        Prefix(lambda prompt, ids: [] if prompt else [1])(torch.ones(2, 3).long(), torch.ones(2, VOCAB))


def test_b07_beams_that_may_not_go_on_end_quietly() -> None:
    ids = torch.tensor([[1, 4], [1, 5]])
    ctx = context(ids, vocab_size=VOCAB, num_beams=2)
    ctx.slots = (0, 0)
    bound = Prefix(lambda prompt, row: [] if row[-1] == 5 else [3]).bind(ctx)
    for _ in range(1):
        got = bound(ids, torch.ones(2, VOCAB))
        assert got.isfinite().sum(-1).tolist() == [1, 0]
    # What it allows is forbidden already: kept alive only where no beam of the prompt is.
    one = Prefix(lambda prompt, row: [3]).bind(ctx)
    scores = torch.ones(2, VOCAB)
    scores[1, 3] = -torch.inf
    assert one(ids, scores).isfinite().sum(-1).tolist() == [1, 0]
    scores[0, 3] = -torch.inf
    assert one(ids, scores)[:, 3].tolist() == [0, 0]


def test_the_constraint_holds_over_what_others_forbid() -> None:
    """As in the reference: a minimum length does not make a finished text go on with nothing."""
    out = generate(RISING, [[4]], prefix_allowed_tokens_fn=lambda prompt, ids: [2], min_new_tokens=3, **KEYS)
    assert out.tolist() == [[4, 2]]


def test_b10_every_sequence_has_its_own_state() -> None:
    """A grammar that takes 3 4 5 and then the end; two prompts, three sequences each."""

    def allow(prompt: int, ids: torch.Tensor) -> list[int]:
        return [[3], [4], [5], [2]][len(ids) - 1 - prompt]

    out = generate(
        TinyLM(), [[7], [8, 9]], prefix_allowed_tokens_fn=allow, do_sample=True, num_return_sequences=3, **KEYS
    )
    assert out[:, 2:].tolist() == [[3, 4, 5, 2]] * 6


def test_state_follows_rows_and_comes_back() -> None:
    ids = torch.tensor([[1, 4], [1, 5]])
    asked: list[int] = []
    bound = Prefix(lambda prompt, row: asked.append(prompt) or [3]).bind(context(ids, vocab_size=VOCAB))

    def ask() -> list[int]:
        asked.clear()
        bound(ids, torch.ones(2, VOCAB))
        return list(asked)

    assert ask() == [0, 1]
    bound.accept(torch.tensor([2, 7]), None)
    assert ask() == [1]
    bound.accept(torch.tensor([[7, 7], [7, 2]]), None)
    assert ask() == []
    bound.rollback(1)
    assert ask() == [1]
    bound.reorder(torch.tensor([1, 1]))
    assert ask() == [1, 1]
    bound.accept(torch.tensor([2]), torch.tensor([1]))
    assert ask() == [1]
    bound.rollback(2)
    assert ask() == [1, 1]
    with pytest.raises(ValueError, match="cannot take 1 steps back"):
        bound.rollback(1)
