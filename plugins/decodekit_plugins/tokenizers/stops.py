"""Stop strings, found in bytes."""

from __future__ import annotations

from collections.abc import Iterable

from decodekit.errors import InputError

from .chat import whole


class StopMatcher:
    """Finds stop strings in UTF-8 bytes as they come (Aho-Corasick, one table look-up a byte).

    The stop that ends first in the text wins; of several that end together the longest. Neither the order of `stops`
    nor how the bytes are cut into pushes matters. Raises InputError for an empty stop.
    """

    __slots__ = ("_depth", "_ends", "_table", "hit", "pushed", "state", "stops")

    def __init__(self, stops: Iterable[str]) -> None:
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        self.state = 0
        self.pushed = 0
        """Bytes taken so far."""
        self.hit: tuple[str, int] | None = None
        self._table: list[dict[int, int]] = [{}]
        self._depth = [0]
        self._ends: list[str | None] = [None]
        for stop in self.stops:
            if not isinstance(stop, str) or not stop:
                raise InputError(f"stop strings must be strings that are not empty, got {stop!r}")
            node = 0
            for byte in whole(stop).encode():
                if byte not in self._table[node]:
                    self._table[node][byte] = len(self._table)
                    self._table.append({})
                    self._depth.append(self._depth[node] + 1)
                    self._ends.append(None)
                node = self._table[node][byte]
            self._ends[node] = stop
        # Breadth first: a state's fallback, its longest suffix that begins a stop, is complete before the state is.
        queue = [(child, 0) for child in self._table[0].values()]
        for node, fallback in queue:
            queue += [(child, self._table[fallback].get(byte, 0)) for byte, child in self._table[node].items()]
            self._table[node] = {**self._table[fallback], **self._table[node]}
            self._ends[node] = self._ends[node] or self._ends[fallback]

    def step(self, state: int, data: bytes) -> tuple[int, tuple[str, int] | None]:
        """From `state` (0 at the start) over `data`: the new state, and the stop met with the bytes up to its end."""
        table, ends = self._table, self._ends
        for place, byte in enumerate(data, 1):
            state = table[state].get(byte, 0)
            if state and (stop := ends[state]) is not None:
                return state, (stop, place)
        return state, None

    def push(self, data: bytes) -> tuple[str, int] | None:
        """Take more bytes. Once a stop is met, this and all later calls return it and the offset of its begin."""
        if self.hit is None:
            self.state, met = self.step(self.state, data)
            if met is not None:
                self.hit = met[0], self.pushed + met[1] - len(met[0].encode())
        self.pushed += len(data)
        return self.hit

    @property
    def held(self) -> int:
        """How many of the last bytes could still become a stop."""
        return self._depth[self.state]
