"""Where the tokens of a stored prompt go among those of a new one."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from decodekit.prompt import Prompt
from torch import Tensor


class Misfit(ValueError):
    """The stored prompt is no beginning of the new one; the message says why."""


@attrs.frozen
class Fit:
    """How a stored cache becomes the beginning of a new one."""

    rows: tuple[int, ...]
    """Stored row of each new one."""
    shifts: tuple[int, ...]
    """Columns by which each row moves to the right: rows with more or less padding than before."""
    past: int
    """Columns that need not be run."""


def fit(tokens: Tensor, mask: Tensor, prompt: Prompt, copies: int) -> Fit:
    """Find the place of stored rows [B, T] in those of `prompt`, `copies` of which belong to one prompt each.

    One stored row is the beginning of every prompt; else there is one for each. At least one column is left to run.
    Raises `Misfit` where a stored row is not the beginning of its prompt, or padding stands inside of one.
    """
    width = prompt.tokens.shape[1]
    new = _rows(prompt.tokens[::copies], None if prompt.mask is None else prompt.mask[::copies])
    old = _rows(tokens, mask)
    if len(old) not in (1, len(new)):
        raise Misfit(
            f"holds {len(old)} prompts, and there are {len(new)}: pass as many, or store one that all begin with"
        )
    rows, shifts, past = [], [], width - 1
    for number, mine in enumerate(new):
        row = 0 if len(old) == 1 else number
        theirs = old[row]
        same = next(
            (i for i, (a, b) in enumerate(zip(theirs, mine, strict=False)) if a != b), min(len(theirs), len(mine))
        )
        if same < len(theirs):
            if same < len(mine):
                what = f"token {same} is {theirs[same]} there and {mine[same]} here"
            else:
                what = f"it has {len(theirs)} tokens, and this one {len(mine)}"
            raise Misfit(f"holds other tokens than prompt {number} begins with: {what}; name another file")
        shift = (width - len(mine)) - (tokens.shape[1] - len(theirs))
        past = min(past, width - len(mine) + len(theirs))
        rows += [row] * copies
        shifts += [shift] * copies
    return Fit(tuple(rows), tuple(shifts), past)


def _rows(tokens: Tensor, mask: Tensor | None) -> list[list[int]]:
    """The real tokens of each row."""
    if mask is None:
        return list(tokens.tolist())
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise Misfit("cannot be used for a prompt with padding inside: leave prompt_cache out")
    return [row[len(row) - real :] for row, real in zip(tokens.tolist(), mask.sum(-1).tolist(), strict=True)]


def place(cache: Any, found: Fit, stored: int) -> None:
    """Turn a cache that holds the `stored` columns of a file into the beginning of the new rows.

    Rows whose padding differs from before have their keys and values moved: a token's position counts real tokens
    only, so they are the same in any column. Raises `Misfit` where the cache cannot do what that takes.
    """
    rows = torch.tensor(found.rows)
    if found.rows != tuple(range(int(cache.batch_size))):
        _able(cache, "reorder")
        cache.reorder_cache(rows)
    if not any(found.shifts):
        if found.past < stored:
            _able(cache, "crop")
            cache.crop(found.past)
        return
    layers = [(key, value) for key, value, *_ in cache] if hasattr(cache, "__iter__") else []
    if not layers or any(key is None or key.shape[2] != stored for key, _ in layers):
        raise Misfit(
            "cannot be used: prompts are padded otherwise than before, and this kind of cache cannot move them"
        )
    _able(cache, "crop")
    at = (torch.arange(found.past) - torch.tensor(found.shifts)[:, None]).clamp_(0, stored - 1)
    moved = []
    for pair in layers:
        wheres = [at.to(part.device)[:, None, :, None].expand(-1, part.shape[1], -1, part.shape[3]) for part in pair]
        moved.append([part.gather(2, where) for part, where in zip(pair, wheres, strict=True)])
    cache.crop(0)
    for index, (key, value) in enumerate(moved):
        cache.update(key, value, index)


def _able(cache: Any, ability: str) -> None:
    if ability not in cache.offers():
        raise Misfit(f"cannot be used: that takes cache:{ability}, which {type(cache).__name__} does not offer")
