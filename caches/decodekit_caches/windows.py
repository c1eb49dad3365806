"""Caches that keep of each layer what its attention can see: a window of the newest tokens, or everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import attrs
from decodekit import at_least, option

from .buffers import Layer
from .dynamic import expected
from .layered import PROVIDES, LayeredCache
from .sliding import SlidingLayer

if TYPE_CHECKING:
    from decodekit import BindContext

REWIND = 32
"""Tokens of earlier passes that can always be taken back: more than any strategy drafts at once."""


@attrs.frozen
class Hybrid:
    """Keep of each layer what the model's attention sees: a window where it slides, else every token."""

    provides: ClassVar[frozenset[str]] = PROVIDES
    rewind: int = option(
        "Tokens beyond its window that a sliding layer keeps, so that as many can be taken back.",
        default=REWIND,
        check=at_least(0),
    )

    def bind(self, ctx: BindContext, /) -> HybridCache:
        """Return an empty cache for one call. Layers that the model says nothing of keep every token."""
        return HybridCache(ctx.spec.layer_windows or (), rewind=self.rewind, reserve=expected(ctx))


@attrs.frozen
class SlidingWindow:
    """Keep of every layer the newest tokens only, as many as its attention sees."""

    provides: ClassVar[frozenset[str]] = PROVIDES
    window: int | None = option(
        "Tokens that each layer sees, the newest included; unset: what the model says. Fewer than it sees without a "
        "cache change its answers: it forgets.",
        default=None,
        check=at_least(1),
    )
    rewind: int = option(
        "Tokens beyond its window that a layer keeps, so that as many can be taken back.",
        default=REWIND,
        check=at_least(0),
    )

    def bind(self, ctx: BindContext, /) -> HybridCache:
        """Return an empty cache for one call. Raises ValueError where a layer sees everything, or nobody knows."""
        windows = ctx.spec.layer_windows
        if self.window is not None:
            return HybridCache(windows or (), every=self.window, rewind=self.rewind, reserve=expected(ctx))
        fix = (
            "set cache_implementation='hybrid', which keeps what each layer needs, or "
            "cache_config={'window': n} to have all layers forget what lies further back"
        )
        if not windows:
            raise ValueError(f"needs layers with a window, and this model says nothing of its layers; {fix}")
        whole = [index for index, window in enumerate(windows) if window is None]
        if whole:
            few = ", ".join(map(str, whole[:4])) + (" and others" if len(whole) > 4 else "")
            raise ValueError(f"needs layers with a window, and layer {few} of this model sees every token; {fix}")
        return HybridCache(windows, rewind=self.rewind, reserve=expected(ctx))


class HybridCache(LayeredCache):
    """Layers with a window keep it, the others everything.

    windows: tokens that each layer sees, None: all; layers beyond it see all. every: the window of all layers.
    rewind: tokens of earlier passes that can always be taken back. reserve: slots to make room for at once.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        *,
        every: int | None = None,
        rewind: int = REWIND,
        reserve: int | None = None,
    ) -> None:
        super().__init__()
        self._windows = tuple(windows) if every is None else (every,) * len(windows)
        self._every, self._rewind, self._reserve = every, rewind, reserve or 0

    def make_layer(self, index: int) -> Layer:
        """An empty layer of the kind that layer number `index` needs."""
        window = self._windows[index] if index < len(self._windows) else self._every
        return Layer(self._reserve) if window is None else SlidingLayer(window, self._rewind, self._reserve)

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers forget, those included that nothing was written to yet."""
        rest = [layer.is_sliding for layer in self.layers[len(self._windows) :]]
        return [window is not None for window in self._windows] + rest
