"""``decodekit explain``: the pipeline of a call, without running it."""

from __future__ import annotations

from typing import Any

from .console import aside, dump, shown, table
from .options import open_model, parser, read, shape


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    made = parser(
        "explain",
        "Show which parts a call would use, in which order and why, and what it would leave out. Nothing is run.",
        "decodekit explain --do-sample --top-p 0.9 --repetition-penalty 1.1",
    )
    args, keys = read(made, argv)
    if len(args.prompts) > 1:
        made.error("explain takes one prompt; quote it")
    model = open_model(args)
    # Without a prompt one token stands for it: which parts take part does not depend on the text.
    prompt = shape(args, args.prompts[0]) if args.prompts else [0]
    with aside():
        pipeline = model.plan(prompt, **keys)
        described: dict[str, Any] = pipeline.describe()
    if args.json:
        dump(described, indent=2)
    else:
        _show(described)
    return 0


def _show(described: dict[str, Any]) -> None:
    """Facts first, then a table for everything that has rows."""
    rows = {name: value for name, value in described.items() if isinstance(value, (list, dict))}
    table(("part", "chosen"), [(name, shown(value) or "none") for name, value in described.items() if name not in rows])
    for name, value in rows.items():
        print()
        _table(name.replace("_", " "), value)


def _table(title: str, value: Any) -> None:
    if isinstance(value, list):
        columns = list(dict.fromkeys(column for row in value for column in row))
        table(["", *columns], [[place, *map(row.get, columns)] for place, row in enumerate(value, 1)], title=title)
        return
    nested = all(isinstance(row, dict) for row in value.values())
    columns = list(dict.fromkeys(column for row in value.values() for column in row)) if nested else [""]
    table(["", *columns], [[k, *(map(v.get, columns) if nested else [v])] for k, v in value.items()], title=title)
