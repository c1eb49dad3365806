"""Writes down what happens around a run, by every hook there is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from decodekit import hookimpl

DIARY: list[str] = []


@hookimpl
def config_translated(settings: Any) -> None:
    DIARY.append(f"config_translated {settings.get('do_sample')}")


@hookimpl
def pipeline_assembled(pipeline: Any) -> None:
    DIARY.append(f"pipeline_assembled {pipeline.strategy_name}")


@hookimpl
def run_wrapped(pipeline: Any) -> contextlib.AbstractContextManager[None]:
    @contextlib.contextmanager
    def page() -> Iterator[None]:
        DIARY.append("run opened")
        try:
            yield
        finally:
            DIARY.append("run closed")

    return page()


@hookimpl
def run_finished(pipeline: Any, output: Any) -> None:
    DIARY.append(f"run_finished {tuple(output.sequences.shape)}")


@hookimpl(optionalhook=True)
def cli_commands(subparsers: Any) -> None:
    subparsers.add_parser("diary").set_defaults(run=lambda args: print(DIARY) or 0)


@hookimpl
def report(pipeline: Any) -> dict[str, Any]:
    return {"diary": "kept"}
