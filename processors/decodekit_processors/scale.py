"""Temperature: how sharp the distribution is."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
from decodekit.context import BindContext
from decodekit.fields import Between, option
from decodekit.shortlist import Shortlist
from decodekit.traits import Phase, Traits
from torch import Tensor


@attrs.frozen
class _AboveZero(Between):
    """Above 0; zero gets the advice that people who write it need."""

    def __call__(self, instance: Any, attribute: Any, value: Any) -> None:
        if value == 0 and not isinstance(value, bool):
            raise ValueError(f"must be {self}, got {value!r}; to take the likeliest token always, set do_sample=False")
        Between.__call__(self, instance, attribute, value)


@attrs.frozen
class TemperatureLogitsWarper:
    """Divide the scores by a temperature: below 1 likely tokens gain, above 1 the distribution flattens.

    Scores are floating [B, V]; the result has their shape and dtype. Raises ValueError for a temperature that
    is not above 0. (Ackley, Hinton and Sejnowski 1985, "A learning algorithm for Boltzmann machines".)
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.SCALE, reads_history=False, keeps_argmax=True, pure=True, graph_safe=True
    )

    temperature: float = option(
        "Divides the scores: below 1 sharpens the distribution, above 1 flattens it; 1.0 changes nothing.",
        check=_AboveZero(0, low_open=True, high_open=True),
    )

    def bind(self, ctx: BindContext, /) -> TemperatureLogitsWarper | None:
        """Return itself, or None at 1.0: nothing to do."""
        return None if self.temperature == 1 else self

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return `scores` / temperature."""
        return scores / self.temperature

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist with its values divided; the order stays."""
        return shortlist.replace(shortlist.values / self.temperature)
