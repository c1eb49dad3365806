"""``python -m decodekit`` is the installed ``decodekit`` command, whichever package brings it."""

from __future__ import annotations

from importlib.metadata import distribution

(script,) = distribution("decodekit").entry_points.select(group="console_scripts", name="decodekit")
raise SystemExit(script.load()())
