"""Dia: guidance over a doubled batch, and an end that runs through the audio channels with a delay.

A text of C channels takes C neighbouring rows: row b * C + c is channel c of text b.
"""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import option
from decodekit.traits import Phase, Traits
from torch import Tensor

from decodekit_processors.checks import device_option, whole

from .musicgen import guide, halves, scale_option

_NEVER = torch.iinfo(torch.int64).max // 2


@attrs.frozen
class DiaClassifierFreeGuidanceLogitsProcessor:
    """Move the conditional scores further from the unconditional ones: c + scale * (c - u).

    With `guidance_top_k` the guided scores only choose: the k best tokens by them keep their conditional scores, the
    rest are removed; ties with the k-th stay. `scores` float [2B, V] hold the conditional rows and, behind them, the
    unconditional ones of the same B rows of `input_ids`; the result is [B, V]. Raises ValueError for a scale not above
    1, a k below 1, and for scores whose batch is not doubled. (Ho and Salimans 2022, arXiv 2207.12598; Dia, Nari Labs
    2025, https://github.com/nari-labs/dia.)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.GUIDE, reads_history=False, rowwise=False, pure=True, graph_safe=True)

    guidance_scale: float = scale_option()
    guidance_top_k: int | None = option(
        "Keep this many tokens, the best by guided score, with their conditional scores; unset: keep guided scores.",
        default=None,
        check=whole(1),
    )

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] of scores [2B, V]."""
        conditional, unconditional = halves(input_ids, scores)
        guided = guide(conditional, conditional, unconditional, self.guidance_scale)
        if self.guidance_top_k is None:
            return guided
        least = guided.topk(min(self.guidance_top_k, guided.shape[-1])).values[:, -1:]
        # NaN, which the conditional half alone may not show, stays NaN so that it is noticed.
        return conditional.where(guided >= least, -torch.inf).masked_fill(guided.isnan(), torch.nan)


def _channels(scores: Tensor, channels: int) -> Tensor:
    """Scores [B * C, V] as a view [B, C, V]. Raises ValueError where rows are no whole number of texts."""
    if scores.shape[0] % channels:
        raise ValueError(f"{scores.shape[0]} rows are no whole number of texts of {channels} channels each")
    return scores.view(-1, channels, scores.shape[-1])


def _check_end(eos: int, scores: Tensor) -> None:
    if eos >= scores.shape[-1]:
        raise ValueError(f"eos_token_id {eos} is outside the vocabulary of {scores.shape[-1]}")


@attrs.frozen
class DiaEOSChannelFilterLogitsProcessor:
    """Let only the first channel end, and only by its likeliest token.

    Where the end token is the likeliest of channel 0 nothing else stays in that row, so that no draw can miss it;
    elsewhere it is removed. In the other channels, and above the end token in all, nothing can be taken. Scores are
    floating [B * C, V]. Raises ValueError for fewer than one channel, an end token below 1 or outside the vocabulary,
    and rows that are no whole number of texts. (Dia, Nari Labs 2025, https://github.com/nari-labs/dia.)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.CONSTRAIN, reads_history=False, rowwise=False, pure=True)

    num_channels: int = option("Channels of a text: that many neighbouring rows.", check=whole(1))
    eos_token_id: int = option("The token that ends channel 0; those above it are never taken.", check=whole(1))

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return filtered scores [B * C, V]."""
        eos = self.eos_token_id
        _check_end(eos, scores)
        out = scores.clone(memory_format=torch.contiguous_format)
        texts = _channels(out, self.num_channels)
        texts[:, 1:, eos:] = -torch.inf
        first = texts[:, 0]
        first[:, eos + 1 :] = -torch.inf
        ends = first[:, eos] > first[:, :eos].amax(-1)
        first[:, :eos].masked_fill_(ends[:, None], -torch.inf)
        first[:, eos].masked_fill_(~ends, -torch.inf)
        return out


