"""Every installed strategy keeps the laws."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest
import torch
from decodekit.testing import StrategyContract, installed, results

# Config keys worth testing a plugin with, by name.
KEYS: dict[str, list[dict[str, Any]]] = {
    "sample": [{}, {"temperature": 2.0, "top_k": 0, "top_p": 0.9}],
    "beam": [{}, {"do_sample": True}],
    "group_beam": [{"num_beams": 4}, {"num_beams": 4, "repetition_penalty": 1.2}],
    "constrained_beam": [{"num_beams": 4}],
    "contrastive": [{"top_k": 4}, {"top_k": 1}, {"top_k": 50}],
    "dola": [{}, {"do_sample": True, "temperature": 2.0}],
}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "beam": [{"num_beams": 3}, {}],
    "group_beam": [{"num_beam_groups": 2, "diversity_penalty": 0.5}],
    "constrained_beam": [{"force_words_ids": ((9,),)}],
    "dola": [{}, {"dola_layers": "high"}, {"dola_layers": (1, 3)}],
}
LOOKS_INSIDE = ("contrastive", "dola")
LOOKS_AHEAD = ("contrastive",)
YIELDS_AT_THE_END = ("beam", "group_beam", "constrained_beam")

INSTALLED = installed("strategies", OPTIONS)
CASES = [(case, keys) for case in INSTALLED for keys in (KEYS.get(case.plugin.name, [{}]) if case.own else [{}])]


@functools.cache
def native() -> Any:
    """A small model whose layers can be looked at."""
    from decodekit_plugins.models.native.module import NativeConfig, NativeLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
        model = NativeLM(NativeConfig(vocab_size=37, num_hidden_layers=4, head_dim=8, **shape)).eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, std=0.5) if weight.dim() > 1 else None
    return model


def test_there_are_strategies_to_test() -> None:
    assert {"greedy", "sample"} <= {case.plugin.name for case in INSTALLED if case.own}


class TestEveryStrategy(StrategyContract):
    @pytest.fixture(autouse=True, params=CASES, ids=lambda case: f"{case[0]} {case[1]}")
    def _choose(self, request: pytest.FixtureRequest) -> None:
        self.case, self.keys = request.param
        self.streams = self.case.plugin.name not in YIELDS_AT_THE_END
        self.ahead = int(self.case.plugin.name in LOOKS_AHEAD)

    def make(self) -> Any:
        return self.case.make()

    def model(self) -> Any:
        return native() if self.case.plugin.name in LOOKS_INSIDE else super().model()


# -- strategies that lie fail exactly the tests of what they get wrong -----------------------------


class Honest:
    needs: ClassVar[frozenset[str]] = frozenset()
    samples: ClassVar[bool] = False

    def decode(self, run: Any) -> Any:
        logits = run.prefill()
        while not run.finished:
            step = run.accept(self.pick(run, logits))
            yield step
            logits = None if run.finished else run.forward(step.tokens)

    def pick(self, run: Any, logits: Any) -> Any:
        return run.select(run.process(logits))


class SkipsProcessors(Honest):
    def pick(self, run: Any, logits: Any) -> Any:
        return run.select(logits)


class RunsTheModelTooOften(Honest):
    def decode(self, run: Any) -> Any:
        logits = run.prefill()
        while True:
            step = run.accept(self.pick(run, logits))
            yield step
            logits = run.forward(step.tokens)  # once more than there are tokens
            if run.finished:
                return


class LooksAtTheNeighbours(Honest):
    def pick(self, run: Any, logits: Any) -> Any:
        return run.select(run.process(logits.mean(0, keepdim=True).expand_as(logits)))


class KeepsState(Honest):
    def __init__(self) -> None:
        self.calls = 0

    def pick(self, run: Any, logits: Any) -> Any:
        self.calls += 1
        return (super().pick(run, logits) + (self.calls > 12)) % 37


class CropsUndeclared(Honest):
    def pick(self, run: Any, logits: Any) -> Any:
        if run.cache is not None:
            run.cache.crop(run.cache.get_seq_length())
        return super().pick(run, logits)


class ClaimsToSample(Honest):
    samples: ClassVar[bool] = True
    selector: ClassVar[str] = "argmax"


LIES: dict[type, set[str]] = {
    Honest: set(),
    SkipsProcessors: {"test_processors_act"},
    RunsTheModelTooOften: {"test_passes_of_the_model"},
    LooksAtTheNeighbours: {"test_rows_do_not_depend_on_each_other"},
    KeepsState: {"test_repeats"},
    CropsUndeclared: {"test_needs_are_all_it_uses"},
    ClaimsToSample: {"test_repeats"},
}


@pytest.mark.parametrize("liar", LIES, ids=lambda liar: liar.__name__)
def test_a_lying_strategy_fails_its_lie(liar: type) -> None:
    class Suite(StrategyContract):
        def make(self) -> Any:
            return liar()

    failed = {name for name, verdict in results(Suite()).items() if verdict not in ("ok", "skipped")}
    assert failed == LIES[liar]
