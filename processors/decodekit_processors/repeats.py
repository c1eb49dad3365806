"""Penalties on what was generated (frequency, presence), and on or for what the prompt says."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.errors import warn
from decodekit.fields import between, greater_than, option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import all_scored, numbers, of_rows
from .edits import Editing
from .penalties import anchored, penalise
from .undo import Past


def as_input(value: Any) -> Any:
    """Token ids, in whatever form, as tuples: options are hashable."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(map(as_input, value)) if isinstance(value, (list, tuple)) else value


@attrs.frozen
class EncoderRepetitionPenaltyLogitsProcessor:
    """Make the tokens of the input likelier: the inverse of the repetition penalty, against answers made of nothing.

    The input is `encoder_input_ids` [B, T], or, inside `generate`, the encoder's input and for decoder-only models the
    prompt; padding and negative ids do not count. Penalties above 1 make its tokens likelier. Scores are floating
    [B, V]. Raises ValueError for a penalty not above 0, and for rows that do not fit the batch.
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.PENALTY, before=("repetition_penalty",), pure=True)

    penalty: float | tuple[float, ...] = option(
        "Multiplies positive and divides negative scores of the input's tokens; 1.0 changes nothing.",
        check=greater_than(0),
        per_row=True,
    )
    encoder_input_ids: Any = option(
        "Token ids [B, T] of the input; unset: those of the running call.", default=None, converter=as_input
    )

    def bind(self, ctx: BindContext, /) -> _EncoderPenalty | None:
        """Return the form that holds the input; None at 1.0, or where an encoder's input is not known."""
        if all(number == 1 for number in numbers(self.penalty)):
            return None
        found = input_of(ctx, self.encoder_input_ids, "encoder_repetition_penalty")
        if found is None:
            return None
        ids, real = found
        return _EncoderPenalty(self, ids, real & (ids < ctx.spec.vocab_size), inverse(ctx.per_row(self.penalty)))

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with the input's tokens made likelier. Raises ValueError without the input."""
        if self.encoder_input_ids is None:
            raise ValueError("encoder_input_ids is needed where the processor is called on its own")
        ids = rows_of(self.encoder_input_ids, scores)
        return penalise(ids, scores, inverse(of_rows(self.penalty, scores)), (ids >= 0) & (ids < scores.shape[-1]))


def inverse(penalty: Any) -> Any:
    """1 / penalty, of a number or of a tensor."""
    return penalty.double().reciprocal() if isinstance(penalty, Tensor) else 1 / penalty


def rows_of(ids: Any, scores: Tensor) -> Tensor:
    """Token ids as int64 [B, T] for the rows of `scores`: one list for all, or one for each `B / n` rows."""
    found = torch.as_tensor(ids, device=scores.device).long()
    found = found[None] if found.dim() == 1 else found
    times, rest = divmod(scores.shape[0], found.shape[0])
    if rest or not times:
        raise ValueError(f"encoder_input_ids have {found.shape[0]} rows, which does not fit {scores.shape[0]} rows")
    return found.repeat_interleave(times, 0)


def input_of(ctx: BindContext, given: Any, who: str) -> tuple[Tensor, Tensor] | None:
    """The input of a call, int64 [rows, T], and which of it counts, bool [rows, T]: as given, else the encoder's, else
    of decoder-only models the prompt. None, with a warning that names `who`, where an encoder's input is not known."""
    given = getattr(ctx, "encoder_input_ids", None) if given is None else given
    if given is not None:
        ids = rows_of(given, ctx.tokens)
        return ids, ids >= 0
    if ctx.spec.is_encoder_decoder:
        words = f"{who} is left out: the tokens of the encoder's input are not known here; pass encoder_input_ids"
        warn(words)
        return None
    ids = ctx.tokens[:, : ctx.prompt_width].clone()
    mask = ctx.history_mask(ctx.prompt_width)
    return ids, ids >= 0 if mask is None else mask.clone()


def distinct(ids: Tensor) -> Tensor:
    """Each token of rows [B, T] once, as many columns as the row with the most of them needs; others repeat one."""
    ordered = ids.sort(-1).values
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    first = again.byte().sort(dim=-1, stable=True).indices[:, : int((~again).sum(-1).amax())]
    return ordered.gather(-1, first)


class _EncoderPenalty(Editing):
    __slots__ = ("_ids", "_options", "_penalty")

    def __init__(self, options: Any, ids: Tensor, real: Tensor, penalty: Any) -> None:
        self._options = options
        # Once, and not at every step. A row without any input is penalised by 1: untouched.
        self._ids, self._penalty = ids, penalty
        if ids.shape[-1]:
            kept, some = anchored(ids, real)
            self._ids = distinct(kept)
            if not bool(some.all()):
                each = torch.as_tensor(penalty, dtype=torch.float64, device=ids.device).expand(len(ids), 1)
                self._penalty = each.where(some, 1.0)

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the input of former row `rows[i]`."""
        self._ids = self._ids[rows]
        if isinstance(self._penalty, Tensor):
            self._penalty = self._penalty[rows]

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return scores [B, V] with the input's tokens made likelier."""
        return penalise(self._ids, scores, self._penalty, None, own)


