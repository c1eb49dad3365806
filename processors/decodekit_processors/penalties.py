"""Penalties: tokens that were used already become less likely."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import greater_than, option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import all_scored, id_tuple, numbers, of_rows
from .edits import Editing, mine


def _check_ignore(instance: Any, attribute: Any, value: Any) -> None:
    """Raise ValueError unless None, a count, or one count for each row."""
    counts = value if isinstance(value, (tuple, list)) else (value,)
    for count in counts:
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 0):
            raise ValueError(f"must be a whole number, 0 or more, or one for each row, got {value!r}")


def anchored(ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """`ids` [B, T] with those that do not count (`real` bool [B, T] False) pointed at one of the row that does, and
    whether the row has any, bool [B, 1]: without one they point at 0."""
    first = real.byte().argmax(-1, keepdim=True)
    some = real.gather(-1, first)
    return ids.where(real, ids.gather(-1, first).where(some, 0)), some


def strike(scores: Tensor, ids: Tensor, real: Tensor | None = None, own: bool = False) -> Tensor:
    """Scores [B, V] with -inf at the tokens `ids` [B, T], below V, of which `real` bool [B, T] counts; None: all.

    `own`: the scores may be written to.
    """
    if ids.shape[-1] == 0:
        return scores
    if real is None:
        return mine(scores, own).scatter_(-1, ids, -torch.inf)
    ids, some = anchored(ids, real)
    new = scores.gather(-1, ids).masked_fill_(some, -torch.inf)
    return mine(scores, own).scatter_(-1, ids, new)


def penalise(
    input_ids: Tensor, scores: Tensor, penalty: float | Tensor, real: Tensor | None, own: bool = False
) -> Tensor:
    """Scores [B, V] with the tokens of `input_ids` [B, T] penalised once each, by one number or [B, 1].

    `real` bool [B, T] is False where a token does not count; None: all count and all are below V. Each id is written
    with one value only, however often it occurs. `own`: the scores may be written to.
    """
    if input_ids.shape[-1] == 0:
        return scores
    some: Tensor | None = None
    if real is not None:
        input_ids, some = anchored(input_ids, real)
    old = scores.gather(-1, input_ids)
    # Dividing a negative score would raise it: those are multiplied. That is the lower of the two for a penalty above
    # 1, and the higher below it.
    if isinstance(penalty, Tensor):
        penalty = penalty.to(scores.dtype)
        more, less = old * penalty, old / penalty
        new = torch.minimum(more, less).where(penalty >= 1, torch.maximum(more, less))
    else:
        new = (torch.minimum if penalty >= 1 else torch.maximum)(old * penalty, old / penalty)
    new = new if some is None else new.where(some, old)
    return (scores.scatter_ if own else scores.scatter)(-1, input_ids, new)


@attrs.frozen
class RepetitionPenaltyLogitsProcessor:
    """Make every token of the history less likely: positive scores are divided, negative ones multiplied.

    Penalties above 1 discourage repeats, below 1 encourage them; a token counts once however often it occurred.
    History is real tokens only: inside `generate` padding never counts, whatever its id. Called on its own, all of
    `input_ids` [B, T] (or [B]) counts. Ids at or above V are ignored. Scores are floating [B, V].
    Raises ValueError for a penalty not above 0, or a `prompt_ignore_length` that does not fit the batch.
    (Keskar et al. 2019, CTRL, arXiv 1909.05858.)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.PENALTY, pure=True)

    penalty: float | tuple[float, ...] = option(
        "Divides positive and multiplies negative scores of tokens seen before; 1.0 changes nothing.",
        check=greater_than(0),
        per_row=True,
    )
    prompt_ignore_length: int | tuple[int, ...] | None = option(
        "Leave this many first columns out of the history, padding included: one number, or one for each row.",
        default=None,
        check=_check_ignore,
        converter=id_tuple,
    )

    def bind(self, ctx: BindContext, /) -> _BoundPenalty | None:
        """Return the form that knows padding, or None at 1.0: nothing to do."""
        return None if self.penalty in (1, (1,) * len(numbers(self.penalty))) else _BoundPenalty(self, ctx)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return penalised scores [B, V]; all of `input_ids` is history but what `prompt_ignore_length` names."""
        if input_ids.dim() == 1:
            input_ids = input_ids[:, None]
        real = input_ids < scores.shape[-1]
        ignore = self.prompt_ignore_length
        if isinstance(ignore, tuple):
            if len(ignore) != input_ids.shape[0]:
                raise ValueError(f"prompt_ignore_length has {len(ignore)} numbers for {input_ids.shape[0]} rows")
            real &= _beyond(input_ids, torch.tensor(ignore, device=input_ids.device))
        elif ignore:
            input_ids, real = input_ids[:, ignore:], real[:, ignore:]
        return penalise(input_ids, scores, of_rows(self.penalty, scores), real)


def _beyond(input_ids: Tensor, ignore: Tensor) -> Tensor:
    """bool [B, T], False at the first `ignore` [B] columns."""
    return torch.arange(input_ids.shape[-1], device=input_ids.device) >= ignore[:, None]


class _BoundPenalty(Editing):
    """The penalty inside a run. It keeps no state but reads the run's tokens, so nothing can get out of step."""

    def __init__(self, options: RepetitionPenaltyLogitsProcessor, ctx: BindContext) -> None:
        self._options = options
        self._penalty = ctx.per_row(options.penalty)
        self._ctx = ctx
        ignore = options.prompt_ignore_length
        self._skip = ignore if isinstance(ignore, int) else 0
        self._ignore: Tensor | None = None
        if isinstance(ignore, tuple):
            copies, rest = divmod(ctx.rows, max(len(ignore), 1))
            if rest or not copies:
                raise ValueError(f"prompt_ignore_length has {len(ignore)} numbers for {ctx.rows} rows")
            self._ignore = torch.tensor(ignore, device=ctx.tokens.device).repeat_interleave(copies)
        self._bounded = all_scored(ctx)

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the ignored columns of former row `rows[i]`."""
        if self._ignore is not None:
            self._ignore = self._ignore[rows]
        if isinstance(self._penalty, Tensor):
            self._penalty = self._penalty[rows]

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return scores [B, V] with the real tokens of `input_ids` [B, T] penalised."""
        real = self._ctx.history_mask(input_ids.shape[-1])
        if not self._bounded:
            inside = input_ids < scores.shape[-1]
            real = inside if real is None else real & inside
        if self._ignore is not None:
            late = _beyond(input_ids, self._ignore)
            real = late if real is None else real & late
        if self._skip:
            input_ids = input_ids[:, self._skip :]
            real = None if real is None else real[:, self._skip :]
        return penalise(input_ids, scores, self._penalty, real, own)
