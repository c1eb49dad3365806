"""`GenerationMixin` gives a user's own module `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from decodekit.api import generate, plan, stream
from decodekit.config import GenerationConfig
from decodekit.run import Step


class GenerationMixin:
    """Mix into an ``nn.Module`` whose forward maps int64 tokens [B, T] to logits [B, T, V] (or an object with
    ``.logits``), with whichever of attention_mask, position_ids and a cache argument it names.

    Set ``generation_config`` (a `GenerationConfig` or dict) on the object for its defaults.
    """

    generation_config: GenerationConfig | dict[str, Any] | None = None

    def can_generate(self) -> bool:
        """True: it has `generate`."""
        return True

    def generate(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """`decodekit.generate` with this model."""
        return generate(self, inputs, generation_config, **kwargs)

    def stream(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Iterator[Step]:
        """`decodekit.stream` with this model."""
        return stream(self, inputs, generation_config, **kwargs)

    def plan(self, inputs: Any = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """`decodekit.plan` with this model."""
        return plan(self, inputs, generation_config, **kwargs)
