"""Which form of a weight is fastest on this machine: found out for each shape by running it for a moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from .layouts import Blocked, Columns, Plain, usable
from .streamed import Streamed

ROWS = (1, 4, 8, 24, 128)
"""Numbers of rows that are measured: a token, a few beams, a batch, drafts, a prompt."""
BY_LENGTH = (0, 0, 1, 1, 2, 3, 3, 4)
"""By the bit length of a number of rows, which of `ROWS` stands for it."""
FORMS: dict[str, type[Plain]] = {"blocks": Blocked, "columns": Columns, "kernel": Streamed}
LEAST = 1 << 15
"""Weights below this size are read out of the processor's own caches, in any form."""
SAMPLE = 1 << 24
"""Weights that a shape is measured on: more than a core's caches hold, since a model finds none of its own there."""
MARGIN = 0.9
"""Only what takes this share of the plain layer's time counts as faster: less may be chance."""
REPEATS = 3
BUDGET = 0.2
"""Seconds to measure a shape in: where others use the processor, fewer weights are tried instead of waiting long."""


@attrs.frozen
class Choice:
    """The form for one shape."""

    form: type[Plain] | None
    """None: the layer as it is."""
    picks: tuple[bool, ...] = (True,) * len(BY_LENGTH)
    """By the bit length of the number of rows: whether this form is faster than the layer as it is."""
    share: float = 1.0
    """Time that it takes over the plain layer's, the mean over `ROWS` of the faster of both."""
    whole: float = 1.0
    """The same where this form must serve all numbers of rows."""


PLAIN = Choice(None, (False,) * len(BY_LENGTH))
_known: dict[Any, tuple[Choice, Choice]] = {}


def fixed(form: type[Plain], dtype: torch.dtype) -> Choice:
    """One form for all numbers of rows; the layer as it is where this machine cannot run it."""
    return Choice(form) if usable(form, dtype) else PLAIN


def measured(weights: Sequence[Tensor], only: bool) -> Choice:
    """The form that serves layers with these weights [N, K] of one shape and type best.

    only: whether the original goes away, so that the form must do for every number of rows.
    Measured once in a process for each shape, type and number of threads.
    """
    first = weights[0]
    if first.numel() < LEAST:
        return PLAIN
    key = tuple(first.shape), first.dtype, torch.get_num_threads()
    if key not in _known:
        with torch.no_grad():
            parts = [weight[: max(512, SAMPLE // weight.shape[1])] for weight in weights]
            _known[key] = _measure(parts[: max(1, SAMPLE // parts[0].numel())])
    return _known[key][only]


def _measure(weights: Sequence[Tensor]) -> tuple[Choice, Choice]:
    """The best form beside the original, and the best one that stands alone."""
    dtype = weights[0].dtype
    inputs = [torch.randn(rows, weights[0].shape[1]).to(dtype) for rows in ROWS]
    each = sum(_seconds([lambda x: F.linear(x, weights[0])], x) for x in inputs) * REPEATS * len(FORMS)
    weights = weights[: max(1, int(BUDGET / each))]
    stock = [_seconds([lambda x, w=w: F.linear(x, w) for w in weights], x) for x in inputs]  # type: ignore[misc]
    beside = alone = PLAIN
    for form in (Blocked, Columns):
        if not usable(form, dtype):
            continue
        kernels = [form(weight) for weight in weights]
        shares = [
            _seconds([lambda x, k=k: k(x, None) for k in kernels], x) / base  # type: ignore[misc]
            for x, base in zip(inputs, stock, strict=True)
        ]
        better = [share <= MARGIN for share in shares]
        share = sum(min(1.0, share) if won else 1.0 for share, won in zip(shares, better, strict=True)) / len(shares)
        whole = sum(shares) / len(shares)
        found = Choice(form, tuple(better[place] for place in BY_LENGTH), share, whole)
        beside = found if any(better) and share < beside.share else beside
        alone = attrs.evolve(found, picks=Choice(form).picks) if whole < min(1.0, alone.whole) else alone
    return beside, alone


def _seconds(calls: Sequence[Callable[[Tensor], Any]], x: Tensor) -> float:
    """The least time of a round of calls: whatever else the machine does only adds to it."""
    best, began = float("inf"), time.perf_counter()
    for _ in range(REPEATS):
        start = time.perf_counter()
        for call in calls:
            call(x)
        best = min(best, time.perf_counter() - start)
        if time.perf_counter() - began > BUDGET / len(ROWS):
            break
    return best
