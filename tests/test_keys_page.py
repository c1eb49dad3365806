"""The page of all keys is written from the code, and no key of the reference is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from decodekit.keys import keys
from decodekit.options import REFERENCE

HERE = Path(__file__).parents[1]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("keys_page", HERE / "docs" / "keys.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date() -> None:
    words = "run: python docs/keys.py"
    assert (HERE / "docs" / "keys.md").read_text(encoding="utf-8") == script().page(), words


def test_every_key_of_the_reference_is_on_the_page() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = {name for name in vars(transformers.GenerationConfig()) if not name.startswith("_")}
    page = script().page()
    missing = {name for name in theirs - {"transformers_version"} if f"`{name}`" not in page}
    assert not missing
    assert theirs - {"transformers_version"} <= {*keys.names(), *REFERENCE.split()}
