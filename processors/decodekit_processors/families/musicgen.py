"""MusicGen: classifier-free guidance whose two halves come out of one forward pass."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
from decodekit.fields import greater_than, option
from decodekit.traits import Phase, Traits
from torch import Tensor


def halves(input_ids: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Conditional and unconditional scores [B, V] each, of scores [2B, V] for `input_ids` [B, T].

    Raises ValueError where there are not two rows of scores for every row of tokens.
    """
    rows = input_ids.shape[0]
    if scores.shape[0] != 2 * rows:
        raise ValueError(
            f"scores must have two rows for each of the {rows} rows of tokens, conditional ones first, unconditional "
            f"ones behind; got {scores.shape[0]}. For a model that gives one row each, use guidance_scale"
        )
    return scores[:rows], scores[rows:]


def guide(base: Tensor, conditional: Tensor, unconditional: Tensor, scale: float) -> Tensor:
    """`base` moved by `scale` times what the condition changes; a token that either half rules out is not moved."""
    guided: Tensor = base + (conditional - unconditional) * scale
    return guided.where(~(conditional.isinf() | unconditional.isinf()), conditional)


SCALE_DOC = "Strength of the guidance, above 1: how far to move from the unconditional scores."


def scale_option() -> Any:
    """The field both guidance processors have."""
    return option(SCALE_DOC, check=greater_than(1))


@attrs.frozen
class ClassifierFreeGuidanceLogitsProcessor:
    """Move the scores away from what the model says without the prompt: u + scale * (c - u).

    The model runs on a doubled batch: `scores` float [2B, V] hold the conditional rows and, behind them, the
    unconditional ones of the same B rows of `input_ids`; the result is [B, V]. A row of it therefore depends on two
    rows of scores. Raises ValueError for a scale not above 1, and for scores whose batch is not doubled.
    (Ho and Salimans 2022, arXiv 2207.12598; Copet et al. 2023, MusicGen, arXiv 2306.05284.)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.GUIDE, reads_history=False, rowwise=False, pure=True, graph_safe=True)

    guidance_scale: float = scale_option()

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return guided scores [B, V] of scores [2B, V]."""
        conditional, unconditional = halves(input_ids, scores)
        return guide(unconditional, conditional, unconditional, self.guidance_scale)
