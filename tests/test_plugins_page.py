"""The plugins on docs/plugins.md are what their kinds' conformance suites ask for."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from decodekit import generate
from decodekit.testing import CriterionContract, ProcessorContract, StrategyContract, TinyLM
from decodekit.testing.support import results

PAGE = Path(__file__).parents[1] / "docs" / "plugins.md"
IMPORTS = """
from typing import ClassVar
import attrs, decodekit, torch
from threading import Thread
from torch import Tensor
from decodekit import Phase, Traits, at_least, between, greater_than, option
from decodekit.testing import *
"""


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """A module of all classes and functions on the page."""
    made = types.ModuleType("decodekit_page")
    sys.modules[made.__name__] = made  # attrs resolves annotations through it
    exec(IMPORTS, vars(made))
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M):
        if not block.startswith(("streamer =", "from decodekit.registry")):  # uses, not definitions
            exec(block, vars(made))
    yield made
    del sys.modules[made.__name__]


def failures(suite: type, make: Any, **keys: Any) -> dict[str, str]:
    mine = type("Mine", (suite,), {"make": lambda self: make(), **keys})
    found = results(mine())
    assert "ok" in found.values()
    return {name: verdict for name, verdict in found.items() if verdict not in ("ok", "skipped")}


@pytest.mark.filterwarnings("error")
def test_the_processor(page: Any) -> None:
    assert failures(ProcessorContract, lambda: page.Sharpen(2.0)) == {}


@pytest.mark.filterwarnings("error")
def test_the_criterion(page: Any) -> None:
    assert failures(CriterionContract, lambda: page.AtMost(tokens=10)) == {}


@pytest.mark.filterwarnings("error")
def test_the_strategy(page: Any) -> None:
    assert failures(StrategyContract, page.Greedy) == {}


def test_the_streamer(page: Any, capsys: pytest.CaptureFixture[str]) -> None:
    generate(TinyLM(), [[1, 2], [3]], max_new_tokens=(3, 5), streamer=page.Lengths())
    assert capsys.readouterr().out == "row 0: 3 new tokens\nrow 1: 5 new tokens\n"


def test_suites_are_made_as_the_page_says(page: Any) -> None:
    for name in ("TestSharpen", "TestAtMost"):
        assert attrs.has(type(getattr(page, name)().make()))
