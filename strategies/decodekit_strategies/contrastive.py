"""Contrastive search: likely tokens that the model does not take for what it has said already."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
import torch.nn.functional as F
from decodekit.context import BindContext
from decodekit.errors import InputError
from decodekit.fields import between, option
from decodekit.pipeline import cache_offers
from decodekit.prompt import places, repeat
from decodekit.protocols import Forward
from decodekit.shortlist import Shortlist
from torch import Tensor

if TYPE_CHECKING:
    from decodekit.run import Run, Step

ROOM = 64
"""Columns that the buffer of states grows by at least."""


@attrs.frozen
class ContrastiveSearch:
    """Of the `top_k` likeliest tokens take the one with the greatest (1 - alpha) * p - alpha * s.

    p is its probability after the processors, and s the greatest cosine between the hidden state that the model gives
    it in its place and those of the row's earlier tokens, all of the last layer. All candidates of a step take one
    pass, each in a row of its own, so the cache holds `top_k` copies of every row; the pass of the token that is taken
    gives the scores of the next one. With `low_memory` the candidates take a pass each, and the one that is taken a
    second one: the cache holds every row once. `penalty_alpha` 0 is greedy decoding. (Su et al. 2022, "A Contrastive
    Framework for Neural Text Generation", arXiv 2202.06417.)
    """

    reads: ClassVar[frozenset[str]] = frozenset({"top_k"})
    samples: ClassVar[bool] = False

    penalty_alpha: float = option(
        "Weight of what a candidate repeats against its probability, for contrastive search.",
        default=0.6,
        check=between(0, 1),
    )
    low_memory: bool = option(
        "Look at the candidates of contrastive search one after the other: slower, with a cache that holds no copies.",
        default=False,
    )

    @property
    def needs(self) -> frozenset[str]:
        """Copies of rows in the cache, or one after the other in the same row."""
        return frozenset({"cache:crop" if self.low_memory else "cache:reorder", "model:hidden"})

    def bind(self, ctx: BindContext, /) -> _Contrastive:
        """Return the search of one call. Raises ValueError without a number of candidates."""
        count = ctx.per_row(ctx.settings.get("top_k"))
        counts = count if isinstance(count, Tensor) else torch.full((ctx.rows, 1), count or 0, device=ctx.tokens.device)
        if int(counts.min()) < 1:
            raise ValueError("contrastive search needs top_k, the number of candidates, of at least 1; set it")
        kind = _OneByOne if self.low_memory else _Contrastive
        return kind(self.penalty_alpha, counts, self.needs)


class _Contrastive:
    """The search of one call."""

    samples = ContrastiveSearch.samples

    def __init__(self, alpha: float, counts: Tensor, needs: frozenset[str]) -> None:
        self.alpha, self.counts, self.needs = alpha, counts, needs
        self.room = torch.empty(0)
        """Hidden states of length 1, float32 [rows, capacity, H], `filled` of them."""
        self.filled = 0
        self.extra: dict[str, Any] = {}

    def decode(self, run: Run, /) -> Iterator[Step]:
        """Yield one step for each new token. Raises InputError where a passed cache hides states of the prompt."""
        if run.cache is not None and int(run.cache.get_seq_length()):
            raise InputError("contrastive search needs the hidden states of all tokens: pass no cache that holds any")
        width = min(int(self.counts.max()), run.context.spec.vocab_size)
        layer = run.context.spec.num_layers or 0
        first = torch.arange(run.rows, device=run.context.tokens.device) * width
        every = torch.arange(run.rows * width, device=first.device) // width
        plain = run.taps
        run.taps = plain or (layer,)
        logits = run.prefill()
        self.remember(self.states(run, run.records["hidden_states"][-1][-1]))
        if not plain:
            run.records["hidden_states"].clear()
        self.begin(run, every, width)
        try:
            while True:
                chances, tokens = self.candidates(run.process(logits), width)
                seen = self.look(run, tokens)
                states = self.states(run, seen.hidden[layer][:, -1:]).view(run.rows, width, -1)
                value = (1 - self.alpha) * chances - self.alpha * self.likeness(run, states)
                value = value.masked_fill(chances.isnan(), -torch.inf)
                best, place = value.max(-1, keepdim=True)
                step = run.accept(tokens.gather(1, place).where(best > -torch.inf, -1)[:, 0])
                yield step
                if run.finished:
                    return
                chosen = first + place[:, 0]
                self.remember(states.gather(1, place[..., None].expand(-1, -1, states.shape[-1])))
                self.follow(run, chosen[every], tokens.reshape(-1)[chosen])
                if plain:
                    run.records["hidden_states"].append(tuple(seen.hidden[tap][chosen] for tap in plain))
                for name in ("attentions", "cross_attentions") if run.outputs.output_attentions else ():
                    given = seen.extra.get(name)
                    run.records[name].append(given and tuple(weight[chosen] for weight in given))
                logits = seen.logits[chosen, -1].float()
        finally:
            self.leave(run, first)

    def begin(self, run: Run, rows: Tensor, width: int) -> None:
        """Make room for `width` candidates of each row."""
        if run.cache is not None:
            run.cache.reorder_cache(rows)
        self.extra = repeat(run.extra, run.rows, width)

    def candidates(self, scores: Tensor | Shortlist, width: int) -> tuple[Tensor, Tensor]:
        """Probabilities, NaN where a row has fewer candidates, and tokens of the likeliest: both [rows, width]."""
        values, ids = (scores.values, scores.ids) if isinstance(scores, Shortlist) else (scores, None)
        best, place = values.float().topk(min(width, values.shape[-1]))
        chances = (best - values.float().logsumexp(-1, keepdim=True)).exp()
        few = torch.arange(best.shape[1], device=best.device) >= self.counts.to(best.device)
        chances = chances.masked_fill(few | ~(best > -torch.inf), torch.nan)
        short = (0, width - best.shape[1])
        return F.pad(chances, short, value=torch.nan), F.pad(place if ids is None else ids.gather(1, place), short)

    def look(self, run: Run, tokens: Tensor) -> Forward:
        """See what the model makes of all candidates [rows, width]; row by row, and each row's in their order."""
        return self.read(run, tokens, F.pad(run.whole(), (0, 1), value=True))

    def read(self, run: Run, tokens: Tensor, real: Tensor) -> Forward:
        """Run the model on every candidate [rows, width] as the last token of its row, of which `real` are real."""
        width = tokens.shape[1]
        real = real.repeat_interleave(width, 0)
        fed, positions = tokens.reshape(-1, 1), places(real)
        if run.cache is not None:
            positions = positions[:, -1:]
        else:
            fed = torch.cat([run.context.input_ids.repeat_interleave(width, 0), fed], 1)
        mask = None if self.real(run) is None else real
        seen = run.pipeline.adapter.forward(fed, positions, run.cache, mask=mask, last=1, hidden=run.taps, **self.extra)
        if run.cache is not None and seen.cache is not None:
            run.cache = seen.cache
        return seen

    def states(self, run: Run, hidden: Tensor) -> Tensor:
        """Hidden states of the last layer as the model's head sees them, made length 1: float32."""
        normed = getattr(run.pipeline.adapter, "normed", None)
        return F.normalize((hidden if normed is None else normed(hidden)).float(), dim=-1)

    def remember(self, states: Tensor) -> None:
        """Add the states [rows, N, H] of the row's next tokens."""
        rows, new, size = states.shape
        if self.filled + new > self.room.shape[1 if self.filled else 0]:
            room = states.new_empty(rows, max(self.filled + new + ROOM, 2 * self.filled), size)
            room[:, : self.filled] = self.room[:, : self.filled] if self.filled else room[:, :0]
            self.room = room
        self.room[:, self.filled : self.filled + new] = states
        self.filled += new

    def likeness(self, run: Run, states: Tensor) -> Tensor:
        """The greatest cosine of each candidate's state [rows, width, H] with those of its row's real tokens."""
        cosines = states @ self.room[:, : self.filled].transpose(1, 2)
        mask = self.real(run)
        return (cosines if mask is None else cosines.masked_fill(~mask[:, None], -torch.inf)).amax(-1)

    def real(self, run: Run) -> Tensor | None:
        """bool [rows, K] of all tokens so far; None: all are real."""
        return run.whole() if run.context.mask is not None or run.pipeline.prompt.past_mask is not None else None

    def follow(self, run: Run, rows: Tensor, tokens: Tensor) -> None:
        """Let all copies of a row in the cache go on from the chosen candidate: their last tokens alone differ.

        `rows` has the row of the candidate for each copy, `tokens` [rows] what was chosen and is accepted."""
        if "reorder_tail" in cache_offers(run.cache):
            run.cache.reorder_tail(rows, self.filled - 1)
        elif run.cache is not None:
            run.cache.reorder_cache(rows)

    def leave(self, run: Run, rows: Tensor) -> None:
        """Leave a cache such as other strategies do: one copy of each row, without its last token."""
        if run.cache is not None:
            run.cache.reorder_cache(rows)
            if "crop" in cache_offers(run.cache):
                run.cache.crop(self.filled)


class _OneByOne(_Contrastive):
    """The search with one row of the cache for each row."""

    def begin(self, run: Run, rows: Tensor, width: int) -> None:
        """Nothing is copied."""
        self.extra = run.extra

    def look(self, run: Run, tokens: Tensor) -> Forward:
        """The candidates in turn, each in the place of the one before it."""
        seen = []
        for column in tokens.split(1, 1):
            seen.append(super().look(run, column))
            self.crop(run)
        hidden = {tap: _beside([one.hidden[tap] for one in seen]) for tap in seen[0].hidden}
        # Attention weights: one tensor for each layer.
        extra = {
            name: tuple(_beside(layer) for layer in zip(*(one.extra[name] for one in seen), strict=True))
            for name in ("attentions", "cross_attentions")
            if seen[0].extra.get(name)
        }
        return Forward(_beside([one.logits for one in seen]), hidden, run.cache, extra)

    def follow(self, run: Run, rows: Tensor, tokens: Tensor) -> None:
        """Read what was chosen once more, so that the cache holds it."""
        if run.cache is not None:
            self.read(run, tokens[:, None], run.whole())

    def leave(self, run: Run, rows: Tensor) -> None:
        """There are no copies."""
        self.crop(run)

    def crop(self, run: Run) -> None:
        """Take what goes beyond the remembered states out of the cache."""
        if run.cache is not None:
            run.cache.crop(self.filled)


def _beside(parts: Sequence[Tensor]) -> Tensor:
    """[rows, ...] of each candidate -> [rows * candidates, ...]."""
    return torch.stack(list(parts), 1).flatten(0, 1)
