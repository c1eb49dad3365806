"""Minimum lengths: the end of the text is forbidden until enough tokens exist."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs
from decodekit.context import BindContext
from decodekit.fields import option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import device_option, of_rows, whole
from .edits import Editing
from .ends import Ids, Named, ends_of, eos_option, forbid, usable, write


def _forbid(scores: Tensor, eos: Ids) -> Tensor:
    """Scores [B, V] with the end tokens at -inf."""
    if eos is None:
        raise ValueError("eos_token_id is needed where the processor is called on its own")
    return forbid(scores, usable(eos, scores.shape[-1]))


@attrs.frozen
class MinLengthLogitsProcessor:
    """Forbid the end tokens until a text, prompt included, has `min_length` tokens.

    Inside `generate` a row's real tokens are counted, so padding does not shorten the text; called on its own, the
    width T of `input_ids` [B, T]. `min_length` may be one number for each prompt. Scores are floating [B, V]; once the
    length is reached they pass untouched. Without any end token nothing can end early, and `bind` leaves it out. Raises
    ValueError for a negative length, or as many lengths as there are no prompts.
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.CONSTRAIN, pure=True)

    min_length: int | tuple[int, ...] = option(
        "Least number of tokens of a text, prompt included; 0: no minimum.", check=whole(0), per_row=True
    )
    eos_token_id: int | tuple[int, ...] | None = eos_option()
    device: str = device_option()

    def bind(self, ctx: BindContext, /) -> _NotYet | None:
        """Return the form that counts real tokens, or None where every prompt is long enough or nothing can end."""
        least = ctx.per_row(self.min_length)
        return _not_yet(self, ctx, (least[:, 0] if isinstance(least, Tensor) else least) - ctx.prompt_lengths)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores with end tokens at -inf while T < min_length. Raises ValueError without `eos_token_id`."""
        if not isinstance(self.min_length, tuple):
            return _forbid(scores, self.eos_token_id) if input_ids.shape[-1] < self.min_length else scores
        return _by_row(self.min_length, input_ids.shape[-1], scores, self.eos_token_id)


def _by_row(least: tuple[int, ...], have: int, scores: Tensor, eos: Ids) -> Tensor:
    """Scores [B, V] with end tokens at -inf in the rows that want more tokens than they have."""
    short = of_rows(least, scores) > have
    return _forbid(scores, eos).where(short, scores)


def _not_yet(options: Any, ctx: BindContext, needs: Tensor) -> _NotYet | None:
    ends = ends_of(ctx, options.eos_token_id)
    return None if ends is None or int(needs.max()) <= 0 else _NotYet(options, ctx, ends, needs)


class _NotYet(Editing):
    """A minimum inside a run: row i may not end before it has `needs[i]` new tokens."""

    __slots__ = ("_all_until", "_ctx", "_ends", "_needs", "_options", "_some_until")

    def __init__(self, options: Any, ctx: BindContext, ends: Named, needs: Tensor) -> None:
        self._options = options
        self._ctx = ctx
        self._ends = ends
        self._needs = needs
        # Where every row has end tokens of its own, "all rows" is never the simple case.
        self._all_until = int(needs.min()) if ends.own is None else 0
        self._some_until = int(needs.max())

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i needs what former row `rows[i]` did."""
        self._needs = self._needs[rows]
        self._ends.reorder(rows)

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return scores [B, V] with end tokens at -inf in rows that are too short."""
        new = input_ids.shape[-1] - self._ctx.prompt_width
        if new >= self._some_until:
            return scores
        if new < self._all_until:
            return write(scores, self._ends.ids, -math.inf, None, own)
        short, theirs = (self._needs > new)[:, None], self._ends.own
        return write(scores, self._ends.ids, -math.inf, short if theirs is None else short & theirs, own)


@attrs.frozen
class MinNewTokensLengthLogitsProcessor:
    """Forbid the end tokens until `min_new_tokens` tokens follow the prompt.

    Inside `generate` the prompt's width is known; called on its own, `prompt_length_to_skip` says it. `min_new_tokens`
    may be one number for each prompt. Scores are floating [B, V]; once enough tokens exist they pass untouched. Without
    any end token nothing can end early, and `bind` leaves it out. Raises ValueError for negative numbers, or as many
    numbers as there are no prompts.
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.CONSTRAIN, pure=True)

    prompt_length_to_skip: int | None = option(
        "Width of the prompt; unset: that of the running call.", default=None, check=whole(0)
    )
    min_new_tokens: int | tuple[int, ...] = option(
        "Least number of tokens after the prompt; 0: no minimum.", default=0, check=whole(0), per_row=True
    )
    eos_token_id: int | tuple[int, ...] | None = eos_option()
    device: str = device_option()

    def bind(self, ctx: BindContext, /) -> _NotYet | None:
        """Return the form that knows the prompt and the end tokens, or None where there is nothing to do."""
        least = ctx.per_row(self.min_new_tokens)
        skip = ctx.prompt_width if self.prompt_length_to_skip is None else self.prompt_length_to_skip
        if not isinstance(least, Tensor):
            least = ctx.prompt_lengths.new_full((ctx.rows, 1), least)
        return _not_yet(self, ctx, (least[:, 0] + (skip - ctx.prompt_width)).where(least[:, 0] > 0, 0))

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores with end tokens at -inf while too few tokens follow the prompt.

        Raises ValueError without `eos_token_id` or `prompt_length_to_skip`.
        """
        if self.prompt_length_to_skip is None:
            raise ValueError("prompt_length_to_skip is needed where the processor is called on its own")
        new = input_ids.shape[-1] - self.prompt_length_to_skip
        if not isinstance(self.min_new_tokens, tuple):
            return _forbid(scores, self.eos_token_id) if new < self.min_new_tokens else scores
        return _by_row(self.min_new_tokens, new, scores, self.eos_token_id)
