"""The first hook is fine, the second asks for an argument that does not exist."""

from __future__ import annotations

from typing import Any

from decodekit import hookimpl

SEEN: list[str] = []


@hookimpl
def config_translated(settings: Any) -> None:
    SEEN.append("config_translated")


@hookimpl
def run_finished(pipeline: Any, output: Any, mood: Any) -> None:
    SEEN.append("run_finished")
