"""Stop at a length."""

from __future__ import annotations

import warnings
from typing import Any

import attrs
import torch
from decodekit.context import BindContext
from decodekit.errors import ConfigError, InputError, Problem
from decodekit.fields import at_least, option
from torch import Tensor

DEFAULT_NEW_TOKENS = 20
"""New tokens where nobody sets a length."""


@attrs.frozen
class MaxLengthCriteria:
    """End every row at a total length (`max_length`) or after a number of new tokens (`max_new_tokens`).

    `max_new_tokens` wins where both are set in the same place. Padding is not counted: each row ends by its
    own length, whatever its neighbours are.
    """

    max_length: int | None = option(
        "Greatest length of prompt and new tokens together.",
        default=None,
        check=at_least(1),
        shadows=("max_new_tokens",),
    )
    max_position_embeddings: int | None = option(
        "Positions the model was made for: going past them is said once. Unset: the model's own number.", default=None
    )
    max_new_tokens: int | None = option(
        "Greatest number of new tokens.", default=None, check=at_least(1), shadows=("max_length",)
    )

    def new_tokens(self, length: int, known: int | None = None) -> int:
        """New tokens after a prompt of `length`, for a model made for `known` positions.

        Raises ConfigError where `max_length` leaves room for none.
        """
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        if self.max_length is None:
            return DEFAULT_NEW_TOKENS if known is None or known <= length else min(DEFAULT_NEW_TOKENS, known - length)
        if self.max_length <= length:
            message = (
                f"is {self.max_length}, but the prompt has {length} tokens already, which leaves no room for a "
                "new one: set max_new_tokens, which does not count the prompt"
            )
            raise ConfigError([Problem("max_length", message, "decodekit:max_length")])
        return self.max_length - length

    def bind(self, ctx: BindContext, /) -> _MaxLength:
        """Settle where each row ends. Raises ConfigError where `max_length` leaves a row no room for a new token."""
        known = self.max_position_embeddings
        known = ctx.spec.max_positions if known is None else known
        lengths = ctx.prompt_lengths.tolist()
        new = {length: self.new_tokens(length, known) for length in sorted(set(lengths), reverse=True)}
        ends = [ctx.prompt_width + new[length] for length in lengths]
        return _MaxLength(ends, ctx.prompt_width - max(lengths), known, ctx.tokens.device)

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor:
        """Bool [B], the same for all rows: the width of `input_ids` [B, T] has reached `max_length`."""
        if self.max_length is None:
            raise InputError(
                "max_new_tokens counts from a prompt: use it in a call of generate, or set max_length here"
            )
        return input_ids.new_full((input_ids.shape[0],), input_ids.shape[1] >= self.max_length, dtype=torch.bool)


class _MaxLength:
    """Ends rows at the widths `ends`; real tokens begin at column `padding` of the longest row."""

    __slots__ = ("ends", "first", "known", "last", "padding")

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
        self.ends = self.ends[rows]

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor | bool:
        width = input_ids.shape[1]
        if self.known is not None and width - self.padding > self.known:
            message = f"the text is longer than the {self.known} positions this model was made for: expect worse text"
            warnings.warn(message, stacklevel=2)
            self.known = None
        return self.ends <= width if width >= self.first else False
