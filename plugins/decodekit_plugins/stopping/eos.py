"""Stop at an end-of-sequence token."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import option
from torch import Tensor


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.tolist()
    return tuple(value) if isinstance(value, list) else value


def _check(instance: Any, attribute: Any, value: Any) -> None:
    for token in value if isinstance(value, tuple) else (value,):
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"must be a token id or a list of token ids, got {token!r}")


@attrs.frozen
class EosTokenCriteria:
    """End a row with the first of its tokens that is an end-of-sequence token. Negative ids are ignored."""

    eos_token_id: int | tuple[int, ...] = option(
        "Token id or ids that end a row; negative ones are ignored (-1: no end token).", converter=_plain, check=_check
    )

    def tokens(self) -> tuple[int, ...]:
        """The ids that count, each once."""
        given = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
        return tuple(dict.fromkeys(token for token in given if token >= 0))

    def bind(self, ctx: BindContext, /) -> _Eos | None:
        """The test for this call; None where no id counts."""
        tokens = self.tokens()
        return _Eos(tokens, ctx.spec.device) if tokens else None

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor:
        """Bool [B]: the last token of each row of `input_ids` [B, T] ends it."""
        return _Eos(self.tokens(), input_ids.device)(input_ids, scores)


class _Eos:
    __slots__ = ("eos_token_id", "single")

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
