"""The end of the text becomes likelier, step by step."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import whole
from .edits import Editing
from .ends import Ends, Ids, eos_option, usable, write


def _check(instance: Any, attribute: Any, value: Any) -> None:
    """Raise ValueError unless (whole number of 0 or more, number above 0)."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError(f"must be a pair (start, factor), got {value!r}")
    start, factor = value
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise ValueError(f"must begin with a number of tokens, 0 or more, got {start!r}")
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not 0 < factor < math.inf:
        raise ValueError(f"must end with a factor above 0, got {factor!r}")


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _gain(factor: float, steps: int) -> float:
    """factor ** steps - 1, without a crash where that is more than a float holds."""
    try:
        return float(factor**steps) - 1
    except OverflowError:
        return torch.finfo(torch.float64).max


def _raised(scores: Tensor, ids: Tensor, gain: float) -> Tensor:
    """Scores [B, N] of `ids`, changed by `gain` times their size; those that are not finite stay as they are."""
    old = scores.index_select(-1, ids)
    # The size, not the score: multiplying would push a negative score further down.
    change = old.abs() * min(gain, torch.finfo(scores.dtype).max)
    return torch.where(old.isfinite(), old + change, old)


@attrs.frozen
class ExponentialDecayLengthPenalty:
    """Make end tokens likelier, exponentially, once a text is long enough.

    `exponential_decay_length_penalty` is (start, factor): with n tokens more than `start` after the prompt, the score s
    of an end token becomes s + abs(s) * (factor ** n - 1). A factor below 1 makes it less likely. Scores are floating
    [B, V]; infinite ones stay. Inside `generate` the prompt's width and the end tokens are the run's; called on its
    own, `input_ids_seq_length` and `eos_token_id` say them. Without any end token `bind` leaves it out. Raises
    ValueError for a start below 0 or a factor not above 0.
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.CONSTRAIN, after=("forced_bos_token_id", "forced_eos_token_id"), pure=True
    )

    exponential_decay_length_penalty: tuple[int, float] = option(
        "(start, factor): after `start` new tokens the end becomes likelier, as factor ** steps.",
        check=_check,
        converter=_pair,
    )
    eos_token_id: int | tuple[int, ...] | None = eos_option()
    input_ids_seq_length: int | None = option(
        "Width of the prompt; unset: that of the running call.", default=None, check=whole(0)
    )

    def bind(self, ctx: BindContext, /) -> _Decay | None:
        """Return the form that knows the prompt and the end tokens, or None where nothing can end a text."""
        ends = Ends.of(ctx, self.eos_token_id)
        return None if ends is None or self.exponential_decay_length_penalty[1] == 1 else _Decay(self, ctx, ends)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores with end tokens raised. Raises ValueError without `eos_token_id` or the prompt's width."""
        eos: Ids = self.eos_token_id
        if eos is None or self.input_ids_seq_length is None:
            raise ValueError("eos_token_id and input_ids_seq_length are needed where the processor is called alone")
        start, factor = self.exponential_decay_length_penalty
        steps = input_ids.shape[-1] - self.input_ids_seq_length - start
        if steps <= 0:
            return scores
        ids = torch.tensor(usable(eos, scores.shape[-1]), dtype=torch.long, device=scores.device)
        return write(scores, ids, _raised(scores, ids, _gain(factor, steps)), None, False)


class _Decay(Editing):
    """The rule inside a run."""

    __slots__ = ("_begin", "_ends", "_factor", "_options")

    def __init__(self, options: ExponentialDecayLengthPenalty, ctx: BindContext, ends: Ends) -> None:
        self._options = options
        self._ends = ends
        start, self._factor = options.exponential_decay_length_penalty
        width = options.input_ids_seq_length
        self._begin = start + (ctx.prompt_width if width is None else width)

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i has the end tokens of former row `rows[i]`."""
        self._ends.reorder(rows)

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return scores with end tokens raised."""
        steps = input_ids.shape[-1] - self._begin
        if steps <= 0:
            return scores
        ids = self._ends.ids
        return write(scores, ids, _raised(scores, ids, _gain(self._factor, steps)), self._ends.own, own)
