"""Greedy decoding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import attrs

if TYPE_CHECKING:
    from decodekit.run import Run, Step


@attrs.frozen
class Greedy:
    """Take the likeliest token at every step."""

    needs: ClassVar[frozenset[str]] = frozenset()
    samples: ClassVar[bool] = False
    selector: ClassVar[str] = "argmax"

    def decode(self, run: Run, /) -> Iterator[Step]:
        """Yield one step for each new token of the batch, until every row is finished."""
        logits = run.prefill()
        while True:
            step = run.accept(run.select(run.process(logits)))
            yield step
            if run.finished:
                return
            logits = run.forward(step.tokens)
