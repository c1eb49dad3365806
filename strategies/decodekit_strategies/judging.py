"""What the criteria say of candidates, before any of them is taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from decodekit.run import Run


class Judge:
    """Shows candidates to the criteria of a run, in the rows that its strategy's ``judged_per_prompt`` asked for."""

    def __init__(self, run: Run) -> None:
        self._run, self._ctx = run, run.pipeline.judged
        parts = run.pipeline.criteria
        self._moves: list[Any] = [part.runtime for part in parts if hasattr(part.runtime, "reorder")]
        # What stands before the newest token matters only to those that look at it.
        if any(part.traits.reads_history and not getattr(part.runtime, "newest_only", False) for part in parts):
            self._moves.append(self._ctx)
        self._hears = [part.runtime.accept for part in parts if hasattr(part.runtime, "accept")]
        self._ctx.reserve(run.context.tokens.shape[1])

    def __call__(self, rows: Sequence[int], tokens: Sequence[int]) -> list[int]:
        """Candidate i follows candidate `rows[i]` of the last call (at first: any row of its prompt) with `tokens[i]`.

        Returns for each the number of the criterion that ends it (`reason` has its words), -1 where it may go on.
        """
        ctx, parts = self._ctx, list(self._run.pipeline.criteria)
        new = torch.tensor(tokens, device=ctx.tokens.device)
        if self._moves:
            order = torch.tensor(rows, device=ctx.tokens.device)
            for item in self._moves:
                item.reorder(order)
        ctx.append(new)
        for accept in self._hears:
            accept(new, None)
        codes = [-1] * ctx.rows
        for part, verdict in reversed(self._run.ask(ctx)):
            for row in verdict.nonzero()[:, 0].tolist():
                codes[row] = parts.index(part)
        return codes

    def reason(self, code: int, candidate: int) -> tuple[str, Any]:
        """Name of the criterion that was numbered, and what it says of that candidate."""
        part = self._run.pipeline.criteria[code]
        return part.name, part.runtime.why(candidate) if hasattr(part.runtime, "why") else None


def made(run: Run) -> int:
    """New tokens so far."""
    return run.context.length - run.context.prompt_width


def longest(run: Run) -> int | None:
    """New tokens at which every row has ended; None where no criterion knows."""
    limit = run.context.max_length
    return None if limit is None else limit - run.context.prompt_width
