"""Which tokens end a text, in a run: the same ones for every row, or some for each."""

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


def usable(ids: Ids, vocab: int) -> list[int]:
    """The ids that can be generated at all, each once, in order."""
    given = () if ids is None else (ids,) if isinstance(ids, int) else ids
    return list(dict.fromkeys(token for token in given if 0 <= token < vocab))


class Ends:
    """End tokens of the rows of a run, and which of them are whose.

    ids: int64 [N], every token that ends some row.
    own: bool [rows, N], True where the token ends the row; None: all of them end every row.
    """

    __slots__ = ("ids", "own")

    def __init__(self, ids: Tensor, own: Tensor | None) -> None:
        self.ids = ids
        self.own = own

    @classmethod
    def of(cls, ctx: BindContext, given: Ids) -> Ends | None:
        """Those of the options, else the run's own `eos_token_id`; None where nothing can end a text."""
        vocab, device = ctx.spec.vocab_size, ctx.tokens.device
        rows: Any = ctx.settings.get("eos_token_id") if given is None else None
        nested = isinstance(rows, tuple) and any(isinstance(row, tuple) for row in rows)
        ids = usable(ctx.spec.eos_token_ids if given is None else given, vocab)
        if not ids:
            return None
        own: Tensor | None = None
        if nested:
            own = torch.tensor([[token in rows[slot] for token in ids] for slot in ctx.slots], device=device)
            own = None if bool(own.all()) else own
        return cls(torch.tensor(ids, device=device), own)

    def reorder(self, rows: Tensor) -> None:
        """Row i has the end tokens of former row `rows[i]`."""
        if self.own is not None:
            self.own = self.own[rows]


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
