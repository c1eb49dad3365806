"""Every installed criterion keeps the laws."""

from __future__ import annotations

from typing import Any

import pytest
from decodekit.testing import CriterionContract, Letters, installed
from decodekit_plugins.tokenizers.plugin import PlainTokenizer

# Options with which each plugin ends rows of the kit, by name; several where their forms differ.
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "eos": [{"eos_token_id": 2}, {"eos_token_id": (2, 7, -1)}, {"eos_token_id": ((2,), (7, 2), (), (9,))}],
    "max_length": [{"max_length": 9}, {"max_new_tokens": 5}, {}, {"max_new_tokens": (5, 3, 9, 3)}],
    "max_time": [{"max_time": -1.0}, {"max_time": 5.0, "initial_timestamp": 0.0}, {"max_time": (-1.0, 99, 99, -2)}],
    "confidence": [{"assistant_confidence_threshold": 0.4}],  # it acts in drafts: text/test_criteria_rows.py
    "stop_strings": [{"stop_strings": "c"}, {"stop_strings": ("c", "ab", "fg", "zz")}],
}
CASES = installed("criteria", EXAMPLES)
ALONE = ("test_rows_do_not_depend_on_each_other", "test_padding_does_not_matter")
"""Tests that take a row out of the batch: nothing for options with a value for each row."""


class Bytes(PlainTokenizer):
    """Says which bytes a token adds, so that stop strings take their other way."""

    def token_bytes(self, token: int, /) -> bytes | None:
        return Letters().decode([token]).encode()


def test_there_are_criteria_to_test() -> None:
    assert {"eos", "max_length", "max_time", "stop_strings"} <= {case.plugin.name for case in CASES if case.own}
    untested = {case.plugin.name for case in CASES if case.own} - set(EXAMPLES)
    assert not untested, f"no examples for {', '.join(sorted(untested))}"


class TestEveryCriterion(CriterionContract):
    steps = 24  # so that the default length is reached

    @pytest.fixture(autouse=True, params=CASES, ids=str)
    def _choose(self, request: pytest.FixtureRequest) -> None:
        self.case = request.param
        each = [value for value in self.case.options.values() if isinstance(value, tuple) and len(value) == self.rows]
        if each and request.node.originalname in ALONE:
            pytest.skip("rows are taken out of the batch, and the option has one value for each")

    def make(self) -> Any:
        return self.case.make()

    def test_it_acts(self) -> None:
        if self.case.plugin.name == "confidence":
            assert self.start(self.tokens()).runtime is None  # no draft
            return
        try:
            super().test_it_acts()
        except AssertionError as error:
            if self.case.own:
                raise
            pytest.skip(f"{self.case.plugin.qualified} ends no row with its defaults: {error}")


class TestStopStringsOfBytes(CriterionContract):
    def make(self) -> Any:
        from decodekit_plugins.stopping.strings import StopStringCriteria

        return StopStringCriteria(stop_strings=("c", "ab", "fg"))

    def context(self, *args: Any, **more: Any) -> Any:
        return super().context(*args, tokenizer=Bytes(Letters()), **more)
