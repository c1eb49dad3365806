"""Fields of options classes: a default, a check that can say its range, and the words for the docs."""

from __future__ import annotations

import math
from typing import Any

import attrs


@attrs.frozen
class Between:
    """Validator: a number inside an interval. Its repr is the range shown by ``decodekit keys``."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False

    def __call__(self, instance: Any, attribute: Any, value: Any) -> None:
        """Raise ValueError unless the value lies inside; None passes (unset)."""
        if value is None:
            return
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ValueError(f"must be a number, got {value!r}")
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        if above and below and isinstance(value, int) and abs(value) >= 2**63:
            raise ValueError(f"must fit into 64 bits, got {value}")
        if not (above and below):
            raise ValueError(f"must be {self}, got {value!r}")

    def __str__(self) -> str:
        if self.high == math.inf:
            finite = ("finite",) if self.high_open else ()
            low = () if self.low == -math.inf else (f"{'greater than' if self.low_open else 'at least'} {self.low:g}",)
            return " and ".join((*low, *finite)) or "a number, not NaN"
        left, right = "(" if self.low_open else "[", ")" if self.high_open else "]"
        return f"in {left}{self.low:g}, {self.high:g}{right}"


@attrs.frozen
class OneOf:
    """Validator: one of a few values."""

    choices: tuple[Any, ...]

    def __call__(self, instance: Any, attribute: Any, value: Any) -> None:
        """Raise ValueError unless the value is a choice; None passes (unset)."""
        if value is not None and not any(value is c or (value == c and type(value) is type(c)) for c in self.choices):
            raise ValueError(f"must be {self}, got {value!r}")

    def __str__(self) -> str:
        return "one of " + ", ".join(map(repr, self.choices))


@attrs.frozen
class Each:
    """Validator: what `check` says, of one value or of every value of a tuple with one for each prompt."""

    check: Any = None

    def __call__(self, instance: Any, attribute: Any, value: Any) -> None:
        """Raise ValueError unless every value passes."""
        if value == ():
            raise ValueError("is empty; give one number, or one for each prompt")
        for item in value if isinstance(value, tuple) else (value,):
            if self.check is not None:
                self.check(instance, attribute, item)

    def __str__(self) -> str:
        return f"{self.check}, or a list with one for each prompt" if self.check else "one, or one for each prompt"


def between(low: float, high: float, *, low_open: bool = False, high_open: bool = False) -> Between:
    """A number in [low, high]; `low_open`/`high_open` leave the end out."""
    return Between(low, high, low_open, high_open)


def at_least(low: float) -> Between:
    """A number that is `low` or more."""
    return Between(low)


def greater_than(low: float) -> Between:
    """A number above `low`."""
    return Between(low, low_open=True)


def one_of(*choices: Any) -> OneOf:
    """One of the given values, types included."""
    return OneOf(choices)


def option(
    doc: str, *, default: Any = attrs.NOTHING, check: Any = None, converter: Any = None,
    shadows: tuple[str, ...] = (), per_row: bool = False,
) -> Any:  # fmt: skip
    """An attrs field with its documentation.

    doc: one sentence for the docs and ``decodekit keys``.
    check: a validator such as `between(0, 1)`.
    per_row: the value may also be a tuple with one for each prompt (`BindContext.per_row` makes a tensor of it); say so
        in the field's type, such as ``float | tuple[float, ...]``.
    shadows: config keys that this one overrules where they were set by a weaker source.
    """
    metadata = {"doc": doc, "shadows": shadows, "per_row": per_row}
    return attrs.field(
        default=default, validator=Each(check) if per_row else check, converter=converter, metadata=metadata
    )
