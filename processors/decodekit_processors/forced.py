"""Tokens that must come at one place: the first of a text, or the last."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.errors import ConfigError, Problem
from decodekit.fields import option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import id_tuple, whole
from .ends import by_prompt
from .steps import AtStep


def _check_eos(instance: Any, attribute: Any, value: Any) -> None:
    """Raise ValueError unless a token id of 0 or more, or several."""
    ids = value if isinstance(value, tuple) else (value,)
    if not ids or not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise ValueError(f"must be one token id or several, each 0 or more, got {value!r}")


def forced(scores: Tensor, ids: tuple[int, ...]) -> Tensor:
    """Scores like `scores` [B, V]: 0 at `ids`, -inf elsewhere. Raises ValueError for an id outside the vocabulary."""
    vocab = scores.shape[-1]
    if max(ids) >= vocab:
        raise ValueError(f"cannot force token {max(ids)}: the vocabulary has {vocab} tokens")
    result = torch.full_like(scores, -torch.inf)
    return result.index_fill_(-1, torch.tensor(ids, device=scores.device), 0.0)


def _tested(key: str, ids: tuple[int, ...], ctx: BindContext) -> tuple[int, ...]:
    """The ids. Raises ConfigError where they cannot be generated."""
    vocab, never = ctx.spec.vocab_size, ctx.settings.get("suppress_tokens") or ()
    lists = never if by_prompt(never) else (never,)
    if max(ids) >= vocab:
        raise ConfigError([Problem(key, f"token {max(ids)} is outside the model's vocabulary of {vocab}")])
    if any(set(ids) <= set(each) for each in lists):
        words = f"forces {', '.join(map(str, ids))}, which suppress_tokens forbids; take them out of one of the two"
        raise ConfigError([Problem(key, words)])
    return ids


@attrs.frozen
class ForcedBOSTokenLogitsProcessor:
    """Force the second token of a text: what follows a prompt of one token, such as a decoder's start token.

    Scores are floating [B, V]; where a text has one token the result is 0 at `bos_token_id` and -inf elsewhere, else
    they pass untouched. Inside `generate` a row's real tokens are counted; called on its own, the width of `input_ids`.
    Raises ValueError for an id that is negative or outside the vocabulary.
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.CONSTRAIN, after=("min_length", "min_new_tokens", "prefix_allowed_tokens_fn"), pure=True
    )

    bos_token_id: int = option("Token forced behind a prompt of one token.", check=whole(0))

    def bind(self, ctx: BindContext, /) -> _Forced | None:
        """Return the form that counts real tokens, or None where no prompt is that short."""
        steps = 1 - ctx.prompt_lengths
        if bool((steps < 0).all()):
            return None
        return _Forced(self, ctx, _tested("forced_bos_token_id", (self.bos_token_id,), ctx), steps)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores that force the token where `input_ids` [B, T] has T = 1."""
        return forced(scores, (self.bos_token_id,)) if input_ids.shape[-1] == 1 else scores


@attrs.frozen
class ForcedEOSTokenLogitsProcessor:
    """Force the last token that the length limit allows.

    Scores are floating [B, V]; one token before `max_length` the result is 0 at the tokens `eos_token_id` and -inf
    elsewhere, else they pass untouched. Inside `generate` each row is forced at its own last place; called on its own,
    the width of `input_ids` [B, T] counts. Raises ValueError for an id that is negative or outside the vocabulary, and
    in a run without a length limit.
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.CONSTRAIN,
        after=("min_length", "min_new_tokens", "prefix_allowed_tokens_fn", "forced_bos_token_id"),
        pure=True,
    )

    max_length: int | None = option(
        "Greatest length of prompt and new tokens together; unset: the run's.", default=None, check=whole(1)
    )
    eos_token_id: int | tuple[int, ...] = option(
        "Token, or several to choose from, forced at the greatest length.",
        default=(),
        converter=id_tuple,
        check=_check_eos,
    )

    def bind(self, ctx: BindContext, /) -> _Forced:
        """Return the form that knows where each row ends. Raises ConfigError where nothing limits the length."""
        ids = _tested("forced_eos_token_id", _ids(self.eos_token_id), ctx)
        if self.max_length is not None:
            return _Forced(self, ctx, ids, self.max_length - 1 - ctx.prompt_lengths)
        if ctx.max_length is None:
            words = "forces the last token, but nothing limits the length: set max_new_tokens or max_length"
            raise ConfigError([Problem("forced_eos_token_id", words)])
        return _Forced(self, ctx, ids, _last_widths(ctx, ctx.max_length) - 1 - ctx.prompt_width)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores that force a token where T is `max_length` - 1. Raises ValueError where that is unset."""
        if self.max_length is None:
            raise ValueError("max_length is needed where the processor is called on its own")
        return forced(scores, _ids(self.eos_token_id)) if input_ids.shape[-1] == self.max_length - 1 else scores


def _ids(value: int | tuple[int, ...]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else value


def _last_widths(ctx: BindContext, limit: int) -> Tensor:
    """Width int64 [rows] at which each row ends at the latest; `limit` is that of the last one."""
    new, total = (ctx.settings.get(key) for key in ("max_new_tokens", "max_length"))
    ends = ctx.prompt_lengths.new_full((ctx.rows,), limit)
    value = ctx.per_row(total if new is None else new)
    if value is None:
        return ends
    value = value[:, 0] if isinstance(value, Tensor) else value
    own = ends * 0 + ctx.prompt_width + value - (0 if new is not None else ctx.prompt_lengths)
    # Below the run's limit: the configured rule was replaced by an object that was passed, which knows its own.
    return ends if int(own.max()) < limit else torch.minimum(own, ends)


class _Forced(AtStep):
    """Tokens forced at one step of each row."""

    __slots__ = ("_ids",)

    def __init__(self, options: Any, ctx: BindContext, ids: tuple[int, ...], steps: Tensor) -> None:
        super().__init__(options, ctx, steps)
        self._ids = ids

    def _act(self, scores: Tensor, rows: Tensor | None, own: bool) -> Tensor:
        result = forced(scores, self._ids)
        return result if rows is None else result.where(rows, scores)
