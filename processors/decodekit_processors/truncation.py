"""Truncations: drop the unlikely tail of the distribution. Each finds the smallest score it keeps, and cuts there.

Cutting by score means that tokens with equal scores are kept or dropped together, whatever their ids.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import between, option
from decodekit.shortlist import Shortlist
from decodekit.traits import Phase, Traits
from torch import Tensor

from . import nucleus
from .checks import whole
from .listing import FIRST_WIDTHS, largest, open_list


def _filter_value() -> Any:
    return option("Score given to dropped tokens.", default=-math.inf, check=between(-math.inf, math.inf))


def _min_tokens() -> Any:
    return option("Tokens that are kept however unlikely they are.", default=1, check=whole(1))


class _Dense:
    """A truncation whose dropped tokens keep a finite score: no shortlist can say that."""

    __slots__ = ("_options",)

    def __init__(self, options: _Truncation) -> None:
        self._options = options

    def __repr__(self) -> str:
        return repr(self._options)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return what the options return."""
        return self._options(input_ids, scores)


class _Truncation:
    """What the three share. Their claim to keep the likeliest token holds unless `filter_value` lies above it."""

    __slots__ = ()
    filter_value: float

    def _off(self) -> bool:
        """Whether these options drop nothing."""
        raise NotImplementedError

    def _cut(self, scores: Tensor) -> Tensor:
        """Smallest kept score [B, 1] of dense rows [B, V]."""
        raise NotImplementedError

    def _list_cut(self, values: Tensor) -> Tensor:
        """The same for a descending list [B, K] outside of which everything is removed."""
        raise NotImplementedError

    def _open(self, scores: Tensor) -> Shortlist | None:
        raise NotImplementedError

    def bind(self, ctx: BindContext, /) -> Any | None:
        """Return itself, its dense form alone where `filter_value` is finite, or None where nothing is dropped."""
        if self._off():
            return None
        return self if self.filter_value == -math.inf else _Dense(self)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return `scores` [B, V] with `filter_value` at dropped tokens; shape and dtype stay."""
        if self._off():
            return scores
        return scores.masked_fill(scores < self._cut(scores), self.filter_value)

    def open_shortlist(self, input_ids: Tensor, scores: Tensor, /) -> Shortlist | None:
        """Return the kept tokens of [B, V]; None where too many are kept, or `filter_value` is finite."""
        if self._off() or self.filter_value != -math.inf:
            return None
        return self._open(scores)

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist with dropped tokens at -inf. Raises ValueError where `filter_value` is finite."""
        if self.filter_value != -math.inf:
            raise ValueError(f"a shortlist cannot hold filter_value={self.filter_value}; call the dense form")
        if self._off():
            return shortlist
        values = shortlist.values
        return shortlist.replace(values.masked_fill(values < self._list_cut(values), -torch.inf))


