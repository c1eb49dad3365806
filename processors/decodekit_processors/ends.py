"""Tokens of the rows of a run, such as those that end a text: the same ones for every row, or some for each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from decodekit.context import BindContext
from decodekit.fields import option
from torch import Tensor

from .checks import id_tuple
from .edits import mine

Ids = int | tuple[int, ...] | None


def eos_option() -> Any:
    """The field of a processor that must know the end tokens."""
    return option("Tokens that end a text; unset: the model's.", default=None, converter=id_tuple)


def usable(ids: Ids | list[int], vocab: int) -> list[int]:
    """The ids that can be generated at all, each once, in order."""
    given = () if ids is None else (ids,) if isinstance(ids, int) else ids
    return list(dict.fromkeys(token for token in given if 0 <= token < vocab))


class Named:
    """Tokens that something is done with in a run, and which of them are whose.

    ids: int64 [N], every token named for some row.
    own: bool [rows, N], True where the token is named for the row; None: all of them for every row.
    """

    __slots__ = ("ids", "own")

    def __init__(self, ids: Tensor, own: Tensor | None) -> None:
        self.ids = ids
        self.own = own

    @classmethod
    def of(cls, ctx: BindContext, given: Any) -> Named | None:
        """Token ids for all rows, or a tuple with some for each prompt; None where none of them can be generated.

        Raises ValueError where there are not as many tuples as prompts.
        """
        each, device = by_prompt(given), ctx.tokens.device
        ids = usable([token for row in given for token in row] if each else given, ctx.spec.vocab_size)
        if each and len(given) != ctx.prompts:
            raise ValueError(
                f"has {len(given)} values for {ctx.prompts} prompt{'s'[: ctx.prompts != 1]}; give one list, or one each"
            )
        if not ids:
            return None
        own = torch.tensor([[token in given[slot] for token in ids] for slot in ctx.slots]) if each else None
        return cls(torch.tensor(ids, device=device), None if own is None or bool(own.all()) else own.to(device))

    def reorder(self, rows: Tensor) -> None:
        """Row i has the tokens of former row `rows[i]`."""
        if self.own is not None:
            self.own = self.own[rows]


def ends_of(ctx: BindContext, given: Ids) -> Named | None:
    """The end tokens of the options, else the run's own `eos_token_id`; None where nothing can end a text."""
    rows: Any = ctx.settings.get("eos_token_id") if given is None else None
    if not by_prompt(rows):
        return Named.of(ctx, ctx.spec.eos_token_ids if given is None else given)
    return Named.of(ctx, rows)


def by_prompt(given: Any) -> bool:
    """Whether an option names something for each prompt, and not for all of them."""
    return isinstance(given, tuple) and any(isinstance(row, tuple) for row in given)


def forbid(scores: Tensor, ids: Iterable[int]) -> Tensor:
    """Scores [B, V] with these tokens at -inf, as a new tensor."""
    return scores.index_fill(-1, torch.tensor(list(ids), dtype=torch.long, device=scores.device), -torch.inf)


def write(scores: Tensor, ids: Tensor, values: Tensor | float, rows: Tensor | None, own: bool) -> Tensor:
    """Scores [B, V] with `values` ([B, N], or one number) at `ids` [N], where `rows` says so; a copy unless `own`.

    `rows` is bool [B, 1] or [B, N]; None: everywhere.
    """
    if rows is None and isinstance(values, float):
        return mine(scores, own).index_fill_(-1, ids, values)
    if rows is not None:
        old = scores.index_select(-1, ids)
        values = torch.where(rows, values, old)
    assert isinstance(values, Tensor)
    return mine(scores, own).index_copy_(-1, ids, values)
