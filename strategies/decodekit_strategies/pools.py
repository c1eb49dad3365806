"""The finished hypotheses of one prompt, and whether looking for better ones is worth it."""

from __future__ import annotations

import math
from typing import Any, Literal

import attrs

LARGEST = 650.0
"""Logarithm of the greatest weight of a length: numbers beyond e**709 overflow."""


def length_weight(length: int, penalty: float) -> float:
    """``length ** penalty``, kept to what a float holds: what is divided by it stays finite and keeps its order."""
    exponent = penalty * math.log(length)
    return length**penalty if abs(exponent) < LARGEST else math.exp(math.copysign(LARGEST, exponent))


@attrs.frozen
class Hypothesis:
    """A finished continuation."""

    score: float
    """Summed log-probability over length ** length_penalty."""
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    """For each token the row of the batch whose scores it was chosen by."""
    reason: str
    detail: Any


@attrs.define(eq=False)
class Pool:
    """At most `size` hypotheses, best first."""

    size: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    found: list[Hypothesis] = attrs.field(factory=list)
    open: bool = True
    """Whether the search goes on."""

    def add(self, hypothesis: Hypothesis) -> None:
        """Take a hypothesis, where it is among the best; among equals the earlier one stays first."""
        self.found.append(hypothesis)
        self.found.sort(key=lambda item: -item.score)
        del self.found[self.size :]

    def look(self, best: float, length: int, longest: int | None) -> None:
        """Close where the best running sum of `length` tokens (-inf: none runs) cannot lead to anything better.

        longest: new tokens a hypothesis can have at most; None: nobody knows.
        """
        full = len(self.found) == self.size
        if best == float("-inf") or (full and self.early_stopping is True):
            self.open = False
        elif full:
            # Sums only fall. "never" asks for what the best could still become: with a positive penalty that is
            # the same sum over the greatest length.
            patient = self.early_stopping == "never" and self.length_penalty > 0
            if patient and longest is None:
                return
            reach = longest if patient and longest is not None else length
            self.open = best / length_weight(reach, self.length_penalty) > self.found[-1].score
