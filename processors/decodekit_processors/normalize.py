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
class LogitNormalization:
    """Turn scores into log-probabilities: over the tokens that are left, their exponentials sum to 1.

    Scores are floating [B, V]. The likeliest token and all differences stay; a row without any token becomes NaN.
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.NORMALIZE, reads_history=False, keeps_argmax=True, pure=True, graph_safe=True
    )

    renormalize_logits: bool = option("Make log-probabilities of the scores after all processors.", default=True)

    def bind(self, ctx: BindContext, /) -> LogitNormalization | None:
        """Return itself, or None where it is off."""
        return self if self.renormalize_logits else None

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return log-probabilities in the dtype of the scores."""
        return normalize(scores)

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist with log-probabilities; the order stays."""
        return shortlist.replace(normalize(shortlist.values))


def normalize(scores: Tensor) -> Tensor:
    """log-softmax over the last dimension.

    The sum is taken in float64, so that it does not depend on how many removed tokens lie between the others: a
    shortlist gives what the whole vocabulary gives.
    """
    wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
    below = wide - wide.amax(-1, keepdim=True)
    total = below.exp().sum(-1, keepdim=True, dtype=torch.float64).log_().to(wide.dtype)
    return below.sub_(total).to(scores.dtype)
