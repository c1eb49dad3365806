"""Bark: an end that is taken when it is likely enough, and two codebooks in turns."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import greater_than, option
from decodekit.traits import Phase, Traits
from torch import Tensor

from decodekit_processors.checks import device_option, id_tuple, whole


def _check_ids(instance: Any, attribute: Any, value: Any) -> None:
    for token in value if isinstance(value, tuple) else (value,):
        if token is not None and (not isinstance(token, int) or isinstance(token, bool) or token < 0):
            raise ValueError(f"must be token ids, whole numbers of 0 or more, got {value!r}")


@attrs.frozen
class BarkEosPrioritizerLogitsProcessor:
    """Where an end token is likelier than `min_eos_p`, leave nothing but the end tokens.

    Scores are floating [B, V]; rows in which no end token is that likely pass untouched. Raises ValueError for a
    `min_eos_p` that is not above 0, for ids below 0, and for a direct call without `eos_token_id`.
    (Bark, Suno AI 2023, https://github.com/suno-ai/bark.)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.CONSTRAIN, after=("suppress_tokens",), reads_history=False, pure=True)

    eos_token_id: int | tuple[int, ...] | None = option(
        "Tokens that end a text; unset: the model's.", default=None, check=_check_ids, converter=id_tuple
    )
    min_eos_p: float | tuple[float, ...] | None = option(
        "Probability above which the end is taken; unset: never.", default=None, check=greater_than(0), per_row=True
    )
    device: str = device_option()

    def bind(self, ctx: BindContext, /) -> _Ends | None:
        """Return the form that knows the end tokens, or None without `min_eos_p` or an end token: nothing to do."""
        eos = self.eos_token_id if self.eos_token_id is not None else ctx.spec.eos_token_ids
        ids = [token for token in ((eos,) if isinstance(eos, int) else eos) if token < ctx.spec.vocab_size]
        if self.min_eos_p is None or not ids:
            return None
        return _Ends(self, torch.tensor(ids, device=ctx.spec.device), ctx.per_row(self.min_eos_p))

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V]; without `min_eos_p` the same object. Raises ValueError without `eos_token_id`."""
        if self.min_eos_p is None:
            return scores
        eos = self.eos_token_id
        if eos is None:
            raise ValueError("eos_token_id is needed where the processor is called on its own")
        least: float | Tensor
        if isinstance(self.min_eos_p, tuple):
            least = torch.tensor(self.min_eos_p, dtype=torch.float64, device=scores.device)[:, None]
            if len(least) != scores.shape[0]:
                raise ValueError(f"min_eos_p has {len(least)} values for {scores.shape[0]} rows")
        else:
            least = self.min_eos_p
        ids = torch.tensor(eos, device=scores.device).reshape(-1)
        return _take_end(scores, ids, least)


def _take_end(scores: Tensor, ids: Tensor, least: float | Tensor) -> Tensor:
    wide = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    ends = scores[:, ids]
    odds = (wide[:, ids] - wide.logsumexp(-1, keepdim=True)).exp()
    sure = (odds > (least.to(odds.dtype) if isinstance(least, Tensor) else least)).any(-1, keepdim=True)
    return scores.masked_fill(sure, -torch.inf).index_copy(-1, ids, ends)


class _Ends:
    """The rule inside a run."""

    def __init__(self, options: BarkEosPrioritizerLogitsProcessor, ids: Tensor, least: float | Tensor) -> None:
        self._options, self._ids, self._least = options, ids, least

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the number of former row `rows[i]`."""
        if isinstance(self._least, Tensor):
            self._least = self._least[rows]

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with all but the end tokens at -inf where one of them is likely enough."""
        return _take_end(scores, self._ids, self._least)


@attrs.frozen
class AlternatingCodebooksLogitsProcessor:
    """Let the two coarse codebooks speak in turns: the first new token is of the first, the next of the second.

    Behind `semantic_vocab_size` tokens that are never taken lie `codebook_size` tokens of the first codebook; all that
    follow are the second's. Scores are floating [B, V]. Raises ValueError for negative numbers, and for a direct call
    without `input_start_len`. (Bark, Suno AI 2023, https://github.com/suno-ai/bark.)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.CONSTRAIN, pure=True)

    input_start_len: int | None = option(
        "Width of the prompt, padding included; unset: that of the running call.", default=None, check=whole(0)
    )
    semantic_vocab_size: int = option("Tokens before the first codebook.", default=10_000, check=whole(0))
    codebook_size: int = option("Tokens of the first codebook.", default=1024, check=whole(0))

    def bind(self, ctx: BindContext, /) -> AlternatingCodebooksLogitsProcessor:
        """Return the form that knows the prompt's width."""
        start = self.input_start_len
        return self if start is not None else attrs.evolve(self, input_start_len=ctx.prompt_width)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with all tokens but those of the codebook whose turn it is at -inf."""
        if self.input_start_len is None:
            raise ValueError("input_start_len is needed where the processor is called on its own: the prompt's width")
        first, second = self.semantic_vocab_size, self.semantic_vocab_size + self.codebook_size
        turn = slice(second, None) if (input_ids.shape[-1] - self.input_start_len) % 2 else slice(first, second)
        out = torch.full_like(scores, -torch.inf)
        out[:, turn] = scores[:, turn]
        return out
