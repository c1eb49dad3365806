"""``decodekit keys``: every config key with its type, default, range, owner and meaning."""

from __future__ import annotations

import argparse
from typing import Any

import attrs
from decodekit.converter import field_types, type_name
from decodekit.errors import ConfigError, PluginError, Problem
from decodekit.keys import Key, keys
from decodekit.options import LIBRARY

from .console import aside, dump, table

ALWAYS = ("core", "strategies")
"""Kinds that act unasked, so that the defaults of their options count."""
COLUMNS = ("key", "type", "default", "range", "owner", "doc")


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="decodekit keys",
        description="List every config key, those of installed plugins included, or tell all about one.",
        epilog="example:\n  decodekit keys top_p",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="only this key")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--markdown", action="store_true", help="as a table for documentation")
    args = parser.parse_args(argv)
    wanted = keys.all()
    if args.name:
        owner, _, name = args.name.rpartition(":")
        name = name.removeprefix("--").replace("-", "_")
        wanted = [key for key in wanted if key.name == name and owner in ("", key.distribution)]
        if not wanted:
            raise ConfigError([Problem(args.name, keys.unknown(name))])
    rows = [describe(key) for key in wanted]
    if args.json:
        dump({"keys": rows}, indent=2)
    elif args.markdown:
        print("\n".join(markdown(rows)))
    elif args.name:
        table(("", ""), [(name, _cell(row, name)) for row in rows for name in (*COLUMNS, "error") if row.get(name)])
    else:
        table(COLUMNS, [[_cell(row, name) for name in COLUMNS] for row in rows])
    return int(bool(args.name) and any("error" in row for row in rows))


def describe(key: Key) -> dict[str, Any]:
    """Type, default, range and documentation of a key, or the error that its owner gives. Loads the owner."""
    row: dict[str, Any] = {"key": key.name, "kind": key.kind, "owner": key.owner}
    try:
        keys.find(key.name)
    except PluginError as error:  # a clash
        row["error"] = str(error)
        return row
    try:
        with aside():
            cls = key.load()
            field = attrs.fields_dict(cls)[key.field]
            kind = type_name(field_types(cls)[key.field])
    except (PluginError, KeyError, attrs.exceptions.NotAnAttrsClassError) as error:
        return {**row, "error": str(error)}
    except Exception as error:  # the owner's annotations can fail in any way: only its own row suffers
        return {**row, "error": f"{type(error).__name__}: {error}"}
    default = None if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]
    alone = key.kind not in ALWAYS and len(keys.of(key.plugin.value)) < 2
    if key.name in LIBRARY and key.distribution == "decodekit":
        default = LIBRARY[key.name]
    elif default is attrs.NOTHING or alone:  # the plugin acts only where its key is set: then this is no default
        default = None
    check = field.validator
    return {
        **row,
        "type": kind,
        "default": default,
        "per_prompt": bool(field.metadata.get("per_row")),
        "range": str(check) if type(check).__module__.startswith("decodekit") else "",
        "doc": field.metadata.get("doc", ""),
    }


def _cell(row: dict[str, Any], name: str) -> str:
    if name == "doc" and "error" in row:
        return f"{'CLASH' if 'owned by several' in row['error'] else 'BROKEN'}: {row['error']}"
    value = row.get(name)
    return "" if value is None else value if isinstance(value, str) and name != "default" else repr(value)


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a table."""
    lines = ["| Key | Type | Default | Range | Owner | Meaning |", "| --- | --- | --- | --- | --- | --- |"]
    for row in rows:
        cells = [_cell(row, name).replace("|", "\\|").replace("\n", " ") for name in COLUMNS]
        for place in (0, 2, 4):
            cells[place] = f"`{cells[place]}`" if cells[place] else ""
        lines.append(f"| {' | '.join(cells)} |")
    return lines