class _Counted(Editing):
    """Frequency or presence inside a run: how often each row generated each token. The prompt never counts.

    counts: float32 [rows, V]; marks: whether, 0 or 1, where that is all that matters. A place for each token makes a
    step cost the same however long the text is, and no more than a list of a thousand tokens would.
    """

    __slots__ = ("_cost", "_exact", "_known", "_options", "_past", "_per_row", "counts", "marks")

    def __init__(self, options: Any, ctx: BindContext, penalty: float | Tensor, each: bool) -> None:
        self._options = options
        vocab, device = ctx.spec.vocab_size, ctx.tokens.device
        self._per_row = isinstance(penalty, Tensor)
        # A tensor even for one number: the same arithmetic, whoever shares the batch.
        self._exact = torch.as_tensor(penalty, dtype=torch.float64, device=device).reshape(-1, 1)
        self._cost = self._exact.float()
        self._known = all_scored(ctx)
        self._past = Past()
        self.counts = torch.zeros((ctx.rows, vocab), device=device)
        self.marks: Tensor | None = None if each else torch.zeros_like(self.counts)
        made, mask = ctx.input_ids[:, ctx.prompt_width :], ctx.history_mask()
        self._count(made if mask is None else made.where(mask[:, ctx.prompt_width :], -1), 1)

    def __repr__(self) -> str:
        return repr(self._options)

    def _count(self, tokens: Tensor, times: int, sure: bool = False) -> None:
        """Count tokens int64 [rows, N]; unless they are `sure` to have scores, those that have none are left out."""
        one = self.counts.new_full((), times)
        if sure:
            change = one.expand(tokens.shape)
        else:
            inside = tokens.clamp(0, self.counts.shape[-1] - 1)
            change, tokens = one * (tokens == inside), inside
        self.counts.scatter_add_(-1, tokens, change)
        if self.marks is not None:
            self.marks.scatter_(-1, tokens, self.counts.gather(-1, tokens).clamp_(max=1))

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        """Count accepted tokens int64 [B] or [B, N], negative ones left out, of all rows or of the named ones."""
        new = tokens.reshape(len(tokens), -1)
        if rows is not None:
            new = new.new_full((len(self.counts), new.shape[-1]), -1).index_copy_(0, rows, new)
        self._past.push(new)
        # One token of each row comes from the run, which has looked at it.
        self._count(new, 1, self._known and tokens.dim() == 1 and rows is None)

    def rollback(self, steps: int, /) -> None:
        """Undo the last `steps` calls of `accept`. Raises ValueError where there were not so many."""
        self._past.need(steps)
        for _ in range(steps):
            tokens = self._past.back(1)
            if tokens is not None:
                self._count(tokens, -1)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the counts and the penalty of former row `rows[i]`."""
        self._past.reorder(rows)
        self.counts = self.counts[rows]
        if self.marks is not None:
            self.marks = self.marks[rows]
        if self._per_row:
            self._exact, self._cost = self._exact[rows], self._cost[rows]

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return scores [B, V] lowered at generated tokens."""
        weight, change = self.counts if self.marks is None else self.marks, scores.addcmul_ if own else scores.addcmul
        if scores.dtype == torch.float32:
            return change(weight, self._cost, value=-1)
        return change(weight.to(scores.dtype), self._exact.to(scores.dtype), value=-1)


def lower(made: Tensor, scores: Tensor, penalty: float | Tensor, each: bool) -> Tensor:
    """Scores [B, V] lowered by `penalty` at the tokens `made` [B, N]: for each occurrence, or once."""
    if made.shape[-1] == 0:
        return scores
    cost = torch.as_tensor(penalty, device=scores.device).to(scores.dtype).reshape(-1, 1)
    counts = torch.zeros_like(scores)
    at = made.clamp(0, scores.shape[-1] - 1)
    counts.scatter_add_(-1, at, (at == made).to(scores.dtype))
    return torch.addcmul(scores, counts if each else counts.clamp_(max=1), cost, value=-1)


@attrs.frozen
class FrequencyPenaltyLogitsProcessor:
    """Lower the score of every generated token by `frequency_penalty` for each time it was generated.

    The prompt does not count. Negative values encourage repeats. Called on its own, all of `input_ids` counts. Scores
    are floating [B, V]. (OpenAI API reference, "frequency_penalty".)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.PENALTY, after=("repetition_penalty",), pure=True)

    frequency_penalty: float | tuple[float, ...] = option(
        "Subtracted from a token's score for each time it was generated; 0 changes nothing.",
        check=between(-100, 100),
        per_row=True,
    )

    def bind(self, ctx: BindContext, /) -> _Counted | None:
        """Return the form that knows the prompt, or None at 0."""
        penalty = self.frequency_penalty
        return _Counted(self, ctx, ctx.per_row(penalty), True) if any(numbers(penalty)) else None

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] lowered for each occurrence in `input_ids` [B, T]."""
        return lower(input_ids, scores, of_rows(self.frequency_penalty, scores), True)


@attrs.frozen
class PresencePenaltyLogitsProcessor:
    """Lower the score of every token that was generated by `presence_penalty`, once however often it was.

    The prompt does not count. Negative values encourage repeats. Called on its own, all of `input_ids` counts. Scores
    are floating [B, V]. (OpenAI API reference, "presence_penalty".)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.PENALTY, after=("frequency_penalty",), pure=True)

    presence_penalty: float | tuple[float, ...] = option(
        "Subtracted from the score of every token generated so far; 0 changes nothing.",
        check=between(-100, 100),
        per_row=True,
    )

    def bind(self, ctx: BindContext, /) -> _Counted | None:
        """Return the form that knows the prompt, or None at 0."""
        penalty = self.presence_penalty
        return _Counted(self, ctx, ctx.per_row(penalty), False) if any(numbers(penalty)) else None

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] lowered at the tokens of `input_ids` [B, T]."""
        return lower(input_ids, scores, of_rows(self.presence_penalty, scores), False)
