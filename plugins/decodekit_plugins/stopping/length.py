"""Stop at a length."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from decodekit.context import BindContext
from decodekit.errors import ConfigError, InputError, Problem, warn
from decodekit.fields import at_least, option
from torch import Tensor

DEFAULT_NEW_TOKENS = 20
"""New tokens where nobody sets a length."""


@attrs.frozen
class MaxLengthCriteria:
    """End every row at a total length (`max_length`) or after a number of new tokens (`max_new_tokens`).

    Each may be one number for each prompt. `max_new_tokens` wins where both are set in the same place. Padding is not
    counted: each row ends by its own length, whatever its neighbours are.
    """

    max_length: int | tuple[int, ...] | None = option(
        "Greatest length of prompt and new tokens together.",
        default=None,
        check=at_least(1),
        shadows=("max_new_tokens",),
        per_row=True,
    )
    max_position_embeddings: int | None = option(
        "Positions the model was made for: going past them is said once. Unset: the model's own number.", default=None
    )
    max_new_tokens: int | tuple[int, ...] | None = option(
        "Greatest number of new tokens.", default=None, check=at_least(1), shadows=("max_length",), per_row=True
    )

    def new_tokens(self, length: int, known: int | None = None, prompt: int = 0) -> int:
        """New tokens after a prompt of `length`, number `prompt` of the call, for a model made for `known` positions.

        Raises ConfigError where `max_length` leaves room for none.
        """
        new, total = _of(self.max_new_tokens, prompt), _of(self.max_length, prompt)
        if new is not None:
            return new
        if total is None:
            return DEFAULT_NEW_TOKENS if known is None or known <= length else min(DEFAULT_NEW_TOKENS, known - length)
        if total <= length:
            message = (
                f"is {total}, but the prompt has {length} tokens already, which leaves no room for a "
                "new one: set max_new_tokens, which does not count the prompt"
            )
            raise ConfigError([Problem("max_length", message, "decodekit:max_length")])
        return total - length

    def bind(self, ctx: BindContext, /) -> _MaxLength:
        """Settle where each row ends. Raises ConfigError where `max_length` leaves a row no room for a new token."""
        known = self.max_position_embeddings
        known = ctx.spec.max_positions if known is None else known
        lengths, prompts = ctx.prompt_lengths.tolist(), ctx.prompts
        for value in (self.max_length, self.max_new_tokens):
            if isinstance(value, tuple) and len(value) != prompts:
                words = (
                    f"has {len(value)} values for {prompts} prompt{'s'[: prompts != 1]}; give one number, or one each"
                )
                raise ConfigError([Problem("max_length" if value is self.max_length else "max_new_tokens", words)])
        # The longest first: of several prompts that are too long, that one is named.
        rows = sorted(set(zip(lengths, ctx.slots, strict=True)), reverse=True)
        new = {row: self.new_tokens(row[0], known, row[1]) for row in rows}
        ends = [ctx.prompt_width + new[row] for row in zip(lengths, ctx.slots, strict=True)]
        return _MaxLength(ends, ctx.prompt_width - max(lengths), known, ctx.tokens.device)

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor:
        """Bool [B], the same for all rows unless there is a number for each: the width of `input_ids` [B, T] has
        reached `max_length`. Raises ValueError where that is unset, or has another number of values than rows."""
        rows, total = input_ids.shape[0], self.max_length
        if total is None:
            raise InputError(
                "max_new_tokens counts from a prompt: use it in a call of generate, or set max_length here"
            )
        if not isinstance(total, tuple):
            return input_ids.new_full((rows,), input_ids.shape[1] >= total, dtype=torch.bool)
        if len(total) != rows:
            raise InputError(f"max_length has {len(total)} values for {rows} rows; give one number, or one for each")
        return torch.tensor([input_ids.shape[1] >= end for end in total], device=input_ids.device)


def _of(value: int | tuple[int, ...] | None, prompt: int) -> int | None:
    return value[prompt] if isinstance(value, tuple) else value


class _MaxLength:
    """Ends rows at the widths `ends`; real tokens begin at column `padding` of the longest row."""

    __slots__ = ("ends", "first", "known", "last", "padding")
    newest_only = True
    """Tokens before the newest one make no difference: beams need not move them for its sake."""

    def __init__(self, ends: list[int], padding: int, known: int | None, device: torch.device) -> None:
        self.first, self.last = min(ends), max(ends)
        self.ends = torch.tensor(ends, device=device)
        self.padding = padding
        self.known = known

    def __repr__(self) -> str:
        return f"MaxLengthCriteria(max_length={self.last})"

    def limit(self, prompt_width: int, /) -> int:
        return self.last

    def reorder(self, rows: Tensor, /) -> None:
        if self.first != self.last:
            self.ends = self.ends[rows]

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor | bool:
        width = input_ids.shape[1]
        if self.known is not None and width - self.padding > self.known:
            message = f"the text is longer than the {self.known} positions this model was made for: expect worse text"
            warn(message)
            self.known = None
        return self.ends <= width if width >= self.first else False
