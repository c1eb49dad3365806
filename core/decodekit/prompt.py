"""Turns what the caller passed into left-padded token rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import attrs
import torch
from torch import Tensor

from .errors import DecodekitError, InputError
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
    dropped: Tensor | None = None
    """int64 [B], a token taken off the end of each row that the new text begins by saying again; -1: none."""
    source: Tensor | None = None
    """int64 [B, S] tokens that an encoder reads, -1 at padding; None where it reads none."""

    def expand(self, times: int) -> Prompt:
        """Repeat every row `times` times, neighbours first."""
        return self if times == 1 else Prompt(**repeat(attrs.asdict(self, recurse=False), len(self.tokens), times))


def repeat(values: dict[str, Any], rows: int, times: int) -> dict[str, Any]:
    """Values with `times` rows instead of each: tensors of `rows` rows, and what holds such."""

    def each(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.repeat_interleave(times, 0) if value.dim() and len(value) == rows else value
        if isinstance(value, (tuple, list)):
            return type(value)(map(each, value))
        return type(value)(**repeat(dict(value), rows, times)) if isinstance(value, Mapping) else value

    return values if times == 1 else {name: each(value) for name, value in values.items()}


def read(
    inputs: Any, known: int, settings: Settings, *, attention_mask: Any, tokenizer: Any
) -> tuple[Tensor, Tensor | None]:
    """Text, token lists (ragged ones too), or tensors as int64 [B, T] below `known`, and bool [B, T], False at padding.

    Lists are padded on the left. Raises `InputError` where they cannot be used.
    """
    if inputs is None or isinstance(inputs, str):
        inputs = [[] if inputs is None else inputs]
    if isinstance(inputs, bytes) or not (isinstance(inputs, (Tensor, Sequence)) or hasattr(inputs, "__array__")):
        fix = ": pass what a tokenizer returns as **encoding" if isinstance(inputs, Mapping) else ""
        raise InputError(f"inputs must be text, token ids or a tensor of token ids, not {type(inputs).__name__}{fix}")
    try:
        if isinstance(inputs, Sequence) and (attention_mask is None or not inputs):
            tokens, mask = _pad(_rows(inputs, tokenizer, settings), settings)
        else:
            given = _rectangle(inputs) if isinstance(inputs, Sequence) else torch.as_tensor(inputs)
            tokens, mask = _tensor(given, attention_mask, settings)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # ours, or of torch and tokenizers
        why = "a number does not fit into 64 bits" if "verflow" in str(error) else error
        words = f"inputs or attention_mask cannot be used: {why}"
        raise (error if isinstance(error, DecodekitError) else InputError(words)) from error.__cause__
    if tokens.shape[0] == 0:
        raise InputError("inputs hold no prompt at all: pass at least one row")
    if tokens.shape[1] == 0:
        tokens, mask = _pad([[_bos(settings)] for _ in range(tokens.shape[0])], settings)
    low, high = map(int, (tokens[mask] if mask is not None and mask.shape == tokens.shape else tokens).aminmax())
    if low < 0 or high >= known:
        raise InputError(f"token id {low if low < 0 else high} is outside the model's vocabulary of {known}")
    return tokens, mask


def prepare(
    inputs: Any, adapter: ModelAdapter, settings: Settings, *, attention_mask: Any, tokenizer: Any, past: int = 0
) -> Prompt:
    """What `read` reads as left-padded rows on the model's device; `past` tokens are in a cache already."""
    spec = adapter.spec
    known = spec.num_embeddings or spec.vocab_size
    tokens, mask = read(inputs, known, settings, attention_mask=attention_mask, tokenizer=tokenizer)
    return _place(tokens.to(spec.device), None if mask is None else mask.to(spec.device), past)


def _rows(inputs: Sequence[Any], tokenizer: Any, settings: Settings) -> list[list[int]]:
    if len(inputs) > 0 and isinstance(inputs[0], Integral):
        inputs = [inputs]
    rows: list[list[int]] = []
    for item in inputs:
        if isinstance(item, str):
            if tokenizer is None:
                raise InputError("text prompts need a tokenizer: pass tokenizer=..., or token ids")
            ids = as_tokenizer(tokenizer).encode(item)
        else:
            ids = item.tolist() if hasattr(item, "tolist") else list(item)
        if isinstance(item, bytes) or not all(isinstance(i, Integral) and not isinstance(i, bool) for i in ids):
            raise InputError(f"token ids must be whole numbers, got {item if isinstance(item, bytes) else ids[:8]!r}")
        rows.append(ids or [_bos(settings)])
    return rows


def _bos(settings: Settings) -> int:
    bos = settings.get("bos_token_id")
    if bos is None:
        raise InputError("pass inputs (text or token ids): an empty prompt needs bos_token_id to begin with")
    return int(bos)


