"""A plugin whose import takes two seconds, as heavy libraries do."""

from __future__ import annotations

import time
from typing import ClassVar

import attrs
from decodekit import Phase, Traits, option
from torch import Tensor

time.sleep(2)


@attrs.frozen
class Slow:
    """Adds `amount` to every score, which changes nothing but the numbers."""

    traits: ClassVar = Traits(phase=Phase.BIAS, reads_history=False, pure=True)
    amount: float = option("What to add.", default=0.0)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        return scores + self.amount
