"""A criterion that lies fails exactly the test of its false claim."""

from __future__ import annotations

import inspect
from typing import Any

import attrs
import pytest
import torch
from decodekit.testing import CriterionContract, results
from torch import Tensor


class State:
    """Ends a row with token 2, or after `most` tokens."""

    def __init__(self, ctx: Any, most: int) -> None:
        self.ctx, self.most = ctx, most
        self.ended = torch.zeros(ctx.rows, dtype=torch.bool)
        self.made = torch.zeros(ctx.rows, dtype=torch.long)
        self.back: list[tuple[Tensor, Tensor]] = []

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        self.back.append((self.ended.clone(), self.made.clone()))
        rows = torch.arange(len(tokens)) if rows is None else rows
        tokens = tokens.reshape(len(tokens), -1)
        self.ended[rows] |= (tokens == 2).any(-1)
        self.made[rows] += tokens.shape[1]

    def rollback(self, steps: int, /) -> None:
        for _ in range(steps):
            self.ended, self.made = self.back.pop()

    def reorder(self, rows: Tensor, /) -> None:
        self.ended, self.made = self.ended[rows], self.made[rows]
        self.back = [(ended[rows], made[rows]) for ended, made in self.back]

    def limit(self, prompt_width: int, /) -> int:
        return prompt_width + self.most

    def why(self, row: int, /) -> Any:
        return "two" if self.ended[row] else "length"

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Any:
        verdict = self.ended | (self.made >= self.most)
        return verdict if bool(verdict.any()) else False


@attrs.frozen
class Honest:
    most: int = 10

    def bind(self, ctx: Any, /) -> Any:
        return State(ctx, self.most)


def lying(state: type) -> type:
    """Options that bind to `state`."""
    return attrs.frozen(type(f"Options{state.__name__}", (Honest,), {"bind": lambda self, ctx: state(ctx, self.most)}))


class SaysNumbers(State):
    def __call__(self, input_ids: Tensor, scores: Any, /) -> Any:
        return torch.as_tensor(super().__call__(input_ids, scores)).long().expand(len(input_ids))


class SaysTrue(State):
    """One word for all rows is cheap only where it is False."""

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Any:
        verdict = super().__call__(input_ids, scores)
        return True if verdict is not False and bool(verdict.all()) else verdict


class SaysOneForAll(State):
    def __call__(self, input_ids: Tensor, scores: Any, /) -> Any:
        verdict = super().__call__(input_ids, scores)
        return verdict if verdict is False else verdict[:, None]


class WritesIntoIds(State):
    def __call__(self, input_ids: Tensor, scores: Any, /) -> Any:
        input_ids[:, -1] += 1
        return super().__call__(input_ids, scores)


class WritesIntoAccepted(State):
    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        super().accept(tokens, rows)
        tokens.zero_()


class WritesIntoScores(State):
    def __call__(self, input_ids: Tensor, scores: Any, /) -> Any:
        if scores is not None:
            scores[0].add_(1)
        return super().__call__(input_ids, scores)


class EndsEarlierInCompany(State):
    def __call__(self, input_ids: Tensor, scores: Any, /) -> Any:
        verdict = self.ended | (self.made >= self.most)
        return verdict | (self.made >= 3) if len(input_ids) > 1 else verdict


class CountsPadding(State):
    def __call__(self, input_ids: Tensor, scores: Any, /) -> Any:
        return self.ended | torch.full((len(input_ids),), input_ids.shape[1] >= 8)


class LooksUnderThePadding(State):
    def __call__(self, input_ids: Tensor, scores: Any, /) -> Any:
        mask = self.ctx.history_mask()
        hidden = torch.zeros_like(self.ended) if mask is None else ((input_ids == 4) & ~mask).any(-1)
        return self.ended | (self.made >= self.most) | hidden


class CountsCalls(State):
    """Ends every row when asked a third time about the same tokens."""

    calls = 0

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        super().accept(tokens, rows)
        self.calls = 0

    def rollback(self, steps: int, /) -> None:
        super().rollback(steps)
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Any:
        self.calls += 1
        return super().__call__(input_ids, scores) if self.calls < 3 else torch.ones_like(self.ended)


class ReadsTheLastOfSeveral(State):
    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        super().accept(tokens if tokens.dim() == 1 else tokens[:, -1], rows)


class IgnoresNames(State):
    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        super().accept(tokens, None)


class KeepsRejectedTokens(State):
    def rollback(self, steps: int, /) -> None:
        pass


class RollsBackOne(State):
    def rollback(self, steps: int, /) -> None:
        super().rollback(1)


