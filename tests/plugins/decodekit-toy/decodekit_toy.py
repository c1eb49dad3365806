"""A whole decoding pipeline, and one plugin of every other kind, that uses nothing of decodekit's built-ins.

The model knows how to count: after token t it likes t + 1 best and t + 2 second best.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import attrs
import torch
from decodekit import BindContext, Run, Step, at_least, option
from decodekit.protocols import Candidates, Detection, Forward, ModelSpec
from torch import Tensor, nn

# -- model -------------------------------------------------------------------------------------------


class Parrot(nn.Module):
    """Maps tokens int64 [B, T] to logits [B, T, vocab]."""

    def __init__(self, vocab: int = 32) -> None:
        super().__init__()
        self.vocab = vocab
        likes = torch.zeros(vocab, vocab)
        for token in range(vocab):
            for rank in range(4):
                likes[token, (token + 1 + rank) % vocab] = 4.0 - rank
        self.likes = nn.Parameter(likes, requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.likes[tokens]


@attrs.define
class ParrotAdapter:
    """A `Parrot` as the loop sees it: no cache, no padding to care about."""

    model: Parrot
    defaults: dict[str, Any] = attrs.field(factory=dict)
    tokenizer: Any = None

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(self.model.vocab, torch.device("cpu"), torch.float32)

    def offers(self) -> frozenset[str]:
        return frozenset({"cache", "mask", "last"})

    def make_cache(self, name: str, /, **options: Any) -> None:
        return None

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Any,
        /,
        *,
        mask: Tensor | None = None,
        last: int = 1,
        hidden: Sequence[int] = (),
        **model_kwargs: Any,
    ) -> Forward:
        return Forward(self.model(tokens[:, -last:]))


class Parrots:
    """Adapts parrots; opens ``parrot:<vocab>``."""

    def adapt(self, model: Any, /) -> ParrotAdapter | None:
        return ParrotAdapter(model, dict(getattr(model, "defaults", {}))) if isinstance(model, Parrot) else None

    def opens(self, ref: str, /) -> bool:
        return ref.startswith("parrot:")

    def open(self, ref: str, /, **options: Any) -> ParrotAdapter:
        return ParrotAdapter(Parrot(int(ref.removeprefix("parrot:"))))


# -- loop --------------------------------------------------------------------------------------------


@attrs.frozen
class Walk:
    """One token at a time, whatever the selector says."""

    needs: ClassVar[frozenset[str]] = frozenset()
    samples: ClassVar[bool] = False
    selector: ClassVar[str] = "toy_second"

    def decode(self, run: Run, /) -> Iterator[Step]:
        logits = run.prefill()
        while not run.finished:
            step = run.accept(run.select(run.process(logits)))
            yield step
            if not run.finished:
                logits = run.forward(step.tokens)


@attrs.frozen
class Second:
    """Always the second-likeliest token, where there are two that may be chosen."""

    def __call__(self, scores: Any, ctx: BindContext, /) -> Tensor:
        dense = scores if isinstance(scores, Tensor) else scores.dense()
        best = dense.topk(2)
        return best.indices.gather(1, (best.values[:, 1:] > -torch.inf).long())[:, 0]


@attrs.frozen
class AtMost:
    """Stop after so many new tokens."""

    tokens: int = option("New tokens to make.", default=3, check=at_least(1))

    def bind(self, ctx: BindContext, /) -> _Counter:
        return _Counter(ctx.prompt_width + self.tokens)


@attrs.frozen
class _Counter:
    width: int

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.width)

    def limit(self, prompt_width: int, /) -> int:
        return self.width


# -- watermark, candidates, scheduler ----------------------------------------------------------------


@attrs.frozen
class EvenMark:
    """Favours even tokens by `strength`."""

    strength: float = option("Added to the scores of even tokens.", default=2.0)

    def bind(self, ctx: BindContext, /) -> _Favour:
        return _Favour(self.strength)

    def detect(self, token_ids: Tensor, /) -> Detection:
        """Normal approximation of the number of even tokens among n fair coins."""
        n, even = token_ids.numel(), int((token_ids % 2 == 0).sum())
        z = (even - n / 2) / math.sqrt(n / 4)
        return Detection(z, 0.5 * math.erfc(z / math.sqrt(2)), n)


@attrs.frozen
class _Favour:
    strength: float

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        marked = scores.clone()
        marked[:, ::2] += self.strength
        return marked


@attrs.frozen
class Guess:
    """Drafts that the text counts on by ones."""

    length: int = option("Tokens to draft.", default=2, check=at_least(1))

    def bind(self, ctx: BindContext, /) -> _Guesser:
        return _Guesser(self.length, ctx.spec.vocab_size)


@attrs.define
class _Guesser:
    length: int
    vocab: int
    learned: list[list[int]] = attrs.field(factory=list)

    def propose(self, input_ids: Tensor, limit: int, /) -> Candidates | None:
        count = min(self.length, limit)
        steps = torch.arange(1, count + 1)
        return Candidates((input_ids[:, -1:] + steps) % self.vocab) if count else None

    def observe(self, accepted: Tensor, scores: Tensor | None, /) -> None:
        self.learned.append(accepted.tolist())


@attrs.define
class ShortestFirst:
    """Serves the requests with the fewest tokens first. A request has `request_id` and `tokens_to_process`."""

    waiting: dict[str, Any] = attrs.field(factory=dict)
    running: dict[str, Any] = attrs.field(factory=dict)
    cancelled: set[str] = attrs.field(factory=set)

    def add_waiting_request(self, state: Any, /) -> None:
        self.waiting[state.request_id] = state

    def schedule_batch(self, token_budget: int, cache_budget: int, /) -> Sequence[Any] | None:
        batch = []
        everyone = [*self.running.values(), *self.waiting.values()]
        for state in sorted(everyone, key=lambda state: len(state.tokens_to_process)):
            size = len(state.tokens_to_process)
            if state.request_id in self.cancelled or size > min(token_budget, cache_budget):
                continue
            token_budget, cache_budget = token_budget - size, cache_budget - size
            batch.append(state)
            self.running[state.request_id] = self.waiting.pop(state.request_id, state)
        return batch or None

    def finish_request(self, request_id: str, /) -> None:
        self.running.pop(request_id, None)

    def set_request_cancellation(self, request_id: str, /) -> None:
        self.cancelled.add(request_id)

    def clear_cancelled_requests(self) -> None:
        for request_id in self.cancelled:
            self.waiting.pop(request_id, None)
            self.running.pop(request_id, None)
        self.cancelled.clear()

    def has_pending_requests(self) -> bool:
        return bool(self.waiting or self.running)
