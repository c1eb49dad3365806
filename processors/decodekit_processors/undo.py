"""What taking accepted tokens back needs: the state of each row before them."""

from __future__ import annotations

from collections import deque

import attrs
from torch import Tensor


@attrs.frozen
class _Moved:
    rows: Tensor


class Past:
    """States [rows, ...] of earlier steps, the newest last. That rows changed places in between costs nothing until
    tokens are taken back.

    most: how many steps are kept; None: all.
    """

    __slots__ = ("_entries", "_most", "_steps")

    def __init__(self, most: int | None = None) -> None:
        self._entries: deque[Tensor | _Moved | None] = deque()
        self._steps = 0
        self._most = most

    def push(self, state: Tensor | None) -> None:
        """Keep the state before a step; it must not be written to any more."""
        self._entries.append(state)
        self._steps += 1
        while self._most is not None and self._steps > self._most:
            self._steps -= not isinstance(self._entries.popleft(), _Moved)

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on with the past of former row `rows[i]`."""
        if not self._steps:
            return
        last = self._entries[-1]
        if isinstance(last, _Moved):  # one move instead of two
            self._entries[-1] = _Moved(last.rows[rows])
        else:
            self._entries.append(_Moved(rows))

    def need(self, steps: int) -> None:
        """Raise ValueError where so many steps cannot be taken back."""
        if steps > self._steps:
            kept = "there were" if self._steps != self._most else "kept are the last"
            raise ValueError(f"cannot take {steps} steps back: {kept} {self._steps}")

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
