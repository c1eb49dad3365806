"""A search of two beams, and a penalty whose state follows rows that trade places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import attrs
import torch
from decodekit import BindContext, GenerateDecoderOnlyOutput, Phase, Run, Step, Traits, at_least, option
from torch import Tensor


@attrs.frozen
class Twins:
    """Keep the two likeliest continuations of each prompt, and return the better one."""

    needs: ClassVar[frozenset[str]] = frozenset({"cache:reorder"})
    samples: ClassVar[bool] = False

    def rows_per_prompt(self, settings: Any, /) -> int:
        """Two."""
        return 2

    def bind(self, ctx: BindContext, /) -> _Search:
        """Return the search of one call."""
        return _Search(ctx)


class _Search:
    needs = Twins.needs
    samples = False

    def __init__(self, ctx: BindContext) -> None:
        self.totals = torch.tensor([0.0, -torch.inf]).repeat(ctx.rows // 2)
        self.streamed_per_prompt = 1

    def decode(self, run: Run, /) -> Iterator[Step]:
        """Yield one step for each new token."""
        logits, over = run.prefill(), [False] * run.rows
        while not run.finished:
            scores = run.process(logits, normalise=True)
            dense = scores if isinstance(scores, Tensor) else scores.dense()
            for row in (row for row, ended in enumerate(over) if ended):  # a text that has ended costs no more
                dense[row] = -torch.inf
                dense[row, 0] = 0.0
            sums = (dense + self.totals[:, None]).reshape(run.rows // 2, -1)
            best, place = sums.topk(2)
            first = torch.arange(0, run.rows, 2)[:, None]
            rows, tokens = (place // dense.shape[1] + first).flatten(), (place % dense.shape[1]).flatten()
            self.totals = best.flatten()
            run.reorder(rows)
            step = run.accept(tokens)
            over = list(step.finished)
            yield step
            if not run.finished:
                logits = run.forward(step.tokens)

    def finish(self, run: Run, output: GenerateDecoderOnlyOutput) -> GenerateDecoderOnlyOutput:
        """The better row of each prompt."""
        best = self.totals.view(-1, 2).argmax(1) + torch.arange(0, run.rows, 2)
        return attrs.evolve(
            output,
            sequences=output.sequences[best],
            **{name: tuple(getattr(output, name)[i] for i in best.tolist())
               for name in ("stop_reasons", "stop_details", "lengths")},
        )  # fmt: skip


@attrs.frozen
class UnlikeLast:
    """Lower the score of a token by how often its row has taken it."""

    traits: ClassVar[Traits] = Traits(phase=Phase.PENALTY, reads_history=True)
    unlike_last: float = option("What each time costs.", check=at_least(0))

    def bind(self, ctx: BindContext, /) -> _Counts:
        """Return fresh counts."""
        return _Counts(self.unlike_last, ctx)


class _Counts:
    def __init__(self, cost: float, ctx: BindContext) -> None:
        real = torch.ones_like(ctx.input_ids) if ctx.mask is None else ctx.history_mask().long()
        self.cost = cost
        self.counts = torch.zeros(ctx.rows, ctx.spec.vocab_size).scatter_add_(1, ctx.input_ids, real.float())
        self.back: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        return scores - self.cost * self.counts

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        self.back.append(self.counts)
        where = torch.arange(len(self.counts)) if rows is None else rows
        self.counts = self.counts.clone()
        for column in tokens.view(len(where), -1).unbind(1):
            self.counts[where, column] += 1

    def rollback(self, steps: int, /) -> None:
        for _ in range(steps):
            self.counts = self.back.pop()

    def reorder(self, rows: Tensor, /) -> None:
        self.counts = self.counts[rows]
        self.back = [counts[rows] for counts in self.back]