@attrs.frozen
class TopKLogitsWarper(_Truncation):
    """Keep the `top_k` likeliest tokens (Fan, Lewis and Dauphin 2018, arXiv 1805.04833); 0 switches it off.

    All tokens that tie with the last one are kept too. Scores are floating [B, V].
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.TRUNCATE, reads_history=False, keeps_argmax=True, pure=True, graph_safe=True
    )

    top_k: int = option("Keep this many of the likeliest tokens.", check=whole(0, remark="0: off"))
    filter_value: float = _filter_value()
    min_tokens_to_keep: int = _min_tokens()

    def _off(self) -> bool:
        return self.top_k == 0

    def _list_cut(self, values: Tensor) -> Tensor:
        k = min(max(self.top_k, self.min_tokens_to_keep), values.shape[-1])
        return values[:, k - 1 : k]

    def _cut(self, scores: Tensor) -> Tensor:
        k = min(max(self.top_k, self.min_tokens_to_keep), scores.shape[-1])
        return self._list_cut(largest(scores, k)[0])

    def _open(self, scores: Tensor) -> Shortlist | None:
        k = max(self.top_k, self.min_tokens_to_keep)
        if k < scores.shape[-1]:
            # Mostly the next score is lower: then the k largest are the list, whole and without a mask.
            values, ids = largest(scores, k + 1)
            if all(after < last for last, after in values.narrow(1, k - 1, 2).tolist()):
                return Shortlist(values.narrow(1, 0, k), ids.narrow(1, 0, k), scores.shape[-1])
        # Half-precision models tie often: leave room for ties with the last one.
        width = k + max(14, k // 4)
        return open_list(scores, (width, 4 * width), self._list_cut)


@attrs.frozen
class TopPLogitsWarper(_Truncation):
    """Keep the smallest set of likeliest tokens that holds `top_p` of the probability, the nucleus.

    A token is kept while the tokens likelier than it hold less than `top_p`; tokens that tie with the last kept one
    are kept too. 1.0 switches it off, 0 keeps the likeliest. Scores are floating [B, V]; sums are float64.
    (Holtzman et al. 2020, arXiv 1904.09751.)
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.TRUNCATE, after=("top_k",), reads_history=False, keeps_argmax=True, pure=True
    )

    top_p: float = option(
        "Keep the likeliest tokens that together hold this much probability; 1.0 keeps all.", check=between(0, 1)
    )
    filter_value: float = _filter_value()
    min_tokens_to_keep: int = _min_tokens()

    def _off(self) -> bool:
        return self.top_p >= 1

    def _list_cut(self, values: Tensor) -> Tensor:
        return nucleus.list_cut(values, self.top_p, self.min_tokens_to_keep)

    def _cut(self, scores: Tensor) -> Tensor:
        return nucleus.dense_cut(scores, self.top_p, self.min_tokens_to_keep)

    def _open(self, scores: Tensor) -> Shortlist | None:
        return nucleus.open_nucleus(scores, self.top_p, self.min_tokens_to_keep)

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist without dropped tokens. Raises ValueError where `filter_value` is finite."""
        few = shortlist.values.numel() <= nucleus.FEW and shortlist.values.device.type == "cpu"
        if few and self.filter_value == -math.inf and self.top_p < 1:
            shorter = nucleus.shorten_few(shortlist, self.top_p, self.min_tokens_to_keep)
            if shorter is not None:
                return shorter
        return super().shorten(input_ids, shortlist)


@attrs.frozen
class MinPLogitsWarper(_Truncation):
    """Keep tokens at least `min_p` times as likely as the likeliest (Nguyen et al. 2024, arXiv 2407.01082).

    Compared as scores: the best score plus log(min_p) is the floor. 0 keeps all. Scores are floating [B, V].
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.TRUNCATE,
        after=("top_k", "top_p"),
        reads_history=False,
        keeps_argmax=True,
        pure=True,
        graph_safe=True,
    )

    min_p: float = option("Drop tokens less likely than this times the likeliest; 0 keeps all.", check=between(0, 1))
    filter_value: float = _filter_value()
    min_tokens_to_keep: int = _min_tokens()

    def _off(self) -> bool:
        return self.min_p == 0

    def _list_cut(self, values: Tensor) -> Tensor:
        floor = values[:, :1] + math.log(self.min_p)
        if self.min_tokens_to_keep == 1:
            return floor
        k = min(self.min_tokens_to_keep, values.shape[-1])
        return torch.minimum(floor, values[:, k - 1 : k])

    def _cut(self, scores: Tensor) -> Tensor:
        if self.min_tokens_to_keep == 1:
            return scores.amax(-1, keepdim=True) + math.log(self.min_p)
        return self._list_cut(largest(scores, min(self.min_tokens_to_keep, scores.shape[-1]))[0])

    def _open(self, scores: Tensor) -> Shortlist | None:
        return open_list(scores, FIRST_WIDTHS, self._list_cut)
