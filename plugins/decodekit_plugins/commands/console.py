"""Tables and JSON for commands: for people on a terminal, plain columns in a pipe, valid JSON for machines."""

from __future__ import annotations

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from decodekit.converter import plain


def aside() -> contextlib.AbstractContextManager[Any]:
    """While held, what plugins print when they load or work goes to stderr, so that it cannot spoil a result."""
    return contextlib.redirect_stdout(sys.stderr)


def shown(value: Any) -> str:
    """A value as a person reads it: nothing for None."""
    return "" if value is None else value if isinstance(value, str) else str(value)


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "") -> None:
    """Print rows under `columns`; without any row it says so.

    In a pipe nothing is cut or wrapped and columns are at least two spaces apart, so that grep and awk can work.
    """
    cells = [[shown(value) for value in row] for row in rows]
    if not sys.stdout.isatty():
        print("\n".join(_columns(columns, cells, title)))
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Cells are Text: plugins write what they like into names and messages, and rich must not take it for markup.
    made = Table(box=SIMPLE, title=Text(title, "bold") if title else None, title_justify="left")
    for place, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=place == 0)
    for row in cells:
        made.add_row(*map(Text, row))
    Console().print(made if cells else Text(f"{title}: none" if title else "none"))


def _columns(columns: Sequence[str], cells: list[list[str]], title: str) -> list[str]:
    if not cells:
        return [f"{title}: none" if title else "none"]
    lines = [list(columns), *([" ".join(cell.split()) for cell in row] for row in cells)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    made = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return [title, *made] if title else made


def dump(data: Any, *, indent: int | None = None) -> None:
    """Print one JSON document and flush it, so that a later failure loses nothing that was finished."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(_jsonable(data), ensure_ascii=not utf8, indent=indent, allow_nan=False), flush=True)


def _jsonable(value: Any) -> Any:
    value = plain(value)
    if isinstance(value, Mapping):
        return {k if isinstance(k, str) else str(k): _jsonable(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinity
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)
