"""What truncations share: switched off or on, one value for all rows or one for each, dense rows or a shortlist."""

from __future__ import annotations

import math
import warnings
from typing import Any, ClassVar

import torch
from decodekit.context import BindContext
from decodekit.fields import between, option
from decodekit.shortlist import Shortlist
from torch import Tensor

from .checks import of_rows, whole

Knob = float | Tensor
"""How much to drop: a number for all rows, or a Tensor [B, 1]."""


def filter_value() -> Any:
    """The option of what dropped tokens get."""
    return option("Score given to dropped tokens.", default=-math.inf, check=between(-math.inf, math.inf))


def min_tokens() -> Any:
    """The option of how many tokens always stay."""
    return option("Tokens that are kept however unlikely they are.", default=1, check=whole(1))


def like(value: Any, scores: Tensor) -> Any:
    """A number as it is, a Tensor in the dtype of `scores`: so both round alike in arithmetic with them."""
    return value.to(scores.dtype) if isinstance(value, Tensor) else value


def idle(ctx: BindContext, key: str) -> bool:
    """Whether a truncation that may move the likeliest token has nothing to do, as no token is drawn in this run.

    Warns where the caller asked for it with `key`.
    """
    if not ctx.samples and ctx.settings.origin(key) in ("config", "call"):
        warnings.warn(f"{key} has no effect without do_sample=True: the likeliest token is taken", stacklevel=2)
    return not ctx.samples


def resorted(shortlist: Shortlist, drop: Tensor) -> Shortlist:
    """The shortlist with dropped entries at -inf, descending again where they were not the last ones."""
    values, places = shortlist.values.masked_fill(drop, -torch.inf).sort(dim=-1, descending=True, stable=True)
    return Shortlist(values, shortlist.ids.gather(-1, places), shortlist.vocab_size)


class Truncation:
    """Options of a truncation. Subclasses say what to drop; `value` is the number that the option `knob` holds,
    passed through `_number`, or a Tensor [B, 1] of such numbers."""

    __slots__ = ()
    knob: ClassVar[str]
    """Field that says how much to drop."""
    off: ClassVar[float | None] = None
    """The value at which nothing is dropped."""
    filter_value: float

    def _number(self, value: float) -> float:
        """The form of the option's value that the arithmetic uses."""
        return float(value)

    def _drop(self, scores: Tensor, value: Knob) -> Tensor:
        """What to drop of dense rows [B, V]: bool [B, V]."""
        raise NotImplementedError

    def _list_drop(self, values: Tensor, value: Knob) -> Tensor:
        """The same for a descending list [B, K] outside of which everything is removed."""
        raise NotImplementedError

    def _open(self, scores: Tensor, value: Knob) -> Shortlist | None:
        """The kept tokens of dense rows; None where they are too many."""
        raise NotImplementedError

    def _shorten(self, shortlist: Shortlist, value: Knob, on: Tensor | None = None) -> Shortlist:
        """The shortlist without dropped tokens, in the rows `on` bool [B, 1] (None: in all)."""
        drop = self._list_drop(shortlist.values, value)
        drop = drop if on is None else drop & on
        return shortlist.replace(shortlist.values.masked_fill(drop, -torch.inf))

    def bind(self, ctx: BindContext, /) -> Any | None:
        """Return itself, a form with a value for each row, one that is dense alone where `filter_value` is finite, or
        None where nothing is dropped."""
        value = getattr(self, self.knob)
        short = self.filter_value == -math.inf
        if isinstance(value, tuple):
            rows = ctx.per_row(value)
            if all(each == self.off for each in value):
                return None
            return ShortRows(self, rows) if short else Rows(self, rows)
        if value == self.off:
            return None
        return self if short else _Dense(self)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return `scores` [B, V] with `filter_value` at dropped tokens; shape and dtype stay."""
        value = getattr(self, self.knob)
        if isinstance(value, tuple):
            return Rows(self, of_rows(value, scores))(input_ids, scores)
        if value == self.off:
            return scores
        return scores.masked_fill(self._drop(scores, self._number(value)), self.filter_value)

    def open_shortlist(self, input_ids: Tensor, scores: Tensor, /) -> Shortlist | None:
        """Return the kept tokens of [B, V]; None where too many are kept, or `filter_value` is finite."""
        value = getattr(self, self.knob)
        if value == self.off or self.filter_value != -math.inf:
            return None
        if isinstance(value, tuple):
            return ShortRows(self, of_rows(value, scores)).open_shortlist(input_ids, scores)
        return self._open(scores, self._number(value))

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist with dropped tokens at -inf. Raises ValueError where `filter_value` is finite."""
        if self.filter_value != -math.inf:
            raise ValueError(f"a shortlist cannot hold filter_value={self.filter_value}; call the dense form")
        value = getattr(self, self.knob)
        if value == self.off:
            return shortlist
        if isinstance(value, tuple):
            return ShortRows(self, of_rows(value, shortlist.values)).shorten(input_ids, shortlist)
        return self._shorten(shortlist, self._number(value))


class Cutting(Truncation):
    """A truncation that keeps everything at or above some score."""

    __slots__ = ()

    def _cut(self, scores: Tensor, value: Knob) -> Tensor:
        """Smallest kept score [B, 1] of dense rows [B, V]."""
        raise NotImplementedError

    def _list_cut(self, values: Tensor, value: Knob) -> Tensor:
        """The same for a descending list [B, K] outside of which everything is removed."""
        raise NotImplementedError

    def _drop(self, scores: Tensor, value: Knob) -> Tensor:
        return scores < self._cut(scores, value)

    def _list_drop(self, values: Tensor, value: Knob) -> Tensor:
        return values < self._list_cut(values, value)


class _Dense:
    """A truncation whose dropped tokens keep a finite score: no shortlist can say that."""

    __slots__ = ("_options",)

    def __init__(self, options: Truncation) -> None:
        self._options = options

    def __repr__(self) -> str:
        return repr(self._options)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return what the options return."""
        return self._options(input_ids, scores)


class Rows:
    """A truncation with a value for each row; rows whose value means off stay as they are."""

    __slots__ = ("_all_on", "_on", "_options", "_values")

    def __init__(self, options: Truncation, values: Tensor) -> None:
        self._options = options
        # Each number goes through the same arithmetic as one for all rows would.
        numbers = [[options._number(value)] for value in values[:, 0].tolist()]
        kind = torch.int64 if isinstance(numbers[0][0], int) else torch.float64
        self._values = torch.tensor(numbers, dtype=kind, device=values.device)
        self._on = torch.ones_like(values, dtype=torch.bool) if options.off is None else values != options.off
        self._all_on = bool(self._on.all())

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the value of former row `rows[i]`."""
        self._values, self._on = self._values[rows], self._on[rows]
        self._all_on = bool(self._on.all())

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return `scores` [B, V] with `filter_value` at dropped tokens; shape and dtype stay."""
        drop = self._options._drop(scores, self._values)
        drop = drop if self._all_on else drop & self._on
        return scores.masked_fill(drop, self._options.filter_value)


class ShortRows(Rows):
    """The same, on shortlists too."""

    __slots__ = ()

    def open_shortlist(self, input_ids: Tensor, scores: Tensor, /) -> Shortlist | None:
        """Return the kept tokens of [B, V]; None where too many are kept."""
        return self._options._open(scores, self._values) if self._all_on else None

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist with dropped tokens at -inf."""
        return self._options._shorten(shortlist, self._values, None if self._all_on else self._on)
