"""Stop after a time."""

from __future__ import annotations

import time
from typing import Any

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import between, option
from torch import Tensor


@attrs.frozen(slots=False)
class MaxTimeCriteria:
    """End every row with the first token that is done after `max_time` seconds.

    The clock starts with each call of generate, or at `initial_timestamp` (seconds, as `time.time()` gives them). Used
    directly it starts when the object is made. At least one token is made, however short the time.
    """

    max_time: float = option("Seconds after which no further token is begun.", check=between(-torch.inf, torch.inf))
    initial_timestamp: float | None = option("Start of the clock; unset: the start of each call.", default=None)

    def __attrs_post_init__(self) -> None:
        # Not a field: when an object was made is no option of it.
        object.__setattr__(self, "_made", time.monotonic())

    def bind(self, ctx: BindContext, /) -> _MaxTime:
        """Start the clock."""
        return _MaxTime(self.max_time, self._start(time.monotonic()))

    def _start(self, now: float) -> float:
        if self.initial_timestamp is None:
            return now
        return time.monotonic() - (time.time() - self.initial_timestamp)

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor:
        """Bool [B], the same for all rows."""
        made: float = self.__dict__["_made"]
        done = _MaxTime(self.max_time, self._start(made))(input_ids, scores) is not False
        return input_ids.new_full((input_ids.shape[0],), done, dtype=torch.bool)


class _MaxTime:
    __slots__ = ("max_time", "start")

    def __init__(self, max_time: float, start: float) -> None:
        self.max_time = max_time
        # Monotonic: a clock that is set while a text is generated must not end it.
        self.start = start

    def __repr__(self) -> str:
        return f"MaxTimeCriteria(max_time={self.max_time})"

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor | bool:
        if time.monotonic() - self.start <= self.max_time:
            return False
        return input_ids.new_ones(input_ids.shape[0], dtype=torch.bool)
