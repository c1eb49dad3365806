"""Stop at an end-of-sequence token."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import option
from torch import Tensor


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return value


def _check(instance: Any, attribute: Any, value: Any) -> None:
    items = value if isinstance(value, tuple) else (value,)
    if any(isinstance(item, tuple) for item in items):
        if not all(isinstance(item, tuple) for item in items):
            raise ValueError(f"must be a list of token ids, or a list of such lists, not both in one: {value!r}")
        items = tuple(token for row in items for token in row)
    for token in items:
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"must be a token id or a list of token ids, got {token!r}")
        if abs(token) >= 2**63:
            raise ValueError(f"must fit into 64 bits, got {token}")


def _counting(ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(token for token in ids if token >= 0))


@attrs.frozen
class EosTokenCriteria:
    """End a row with the first of its tokens that is an end-of-sequence token. Negative ids are ignored.

    A list of lists has one list for each prompt; an empty one never ends its rows.
    """

    eos_token_id: int | tuple[int, ...] | tuple[tuple[int, ...], ...] = option(
        "Token id or ids that end a row, or a list of them for each prompt; negative ones are ignored (-1: none).",
        converter=_plain,
        check=_check,
    )

    def lists(self) -> tuple[tuple[int, ...], ...] | None:
        """The ids that count for each prompt; None where they are the same for all."""
        given = self.eos_token_id
        if isinstance(given, tuple) and given and isinstance(given[0], tuple):
            return tuple(_counting(row) for row in given if isinstance(row, tuple))
        return None

    def tokens(self) -> tuple[int, ...]:
        """The ids that count, for some prompt or for all, each once."""
        given = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
        return _counting(token for item in given for token in (item if isinstance(item, tuple) else (item,)))

    def bind(self, ctx: BindContext, /) -> _Eos | _EosRows | None:
        """The test for this call; None where no id counts. Raises ValueError for more or fewer lists than prompts."""
        tokens, lists = self.tokens(), self.lists()
        if lists is not None:
            if len(lists) != ctx.prompts:
                words = (
                    f"has {len(lists)} lists for {ctx.prompts} prompt{'s'[: ctx.prompts != 1]}; give one, or one each"
                )
                raise ValueError(words)
            if tokens and len(set(map(frozenset, lists))) > 1:
                return _EosRows([lists[slot] for slot in ctx.slots], ctx.tokens.device)
        return _Eos(tokens, ctx.spec.device) if tokens else None

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor:
        """Bool [B]: the last token of each row of `input_ids` [B, T] ends it.

        Raises ValueError where there are lists, and not one for each row.
        """
        lists = self.lists()
        if lists is None:
            return _Eos(self.tokens(), input_ids.device)(input_ids, scores)
        if len(lists) != input_ids.shape[0]:
            raise ValueError(f"eos_token_id has {len(lists)} lists for {input_ids.shape[0]} rows; give one for each")
        return _EosRows(lists, input_ids.device)(input_ids, scores)


class _Eos:
    __slots__ = ("eos_token_id", "single")
    newest_only = True

    def __init__(self, tokens: tuple[int, ...], device: torch.device) -> None:
        self.eos_token_id = torch.tensor(tokens, dtype=torch.long, device=device)
        self.single = tokens[0] if len(tokens) == 1 else None

    def __repr__(self) -> str:
        return f"EosTokenCriteria(eos_token_id={self.eos_token_id.tolist()})"

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor:
        last = input_ids[:, -1]
        if self.single is not None:
            return last == self.single
        return (last[:, None] == self.eos_token_id.to(last.device)).any(-1)


class _EosRows:
    """End tokens of each row, int64 [B, N]; -1, which is no token, where a row has fewer."""

    __slots__ = ("ids",)
    newest_only = True

    def __init__(self, lists: Sequence[tuple[int, ...]], device: torch.device) -> None:
        most = max(1, *map(len, lists))
        self.ids = torch.tensor([(*row, *[-1] * (most - len(row))) for row in lists], device=device)

    def __repr__(self) -> str:
        return f"EosTokenCriteria(eos_token_id={[[i for i in row if i >= 0] for row in self.ids.tolist()]})"

    def reorder(self, rows: Tensor, /) -> None:
        self.ids = self.ids[rows]

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor:
        last = input_ids[:, -1:]
        return ((last == self.ids) & (last >= 0)).any(-1)
