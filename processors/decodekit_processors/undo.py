"""What taking accepted tokens back needs: the state of each row before them."""

from __future__ import annotations

import attrs
from torch import Tensor


@attrs.frozen
class _Moved:
    rows: Tensor


class Past:
    """States [rows, ...] of earlier steps, the newest last. That rows changed places in between costs nothing until
    tokens are taken back."""

    __slots__ = ("_entries", "_steps")

    def __init__(self) -> None:
        self._entries: list[Tensor | _Moved | None] = []
        self._steps = 0

    def push(self, state: Tensor | None) -> None:
        """Keep the state before a step; it must not be written to any more."""
        self._entries.append(state)
        self._steps += 1

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on with the past of former row `rows[i]`."""
        if self._steps:
            self._entries.append(_Moved(rows))

    def need(self, steps: int) -> None:
        """Raise ValueError where so many steps cannot be taken back."""
        if steps > self._steps:
            raise ValueError(f"cannot take {steps} steps back: there were {self._steps}")

    def back(self, steps: int) -> Tensor | None:
        """Forget the last `steps` (1 or more) steps and return the state before them, in today's order of rows.

        Raises ValueError where there were not so many.
        """
        self.need(steps)
        self._steps -= steps
        moved: Tensor | None = None
        state: Tensor | None = None
        while steps:
            entry = self._entries.pop()
            if isinstance(entry, _Moved):
                moved = entry.rows if moved is None else entry.rows[moved]
            else:
                state, steps = entry, steps - 1
        if moved is not None:
            state = None if state is None else state[moved]
            self.reorder(moved)
        return state
