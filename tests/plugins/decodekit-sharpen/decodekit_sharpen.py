"""Sharpen: raise every probability to a power."""

from __future__ import annotations

from typing import ClassVar

import attrs
from decodekit import Phase, Traits, greater_than, option
from torch import Tensor


@attrs.frozen
class Sharpen:
    """Raise probabilities to `power`: above 1 likely tokens gain, below 1 they lose."""

    traits: ClassVar = Traits(phase=Phase.SCALE, reads_history=False, keeps_argmax=True, pure=True, graph_safe=True)
    power: float = option("The power; 1 changes nothing.", default=2.0, check=greater_than(0))

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        return scores * self.power
