"""What truncations share: switched off or on, one value for all rows or one for each, dense rows or a shortlist."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from decodekit.context import BindContext
from decodekit.fields import between, option
from decodekit.shortlist import Shortlist
from torch import Tensor

from .checks import numbers, of_rows, whole
from .listing import at_or_above, list_above, looped

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

    def _keep(self, scores: Tensor, value: Knob, on: Tensor | None = None, clue: Any = None) -> Tensor:
        """Dense rows [B, V] with `filter_value` at dropped tokens in the rows `on` bool [B, 1] (None: in all).

        `clue` is what `_open` returned for the same arguments.
        """
        raise NotImplementedError

    def _list_drop(self, values: Tensor, value: Knob) -> Tensor:
        """What to drop of a descending list [B, K] outside of which everything is removed: bool [B, K]."""
        raise NotImplementedError

    def _open(self, scores: Tensor, value: Knob) -> Any:
        """The kept tokens of dense rows as a `Shortlist`; where they are too many, what helps `_keep`, or None."""
        raise NotImplementedError

    def _shorten(self, shortlist: Shortlist, value: Knob, on: Tensor | None = None) -> Shortlist:
        """The shortlist without dropped tokens, in the rows `on` bool [B, 1] (None: in all)."""
        drop = self._list_drop(shortlist.values, value)
        drop = drop if on is None else drop & on
        return shortlist.replace(shortlist.values.masked_fill(drop, -torch.inf))

    def bind(self, ctx: BindContext, /) -> Any | None:
        """Return the form for a run, dense alone where `filter_value` is finite, or None where nothing is dropped."""
        value = ctx.per_row(getattr(self, self.knob))
        if all(each == self.off for each in numbers(getattr(self, self.knob))):
            return None
        return Listing(self, value) if self.filter_value == -math.inf else Bound(self, value)

    def _alone(self, scores: Tensor) -> Listing | None:
        """The form for a call outside of a run; None where nothing is dropped."""
        value = getattr(self, self.knob)
        return None if value == self.off else Listing(self, of_rows(value, scores))

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return `scores` [B, V] with `filter_value` at dropped tokens; shape and dtype stay."""
        bound = self._alone(scores)
        return scores if bound is None else bound(input_ids, scores)

    def open_shortlist(self, input_ids: Tensor, scores: Tensor, /) -> Shortlist | None:
        """Return the kept tokens of [B, V]; None where too many are kept, or `filter_value` is finite."""
        bound = None if self.filter_value != -math.inf else self._alone(scores)
        return None if bound is None else bound.open_shortlist(input_ids, scores)

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist with dropped tokens at -inf. Raises ValueError where `filter_value` is finite."""
        if self.filter_value != -math.inf:
            raise ValueError(f"a shortlist cannot hold filter_value={self.filter_value}; call the dense form")
        bound = self._alone(shortlist.values)
        return shortlist if bound is None else bound.shorten(input_ids, shortlist)


class Cutting(Truncation):
    """A truncation that keeps everything at or above some score."""

    __slots__ = ()

    def _cut(self, scores: Tensor, value: Knob, clue: Any = None) -> Tensor:
        """Smallest kept score [B, 1] of dense rows [B, V]."""
        raise NotImplementedError

    def _list_cut(self, values: Tensor, value: Knob) -> Tensor:
        """The same for a descending list [B, K] outside of which everything is removed."""
        raise NotImplementedError

    def _keep(self, scores: Tensor, value: Knob, on: Tensor | None = None, clue: Any = None) -> Tensor:
        cut = self._cut(scores, value, clue)
        if on is not None:
            cut = cut.masked_fill(~on, -torch.inf)
        if self.filter_value == -math.inf and looped(scores):
            return at_or_above(scores, cut)
        return scores.masked_fill(scores < cut, self.filter_value)

    def _list_drop(self, values: Tensor, value: Knob) -> Tensor:
        return values < self._list_cut(values, value)


class Scanning(Cutting):
    """A cut that is found by reading dense rows whole: where no shortlist holds what is kept, the cut is the clue."""

    __slots__ = ()

    def _scan(self, scores: Tensor, value: Knob) -> Tensor:
        """Smallest kept score [B, 1] of dense rows [B, V]."""
        raise NotImplementedError

    def _cut(self, scores: Tensor, value: Knob, clue: Any = None) -> Tensor:
        known: Tensor = self._scan(scores, value) if clue is None else clue
        return known

    def _open(self, scores: Tensor, value: Knob) -> Shortlist | Tensor | None:
        cut = self._scan(scores, value)
        short = list_above(scores, cut)
        return cut if short is None else short


class Bound:
    """A truncation inside a run, with one number or with one for each row; rows whose number means off stay as they
    are."""

    __slots__ = ("_clue", "_on", "_options", "_value")

    def __init__(self, options: Truncation, value: Any) -> None:
        self._options = options
        self._clue: tuple[Tensor, Any] | None = None
        self._on: Tensor | None = None
        """bool [rows, 1], None where all rows are on."""
        if not isinstance(value, Tensor):
            self._value: Knob = options._number(value)
            return
        # Each number goes through the same arithmetic as one for all rows would.
        made = [[options._number(each)] for each in value[:, 0].tolist()]
        kind = torch.int64 if isinstance(made[0][0], int) else torch.float64
        self._value = torch.tensor(made, dtype=kind, device=value.device)
        if options.off is not None:
            self._switch(value != options.off)

    def _switch(self, on: Tensor) -> None:
        self._on = None if bool(on.all()) else on

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the number of former row `rows[i]`."""
        if isinstance(self._value, Tensor):
            self._value = self._value[rows]
        if self._on is not None:
            self._switch(self._on[rows])

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return `scores` [B, V] with `filter_value` at dropped tokens; shape and dtype stay."""
        clue, self._clue = self._clue, None
        known = clue[1] if clue is not None and clue[0] is scores else None
        return self._options._keep(scores, self._value, self._on, known)


class Listing(Bound):
    """The same, on shortlists too. What was found out in vain for a shortlist is kept for the dense form, which is
    asked for next."""

    __slots__ = ()

    def open_shortlist(self, input_ids: Tensor, scores: Tensor, /) -> Shortlist | None:
        """Return the kept tokens of [B, V]; None where too many are kept."""
        self._clue = None
        if self._on is not None:
            return None
        found = self._options._open(scores, self._value)
        if found is None or isinstance(found, Shortlist):
            return found
        self._clue = (scores, found)
        return None

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist with dropped tokens at -inf."""
        return self._options._shorten(shortlist, self._value, self._on)
