"""A processor that lies fails exactly the test of its false claim."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import attrs
import pytest
import torch
from decodekit.shortlist import Shortlist
from decodekit.testing import ProcessorContract, results
from decodekit.traits import Phase, Traits
from torch import Tensor

HONEST = Traits(phase=Phase.SCALE, reads_history=False, keeps_argmax=True, rowwise=True, pure=True, graph_safe=True)


@attrs.frozen
class Honest:
    """Halves all scores."""

    traits: ClassVar[Traits] = HONEST
    power: float = 0.5

    def bind(self, ctx: Any, /) -> Any:
        return self

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        return scores * self.power


@attrs.frozen
class WritesIntoScores(Honest):
    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        return scores.mul_(self.power)


@attrs.frozen
class WritesIntoIds(Honest):
    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        input_ids[:, 0] += 1
        return scores * self.power


class _Counts:
    def __init__(self, power: float) -> None:
        self.power, self.calls = power, 0

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        self.calls += 1
        return scores * self.power / self.calls


@attrs.frozen
class KeepsState(Honest):
    def bind(self, ctx: Any, /) -> Any:
        return _Counts(self.power)


@attrs.frozen
class LooksAtNeighbours(Honest):
    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        return scores * self.power - scores.amax(0, keepdim=True).clamp(-100, 100).amax()


@attrs.frozen
class MovesTheBest(Honest):
    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        best = scores == scores.amax(-1, keepdim=True)
        return torch.where(best, scores - 1000, scores * self.power)


@attrs.frozen
class LooksAtHistory(Honest):
    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        return scores * self.power - input_ids[:, -1:]


@attrs.frozen
class WaitsForTheDevice(Honest):
    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        return scores * self.power if scores.shape[0] and float(scores.sum()) != 1.25 else scores


@attrs.frozen
class Shortens(Honest):
    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        return shortlist.replace(shortlist.values * self.power)


@attrs.frozen
class ShortensOtherwise(Honest):
    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        return shortlist.replace(shortlist.values * self.power + 1)


@attrs.frozen
class Edits(Honest):
    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        return scores.mul_(self.power) if own else scores * self.power


@attrs.frozen
class EditsWhatIsNotItsOwn(Honest):
    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        return scores.mul_(self.power)


@attrs.frozen
class EditsOtherwise(Honest):
    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        return scores * self.power + own


@attrs.frozen
class GivesAView(Honest):
    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        return (scores.mul_(self.power) if own else scores * self.power)[:]


class _Keeps:
    def __init__(self, power: float) -> None:
        self.power = power
        self.kept: dict[Any, Tensor] = {}

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        return scores * self.power

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        key = str(scores.tolist())
        return self.kept.setdefault(key, scores * self.power)


@attrs.frozen
class KeepsWhatItGives(Honest):
    def bind(self, ctx: Any, /) -> Any:
        return _Keeps(self.power)


@attrs.frozen
class CountsPadding(Honest):
    traits: ClassVar[Traits] = attrs.evolve(HONEST, reads_history=True)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        return scores * self.power - input_ids.sum(-1, keepdim=True)


class _Ends:
    def __init__(self, options: Any, log: list[int]) -> None:
        self.options, self.log = options, log

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        self.log.append(1)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        return scores * self.options.power - len(self.log)


@attrs.frozen
class ResumesTheLastRun(Honest):
    log: list[int] = attrs.field(factory=list, eq=False)

    def bind(self, ctx: Any, /) -> Any:
        return _Ends(self, self.log)


@attrs.frozen(hash=False, eq=False)
class CannotBeStored(Honest):
    secret: int = attrs.field(factory=itertools.count().__next__)

    def __hash__(self) -> int:
        return self.secret


def failures(cls: type) -> set[str]:
    class Suite(ProcessorContract):
        def make(self) -> Any:
            return cls()

    return {name for name, verdict in results(Suite()).items() if verdict not in ("ok", "skipped")}


LIES = {
    WritesIntoScores: "test_claim_pure",
    WritesIntoIds: "test_claim_pure",
    KeepsState: "test_claim_pure",
    LooksAtNeighbours: "test_claim_rowwise",
    MovesTheBest: "test_claim_keeps_argmax",
    LooksAtHistory: "test_claim_reads_no_history",
    WaitsForTheDevice: "test_claim_graph_safe",
    ShortensOtherwise: "test_shortlist_form_equals_dense_form",
    EditsWhatIsNotItsOwn: "test_edit_equals_call",
    EditsOtherwise: "test_edit_equals_call",
    GivesAView: "test_edit_equals_call",
    KeepsWhatItGives: "test_edit_equals_call",
    CountsPadding: "test_padding_is_never_history",
    ResumesTheLastRun: "test_a_second_run_starts_clean",
    CannotBeStored: "test_options_survive_a_round_trip",
}


@pytest.mark.parametrize("cls", [Honest, Shortens, Edits])
def test_an_honest_processor_passes(cls: type) -> None:
    assert failures(cls) == set()


@pytest.mark.parametrize("cls", LIES, ids=lambda cls: cls.__name__)
def test_a_lie_fails_its_own_test_only(cls: type) -> None:
    assert failures(cls) == {LIES[cls]}


def test_options_that_do_nothing_are_told_apart() -> None:
    class Suite(ProcessorContract):
        def make(self) -> Any:
            return Honest(power=1.0)

    assert "test_it_acts" in {k for k, v in results(Suite()).items() if v not in ("ok", "skipped")}


def test_a_plain_function_is_held_to_the_laws_too() -> None:
    class Suite(ProcessorContract):
        def make(self) -> Any:
            return lambda input_ids, scores: scores - 1

    verdicts = results(Suite())
    assert set(verdicts.values()) == {"ok", "skipped"}
    assert verdicts["test_claim_rowwise"] == verdicts["test_padding_is_never_history"] == "ok"
    assert verdicts["test_claim_pure"] == "skipped"
