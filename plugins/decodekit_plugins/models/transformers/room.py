"""Tables of positions: models that look each position up in one cannot go on behind its end."""

from __future__ import annotations

import weakref
from typing import Any

import attrs
import torch
from decodekit.config import mode_of
from decodekit.errors import ConfigError, InputError, Problem
from decodekit.options import LIBRARY
from decodekit.prompt import Prompt
from decodekit.settings import CALLER, Settings

TABLES = (
    "embed_positions", "wpe", "position_embeddings", "position_embedding", "positions_embed", "embed_pos",
)  # fmt: skip
"""Names that models give their tables of positions."""
OFFSET = 2
"""Rows at most that a table has before the first position."""
USUAL = LIBRARY["max_new_tokens"]
"""New tokens where nobody sets a length."""

_found: weakref.WeakKeyDictionary[Any, int | None] = weakref.WeakKeyDictionary()


def table_of(part: Any) -> int | None:
    """Positions in the table of a decoder or encoder; None for one without (rotary, ALiBi, relative positions, and
    sinusoids that are made as they are needed).

    part: the module that reads tokens; pictures have tables, too, which are not meant. Looked up once for each.
    """
    if part not in _found:
        _found[part] = _table_of(part)
    return _found[part]


def _table_of(part: Any) -> int | None:
    for name, module in part.named_modules():
        if isinstance(module, torch.nn.Embedding) and name.rpartition(".")[2] in TABLES:
            return int(module.weight.shape[0]) - min(int(getattr(module, "offset", 0) or 0), OFFSET)
    return None


def fit(prompt: Prompt, room: int | None, settings: Settings, name: str) -> None:
    """Lower limits that nobody asked for to what a table of `room` positions allows.

    The last token of a text is not read, so that it may be one longer than the table; contrastive search reads it.
    Raises `InputError` for prompts that are too long, `ConfigError` for limits of the caller's that are too great.
    """
    if room is None:
        return
    mode = settings.get("strategy") or mode_of({key: final.value for key, final in settings.values.items()}).value
    room = room if str(mode).startswith("contrastive") else room + 1
    held = [int(last) + 1 for last in prompt.positions[:, -1]]
    left = [room - each for each in held]
    if min(left) < 1:
        words = f"the prompt has {max(held)} tokens, but {name} has room for {room - 1}"
        raise InputError(f"{words}: its table of positions ends there; shorten the prompt")
    counted = prompt.tokens.shape[1]  # of embeddings or tokens in a cache max_length knows nothing
    own = (
        [counted] * len(held) if prompt.mask is None else prompt.mask[:, -counted:].sum(-1).tolist() if counted else []
    )
    totals = [more + (own[row] if own else 0) for row, more in enumerate(left)]
    for at, active in settings.active.items():
        options = active.options
        if at[0] == "criteria" and hasattr(options, "max_new_tokens") and hasattr(options, "max_length"):
            new = _within("max_new_tokens", options.max_new_tokens, left, held, settings)
            total = _within("max_length", options.max_length, totals, held, settings)
            if new is None and total is None and min(left) < USUAL:
                new = tuple(min(USUAL, each) for each in left)
            # Nothing that is planned can be too long: there is nothing to warn of.
            known = getattr(options, "max_position_embeddings", None) or counted + max(left)
            options = attrs.evolve(options, max_new_tokens=new, max_length=total, max_position_embeddings=known)
            settings.active[at] = attrs.evolve(active, options=options)


def readable(width: int, room: int | None, name: str) -> None:
    """Raise `InputError` for `width` tokens or embeddings that the encoder called `name` has no positions for."""
    if room is not None and width > room:
        raise InputError(
            f"the encoder's input has {width} tokens, but {name} has room for {room}: its table of positions ends there"
        )


def _within(key: str, value: Any, left: list[int], held: list[int], settings: Settings) -> Any:
    """The limit, or for each row what there is room for, where the model's own file asks for more."""
    if value is None:
        return None
    wanted = value if isinstance(value, tuple) else (value,) * len(left)
    over = [row for row, (each, most) in enumerate(zip(wanted, left, strict=False)) if each > most]
    if not over:
        return value
    if settings.origin(key) not in CALLER:
        return tuple(min(each, most) for each, most in zip(wanted, left, strict=True))
    row = over[0]
    behind = f"behind a prompt of {held[row]} tokens " if key == "max_new_tokens" else "with its prompt "
    words = f"is {wanted[row]}, but {behind}this model's table of positions has room for {left[row]}; lower it"
    raise ConfigError([Problem(key, words, settings.values[key].owner)])
