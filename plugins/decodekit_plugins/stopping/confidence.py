"""Stop drafting where the draft model is not sure."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from decodekit.context import BindContext
from decodekit.errors import InputError, warn
from decodekit.fields import between, option
from decodekit.settings import CALLER
from torch import Tensor


@attrs.frozen
class ConfidenceCriteria:
    """End a draft with the first token whose probability is below a threshold.

    It is a rule for drafts: a context says that it is one by its attribute `drafting`, and in all other runs `bind`
    leaves the criterion out. It reads the scores of the newest step, so they must be recorded (``output_scores``).
    """

    assistant_confidence_threshold: float = option(
        "A draft ends with the first token less likely than this; 0: never.", check=between(0, 1)
    )

    def bind(self, ctx: BindContext, /) -> ConfidenceCriteria | None:
        """Return itself in a draft, else None, with a warning where the caller asked for it."""
        drafting = bool(getattr(ctx, "drafting", False))
        if not drafting and ctx.settings.origin("assistant_confidence_threshold") in CALLER:
            warn("assistant_confidence_threshold has no effect: nothing is drafted in this run")
        return self if drafting and self.assistant_confidence_threshold > 0 else None

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor:
        """Bool [B]: the last token of the row of `input_ids` [B, T] was less likely than the threshold.

        `scores` is the sequence of recorded scores [B, V], one for each step. Raises InputError without them.
        """
        if not scores:
            raise InputError("assistant_confidence_threshold reads the scores of each step: set output_scores=True")
        newest: Tensor = scores[-1]
        last = input_ids[:, -1:].to(newest.device)
        chance = (newest.gather(-1, last)[:, 0] - torch.logsumexp(newest, -1)).exp()
        return (chance < self.assistant_confidence_threshold).to(input_ids.device)
