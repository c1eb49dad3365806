"""Scores that are numbers, and scores that are log-probabilities."""

from __future__ import annotations

from typing import ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import option
from decodekit.shortlist import Shortlist
from decodekit.traits import Phase, Traits
from torch import Tensor

from .edits import Editing


@attrs.frozen
class InfNanRemoveLogitsProcessor(Editing):
    """Make every score finite: NaN becomes 0, the infinities the ends of the dtype's range.

    Scores are floating [B, V]. In a run it comes first and cleans what the model said. What processors forbid stays at
    -inf, so that a row they leave without a token is still noticed.
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.GUIDE,
        before=("guidance_scale", "batched_guidance", "dia_guidance"),
        reads_history=False,
        keeps_argmax=True,
        pure=True,
        graph_safe=True,
    )

    remove_invalid_values: bool = option("Replace NaN and infinite scores by finite ones.", default=True)

    def bind(self, ctx: BindContext, /) -> InfNanRemoveLogitsProcessor | None:
        """Return itself, or None where it is off."""
        return self if self.remove_invalid_values else None

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return scores without NaN and infinities, in the same dtype."""
        return (torch.nan_to_num_ if own else torch.nan_to_num)(scores)


@attrs.frozen
class LogitNormalization(Editing):
    """Turn scores into log-probabilities: over the tokens that are left, their exponentials sum to 1.

    Scores are floating [B, V]. The likeliest token and all differences stay; a row without any token becomes NaN. A
    shortlist gives what the whole vocabulary gives, but for the rounding of a sum taken in another order.
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.NORMALIZE, reads_history=False, keeps_argmax=True, pure=True, graph_safe=True
    )

    renormalize_logits: bool = option("Make log-probabilities of the scores after all processors.", default=True)

    def bind(self, ctx: BindContext, /) -> LogitNormalization | None:
        """Return itself, or None where it is off."""
        return self if self.renormalize_logits else None

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return log-probabilities in the dtype of the scores."""
        if own and scores.is_cpu and scores.dtype == torch.float32:
            # There a row is written when it has been read for the last time.
            return torch.log_softmax(scores, -1, out=scores)
        return normalize(scores)

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist with log-probabilities; the order stays."""
        return shortlist.replace(normalize(shortlist.values))


def normalize(scores: Tensor) -> Tensor:
    """log-softmax over the last dimension; half precision is rounded once, at the end."""
    half = scores.dtype not in (torch.float32, torch.float64)
    return scores.log_softmax(-1, dtype=torch.float32 if half else None).to(scores.dtype)
