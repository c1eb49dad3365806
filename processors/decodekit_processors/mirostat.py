"""Mirostat: steer the surprise of the text towards a target."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import at_least, option
from decodekit.shortlist import Shortlist
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import numbers, of_rows
from .entropy import level
from .listing import at_or_above, list_above, looped
from .nucleus import mass, weights
from .undo import Past

_BIT = math.log(2)


def _cut(top: Tensor, total: Tensor, limit: Any) -> Tensor:
    """Smallest kept score [B, 1]: that of a surprise of `limit` bits, but never above the best score [B, 1]."""
    return torch.minimum((level(top, total) - limit * _BIT).to(top.dtype), top)


@attrs.frozen
class MirostatLogitsWarper:
    """Mirostat 2: drop tokens that would surprise by more than a limit, and move the limit after every token.

    The limit begins at twice `mirostat_tau`. After a token whose surprise among the kept tokens was s bits it sinks by
    `mirostat_eta` * (s - `mirostat_tau`), so that the text's surprise settles at the target. The likeliest token, and
    what ties with it, always stays. A target of 0 switches it off. Scores are floating [B, V]; called on its own it
    cuts at the first limit. Raises ValueError for negative numbers.
    (Basu et al. 2020, "Mirostat", arXiv 2007.14966.)
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.TRUNCATE,
        after=(
            "top_n_sigma", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "xtc",
        ),
        keeps_argmax=True,
        pure=True,
    )  # fmt: skip

    mirostat_tau: float | tuple[float, ...] = option(
        "Surprise to aim at, in bits for each token; 0: off.", default=5.0, check=at_least(0), per_row=True
    )
    mirostat_eta: float | tuple[float, ...] = option(
        "How fast the limit follows the surprise of the last token.", default=0.1, check=at_least(0), per_row=True
    )

    def bind(self, ctx: BindContext, /) -> _Bound | None:
        """Return the form with a limit for each row, or None where every target is 0."""
        tau, eta = ctx.per_row(self.mirostat_tau), ctx.per_row(self.mirostat_eta)
        return _Bound(self, ctx, tau, eta) if any(numbers(self.mirostat_tau)) else None

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return `scores` [B, V] with -inf at tokens beyond the first limit."""
        tau = of_rows(self.mirostat_tau, scores)
        of_rows(self.mirostat_eta, scores)  # not needed here, but a wrong number of values is an error everywhere
        if not any(numbers(self.mirostat_tau)):
            return scores
        top = scores.amax(-1, keepdim=True)
        drop = scores < _cut(top, mass(scores, top), 2 * tau)
        return scores.masked_fill(drop if not isinstance(tau, Tensor) else drop & (tau > 0), -torch.inf)


class _Bound:
    """The processor inside a run: a limit for each row, moved when tokens are accepted."""

    def __init__(self, options: MirostatLogitsWarper, ctx: BindContext, tau: Any, eta: Any) -> None:
        def column(value: Any) -> Tensor:
            full = torch.full((ctx.rows, 1), 1.0, dtype=torch.float64, device=ctx.tokens.device)
            return full * value

        self._options = options
        self._tau, self._eta = column(tau), column(eta)
        self._limit = 2 * self._tau
        self._limit[self._tau == 0] = torch.inf
        self._past = Past()
        self._seen: Tensor | Shortlist | None = None
        self._order: Tensor | None = None
        self._clue: tuple[Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        return repr(self._options)

    @property
    def limit(self) -> Tensor:
        """Surprise in bits beyond which tokens are dropped now: float64 [rows, 1], inf where it is off."""
        return self._limit

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return `scores` [B, V] with -inf at tokens beyond the row's limit."""
        clue, self._clue = self._clue, None
        cut = clue[1] if clue is not None and clue[0] is scores else self._cut(scores)
        kept = at_or_above(scores, cut) if looped(scores) else scores.masked_fill(scores < cut, -torch.inf)
        self._seen, self._order = kept, None
        return kept

    def _cut(self, scores: Tensor) -> Tensor:
        top = scores.amax(-1, keepdim=True)
        return _cut(top, mass(scores, top), self._limit)

    def open_shortlist(self, input_ids: Tensor, scores: Tensor, /) -> Shortlist | None:
        """Return the kept tokens of [B, V]; None where too many are kept."""
        cut = self._cut(scores)
        short = list_above(scores, cut)
        # The dense form is asked for next: it need not look for the same cut again.
        self._clue = (scores, cut) if short is None else None
        self._seen, self._order = short, None
        return short

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist with -inf at tokens beyond the row's limit."""
        values = shortlist.values
        top = values[:, :1]
        cut = _cut(top, weights(values, top).sum(-1, keepdim=True, dtype=torch.float64), self._limit)
        self._seen, self._order = shortlist.replace(values.masked_fill(values < cut, -torch.inf)), None
        return self._seen

    def _surprise(self, tokens: Tensor, rows: Tensor | None) -> Tensor:
        """Bits of tokens [B] in the rows of the last call: float64 [B, 1]; not finite for tokens that were dropped."""
        seen = self._seen
        assert seen is not None
        if self._order is not None:
            rows = self._order if rows is None else self._order[rows]
        values = seen.values if isinstance(seen, Shortlist) else seen
        values = values if rows is None else values[rows]
        tokens = tokens[:, None]
        if isinstance(seen, Shortlist):
            here = (seen.ids if rows is None else seen.ids[rows]) == tokens
            own = values.masked_fill(~here, -torch.inf).amax(-1, keepdim=True)
            top = values[:, :1]
            total = weights(values, top).sum(-1, keepdim=True, dtype=torch.float64)
        else:
            own = values.gather(-1, tokens)
            top = values.amax(-1, keepdim=True)
            total = mass(values, top)
        return (level(top, total) - own.double()) / _BIT

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        """Move the limits by the surprise of `tokens` [B], or of the first of [B, N]: only that was priced.

        A token that was dropped was not drawn from what this processor left; it moves nothing.
        """
        self._past.push(self._limit)
        if self._seen is None:
            return
        bits = self._surprise(tokens if tokens.dim() == 1 else tokens[:, 0], rows)
        here: Any = slice(None) if rows is None else rows
        limit = self._limit[here]
        moved = limit - self._eta[here] * (bits - self._tau[here])
        limit = moved.where(bits.isfinite(), limit)
        if rows is None:
            self._limit = limit
        else:
            self._limit = self._limit.index_copy(0, rows, limit)
        self._seen = self._order = None

    def rollback(self, steps: int, /) -> None:
        """Go back to the limits before the last `steps` tokens. Raises ValueError where there were not so many."""
        if steps:
            earlier = self._past.back(steps)
            assert earlier is not None
            self._limit, self._seen, self._order = earlier, None, None

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the limit and the options of former row `rows[i]`."""
        self._past.reorder(rows)
        self._limit, self._tau, self._eta = self._limit[rows], self._tau[rows], self._eta[rows]
        self._order = rows if self._order is None else self._order[rows]
