"""What a plugin states about itself. Every claim is tested by `decodekit.testing`."""

from __future__ import annotations

import enum
from typing import Any

import attrs


class Phase(enum.IntEnum):
    """Where in the chain a logits processor runs. Closed: a new need is a new name here, not a number."""

    GUIDE = 0
    """Mixes in other forward passes (classifier-free guidance)."""
    BIAS = 1
    """Adds to chosen tokens (sequence bias, logit bias)."""
    PENALTY = 2
    """Looks at history and makes tokens less or more likely."""
    CONSTRAIN = 3
    """Forbids or forces tokens."""
    CUSTOM = 4
    """Objects the caller passed that say nothing about themselves."""
    SCALE = 5
    """Reshapes the whole distribution (temperature)."""
    TRUNCATE = 6
    """Drops unlikely tokens (top-k, top-p, min-p)."""
    WATERMARK = 7
    """Marks what is left."""
    NORMALIZE = 8
    """Makes log-probabilities again."""


@attrs.frozen
class Traits:
    """Claims of a plugin class, held in its ClassVar ``traits``.

    phase: where in the chain it runs.
    after, before: plugin names inside the same phase it must follow or precede. A name that is not active, or is
        active in another phase, has no effect: the phases are in order already.
    conflicts: plugin names it cannot run with.
    needs: capabilities it needs from model, cache or strategy (``cache:crop``).
    reads_history: its result depends on `input_ids`.
    keeps_argmax: it never changes which token is the likeliest.
    only_sampling: it matters only where tokens are drawn, though it may change which token is the likeliest: where it
        was configured, it is left out of runs that take the likeliest. What keeps the argmax in phase SCALE or TRUNCATE
        is left out of them anyway.
    rowwise: the result of a row depends on that row alone.
    pure: it writes to no argument and keeps no state between calls; None means unknown.
    graph_safe: it runs inside a captured graph (no host synchronisation, fixed shapes).
    """

    phase: Phase = Phase.CUSTOM
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    reads_history: bool = True
    keeps_argmax: bool = False
    only_sampling: bool = False
    rowwise: bool = True
    pure: bool | None = None
    graph_safe: bool = False


UNKNOWN = Traits()
"""What is assumed of an object that states nothing."""


def traits_of(plugin: Any) -> Traits:
    """The traits of a plugin class or object; `UNKNOWN` where it states none."""
    found = getattr(plugin, "traits", None)
    return found if isinstance(found, Traits) else UNKNOWN
