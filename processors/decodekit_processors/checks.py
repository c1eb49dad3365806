"""Validators that several options share."""

from __future__ import annotations

from typing import Any

import attrs
from decodekit.fields import Between


@attrs.frozen
class Whole(Between):
    """Validator: a whole number inside an interval, with an optional remark on what its ends mean."""

    remark: str = ""

    def __call__(self, instance: Any, attribute: Any, value: Any) -> None:
        """Raise ValueError unless the value is an int inside; None passes (unset)."""
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(f"must be a whole number, got {value!r}")
        Between.__call__(self, instance, attribute, value)

    def __str__(self) -> str:
        return Between.__str__(self) + (f" ({self.remark})" if self.remark else "")


def whole(low: float, *, remark: str = "") -> Whole:
    """A whole number, `low` or more."""
    return Whole(low, remark=remark)


def id_tuple(value: Any) -> Any:
    """A token id, or several in a list or tensor, as an int or a tuple of ints; other values pass unchanged."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else value
