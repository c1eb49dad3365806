"""What an encoder reads or has read, checked before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from decodekit.errors import InputError
from torch import Tensor

from .facts import fact


def floating(name: str, value: Any, size: int | None) -> Tensor:
    """Frames, waves, pictures or embeddings: a floating tensor with a row for each prompt.

    size: width of the encoder's own embeddings, where `value` takes their place. Raises `InputError` otherwise.
    """
    if value is None:
        raise InputError(f"this model's encoder reads {name}: pass {name}=... (or inputs)")
    if not isinstance(value, Tensor):
        raise InputError(f"{name} must be a tensor, not {type(value).__name__}")
    if not value.is_floating_point() or value.dim() < 2 or not value.numel():
        raise InputError(f"{name} must be a floating tensor with a row for each prompt, none of them empty, got "
                         f"{value.dtype} {tuple(value.shape)}")  # fmt: skip
    if name == "inputs_embeds" and (value.dim() != 3 or size not in (None, value.shape[2])):
        raise InputError(f"inputs_embeds must be [B, S, {size or 'H'}], as wide as the encoder's embeddings, got "
                         f"{tuple(value.shape)}")  # fmt: skip
    return value


def state_of(encoded: Any, encoder: Any, composite: bool) -> Tensor:
    """The last hidden state [B, S, H] of an encoder's output. Raises `InputError` where it is none of this encoder.

    composite: whether encoder and decoder are two models, between which the width may change.
    """
    state = encoded[0] if isinstance(encoded, (tuple, list)) else getattr(encoded, "last_hidden_state", encoded)
    if not isinstance(state, Tensor) or state.dim() != 3:
        raise InputError("encoder_outputs must hold last_hidden_state [B, S, H], as the model's encoder returns them")
    if not state.is_floating_point() or not state.numel():
        raise InputError(f"encoder_outputs must be floating and not empty, got {state.dtype} {tuple(state.shape)}")
    size = None if composite else fact(getattr(encoder, "config", None), "hidden_size")
    if isinstance(size, int) and state.shape[2] != size:
        raise InputError(f"encoder_outputs must be [B, S, {size}] of this model's encoder, got {tuple(state.shape)}")
    return state


def real_of(mask: Any, rows: int, width: int | None) -> Tensor:
    """A mask for what the encoder reads: int64 [B, S]. Raises `InputError` for what `inputs` would be refused.

    width: what it must cover, None where that cannot be told.
    """
    mask = torch.as_tensor(mask)
    if mask.dim() != 2 or len(mask) != rows:
        shape = "" if mask.dim() == 2 else f", of shape {tuple(mask.shape)}"
        raise InputError(
            f"attention_mask has {len(mask) if mask.dim() else 0} rows{shape}, the encoder's input has {rows}"
        )
    if width is not None and mask.shape[1] != width:
        raise InputError(
            f"attention_mask covers {mask.shape[1]} tokens, but the encoder's input has {width}: they must agree"
        )
    if not bool(((mask == 1) | (mask == 0)).all()):
        raise InputError("attention_mask must hold 1 or True at tokens and 0 or False at padding, and nothing else")
    if not bool((mask == 1).any(-1).all()):
        raise InputError("attention_mask hides a whole row: every prompt needs something to read")
    return mask.long()


def refuse_both(named: Sequence[str], inputs: Any, encoded: Any, reads_tokens: bool) -> None:
    """Raise `InputError` for `encoder_outputs` beside what the encoder would read.

    Tokens may stand beside them: processors look at what the encoder has read.
    """
    if encoded is None:
        return
    both = [*named, *([] if inputs is None or reads_tokens else ["inputs"])]
    if both:
        raise InputError(f"encoder_outputs and {both[0]} both say what the encoder reads: pass only one of them")


def refuse_others(tokens: Tensor, state: Tensor) -> None:
    """Raise `InputError` for tokens [B, S] that cannot be what `encoder_outputs` were made of."""
    if tokens.shape != state.shape[:2]:
        raise InputError(
            f"inputs are {tuple(tokens.shape)}, but encoder_outputs were made of {tuple(state.shape[:2])} tokens: pass "
            "those tokens, or encoder_outputs alone (the decoder's prompt is decoder_input_ids)"
        )


def refuse_nothing(inputs: Any, bos: Any) -> None:
    """Raise `InputError` for tokens that are none: an encoder has nothing that it could begin with instead."""
    if inputs is None:
        if bos is None:
            raise InputError("pass inputs (text or token ids) for the encoder to read; without any it reads "
                             "bos_token_id, which is not set")  # fmt: skip
        return
    rows = inputs if hasattr(inputs, "__len__") and not isinstance(inputs, (str, bytes)) else ()
    if isinstance(inputs, Tensor):
        empty = inputs.dim() > 0 and len(inputs) > 0 and not inputs.numel()
    else:
        empty = any(hasattr(row, "__len__") and len(row) == 0 for row in rows)
    if empty:
        raise InputError("a row of the encoder's input is empty: it needs at least one token, such as the "
                         "one that ends a text")  # fmt: skip


def is_empty(decoder: Any) -> bool:
    """Whether a prompt for the decoder has rows, but no token."""
    if isinstance(decoder, Tensor):
        return decoder.dim() == 2 and len(decoder) > 0 and decoder.shape[1] == 0
    rows = decoder if isinstance(decoder, (list, tuple)) else ()
    return len(rows) > 0 and all(hasattr(row, "__len__") and len(row) == 0 for row in rows)


def shapes(given: Mapping[str, Any]) -> str:
    """Arguments in words: the shape of each tensor."""
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in given.items() if isinstance(value, Tensor))
