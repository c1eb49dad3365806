"""Checks that every part gets what it needs, and says what would do where it does not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import attrs

from .errors import PluginError, Problem
from .registry import registry


@attrs.frozen
class Need:
    """A part and the capabilities (``cache:crop``, ``model:hidden``) it cannot do without."""

    part: str
    capabilities: frozenset[str]


def negotiate(needs: Iterable[Need], offers: Mapping[str, Iterable[str]]) -> Iterator[Problem]:
    """Compare needs with what is offered, a mapping from source (``cache dynamic``) to capabilities."""
    have = {capability for offered in offers.values() for capability in offered}
    for need in needs:
        for capability in sorted(need.capabilities - have):
            kind = capability.partition(":")[0]
            sources = [name for name in offers if name.startswith(kind)] or [f"no {kind}"]
            words = f"needs {capability}, which {' and '.join(sources)} does not offer; {would_do(capability)}"
            yield Problem(need.part, words)


def would_do(capability: str) -> str:
    """Which installed plugins declare a capability (class attribute ``provides``)."""
    group = {"cache": "caches", "model": "models", "strategy": "strategies"}.get(capability.partition(":")[0])
    if group is None:
        return "no installed plugin kind offers it"
    able = []
    for plugin in registry.plugins(group):
        with contextlib.suppress(PluginError):
            if not plugin.disabled and capability in getattr(plugin.load(), "provides", ()):
                able.append(plugin.name)
    setting = {"caches": "cache_implementation", "strategies": "strategy"}.get(group, "another model")
    return f"these do: {', '.join(sorted(able))} (set {setting})" if able else "no installed plugin offers it"
