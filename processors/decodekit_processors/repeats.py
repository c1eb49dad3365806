"""Penalties on what was generated (frequency, presence), and on or for what the prompt says."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import between, greater_than, option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import numbers, of_rows
from .penalties import penalise


def as_input(value: Any) -> Any:
    """Token ids, in whatever form, as tuples: options are hashable."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(map(as_input, value)) if isinstance(value, (list, tuple)) else value


@attrs.frozen
class EncoderRepetitionPenaltyLogitsProcessor:
    """Make the tokens of the input likelier: the inverse of the repetition penalty, against answers made of nothing.

    The input is `encoder_input_ids` [B, T], or, inside `generate`, the encoder's input and for decoder-only models the
    prompt; padding does not count. Penalties above 1 make its tokens likelier. Scores are floating [B, V].
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
        """Return the form that holds the input, or None at 1.0: nothing to do."""
        if all(number == 1 for number in numbers(self.penalty)):
            return None
        ids, real = input_of(ctx, self.encoder_input_ids)
        return _EncoderPenalty(self, ids, real, inverse(ctx.per_row(self.penalty)))

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with the input's tokens made likelier. Raises ValueError without the input."""
        if self.encoder_input_ids is None:
            raise ValueError("encoder_input_ids is needed where the processor is called on its own")
        ids = rows_of(self.encoder_input_ids, scores)
        penalty = inverse(of_rows(self.penalty, scores))
        return _EncoderPenalty(self, ids, (ids >= 0) & (ids < scores.shape[-1]), penalty)(input_ids, scores)


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


def input_of(ctx: BindContext, given: Any) -> tuple[Tensor, Tensor]:
    """The input of a call, int64 [rows, T], and which of it counts, bool [rows, T]."""
    if given is not None:
        ids = rows_of(given, ctx.tokens)
        return ids, (ids >= 0) & (ids < ctx.spec.vocab_size)
    ids = ctx.tokens[:, : ctx.prompt_width].clone()
    mask = ctx.history_mask(ctx.prompt_width)
    inside = ids < ctx.spec.vocab_size
    return ids, inside if mask is None else inside & mask


class _EncoderPenalty:
    __slots__ = ("_ids", "_options", "_penalty", "_real")

    def __init__(self, options: Any, ids: Tensor, real: Tensor, penalty: Any) -> None:
        self._options, self._ids, self._real, self._penalty = options, ids, real, penalty

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the input of former row `rows[i]`."""
        self._ids, self._real = self._ids[rows], self._real[rows]
        if isinstance(self._penalty, Tensor):
            self._penalty = self._penalty[rows]

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with the input's tokens made likelier."""
        return penalise(self._ids, scores, self._penalty, self._real)


class _Counting:
    """What frequency and presence share: only generated tokens count, never the prompt or what fills ended rows."""

    __slots__ = ("_ctx", "_options", "_penalty")
    each: ClassVar[bool]
    """Whether every occurrence counts."""

    def __init__(self, options: Any, ctx: BindContext, penalty: Any) -> None:
        self._options, self._ctx, self._penalty = options, ctx, penalty

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the penalty of former row `rows[i]`."""
        if isinstance(self._penalty, Tensor):
            self._penalty = self._penalty[rows]

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] lowered at generated tokens."""
        return lower(input_ids[:, self._ctx.prompt_width :], scores, self._penalty, self.each)


class _Frequency(_Counting):
    __slots__ = ()
    each = True


class _Presence(_Counting):
    __slots__ = ()
    each = False


def lower(made: Tensor, scores: Tensor, penalty: float | Tensor, each: bool) -> Tensor:
    """Scores [B, V] lowered by `penalty` at the tokens `made` [B, N]: for each occurrence, or once."""
    if made.shape[-1] == 0:
        return scores
    cost = penalty.to(scores.dtype) if isinstance(penalty, Tensor) else penalty
    inside = made < scores.shape[-1]
    if bool(inside.all()):
        if each:
            lowered = scores.new_zeros(()).sub(cost).expand(made.shape).contiguous()
            return scores.scatter_add(-1, made, lowered)
        return scores.scatter(-1, made, scores.gather(-1, made) - cost)
    rows = [lower(row[ok][None], score[None], c, each) for row, ok, score, c in zip(
        made, inside, scores, cost if isinstance(cost, Tensor) else [cost] * len(made), strict=True)]  # fmt: skip
    return torch.cat(rows)


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

    def bind(self, ctx: BindContext, /) -> _Frequency | None:
        """Return the form that knows the prompt, or None at 0."""
        penalty = self.frequency_penalty
        return _Frequency(self, ctx, ctx.per_row(penalty)) if any(numbers(penalty)) else None

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

    def bind(self, ctx: BindContext, /) -> _Presence | None:
        """Return the form that knows the prompt, or None at 0."""
        penalty = self.presence_penalty
        return _Presence(self, ctx, ctx.per_row(penalty)) if any(numbers(penalty)) else None

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] lowered at the tokens of `input_ids` [B, T]."""
        return lower(input_ids, scores, of_rows(self.presence_penalty, scores), False)
