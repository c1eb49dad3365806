"""The end of the text becomes likelier, step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import whole
from .edits import Editing
from .ends import Ids, Named, by_prompt, ends_of, eos_option, usable, write

Rule = tuple[int, float]
"""Number of new tokens from which on the end becomes likelier, and the factor."""


def _check(instance: Any, attribute: Any, value: Any) -> None:
    """Raise ValueError unless (whole number of 0 or more, number above 0), or a tuple of such pairs."""
    if value and by_prompt(value):
        for rule in value:
            _check(instance, attribute, rule if isinstance(rule, tuple) else (rule,))
        return
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError(f"must be a pair (start, factor), or a list with such a pair for each prompt, got {value!r}")
    start, factor = value
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise ValueError(f"must begin with a number of tokens, 0 or more, got {start!r}")
    if not isinstance(factor, (int, float)) or isinstance(factor, bool) or not 0 < factor < math.inf:
        raise ValueError(f"must end with a factor above 0, got {factor!r}")


def _pair(value: Any) -> Any:
    return tuple(map(_pair, value)) if isinstance(value, (list, tuple)) else value


def _gain(factor: float, steps: int) -> float:
    """factor ** steps - 1, without a crash where that is more than a float holds."""
    try:
        return float(factor**steps) - 1
    except OverflowError:
        return torch.finfo(torch.float64).max


def _gains(rules: Sequence[Rule], width: int) -> list[float]:
    """How much is gained `width` tokens behind where each of the rules counts from."""
    return [_gain(factor, width - start) if width > start else 0.0 for start, factor in rules]


def _raised(scores: Tensor, ids: Tensor, gains: Sequence[float]) -> Tensor:
    """Scores [B, N] of `ids`, changed by a gain for all rows, or by one for each, times their size; those that are not
    finite stay as they are."""
    old = scores.index_select(-1, ids)
    most = torch.finfo(scores.dtype).max
    gain = [[min(gain, most)] for gain in gains]
    # The size, not the score: multiplying would push a negative score further down.
    change = old.abs() * (torch.tensor(gain, dtype=scores.dtype, device=scores.device) if len(gain) > 1 else gain[0][0])
    return torch.where(old.isfinite(), old + change, old)


@attrs.frozen
class ExponentialDecayLengthPenalty:
    """Make end tokens likelier, exponentially, once a text is long enough.

    `exponential_decay_length_penalty` is (start, factor), or a list with such a pair for each prompt: with n tokens
    more than `start` after the prompt, the score s of an end token becomes s + abs(s) * (factor ** n - 1). A factor
    below 1 makes it less likely. Scores are floating [B, V]; infinite ones stay. Inside `generate` the prompt's width
    and the end tokens are the run's; called on its own, `input_ids_seq_length` and `eos_token_id` say them. Without any
    end token `bind` leaves it out. Raises ValueError for a start below 0 or a factor not above 0, and for as many pairs
    as there are no prompts.
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.CONSTRAIN, after=("forced_bos_token_id", "forced_eos_token_id"), pure=True
    )

    exponential_decay_length_penalty: tuple[int, float] | tuple[tuple[int, float], ...] = option(
        "(start, factor): after `start` new tokens the end becomes likelier, as factor ** steps; or one such pair for"
        " each prompt.",
        check=_check,
        converter=_pair,
    )
    eos_token_id: int | tuple[int, ...] | None = eos_option()
    input_ids_seq_length: int | None = option(
        "Width of the prompt; unset: that of the running call.", default=None, check=whole(0)
    )

    def bind(self, ctx: BindContext, /) -> _Decay | None:
        """Return the form that knows the prompt and the end tokens, or None where nothing can end a text."""
        ends = ends_of(ctx, self.eos_token_id)
        rules = self._rules(ctx.prompts, "prompt")
        return None if ends is None or all(factor == 1 for _, factor in rules) else _Decay(self, ctx, ends, rules)

    def _rules(self, count: int, what: str) -> tuple[Rule, ...]:
        """The rule for all rows, or those of each. Raises ValueError where there are not `count` of them."""
        given: Any = self.exponential_decay_length_penalty
        if by_prompt(given) and len(given) != count:
            raise ValueError(
                f"has {len(given)} values for {count} {what}{'s'[: count != 1]}; give one pair, or one each"
            )
        return given if by_prompt(given) else (given,)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores with end tokens raised. Raises ValueError without `eos_token_id` or the prompt's width."""
        eos: Ids = self.eos_token_id
        if eos is None or self.input_ids_seq_length is None:
            raise ValueError("eos_token_id and input_ids_seq_length are needed where the processor is called alone")
        gains = _gains(self._rules(len(scores), "row"), input_ids.shape[-1] - self.input_ids_seq_length)
        if not any(gains):
            return scores
        ids = torch.tensor(usable(eos, scores.shape[-1]), dtype=torch.long, device=scores.device)
        return write(scores, ids, _raised(scores, ids, gains), None, False)


class _Decay(Editing):
    """The rule inside a run, or one for each row."""

    __slots__ = ("_ends", "_options", "_rules", "_width")

    def __init__(
        self, options: ExponentialDecayLengthPenalty, ctx: BindContext, ends: Named, rules: Sequence[Rule]
    ) -> None:
        self._options = options
        self._ends = ends
        self._rules = rules if len(rules) == 1 else [rules[slot] for slot in ctx.slots]
        width = options.input_ids_seq_length
        self._width = ctx.prompt_width if width is None else width

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i has the end tokens and the rule of former row `rows[i]`."""
        self._ends.reorder(rows)
        self._rules = self._rules if len(self._rules) == 1 else [self._rules[i] for i in rows.tolist()]

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return scores with end tokens raised."""
        gains = _gains(self._rules, input_ids.shape[-1] - self._width)
        if not any(gains):
            return scores
        ids = self._ends.ids
        return write(scores, ids, _raised(scores, ids, gains), self._ends.own, own)
