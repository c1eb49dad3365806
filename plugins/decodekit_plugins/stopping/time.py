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
    directly it starts when the object is made. At least one token is made, however short the time. `max_time` may be
    one number for each prompt.
    """

    max_time: float | tuple[float, ...] = option(
        "Seconds after which no further token is begun.", check=between(-torch.inf, torch.inf), per_row=True
    )
    initial_timestamp: float | None = option("Start of the clock; unset: the start of each call.", default=None)

    def __attrs_post_init__(self) -> None:
        # Not a field: when an object was made is no option of it.
        object.__setattr__(self, "_made", time.monotonic())

    def bind(self, ctx: BindContext, /) -> _MaxTime | _MaxTimeRows:
        """Start the clock. Raises ValueError for more or fewer times than prompts."""
        start, limit = self._start(time.monotonic()), self.max_time
        return _MaxTimeRows(ctx.per_row(limit)[:, 0], start) if isinstance(limit, tuple) else _MaxTime(limit, start)

    def _start(self, now: float) -> float:
        if self.initial_timestamp is None:
            return now
        return time.monotonic() - (time.time() - self.initial_timestamp)

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor:
        """Bool [B], the same for all rows unless there is a time for each.

        Raises ValueError where there are more or fewer times than rows.
        """
        start, limit, rows = self._start(self.__dict__["_made"]), self.max_time, input_ids.shape[0]
        if not isinstance(limit, tuple):
            done = _MaxTime(limit, start)(input_ids, scores) is not False
            return input_ids.new_full((rows,), done, dtype=torch.bool)
        if len(limit) != rows:
            raise ValueError(f"max_time has {len(limit)} values for {rows} rows; give one number, or one for each")
        times = torch.tensor(limit, dtype=torch.float64, device=input_ids.device)
        return torch.as_tensor(_MaxTimeRows(times, start)(input_ids, scores)).expand(rows)


class _MaxTime:
    __slots__ = ("max_time", "start")
    newest_only = True

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


class _MaxTimeRows:
    """A time for each row, float64 [B]."""

    __slots__ = ("first", "max_time", "start")
    newest_only = True

    def __init__(self, max_time: Tensor, start: float) -> None:
        self.max_time = max_time
        self.first = float(max_time.min())
        self.start = start

    def __repr__(self) -> str:
        return f"MaxTimeCriteria(max_time={self.max_time.tolist()})"

    def reorder(self, rows: Tensor, /) -> None:
        self.max_time = self.max_time[rows]

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor | bool:
        gone = time.monotonic() - self.start
        return False if gone <= self.first else self.max_time < gone
