"""A key/value cache that grows as needed and copies nothing per token."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import attrs
from decodekit import at_least, option

from .buffers import Layer
from .layered import AHEAD, PROVIDES, LayeredCache

if TYPE_CHECKING:
    from decodekit import BindContext


@attrs.frozen
class Dynamic:
    """Keep keys and values of every token, in buffers that grow by half when they are full."""

    provides: ClassVar[frozenset[str]] = PROVIDES
    reserve: int | None = option(
        "Slots to make room for at once; unset: up to the run's greatest length, where it is known.",
        default=None,
        check=at_least(1),
    )

    def bind(self, ctx: BindContext, /) -> DynamicCache:
        """Return an empty cache for one call."""
        return DynamicCache(expected(ctx) if self.reserve is None else self.reserve)


def expected(ctx: BindContext) -> int | None:
    """Slots worth making room for at once; None where nobody knows how long the run gets."""
    return None if ctx.max_length is None else min(ctx.max_length, ctx.prompt_width + AHEAD)


class DynamicCache(LayeredCache):
    """Keys and values of all tokens.

    It keeps everything, for sliding-window layers too: models mask what lies outside the window.
    """

    def __init__(self, reserve: int | None = None) -> None:
        super().__init__()
        self._reserve = reserve or 0

    def make_layer(self, index: int) -> Layer:
        """An empty layer."""
        return Layer(self._reserve)
