"""XTC: now and then, exclude the top choices."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext, RowRandom, mix_seed
from decodekit.fields import between, option
from decodekit.shortlist import Shortlist
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import numbers, of_rows
from .entropy import level
from .nucleus import mass, weights
from .rowwise import resorted
from .undo import Past

_STREAM = 2
"""Which of the streams that a row's seed gives: 0 is that of its tokens, 1 that of further copies of a prompt."""


def _choices(scores: Tensor, top: Tensor, total: Tensor, log_p: Any) -> Tensor:
    """The score of the least likely of the tokens of [B, V] that reach the threshold [B, 1]; inf where none does."""
    cut = (level(top, total) + log_p).to(scores.dtype)
    return torch.where(scores >= cut, scores, torch.inf).amin(-1, keepdim=True)


def _log(value: Any) -> Any:
    """Logarithms taken one by one in either form of the option, so that both round alike."""
    if isinstance(value, Tensor):
        logs = [[math.log(number)] for number in value[:, 0].tolist()]
        return torch.tensor(logs, dtype=torch.float64, device=value.device)
    return math.log(value)


@attrs.frozen
class XTCLogitsWarper:
    """With probability `xtc_probability`, drop all tokens at or above `xtc_threshold` but the least likely of them.

    The row keeps what the threshold calls good, without the obvious choice; where at most one token reaches the
    threshold, nothing is dropped, and tokens that tie with the least likely one stay. Each step draws one number per
    row from a stream of the row's own, which is not the one that its tokens are drawn from. A probability of 0 or a
    threshold of 0.5 or more switches it off. It matters only where tokens are drawn, and is left out elsewhere. Scores
    are floating [B, V].
    Raises ValueError for a probability outside of [0, 1] or a threshold outside of (0, 1].
    (p-e-w 2024, "Exclude Top Choices", pull request 6335 of text-generation-webui.)
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.TRUNCATE,
        after=(
            "top_n_sigma", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff",
        ),
        only_sampling=True,
        pure=True,
    )  # fmt: skip

    xtc_probability: float | tuple[float, ...] = option(
        "Chance of each step to drop the likeliest tokens; 0: off.", check=between(0, 1), per_row=True
    )
    xtc_threshold: float | tuple[float, ...] = option(
        "Tokens with at least this probability are dropped, but for the least likely of them.",
        default=0.1,
        check=between(0, 1, low_open=True),
        per_row=True,
    )

    def bind(self, ctx: BindContext, /) -> _Bound | None:
        """Return the form that draws, or None where nothing can be dropped."""
        chance, threshold = ctx.per_row(self.xtc_probability), ctx.per_row(self.xtc_threshold)
        off = not any(numbers(self.xtc_probability)) or min(numbers(self.xtc_threshold)) >= 0.5
        return None if off else _Bound(self, ctx, chance, threshold)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return `scores` [B, V] with -inf at dropped tokens; outside of a run torch's global generator draws."""
        number = torch.rand(len(scores), 1, dtype=torch.float64).to(scores.device)
        hit = number < of_rows(self.xtc_probability, scores)
        return _exclude(scores, hit, _log(of_rows(self.xtc_threshold, scores)))


def _exclude(scores: Tensor, hit: Tensor, log_p: Any) -> Tensor:
    """Scores [B, V] without the top choices in rows `hit` bool [B, 1]."""
    if scores.device.type == "cpu" and not bool(hit.any()):
        return scores
    top = scores.amax(-1, keepdim=True)
    least = _choices(scores, top, mass(scores, top), log_p)
    return scores.masked_fill((scores > least) & hit, -torch.inf)


class _Bound:
    """The processor inside a run. A step's number is drawn when it is first needed, and kept until `accept`."""

    def __init__(self, options: XTCLogitsWarper, ctx: BindContext, chance: Any, threshold: Any) -> None:
        self._options = options
        self._chance, self._log_p = chance, _log(threshold)
        # Were it that of the tokens, a row with a probability of 0 among others would draw other tokens than alone.
        base = int(torch.randint(0, 2**62, ()).item()) if ctx.seeds is None else 0
        seeds = [mix_seed(base, row) for row in range(ctx.rows)] if ctx.seeds is None else ctx.seeds
        self._random = RowRandom([mix_seed(seed, 1, salt=_STREAM) for seed in seeds], ctx.tokens.device)
        self._number: Tensor | None = None
        self._past = Past()

    def __repr__(self) -> str:
        return repr(self._options)

    def _hit(self) -> Tensor:
        if self._number is None:
            self._number = self._random.uniform()[:, None]
        return self._number < self._chance

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return `scores` [B, V] with -inf at dropped tokens."""
        return _exclude(scores, self._hit(), self._log_p)

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist with dropped tokens at -inf, at its end."""
        hit, values = self._hit(), shortlist.values
        if values.device.type == "cpu" and not bool(hit.any()):
            return shortlist
        top = values[:, :1]
        total = weights(values, top).sum(-1, keepdim=True, dtype=torch.float64)
        return resorted(shortlist, (values > _choices(values, top, total, self._log_p)) & hit)

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        """The next step draws anew."""
        self._past.push(self._number)
        self._number = None

    def rollback(self, steps: int, /) -> None:
        """Go back to the number of an earlier step. Raises ValueError where there were not so many steps."""
        if steps:
            self._number = self._past.back(steps)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the number and the options of former row `rows[i]`."""
        self._past.reorder(rows)
        self._random.reorder(rows)
        self._number = None if self._number is None else self._number[rows]
        for name in ("_chance", "_log_p"):
            if isinstance(value := getattr(self, name), Tensor):
                setattr(self, name, value[rows])
