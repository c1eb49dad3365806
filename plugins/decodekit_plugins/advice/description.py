"""A pipeline as plain data."""

from __future__ import annotations

import contextlib
from typing import Any

from decodekit.chain import Part
from decodekit.hooks import hookimpl
from decodekit.pipeline import Pipeline


@hookimpl(tryfirst=True)
def report(pipeline: Pipeline) -> dict[str, Any]:
    """What runs, in which order, who owns it and why it is there."""

    def row(part: Part) -> dict[str, Any]:
        options = type(part.runtime).__name__
        with contextlib.suppress(Exception):  # a plugin's repr can fail, too
            options = options if " at 0x" in (text := repr(part.runtime)) else text
        return {"name": part.name, "owner": part.owner, "why": part.why, "options": options}

    values = sorted(pipeline.settings.values.items())
    prepared = getattr(pipeline.adapter, "prepared", None)
    return {
        "model": type(getattr(pipeline.adapter, "model", pipeline.adapter)).__name__,
        "adapter": type(pipeline.adapter).__name__,
        "strategy": pipeline.strategy_name,
        "selector": pipeline.selector_name,
        "cache": pipeline.cache_name,
        "processors": [{**row(part), "phase": part.traits.phase.name} for part in pipeline.chain.parts],
        "criteria": [row(part) for part in pipeline.criteria],
        "candidates": [row(part) for part in pipeline.candidates],
        "streamer": type(pipeline.streamer).__name__ if pipeline.streamer is not None else None,
        **({"prepared": prepared()} if callable(prepared) else {}),
        "left_out": dict(pipeline.left_out),
        "settings": {k: {"value": v.value, "origin": v.origin, "owner": v.owner} for k, v in values},
        "unknown_keys": dict(pipeline.settings.unknown),
    }
