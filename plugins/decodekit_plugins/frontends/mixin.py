"""`GenerationMixin` gives a user's own module `generate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from decodekit.api import plan, stream
from decodekit.config import GenerationConfig
from decodekit.run import Step
from torch import Tensor

from .calls import generate_as
from .transitions import compute_transition_scores


class GenerationMixin:
    """Mix into an ``nn.Module`` whose forward maps int64 tokens [B, T] to logits [B, T, V] (or an object with
    ``.logits``), with whichever of attention_mask, position_ids and a cache argument it names.

    Set ``generation_config`` (a `GenerationConfig` or dict) on the object for its defaults.
    """

    generation_config: GenerationConfig | dict[str, Any] | None = None

    def can_generate(self) -> bool:
        """True: it has `generate`."""
        return True

    generate = generate_as

    def stream(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Iterator[Step]:
        """`decodekit.stream` with this model."""
        return stream(self, inputs, generation_config, **kwargs)

    def plan(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """`decodekit.plan` with this model."""
        return plan(self, inputs, generation_config, **kwargs)

    def compute_transition_scores(
        self,
        sequences: Tensor,
        scores: Sequence[Tensor],
        beam_indices: Tensor | None = None,
        normalize_logits: bool = False,
    ) -> Tensor:
        """`decodekit.compute_transition_scores`."""
        return compute_transition_scores(sequences, scores, beam_indices, normalize_logits)
