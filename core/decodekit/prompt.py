"""Turns what the caller passed into left-padded token rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from .errors import InputError
from .protocols import ModelAdapter
from .settings import Settings
from .text import as_tokenizer


@attrs.frozen
class Prompt:
    """The rows to continue."""

    tokens: Tensor
    """int64 [B, T], left-padded."""
    mask: Tensor | None
    """bool [B, T], False at padding; None where there is none."""
    positions: Tensor
    """int64 [B, T]: place of each token among the real tokens of its row."""
    past: int = 0
    """Tokens a passed cache holds already; they are part of `positions` and `mask` but not fed again."""
    fresh: bool = False
    """Whether `tokens` come after the cached ones, rather than including them."""
    past_mask: Tensor | None = None
    """bool [B, past] of the cached tokens where `tokens` are fresh and any of them is padding."""

    def expand(self, times: int) -> Prompt:
        """Repeat every row `times` times, neighbours first."""
        if times == 1:
            return self

        def repeat(value: Tensor | None) -> Any:
            return None if value is None else value.repeat_interleave(times, 0)

        return Prompt(
            repeat(self.tokens),
            repeat(self.mask),
            repeat(self.positions),
            self.past,
            self.fresh,
            repeat(self.past_mask),
        )


def prepare(
    inputs: Any,
    adapter: ModelAdapter,
    settings: Settings,
    *,
    attention_mask: Any = None,
    tokenizer: Any = None,
    past: int = 0,
) -> Prompt:
    """Accept text, token lists (ragged ones too), or tensors; return left-padded rows on the model's device.

    Raises `InputError` where they cannot be used.
    """
    spec = adapter.spec
    if inputs is None:
        inputs = [[]]
    if isinstance(inputs, str):
        inputs = [inputs]
    if not isinstance(inputs, Tensor) and hasattr(inputs, "__array__"):
        inputs = torch.as_tensor(inputs)
    if isinstance(inputs, Tensor):
        tokens, mask = _tensor(inputs, attention_mask, settings)
    elif isinstance(inputs, Sequence):
        if attention_mask is not None and inputs and not isinstance(inputs[0], int):
            inputs = _rectangle(inputs)
            tokens, mask = _tensor(torch.tensor(inputs, dtype=torch.long), attention_mask, settings)
        else:
            rows = _rows(inputs, tokenizer, settings)
            tokens, mask = _pad(rows, settings)
    else:
        raise InputError(f"inputs must be text, token ids or a tensor of token ids, not {type(inputs).__name__}")
    if tokens.shape[0] == 0:
        raise InputError("inputs hold no prompt at all: pass at least one row")
    if tokens.shape[1] == 0:
        tokens, mask = _pad([[_bos(settings)] for _ in range(tokens.shape[0])], settings)
    _check_ids(tokens, mask, spec.num_embeddings or spec.vocab_size)
    tokens = tokens.to(spec.device)
    mask = None if mask is None else mask.to(spec.device)
    return _place(tokens, mask, past)


def _rows(inputs: Sequence[Any], tokenizer: Any, settings: Settings) -> list[list[int]]:
    if len(inputs) == 0 or isinstance(inputs[0], int):
        inputs = [inputs]
    rows: list[list[int]] = []
    for item in inputs:
        if isinstance(item, str):
            if tokenizer is None:
                raise InputError("text prompts need a tokenizer: pass tokenizer=..., or token ids")
            ids = as_tokenizer(tokenizer).encode(item)
        else:
            ids = item.tolist() if hasattr(item, "tolist") else list(item)
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise InputError(f"token ids must be whole numbers, got {ids[:8]!r}")
        rows.append(ids or [_bos(settings)])
    return rows


def _bos(settings: Settings) -> int:
    bos = settings.get("bos_token_id")
    if bos is None:
        raise InputError("an empty prompt needs bos_token_id to begin with; set it, or pass tokens")
    return int(bos)


def _rectangle(inputs: Sequence[Any]) -> list[list[int]]:
    rows = [list(row) for row in inputs]
    if len({len(row) for row in rows}) > 1:
        raise InputError("rows of different length take no attention_mask: pass a padded tensor, or leave the mask out")
    return rows


def filler(settings: Settings) -> int:
    """The token that fills places nobody reads: pad, else the first eos, else 0."""
    pad = settings.get("pad_token_id")
    if pad is not None and pad >= 0:
        return int(pad)
    eos = settings.get("eos_token_id")
    first = eos[0] if isinstance(eos, (tuple, list)) and eos else eos
    return int(first) if isinstance(first, int) else 0


def _pad(rows: list[list[int]], settings: Settings) -> tuple[Tensor, Tensor | None]:
    width = max(map(len, rows))
    if all(len(row) == width for row in rows):
        return torch.tensor(rows, dtype=torch.long), None
    fill = filler(settings)
    tokens = torch.tensor([[fill] * (width - len(row)) + row for row in rows], dtype=torch.long)
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return tokens, mask


def _tensor(tokens: Tensor, attention_mask: Any, settings: Settings) -> tuple[Tensor, Tensor | None]:
    if tokens.dim() == 1:
        tokens = tokens[None]
        if attention_mask is not None:
            attention_mask = torch.as_tensor(attention_mask).reshape(1, -1)
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise InputError(f"inputs must be integer token ids [B, T], got {tokens.dtype} {tuple(tokens.shape)}")
    tokens = tokens.long()
    if attention_mask is None:
        return _guess(tokens, settings)
    mask = torch.as_tensor(attention_mask)
    if mask.dim() != 2 or mask.shape[0] != tokens.shape[0]:
        raise InputError(f"attention_mask must be [B, T] = {tuple(tokens.shape)}, got {tuple(mask.shape)}")
    mask = mask.to(tokens.device) != 0
    if not bool(mask.any(-1).all()):
        raise InputError("attention_mask hides a whole row: every prompt needs at least one real token")
    return tokens, mask


def _guess(tokens: Tensor, settings: Settings) -> tuple[Tensor, Tensor | None]:
    """Without a mask, runs of the pad token at either end are padding, unless it also ends sequences."""
    pad = settings.get("pad_token_id")
    eos = settings.get("eos_token_id") or ()
    if pad is None or pad in (eos if isinstance(eos, (tuple, list)) else (eos,)):
        return tokens, None
    real = tokens != pad
    if bool(real.all()) or not bool(real.any(-1).all()):
        return tokens, None
    inside = (real.cumsum(-1) > 0) & (real.flip(-1).cumsum(-1).flip(-1) > 0)
    return tokens, None if bool(inside.all()) else inside


def _check_ids(tokens: Tensor, mask: Tensor | None, known: int) -> None:
    used = tokens if mask is None else tokens[mask.to(tokens.device)] if mask.shape == tokens.shape else tokens
    low, high = int(used.min()), int(used.max())
    if low < 0 or high >= known:
        raise InputError(f"token id {low if low < 0 else high} is outside the model's vocabulary of {known}")


def _place(tokens: Tensor, mask: Tensor | None, past: int) -> Prompt:
    width = tokens.shape[1]
    past_mask = None
    fresh = False
    if past:
        fresh = mask is not None and mask.shape[1] == past + width
        if mask is not None and not fresh and mask.shape[1] != width:
            raise InputError(
                f"attention_mask covers {mask.shape[1]} tokens, but the cache holds {past} and inputs are {width}: "
                f"pass a mask of {width} (inputs are the whole sequence) or {past + width} (inputs are new)"
            )
        fresh = fresh or (mask is None and width <= past)
        if not fresh and width <= past:
            raise InputError(f"the cache holds {past} tokens but the whole sequence given has only {width}")
    elif mask is not None and mask.shape[1] != width:
        raise InputError(f"attention_mask covers {mask.shape[1]} tokens, but inputs have {width}")
    # Only now: the width of a mask says what the inputs are, even where it hides nothing.
    if mask is None or bool(mask.all()):
        start = past if fresh else 0
        positions = torch.arange(start, start + width, device=tokens.device).expand(tokens.shape[0], width)
        return Prompt(tokens, None, positions, past, fresh)
    if not past and not bool(mask[:, -1].all()):
        # Right padding: generation goes on behind the last real token, so real tokens move to the right end.
        index = mask.long().argsort(dim=-1, stable=True)
        tokens, mask = tokens.gather(1, index), mask.gather(1, index)
    positions = (mask.long().cumsum(-1) - 1).clamp_min_(0)
    if fresh:
        past_mask, mask, positions = mask[:, :past], mask[:, past:], positions[:, past:]
    # Padding must not reach the model as an id outside its embedding.
    tokens = tokens.masked_fill(~mask, 0) if bool((tokens < 0).any()) else tokens
    return Prompt(tokens, mask, positions, past, fresh, past_mask)