class StaysInPlace(State):
    def reorder(self, rows: Tensor, /) -> None:
        pass


class PassesItsLimit(State):
    def limit(self, prompt_width: int, /) -> int:
        return prompt_width + self.most - 3


class CannotSayWhy(State):
    def why(self, row: int, /) -> Any:
        return {}[row]


class SaysNothing(State):
    def why(self, row: int, /) -> Any:
        return None


class NeverEnds(State):
    limit = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name == "limit":
            raise AttributeError(name)
        return super().__getattribute__(name)

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Any:
        return False


@attrs.frozen
class Resumes(Honest):
    """Goes on where the last call of the same options stopped."""

    log: list[int] = attrs.field(factory=list, eq=False)

    def bind(self, ctx: Any, /) -> Any:
        state = State(ctx, self.most)
        state.made += len(self.log)
        self.log.append(1)
        return state


@attrs.frozen
class SharesOneState(Honest):
    """Binds two calls to the same state."""

    held: dict[int, Any] = attrs.field(factory=dict, eq=False)

    def bind(self, ctx: Any, /) -> Any:
        return self.held.setdefault(ctx.rows, State(ctx, self.most))


@attrs.define(hash=True)
class CanBeChanged:
    most: int = 10

    def bind(self, ctx: Any, /) -> Any:
        return State(ctx, self.most)


LIES: dict[type, str] = {
    NeverEnds: "test_it_acts",
    SaysNumbers: "test_verdict_is_bool_per_row",
    SaysTrue: "test_verdict_is_bool_per_row",
    SaysOneForAll: "test_verdict_is_bool_per_row",
    CanBeChanged: "test_options_are_frozen_and_survive_a_round_trip",
    WritesIntoIds: "test_arguments_stay",
    WritesIntoAccepted: "test_arguments_stay",
    WritesIntoScores: "test_arguments_stay",
    EndsEarlierInCompany: "test_rows_do_not_depend_on_each_other",
    CountsPadding: "test_padding_does_not_matter",
    LooksUnderThePadding: "test_padding_does_not_matter",
    CountsCalls: "test_calls_change_nothing",
    Resumes: "test_two_binds_are_independent",
    SharesOneState: "test_two_binds_are_independent",
    ReadsTheLastOfSeveral: "test_several_tokens_equal_one_by_one",
    IgnoresNames: "test_named_rows_equal_all_in_order",
    KeepsRejectedTokens: "test_rollback_undoes_accept",
    RollsBackOne: "test_rollback_undoes_accept",
    StaysInPlace: "test_reorder_moves_rows",
    PassesItsLimit: "test_limit_is_kept",
    CannotSayWhy: "test_why_of_rows_that_ended",
    SaysNothing: "test_why_of_rows_that_ended",
}


def verdicts(make: Any) -> dict[str, str]:
    class Suite(CriterionContract):
        def make(self) -> Any:
            return make()

    return results(Suite())


def failures(make: Any) -> set[str]:
    return {name for name, verdict in verdicts(make).items() if verdict not in ("ok", "skipped")}


def test_an_honest_criterion_passes_everything() -> None:
    assert set(verdicts(Honest).values()) == {"ok"}


@pytest.mark.parametrize("liar", LIES, ids=lambda liar: liar.__name__)
def test_a_lie_fails_its_own_test_only(liar: type) -> None:
    assert failures(lying(liar) if issubclass(liar, State) else liar) == {LIES[liar]}


def test_bind_to_something_else_is_named() -> None:
    @attrs.frozen
    class BindsToText(Honest):
        def bind(self, ctx: Any, /) -> Any:
            return "no criterion"

    assert "cannot be called" in verdicts(BindsToText)["test_bind_gives_a_criterion_or_none"]


def test_nothing_to_do_is_said_by_it_acts_alone() -> None:
    @attrs.frozen
    class Idle(Honest):
        def bind(self, ctx: Any, /) -> Any:
            return None

    assert failures(Idle) == {"test_it_acts"}


def test_a_plain_function_is_held_to_the_laws_too() -> None:
    def ends_with_two(input_ids: Tensor, scores: Any) -> Tensor:
        return input_ids[:, -1] == 2

    found = verdicts(lambda: ends_with_two)
    assert set(found.values()) == {"ok", "skipped"}
    assert found["test_rows_do_not_depend_on_each_other"] == found["test_padding_does_not_matter"] == "ok"


def test_every_test_has_its_liar() -> None:
    tests = {name for name, _ in inspect.getmembers(CriterionContract) if name.startswith("test_")}
    assert tests - {"test_bind_gives_a_criterion_or_none"} == set(LIES.values())
