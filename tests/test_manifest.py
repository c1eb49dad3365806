"""What pyproject.toml declares is what is installed, and all of it exists."""

from __future__ import annotations

from collections import Counter
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import attrs
import pytest
from decodekit.keys import keys
from decodekit.registry import KINDS, TABLES, registry
from decodekit_plugins.commands.keys import describe

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).parents[1]
DECLARED: dict[str, dict[str, str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
INSTALLED = [entry for entry in distribution("decodekit").entry_points if entry.group.startswith("decodekit.")]


def rows(*groups: str) -> list[tuple[str, str, str]]:
    return [(group, name, value) for group in groups for name, value in DECLARED.get(group, {}).items()]


PLUGINS = rows(*(f"decodekit.{kind}" for kind in KINDS))


def test_the_installed_tables_are_those_of_pyproject() -> None:
    declared = {(group, name, value) for group, table in DECLARED.items() for name, value in table.items()}
    installed = {(entry.group, entry.name, entry.value) for entry in INSTALLED}
    assert installed == declared, "reinstall with `pip install -e .` after changing entry points"


def test_every_table_is_one_that_the_registry_reads() -> None:
    assert set(DECLARED) <= {f"decodekit.{name}" for name in (*KINDS, *TABLES)}


@pytest.mark.parametrize(("group", "name", "value"), PLUGINS, ids=lambda item: str(item).removeprefix("decodekit."))
def test_every_plugin_loads(group: str, name: str, value: str) -> None:
    plugin = registry.find(group.removeprefix("decodekit."), f"decodekit:{name}")
    assert plugin.value == value
    loaded: Any = plugin.load()
    assert callable(loaded) or plugin.kind == "hooks"
    assert loaded.__doc__


@pytest.mark.parametrize(("group", "name", "value"), rows("decodekit.keys"), ids=lambda item: str(item))
def test_every_key_is_a_field_of_a_plugin(group: str, name: str, value: str) -> None:
    target, _, field = value.rpartition(".")
    owners = [row for row in PLUGINS if row[2] == target]
    assert len(owners) == 1, f"{target} must be exactly one plugin"
    key = next(key for key in keys.all() if key.name == name and key.distribution == "decodekit")
    assert field in attrs.fields_dict(key.load())
    described = describe(key)
    assert described["doc"], f"the field {field} of {target} needs its sentence"
    assert "error" not in described


@pytest.mark.parametrize(("group", "name", "value"), rows("decodekit.adapts"), ids=lambda item: str(item))
def test_every_claimed_class_exists_and_its_plugin_too(group: str, name: str, value: str) -> None:
    assert value in {**DECLARED["decodekit.models"], **DECLARED.get("decodekit.tokenizers", {})}
    module, _, cls = name.rpartition(".")
    if module.split(".")[0] == "transformers":
        pytest.importorskip("transformers")
    found = getattr(__import__(module, fromlist=[cls]), cls)
    assert isinstance(found, type)
    assert f"{found.__module__}.{found.__qualname__}" == name


def test_no_name_is_used_twice() -> None:
    for group in {entry.group for entry in INSTALLED}:
        names = Counter(entry.name for entry in INSTALLED if entry.group == group)
        assert max(names.values()) == 1, group
    core = {key.name for key in keys.all() if key.kind == "core"}
    assert not core & set(DECLARED["decodekit.keys"]), "a core key cannot be owned by a plugin, too"
