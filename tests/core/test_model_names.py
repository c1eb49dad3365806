"""`load` by name: what is offered can be opened, and a plugin's name is not taken for a model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from decodekit import PluginNotFound, load


@pytest.mark.parametrize("name", ["module", "native", "transformers"])
def test_plugins_that_need_a_folder_or_an_object_say_so(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PluginNotFound) as caught:
        load(name)
    words = f"no models plugin can open '{name}'; '{name}' is a models plugin itself: give it a folder with config.json"
    assert str(caught.value).startswith(words)
    assert str(caught.value).endswith("or your own model object")
    (tmp_path / name).mkdir()  # a folder without a model
    with pytest.raises(PluginNotFound, match="is a models plugin itself"):
        load(name)


@pytest.mark.parametrize("ref", ["./no/such/folder", "modul", "nativ"])
def test_only_names_that_open_are_offered(ref: str) -> None:
    with pytest.raises(PluginNotFound) as caught:
        load(ref)
    assert "or one of: bundled" in str(caught.value)
    for name in ("native", "module,", "did you mean"):
        assert name not in str(caught.value).partition(";")[2]


def test_a_third_party_name_that_opens_is_offered_and_opens(register: Any, parrot: Any) -> None:
    class Zoo:
        def adapt(self, model: Any, /) -> None:
            return None

        def opens(self, ref: str, /) -> bool:
            return ref in ("zoo", "zoo/parrot")

        def open(self, ref: str, /, **options: Any) -> Any:
            return parrot()

    register("models", "zoo", Zoo)
    assert load("zoo").generate is not None
    assert load("zoo/parrot").adapter.spec.vocab_size == parrot().spec.vocab_size
    with pytest.raises(PluginNotFound, match=r"'zooo'; did you mean zoo\?"):
        load("zooo")
