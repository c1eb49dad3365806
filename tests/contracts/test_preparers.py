"""Every installed preparer keeps the laws; a lying one is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit.models import adapter_for
from decodekit.registry import registry
from decodekit.testing import Installed, PreparerContract, TinyLM, installed, results

EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "kernels": [{}, {"free": True}],
    "packed": [
        {},
        {"layout": "blocks"},
        {"layout": "columns"},
        {"layout": "blocks", "free": True},
        {"layout": "columns", "free": True},
    ],
}
OTHERS = {"synced", "compiled"}
"""One needs a group of processes and is tested with one, the other a backend that compiles nothing: tests/compiling."""
CASES = [case for case in installed("preparers", EXAMPLES) if case.plugin.name not in OTHERS]


class TestEveryPreparer(PreparerContract):
    @pytest.fixture(autouse=True, params=CASES, ids=str)
    def _choose(self, request: pytest.FixtureRequest) -> None:
        self.case: Installed = request.param
        self.frees = bool(self.case.options.get("free")) and self.case.plugin.name == "packed"

    def make(self) -> Any:
        return self.case.make()


def test_the_built_in_ones_are_tested() -> None:
    assert {case.plugin.name for case in CASES} >= {"packed", "kernels", "auto", "sharded"}


class Honest:
    """Does nothing at all, and says the truth about it."""

    frozen = False

    def prepare(self, adapter: Any, /) -> Any:
        return adapter

    def release(self, model: Any, /) -> bool:
        return False


def lying(preparer: Any) -> set[str]:
    class Suite(PreparerContract):
        def make(self) -> Any:
            return preparer

    return {name for name, verdict in results(Suite()).items() if verdict not in ("ok", "skipped")}


def test_honest_preparer_passes() -> None:
    assert lying(Honest()) == set()


def test_a_stale_copy_is_found() -> None:
    class Stale(Honest):
        def __init__(self) -> None:
            self.kept: dict[int, Any] = {}

        def prepare(self, adapter: Any, /) -> Any:
            import copy

            return self.kept.setdefault(id(adapter.model), adapter_for(copy.deepcopy(adapter.model)))

    assert "test_changed_weights_are_noticed" in lying(Stale())


def test_other_answers_are_found() -> None:
    class Rounds(Honest):
        def prepare(self, adapter: Any, /) -> Any:
            class Rounded(type(adapter)):  # type: ignore[misc]
                def forward(self, *args: Any, **keys: Any) -> Any:
                    out = super().forward(*args, **keys)
                    return type(out)((out.logits * 4).round() / 4, out.hidden, out.cache)

            return Rounded(adapter.model)

    assert "test_same_answers" in lying(Rounds())


def test_a_changed_model_is_found() -> None:
    class Writes(Honest):
        def prepare(self, adapter: Any, /) -> Any:
            adapter.model.prepared = True
            return adapter

    assert lying(Writes()) == {"test_model_stays_as_it_was"}


def test_the_example_model_has_layers_to_pack() -> None:
    rows = registry.load("preparers", "packed")(layout="blocks").prepare(adapter_for(TinyLM().eval())).prepared()
    assert sum(row["layers"] for row in rows if row["rows"] == "all") == 3
    assert torch.get_num_threads() == 1
