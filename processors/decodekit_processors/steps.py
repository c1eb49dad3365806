"""What happens at one step of each row, and at no other."""

from __future__ import annotations

from typing import Any

from decodekit.context import BindContext
from torch import Tensor

from .edits import Editing


class AtStep(Editing):
    """A runtime that acts on row i when it has `steps[i]` new tokens, int64 [rows]."""

    __slots__ = ("_any", "_ctx", "_options", "_steps")

    def __init__(self, options: Any, ctx: BindContext, steps: Tensor) -> None:
        self._options = options
        self._ctx = ctx
        self._steps = steps
        self._any = frozenset(steps.tolist())

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i acts when former row `rows[i]` would have."""
        self._steps = self._steps[rows]

    def _act(self, scores: Tensor, rows: Tensor | None, own: bool) -> Tensor:
        """Scores [B, V] changed in `rows` bool [B, 1], None: in all; new ones unless `own`."""
        raise NotImplementedError

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return scores [B, V], changed in the rows whose step it is."""
        new = input_ids.shape[-1] - self._ctx.prompt_width
        if new not in self._any:
            return scores
        return self._act(scores, None if len(self._any) == 1 else (self._steps == new)[:, None], own)