def _rectangle(inputs: Sequence[Any]) -> Tensor:
    flat = isinstance(inputs[0], Integral)
    if not flat and (isinstance(inputs[0], str) or len(set(map(len, inputs))) > 1):
        raise InputError("text and rows of different length take no attention_mask: pass a padded tensor, or no mask")
    return torch.tensor(inputs if flat else [list(row) for row in inputs])


def as_list(items: Any) -> list[Any]:
    """What was passed as a list, or a single one."""
    return [] if items is None else list(items) if isinstance(items, (list, tuple)) else [items]


def eos_ids(settings: Settings) -> tuple[int, ...]:
    """The tokens that end a row: where every prompt has its own, all that end some row."""
    return tuple(dict.fromkeys(i for row in as_list(settings.get("eos_token_id")) for i in as_list(row)))


def filler(settings: Settings) -> int:
    """The token that fills places nobody reads: pad, else the first eos, else 0."""
    pad = settings.get("pad_token_id")
    return int(pad) if pad is not None and pad >= 0 else next((i for i in eos_ids(settings) if i >= 0), 0)


def _pad(rows: list[list[int]], settings: Settings) -> tuple[Tensor, Tensor | None]:
    width, fill = max(map(len, rows), default=0), filler(settings)
    tokens = torch.tensor([[fill] * (width - len(row)) + row for row in rows], dtype=torch.long)
    mask = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in rows])
    return tokens, None if bool(mask.all()) else mask


def _tensor(tokens: Tensor, attention_mask: Any, settings: Settings) -> tuple[Tensor, Tensor | None]:
    flat = tokens.dim() == 1
    tokens = tokens[None] if flat else tokens
    if tokens.dim() != 2 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise InputError(f"inputs must be integer token ids [B, T], got {tokens.dtype} {tuple(tokens.shape)}")
    tokens = tokens.long()
    if attention_mask is None:
        return _guess(tokens, settings)
    mask = torch.as_tensor(attention_mask)
    mask = mask.reshape(1, -1) if flat else mask
    if mask.dim() != 2 or mask.shape[0] != tokens.shape[0]:
        raise InputError(f"attention_mask must be [B, T] = {tuple(tokens.shape)}, got {tuple(mask.shape)}")
    ones = mask == 1
    if mask.shape == tokens.shape and bool(ones.all()):
        return tokens, None
    if not bool((ones | (mask == 0)).all()):
        raise InputError("attention_mask must hold 1 or True at tokens and 0 or False at padding, and nothing else")
    if not bool(ones.any(-1).all()):
        raise InputError("attention_mask hides a whole row: every prompt needs at least one real token")
    return tokens, ones.to(tokens.device)


def _guess(tokens: Tensor, settings: Settings) -> tuple[Tensor, Tensor | None]:
    """Without a mask, runs of the pad token at either end are padding, unless it also ends sequences."""
    pad = settings.get("pad_token_id")
    if pad is None or pad in eos_ids(settings):
        return tokens, None
    real = tokens != pad
    if bool(real.all()) or not bool(real.any(-1).all()):
        return tokens, None
    inside = (real.cumsum(-1) > 0) & (real.flip(-1).cumsum(-1).flip(-1) > 0)
    return tokens, None if bool(inside.all()) else inside


def places(mask: Tensor) -> Tensor:
    """The place of each token among the real ones of its row: int64, as bool `mask` [B, T]."""
    return (mask.long().cumsum(-1) - 1).clamp_min_(0)


def _place(tokens: Tensor, mask: Tensor | None, past: int) -> Prompt:
    width, past_mask = tokens.shape[1], None
    covered = width if mask is None else mask.shape[1]
    fresh = past > 0 and covered == past + width
    if not fresh and (covered != width or width <= past):
        words = "" if mask is None else f"attention_mask covers {covered} tokens, but "
        words += f"the cache holds {past} tokens and inputs are {width}" if past else f"inputs are {width}"
        fix = f"pass the whole sequence, or only the new tokens with an attention_mask of {past} + their number"
        raise InputError(f"{words}; {fix if past else 'they must agree'}")
    # Only now: the width of a mask says what the inputs are, even where it hides nothing.
    if mask is None or bool(mask.all()):
        positions = torch.arange(covered, device=tokens.device)[covered - width :].expand_as(tokens)
        return Prompt(tokens, None, positions, past, fresh)
    if not past and not bool(mask[:, -1].all()):
        # Right padding: generation goes on behind the last real token, so real tokens move to the right end.
        index = mask.long().argsort(dim=-1, stable=True)
        tokens, mask = tokens.gather(1, index), mask.gather(1, index)
    positions = places(mask)
    if fresh:
        past_mask, mask, positions = mask[:, :past], mask[:, past:], positions[:, past:]
    # Padding must not reach the model as an id outside its embedding.
    tokens = tokens.masked_fill(~mask, 0) if bool((tokens < 0).any()) else tokens
    return Prompt(tokens, mask, positions, past, fresh, past_mask)
