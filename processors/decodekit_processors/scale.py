"""Temperature: how sharp the distribution is."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import Between, at_least, greater_than, option
from decodekit.shortlist import Shortlist
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import numbers, of_rows
from .edits import Editing
from .entropy import entropy, profile

_COLDEST = 1e-3
"""Below this only the likeliest token is left anyway, and scores would grow out of half precision's range."""

_LEAST = 1e-30
"""Divisors below it would make many scores infinite, and so equal, where the likeliest token is meant."""


@attrs.frozen
class _AboveZero(Between):
    """Above 0; zero gets the advice that people who write it need."""

    def __call__(self, instance: Any, attribute: Any, value: Any) -> None:
        if value == 0 and not isinstance(value, bool):
            raise ValueError(f"must be {self}, got {value!r}; to take the likeliest token always, set do_sample=False")
        Between.__call__(self, instance, attribute, value)


@attrs.frozen
class TemperatureLogitsWarper(Editing):
    """Divide the scores by a temperature: below 1 likely tokens gain, above 1 the distribution flattens.

    With `dynatemp_range` r above 0 the temperature of each step follows the entropy h of the row, as a share of the
    largest that its tokens could have: max(0, t - r) + (t + r - max(0, t - r)) * h ** `dynatemp_exponent`, t being
    `temperature`, and no less than 0.001. Removed tokens do not count, and a row of one token stays as it is.

    Scores are floating [B, V]; the result has their shape and dtype. Raises ValueError for a temperature or an exponent
    that is not above 0, and for a negative range. (Ackley, Hinton and Sejnowski 1985, "A learning algorithm for
    Boltzmann machines"; the dynamic form is that of llama.cpp.)
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.SCALE, reads_history=False, keeps_argmax=True, pure=True, graph_safe=True
    )

    temperature: float | tuple[float, ...] = option(
        "Divides the scores: below 1 sharpens the distribution, above 1 flattens it; 1.0 changes nothing.",
        default=1.0,
        check=_AboveZero(0, low_open=True, high_open=True),
        per_row=True,
    )
    dynatemp_range: float | tuple[float, ...] = option(
        "Let the temperature move by up to this much with the entropy of the row; 0: it stands still.",
        default=0.0,
        check=at_least(0),
        per_row=True,
    )
    dynatemp_exponent: float | tuple[float, ...] = option(
        "Power of the row's share of the largest possible entropy that places the temperature in its range.",
        default=1.0,
        check=greater_than(0),
        per_row=True,
    )

    def bind(self, ctx: BindContext, /) -> Any | None:
        """Return itself, a form with values for each row, or None where nothing changes."""
        values = [ctx.per_row(v) for v in (self.temperature, self.dynatemp_range, self.dynatemp_exponent)]
        moves = any(numbers(self.dynatemp_range))
        if not moves and all(each == 1 for each in numbers(self.temperature)):
            return None
        if not (moves or isinstance(values[0], Tensor)):
            return self
        return _Dynamic(self, *values) if moves else _Rows(self, values[0])

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return `scores` / temperature."""
        if type(self.temperature) is tuple or self.dynatemp_range:
            return self._alone(scores).edit(input_ids, scores, own)
        return (scores.div_ if own else scores.div)(max(self.temperature, _LEAST))

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist with its values divided; the order stays."""
        if type(self.temperature) is tuple or self.dynatemp_range:
            return self._alone(shortlist.values).shorten(input_ids, shortlist)
        return shortlist.replace(shortlist.values / max(self.temperature, _LEAST))

    def _alone(self, scores: Tensor) -> _Rows:
        temperature = of_rows(self.temperature, scores)
        if not any(numbers(self.dynatemp_range)):
            return _Rows(self, temperature)
        moves, power = of_rows(self.dynatemp_range, scores), of_rows(self.dynatemp_exponent, scores)
        return _Dynamic(self, temperature, moves, power)


def _divide(scores: Tensor, temperature: Tensor, own: bool = False) -> Tensor:
    """Rows [B, K] over temperatures [B, 1], rounded as division by a number is; new ones unless `own`."""
    temperature = temperature.clamp(min=_LEAST).to(scores.dtype)
    if scores.is_cuda:  # there a division by one number is a product with its inverse
        return (scores.mul_ if own else scores.mul)(temperature.reciprocal())
    return (scores.div_ if own else scores.div)(temperature)


class _Rows(Editing):
    """A temperature for each row."""

    def __init__(self, options: TemperatureLogitsWarper, temperature: Any) -> None:
        self._options, self._temperature = options, temperature

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the values of former row `rows[i]`."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value[rows])

    def _of(self, scores: Tensor) -> Tensor:
        """The temperatures [B, 1] of rows [B, K]."""
        found: Tensor = self._temperature
        return found

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return `scores` [B, V] / temperature."""
        return _divide(scores, self._of(scores), own)

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist with its values divided; the order stays."""
        return shortlist.replace(_divide(shortlist.values, self._of(shortlist.values)))


class _Dynamic(_Rows):
    """A temperature that follows the entropy of each row."""

    def __init__(self, options: TemperatureLogitsWarper, temperature: Any, moves: Any, power: Any) -> None:
        super().__init__(options, temperature)
        self._moves, self._power = moves, power

    def _of(self, scores: Tensor) -> Tensor:
        total, mean = profile(scores, scores.amax(-1, keepdim=True))
        live = (scores > -torch.inf).sum(-1, keepdim=True)
        share = (entropy(total, mean) / live.double().log()).clamp_(max=1)
        base, power = torch.zeros_like(share) + self._temperature, torch.zeros_like(share) + self._power
        low = (base - self._moves).clamp_(min=0)
        found = (low + (base + self._moves - low) * share**power).clamp_(min=_COLDEST)
        # NaN: of one token, or of a broken row, there is no entropy to follow.
        return found.where(share >= 0, 1.0).where(base - self._moves < base, base)
