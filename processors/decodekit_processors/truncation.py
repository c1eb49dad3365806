"""Truncations: drop the unlikely tail of the distribution. Each finds the smallest score it keeps, and cuts there.

Cutting by score means that tokens with equal scores are kept or dropped together, whatever their ids.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs
import torch
from decodekit.fields import between, option
from decodekit.shortlist import Shortlist
from decodekit.traits import Phase, Traits
from torch import Tensor

from . import nucleus
from .checks import whole
from .listing import FIRST_WIDTHS, largest, open_list
from .rowwise import Cutting, Knob, Scanning, filter_value, like, min_tokens


@attrs.frozen
class TopKLogitsWarper(Cutting):
    """Keep the `top_k` likeliest tokens (Fan, Lewis and Dauphin 2018, arXiv 1805.04833); 0 switches it off.

    All tokens that tie with the last one are kept too. Scores are floating [B, V].
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.TRUNCATE, reads_history=False, keeps_argmax=True, pure=True, graph_safe=True
    )
    knob: ClassVar[str] = "top_k"
    off: ClassVar[float | None] = 0

    top_k: int | tuple[int, ...] = option(
        "Keep this many of the likeliest tokens.", check=whole(0, remark="0: off"), per_row=True
    )
    filter_value: float = filter_value()
    min_tokens_to_keep: int = min_tokens()

    def _number(self, value: float) -> int:
        return int(value)

    def _most(self, k: Knob) -> int:
        """How many tokens the most generous row keeps, ties aside."""
        most: int = int(k.max()) if isinstance(k, Tensor) else k  # type: ignore[assignment]
        return max(most, self.min_tokens_to_keep)

    def _list_cut(self, values: Tensor, k: Knob) -> Tensor:
        if isinstance(k, Tensor):
            return values.gather(-1, k.clamp(min=self.min_tokens_to_keep).clamp_(max=values.shape[-1]) - 1)
        at = min(self._most(k), values.shape[-1])
        return values[:, at - 1 : at]

    def _cut(self, scores: Tensor, k: Knob, clue: Any = None) -> Tensor:
        return self._list_cut(largest(scores, min(self._most(k), scores.shape[-1]))[0], k)

    def _open(self, scores: Tensor, k: Knob) -> Shortlist | None:
        most = self._most(k)
        if most < scores.shape[-1] and not isinstance(k, Tensor):
            # Mostly the next score is lower: then the k largest are the list, whole and without a mask.
            values, ids = largest(scores, most + 1)
            if all(after < last for last, after in values.narrow(1, most - 1, 2).tolist()):
                return Shortlist(values.narrow(1, 0, most), ids.narrow(1, 0, most), scores.shape[-1])
        # Half-precision models tie often: leave room for ties with the last one.
        width = most + max(14, most // 4)
        return open_list(scores, (width, 4 * width), lambda values: self._list_cut(values, k))


@attrs.frozen
class TopPLogitsWarper(Cutting):
    """Keep the smallest set of likeliest tokens that holds `top_p` of the probability, the nucleus.

    A token is kept while the tokens likelier than it hold less than `top_p`; tokens that tie with the last kept one
    are kept too. 1.0 switches it off, 0 keeps the likeliest. Scores are floating [B, V]; sums are float64.
    (Holtzman et al. 2020, arXiv 1904.09751.)
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.TRUNCATE, after=("top_k",), reads_history=False, keeps_argmax=True, pure=True
    )
    knob: ClassVar[str] = "top_p"
    off: ClassVar[float | None] = 1

    top_p: float | tuple[float, ...] = option(
        "Keep the likeliest tokens that together hold this much probability; 1.0 keeps all.",
        check=between(0, 1),
        per_row=True,
    )
    filter_value: float = filter_value()
    min_tokens_to_keep: int = min_tokens()

    def _list_cut(self, values: Tensor, p: Knob) -> Tensor:
        return nucleus.list_cut(values, p, self.min_tokens_to_keep)

    def _cut(self, scores: Tensor, p: Knob, clue: Any = None) -> Tensor:
        return nucleus.dense_cut(scores, p, self.min_tokens_to_keep, clue)

    def _open(self, scores: Tensor, p: Knob) -> Shortlist | nucleus.Found:
        return nucleus.open_nucleus(scores, p, self.min_tokens_to_keep)

    def _shorten(self, shortlist: Shortlist, p: Knob, on: Tensor | None = None) -> Shortlist:
        few = shortlist.values.numel() <= nucleus.FEW and shortlist.values.device.type == "cpu"
        if few and on is None:
            shorter = nucleus.shorten_few(shortlist, p, self.min_tokens_to_keep)
            if shorter is not None:
                return shorter
        return Cutting._shorten(self, shortlist, p, on)


@attrs.frozen
class MinPLogitsWarper(Scanning):
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
    knob: ClassVar[str] = "min_p"
    off: ClassVar[float | None] = 0

    min_p: float | tuple[float, ...] = option(
        "Drop tokens less likely than this times the likeliest; 0 keeps all.", check=between(0, 1), per_row=True
    )
    filter_value: float = filter_value()
    min_tokens_to_keep: int = min_tokens()

    def _number(self, value: float) -> float:
        return math.log(value) if value else -math.inf

    def _list_cut(self, values: Tensor, log_p: Knob) -> Tensor:
        floor = values[:, :1] + like(log_p, values)
        if self.min_tokens_to_keep == 1:
            return floor
        k = min(self.min_tokens_to_keep, values.shape[-1])
        return torch.minimum(floor, values[:, k - 1 : k])

    def _scan(self, scores: Tensor, log_p: Knob) -> Tensor:
        if self.min_tokens_to_keep == 1:
            return scores.amax(-1, keepdim=True) + like(log_p, scores)
        return self._list_cut(largest(scores, min(self.min_tokens_to_keep, scores.shape[-1]))[0], log_p)

    def _open(self, scores: Tensor, log_p: Knob) -> Shortlist | Tensor | None:
        def cut_of(values: Tensor) -> Tensor:
            return self._list_cut(values, log_p)

        if self.min_tokens_to_keep > FIRST_WIDTHS[0]:
            return open_list(scores, FIRST_WIDTHS, cut_of)
        short = open_list(scores, FIRST_WIDTHS[:1], cut_of)
        return Scanning._open(self, scores, log_p) if short is None else short