def _delays(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(value) if isinstance(value, (list, tuple)) else value


def _check_delays(instance: Any, attribute: Any, value: Any) -> None:
    good = isinstance(value, tuple) and value and all(isinstance(n, int) and n >= 0 for n in value)
    if not good:
        raise ValueError(f"must be a list with the delay of each channel, whole numbers of 0 or more, got {value!r}")


@attrs.frozen
class DiaEOSDelayPatternLogitsProcessor:
    """After channel 0 has ended, end channel c `delay_pattern[c]` steps later.

    The end of channel 0 is its end token among the tokens, or about to be (the likeliest of its scores, which
    `DiaEOSChannelFilterLogitsProcessor` lets nothing but itself follow), or the last column from which every delay
    still fits into `max_generation_len`. A forced row holds 0.0 at the end token and -inf elsewhere. Scores are
    floating [B * C, V]. Called on its own it reads all of `input_ids` [B * C, T]; inside a run, only the new tokens.
    Raises ValueError for an empty pattern, negative delays, an end token outside the vocabulary, rows that are no
    whole number of texts, and a direct call without `max_generation_len`.
    (Dia, Nari Labs 2025, https://github.com/nari-labs/dia.)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.CONSTRAIN, after=("dia_eos_filter",), rowwise=False, pure=True)

    delay_pattern: tuple[int, ...] = option(
        "Steps by which each channel ends after channel 0.", converter=_delays, check=_check_delays
    )
    eos_token_id: int = option("The token that ends a channel.", check=whole(0))
    max_generation_len: int | None = option(
        "Greatest width of the text, prompt included; unset: that of the running call.", default=None, check=whole(0)
    )
    device: str = device_option("delays")

    def last_start(self, longest: int | None) -> int:
        """The width at which an end must begin to fit into `longest` columns."""
        return _NEVER if longest is None else longest - max(self.delay_pattern) - 1

    def bind(self, ctx: BindContext, /) -> _Delays:
        """Return the form that reads new tokens only. Raises ValueError where rows or end token do not fit."""
        if ctx.rows % len(self.delay_pattern):
            channels = len(self.delay_pattern)
            raise ValueError(f"{ctx.rows} rows are no whole number of texts of {channels} channels each")
        longest = self.max_generation_len if self.max_generation_len is not None else ctx.max_length
        return _Delays(self, ctx, self.last_start(longest))

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B * C, V] with the channels whose time has come forced to end."""
        if self.max_generation_len is None:
            raise ValueError("max_generation_len is needed where the processor is called on its own")
        ended = _ended(input_ids, self.eos_token_id, 0, len(self.delay_pattern), scores)
        return _force(self, input_ids.shape[1], scores, ended, self.last_start(self.max_generation_len))


def _ended(ids: Tensor, eos: int, start: int, channels: int, scores: Tensor) -> Tensor:
    """int64 [B]: the first column from `start` on in which channel 0 has its end token; `_NEVER` without one."""
    first = ids.view(-1, channels, ids.shape[1])[:, 0, start:] if ids.shape[0] % channels == 0 else None
    if first is None:
        raise ValueError(f"{ids.shape[0]} rows are no whole number of texts of {channels} channels each")
    if first.shape[1] == 0:
        return first.new_full((first.shape[0],), _NEVER).to(scores.device)
    columns = torch.arange(start, ids.shape[1], device=ids.device)
    return columns.where(first == eos, _NEVER).amin(-1).to(scores.device)


def _force(options: DiaEOSDelayPatternLogitsProcessor, width: int, scores: Tensor, ended: Tensor, last: int) -> Tensor:
    """Scores with channels ended whose delay is over; channel 0 of text b ended at column `ended[b]`, int64 [B]."""
    eos = options.eos_token_id
    _check_end(eos, scores)
    texts = _channels(scores.contiguous(), len(options.delay_pattern))
    ending = texts[:, 0].argmax(-1) == eos
    begun = torch.minimum(ended, torch.where(ending, width, _NEVER)).clamp(max=last)
    delay = torch.tensor(options.delay_pattern, device=scores.device)
    now = (begun[:, None] + delay == width)[:, :, None]
    out = texts.masked_fill(now, -torch.inf)
    out[:, :, eos].masked_fill_(now[:, :, 0], 0.0)
    return out.view_as(scores)


class _Delays:
    """The delayed ends inside a run."""

    def __init__(self, options: DiaEOSDelayPatternLogitsProcessor, ctx: BindContext, last: int) -> None:
        self._options, self._ctx = options, ctx
        self._last = last if ctx.prompt_width <= last else _NEVER
        self._channels = len(options.delay_pattern)
        # For every row the end of its channel 0, so that rows may move.
        self._ended: Tensor | None = None

    def __repr__(self) -> str:
        return repr(self._options)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B * C, V] with the channels whose time has come forced to end."""
        if self._ended is None:
            ended = _ended(input_ids, self._options.eos_token_id, self._ctx.prompt_width, self._channels, input_ids)
            self._ended = ended.repeat_interleave(self._channels)
        firsts = self._ended[:: self._channels].to(scores.device)
        return _force(self._options, input_ids.shape[1], scores, firsts, self._last)

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        """Remember the column in which channel 0 of a text ended; the newest tokens are the context's last."""
        if self._ended is None or rows is not None:
            self._ended = None
            return
        columns = tokens[:, None] if tokens.dim() == 1 else tokens
        for place, column in enumerate(columns.unbind(1), self._ctx.length - columns.shape[1]):
            ends = (column[:: self._channels] == self._options.eos_token_id).repeat_interleave(self._channels)
            self._ended = self._ended.where(~ends | (self._ended <= place), place)

    def rollback(self, steps: int, /) -> None:
        """Forget; the next call looks at the tokens that are left."""
        self._ended = None

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the end of former row `rows[i]`."""
        if self._ended is not None:
            self._ended = self._ended[rows]
