"""Top-h: keep likely tokens until they hold their share of the entropy."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from decodekit.fields import between, option
from decodekit.shortlist import Shortlist
from decodekit.traits import Phase, Traits
from torch import Tensor

from .listing import largest, open_list
from .nucleus import weights
from .rowwise import Cutting, Knob, filter_value

_TOP_N = 100
"""Tokens that are looked at."""


@attrs.frozen
class TopHLogitsWarper(Cutting):
    """Keep the likeliest tokens while together they hold at most `top_h` of the entropy (arXiv 2509.02510).

    Only the 100 likeliest tokens are looked at, as a distribution of their own: a token adds -p log p. The likeliest
    always stays, and so do all that tie with the last kept one. 1 keeps all of the 100. Sums are float64.
    Scores are floating [B, V]. Raises ValueError for a top_h outside of (0, 1].
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.TRUNCATE,
        after=("top_n_sigma",),
        before=("top_k", "top_p", "min_p"),
        reads_history=False,
        keeps_argmax=True,
        pure=True,
        graph_safe=True,
    )
    knob: ClassVar[str] = "top_h"

    top_h: float | tuple[float, ...] = option(
        "Keep the likeliest of the 100 likeliest tokens that together hold at most this much of their entropy.",
        check=between(0, 1, low_open=True),
        per_row=True,
    )
    filter_value: float = filter_value()

    def _list_cut(self, values: Tensor, share: Knob) -> Tensor:
        values = values[:, :_TOP_N]
        weight = weights(values, values[:, :1]).double()
        p = weight / weight.sum(-1, keepdim=True)
        sums = torch.special.entr(p).cumsum(-1)
        # Sums that stand still at tokens of no weight keep none of those.
        within = (sums <= sums[:, -1:] * share) & (weight > 0)
        return values.gather(-1, within.sum(-1, keepdim=True).sub_(1).clamp_(min=0))

    def _cut(self, scores: Tensor, share: Knob, clue: Any = None) -> Tensor:
        return self._list_cut(largest(scores, min(_TOP_N, scores.shape[-1]))[0], share)

    def _open(self, scores: Tensor, share: Knob) -> Shortlist | None:
        return open_list(scores, (_TOP_N + 1, 4 * _TOP_N), lambda values: self._list_cut(values, share))
