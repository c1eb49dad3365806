"""Minimum lengths: the end of the text is forbidden until enough tokens exist."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import id_tuple, whole

_EOS_DOC = "Tokens that end a text; unset: the model's."
_DEVICE_DOC = "Accepted for the usual signature; ids follow the scores to their device."


def _eos_option() -> Any:
    return option(_EOS_DOC, default=None, converter=id_tuple)


def _usable(eos: int | tuple[int, ...] | None, vocab: int, also: tuple[int, ...] = ()) -> list[int]:
    """End tokens that can be generated at all; `also` where none were given."""
    if eos is None:
        eos = also
    return [token for token in ((eos,) if isinstance(eos, int) else eos) if 0 <= token < vocab]


def _forbid(scores: Tensor, eos: int | tuple[int, ...] | None) -> Tensor:
    """Scores [B, V] with the end tokens at -inf."""
    if eos is None:
        raise ValueError("eos_token_id is needed where the processor is called on its own")
    return scores.index_fill(-1, torch.tensor(_usable(eos, scores.shape[-1]), device=scores.device), -torch.inf)


@attrs.frozen
class MinLengthLogitsProcessor:
    """Forbid the end tokens until a text, prompt included, has `min_length` tokens.

    Inside `generate` a row's real tokens are counted, so padding does not shorten the text; called on its own, the
    width T of `input_ids` [B, T]. Scores are floating [B, V]; once the length is reached they pass untouched.
    Without any end token nothing can end early, and `bind` leaves it out. Raises ValueError for a negative length.
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.CONSTRAIN, pure=True)

    min_length: int = option("Least number of tokens of a text, prompt included; 0: no minimum.", check=whole(0))
    eos_token_id: int | tuple[int, ...] | None = _eos_option()
    device: str = option(_DEVICE_DOC, default="cpu")

    def bind(self, ctx: BindContext, /) -> _NotYet | None:
        """Return the form that counts real tokens, or None where every prompt is long enough or nothing can end."""
        eos = _usable(self.eos_token_id, ctx.spec.vocab_size, ctx.spec.eos_token_ids)
        if not eos or self.min_length <= int(ctx.prompt_lengths.min()):
            return None
        shortest, longest = int(ctx.prompt_lengths.min()), int(ctx.prompt_lengths.max())
        return _NotYet(self, ctx, eos, self.min_length - longest, self.min_length - shortest, self.min_length)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores with end tokens at -inf while T < min_length. Raises ValueError without `eos_token_id`."""
        return _forbid(scores, self.eos_token_id) if input_ids.shape[-1] < self.min_length else scores


class _NotYet:
    """A minimum inside a run: every row is short below `all_until` new tokens, none is from `some_until` on."""

    __slots__ = ("_all_until", "_ctx", "_eos", "_min_length", "_options", "_some_until")

    def __init__(
        self, options: Any, ctx: BindContext, eos: list[int], all_until: int, some_until: int, min_length: int = 0
    ) -> None:
        self._options = options
        self._ctx = ctx
        self._eos = torch.tensor(eos, device=ctx.spec.device)
        self._all_until = all_until
        self._some_until = some_until
        self._min_length = min_length

    def __repr__(self) -> str:
        return repr(self._options)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with end tokens at -inf in rows that are too short."""
        new = input_ids.shape[-1] - self._ctx.prompt_width
        if new >= self._some_until:
            return scores
        if new < self._all_until:
            return scores.index_fill(-1, self._eos, -torch.inf)
        enough = (self._ctx.prompt_lengths + new >= self._min_length).to(scores.device)
        ends = scores[:, self._eos].where(enough[:, None], -torch.inf)
        return scores.index_copy(-1, self._eos, ends)


@attrs.frozen
class MinNewTokensLengthLogitsProcessor:
    """Forbid the end tokens until `min_new_tokens` tokens follow the prompt.

    Inside `generate` the prompt's width is known; called on its own, `prompt_length_to_skip` says it. Scores are
    floating [B, V]; once enough tokens exist they pass untouched. Without any end token nothing can end early, and
    `bind` leaves it out. Raises ValueError for negative numbers.
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.CONSTRAIN, pure=True)

    prompt_length_to_skip: int | None = option(
        "Width of the prompt; unset: that of the running call.", default=None, check=whole(0)
    )
    min_new_tokens: int = option("Least number of tokens after the prompt; 0: no minimum.", default=0, check=whole(0))
    eos_token_id: int | tuple[int, ...] | None = _eos_option()
    device: str = option(_DEVICE_DOC, default="cpu")

    def bind(self, ctx: BindContext, /) -> _NotYet | None:
        """Return the form that knows the prompt and the end tokens, or None where there is nothing to do."""
        eos = _usable(self.eos_token_id, ctx.spec.vocab_size, ctx.spec.eos_token_ids)
        if not eos or self.min_new_tokens == 0:
            return None
        skip = ctx.prompt_width if self.prompt_length_to_skip is None else self.prompt_length_to_skip
        until = self.min_new_tokens + skip - ctx.prompt_width
        return _NotYet(self, ctx, eos, until, until)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores with end tokens at -inf while too few tokens follow the prompt.

        Raises ValueError without `eos_token_id` or `prompt_length_to_skip`.
        """
        if self.prompt_length_to_skip is None:
            raise ValueError("prompt_length_to_skip is needed where the processor is called on its own")
        new = input_ids.shape[-1] - self.prompt_length_to_skip
        return _forbid(scores, self.eos_token_id) if new < self.min_new_tokens else scores
