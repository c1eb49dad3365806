"""Which installed plugins a suite is run over, and with which options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from decodekit.errors import DecodekitError
from decodekit.registry import Plugin, registry


@attrs.frozen
class Installed:
    """One plugin with options to test it with."""

    plugin: Plugin
    options: Mapping[str, Any]
    own: bool
    """Of the distribution whose tests these are: that it cannot be tested is an error, not a reason to skip it."""

    def __str__(self) -> str:
        return f"{self.plugin.qualified} {dict(self.options)}"

    def make(self) -> Any:
        """The options object. Another distribution's plugin that cannot be made without options skips the test."""
        try:
            return self.plugin.load()(**self.options)
        except (TypeError, ValueError, DecodekitError) as error:
            name = f"{self.plugin.qualified} {self.plugin.version}"
            if self.own:
                raise AssertionError(f"add options for {name} to the examples: {error}") from error
            import pytest

            pytest.skip(f"{name} is of another distribution and cannot be made with its defaults: {error}")


def installed(
    kind: str, examples: Mapping[str, Sequence[Mapping[str, Any]]], distribution: str = "decodekit"
) -> list[Installed]:
    """Every plugin of a kind that is not switched off: with the examples of its name where it is of `distribution`,
    with its defaults where it has none or is somebody else's."""
    return [
        Installed(plugin, options, own)
        for plugin in registry.plugins(kind)
        if not plugin.disabled
        for own in [plugin.distribution == distribution]
        for options in (examples.get(plugin.name, [{}]) if own else [{}])
    ]
