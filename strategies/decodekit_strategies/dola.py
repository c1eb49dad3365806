"""DoLa: what the last layer says, less what an earlier one would have said."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import option
from torch import Tensor

if TYPE_CHECKING:
    from decodekit.run import Run, Step

RELATIVE_TOP = 0.1
"""Tokens less likely than this times the likeliest are left out (the paper's alpha)."""
DEEP = 40
"""Layers of a model from which "low" and "high" mean twenty layers instead of half of them."""


@attrs.frozen
class DoLa:
    """Score tokens by the logarithm of how much likelier the last layer finds them than an earlier layer does.

    The earlier layer is the one of `dola_layers` whose distribution, by the model's own head on its hidden state, has
    the greatest Jensen-Shannon divergence from the last one's, at every step and for every row anew. Tokens that the
    last layer finds less than a tenth as likely as the likeliest are left out. Processors act on the result, which is
    drawn from with `do_sample`; the paper adds a repetition penalty of 1.2. (Chuang et al. 2023, "DoLa: Decoding by
    Contrasting Layers Improves Factuality in Large Language Models", arXiv 2309.03883.)
    """

    needs: ClassVar[frozenset[str]] = frozenset({"model:hidden", "model:early_logits"})
    samples: ClassVar[bool | None] = None
    """As `do_sample` says."""

    dola_layers: Literal["low", "high"] | tuple[int, ...] = option(
        "Earlier layers to choose from: the 'low' or the 'high' half, every second one, or numbers (0: embeddings).",
        default="low",
    )

    def bind(self, ctx: BindContext, /) -> _DoLa:
        """Return the loop of one call. Raises ValueError for layers that the model does not have before its last."""
        depth = ctx.spec.num_layers
        if depth is None:  # such a model offers no hidden states, which is said where needs are compared
            return _DoLa((), ctx.samples)
        return _DoLa(self.chosen(depth, bool(getattr(ctx.model, "tied_embeddings", False))), ctx.samples)

    def chosen(self, depth: int, tied: bool) -> tuple[int, ...]:
        """The layers to choose from, of a model of `depth` layers.

        tied: the head is the embedding, so that layers near it say little but the last token once more.
        """
        if isinstance(self.dola_layers, tuple):
            if wrong := [layer for layer in self.dola_layers if not 0 <= layer < depth]:
                raise ValueError(f"has layer {wrong[0]}; before the last one this model has 0 to {depth - 1}")
            if not self.dola_layers:
                raise ValueError("is empty; name a layer, or 'low' or 'high'")
            return tuple(sorted(set(self.dola_layers)))
        half = depth // 2 if depth <= DEEP else 20
        if self.dola_layers == "high":
            return tuple(range(depth // 2 if depth <= DEEP else depth - half, depth, 2))
        first = min(2, depth - 1) if tied else 0
        return tuple(range(first, max(half, first + 1), 2))


class _DoLa:
    """The loop of one call."""

    needs = DoLa.needs

    def __init__(self, layers: tuple[int, ...], samples: bool) -> None:
        self.layers, self.samples = layers, samples

    def decode(self, run: Run, /) -> Iterator[Step]:
        """Yield one step for each new token of the batch, until every row is finished."""
        recorded = run.taps
        run.taps = recorded or self.layers
        logits = run.prefill()
        while True:
            seen = dict(zip(run.taps, run.records["hidden_states"][-1], strict=True))
            if not recorded:
                run.records["hidden_states"].clear()
            states = torch.stack([seen[layer][:, -1] for layer in self.layers], 1)
            scores = run.process(contrast(logits, run.pipeline.adapter.early_logits(states).float()))  # type: ignore[attr-defined]
            if run.outputs.output_logits:
                run.records["logits"][-1] = logits
            step = run.accept(run.select(scores))
            yield step
            if run.finished:
                return
            logits = run.forward(step.tokens)


def contrast(logits: Tensor, early: Tensor) -> Tensor:
    """Scores float32 [rows, V] of the last layer's logits [rows, V] against those of earlier layers [rows, N, V]."""
    last, early = logits.log_softmax(-1), early.log_softmax(-1)
    if early.shape[1] > 1:
        apart = divergence(last[:, None], early).argmax(-1)
        early = early.gather(1, apart[:, None, None].expand(-1, 1, early.shape[-1]))
    least = last.amax(-1, keepdim=True) + math.log(RELATIVE_TOP)
    return (last - early[:, 0]).masked_fill(last < least, -torch.inf)


def divergence(one: Tensor, other: Tensor) -> Tensor:
    """Jensen-Shannon divergence in nats of log-probabilities [..., V]: their mean distance from their mean."""
    mean = torch.logaddexp(one, other) - math.log(2)
    return (_distance(one, mean) + _distance(other, mean)) / 2


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """Kullback-Leibler divergence of `other` from `one`, log-probabilities [..., V]."""
    return (one.exp() * (one - other)).masked_fill(one == -torch.inf, 0.0).sum(-1)
