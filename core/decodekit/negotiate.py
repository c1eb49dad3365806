"""Checks that every part gets what it needs, and says what would do where it does not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs

from .errors import Problem
from .hooks import hooks


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
            words = f"needs {capability}, which {' and '.join(sources)} does not offer"
            does = hooks.call.would_do(capability=capability)
            yield Problem(need.part, f"{words}; {does}" if does else words)
