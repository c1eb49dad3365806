"""Validators that several options share."""

from __future__ import annotations

from typing import Any

import attrs
from decodekit.context import BindContext, column
from decodekit.fields import Between, option
from torch import Tensor


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


def numbers(value: Any) -> tuple[Any, ...]:
    """The numbers of an option that may be one for each prompt."""
    return value if isinstance(value, tuple) else (value,)


def device_option(what: str = "ids") -> Any:
    """The field that constructors of the reference have for a device."""
    return option(f"Accepted for the usual signature; {what} follow the scores to their device.", default="cpu")


def all_scored(ctx: BindContext) -> bool:
    """Whether every token of a run has a score. Ids above the head exist only where the embedding is larger; where that
    is not known, look."""
    embeddings = ctx.spec.num_embeddings
    return embeddings is not None and embeddings <= ctx.spec.vocab_size


def of_rows(value: Any, scores: Tensor) -> Any:
    """An option for a processor called on its own: a tuple as Tensor [B, 1], one number for each row of `scores`.

    Raises ValueError where the batch has another number of rows.
    """
    if not isinstance(value, tuple):
        return value
    if len(value) != scores.shape[0]:
        raise ValueError(f"has {len(value)} values for {scores.shape[0]} rows; give one number, or one for each row")
    return column(value, scores.device)
