"""Stop at a string in the text."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import attrs
import torch
from decodekit.context import BindContext
from decodekit.errors import GenerationError, InputError
from decodekit.fields import option
from decodekit.text import TextPieces, Tokenizer, as_tokenizer, row_pieces
from torch import Tensor

_KEPT = 64
"""Calls of `accept` that can be taken back."""


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _check(instance: Any, attribute: Any, value: Any) -> None:
    stops = (value,) if isinstance(value, str) else value
    if not isinstance(stops, tuple) or not stops or not all(isinstance(stop, str) and stop for stop in stops):
        raise ValueError(f"must be one string or several, none of them empty, got {value!r}")


@attrs.frozen
class StopStringCriteria:
    """End a row with the token that completes a stop string in its new text.

    Matching is over the bytes of the text, so a stop may begin and end inside tokens and may be made of cut characters.
    The prompt is no part of it. The stop that ends first in the text wins; of several that end together the longest.
    The tokens stay as generated: the text is cut where text is made.

    tokenizer: of the model; unset, the one of the call.
    """

    tokenizer: Any = attrs.field(
        default=None,
        converter=attrs.converters.optional(as_tokenizer),
        eq=False,
        repr=False,
        metadata={"doc": "Tokenizer of the model; unset: the call's."},
    )
    stop_strings: str | tuple[str, ...] = option(
        "One string or several that end a row when they appear in its new text.",
        default=(),
        converter=_tuple,
        check=_check,
    )

    def stops(self) -> tuple[str, ...]:
        """The stop strings, always as a tuple."""
        return (self.stop_strings,) if isinstance(self.stop_strings, str) else self.stop_strings

    def bind(self, ctx: BindContext, /) -> _StopStrings:
        """Fresh state for every row of the call. Raises InputError where there is no tokenizer."""
        known = self.tokenizer
        tokenizer = (
            self._need(None if ctx.tokenizer is None else as_tokenizer(ctx.tokenizer)) if known is None else known
        )
        return _StopStrings(tokenizer, self.stops(), ctx)

    def _need(self, tokenizer: Tokenizer | None) -> Tokenizer:
        if tokenizer is None:
            raise InputError(
                f"stop_strings {self.stop_strings!r} match text: pass tokenizer=... of the model to the call"
            )
        return tokenizer

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor:
        """Bool [B]: a stop string ends inside the last token of the row of `input_ids` [B, T].

        Without a call there is no prompt and no state: the last tokens are read again each time.
        """
        tokenizer = self._need(self.tokenizer)
        found = [_ends_with(tokenizer, row, self.stops()) for row in input_ids.tolist()]
        return torch.tensor(found, dtype=torch.bool, device=input_ids.device)


def _ends_with(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...]) -> bool:
    if not ids:
        return False
    last = tokenizer.token_bytes(ids[-1])
    if last is None:
        ids = ids[-max(map(len, stops)) - 8 :]
        text, before = (tokenizer.decode(part, skip_special_tokens=False) for part in (ids, ids[:-1]))
        return any(stop in text[max(0, len(before) - len(stop) + 1) :] for stop in stops)
    need = max(len(stop.encode()) for stop in stops) - 1
    tail, size = [last], 0
    for token in reversed(ids[:-1]):
        if size >= need:
            break
        tail.append(tokenizer.token_bytes(token) or b"")
        size += len(tail[-1])
    data = b"".join(reversed(tail))
    return any(stop.encode() in data[max(0, len(data) - len(last) - len(stop.encode()) + 1) :] for stop in stops)


class _Row(NamedTuple):
    state: Any
    """Of the matcher: a number; a `TextPieces` where the tokenizer does not say which bytes a token adds."""
    stop: str | None = None
    past: int = 0
    """Tokens accepted after the one that completed the stop."""
    again: bytes = b""
    """What the first token only says again of the prompt: no new text."""


class _StopStrings:
    """State of the rows of one call: `accept` advances it, at a cost that depends on the new tokens alone."""

    __slots__ = ("_back", "_matcher", "_moves", "_rows", "_tokenizer", "_windowed")

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], ctx: BindContext) -> None:
        self._tokenizer = tokenizer
        self._matcher = tokenizer.matcher(stops)
        self._windowed = tokenizer.token_bytes(0) is None
        self._rows = [_Row(self._pieces(ctx, row) if self._windowed else 0) for row in range(ctx.rows)]
        if ctx.dropped is not None and not self._windowed:
            again = [(tokenizer.token_bytes(token) or b"") if token >= 0 else b"" for token in ctx.dropped.tolist()]
            self._rows = [row._replace(again=data) for row, data in zip(self._rows, again, strict=True)]
        self._back: deque[list[_Row]] = deque(maxlen=_KEPT)
        self._moves: dict[tuple[int, int], _Row] = {}
        """Where a token leads from a state of the matcher: texts come back to the same few."""

    def __repr__(self) -> str:
        return f"StopStringCriteria(stop_strings={self._matcher.stops!r})"

    def _pieces(self, ctx: BindContext, row: int) -> TextPieces:
        return row_pieces(self._tokenizer, ctx, row, self._matcher.stops, skip_special_tokens=False)

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        """Take accepted tokens int64 [B] or [B, N], negative ones left out, of all rows or of the named ones."""
        new = tokens.tolist()
        states = list(self._rows)
        places = range(len(new)) if rows is None else rows.tolist()
        advance, moves, plain = self._advance, self._moves, tokens.dim() == 1 and not self._windowed
        for place, ids in zip(places, new, strict=True):
            row = states[place]
            if plain and row.stop is None and not row.again:
                moved = moves.get((row.state, ids))
                if moved is None:
                    moved = moves[row.state, ids] = advance(row, (ids,))
                states[place] = moved
            else:
                states[place] = advance(row, ids if isinstance(ids, list) else (ids,))
        self._back.append(self._rows)
        self._rows = states

    def _advance(self, row: _Row, ids: list[int] | tuple[int, ...]) -> _Row:
        state, stop, past, again = row
        if stop is not None:
            return row._replace(past=past + sum(token >= 0 for token in ids))
        if self._windowed:
            state = state.copy()
        for token in ids:
            if token < 0:
                continue
            if stop is not None:
                past += 1
            elif self._windowed:
                state.push((token,))
                stop = state.stopped
            else:
                state, met = self._matcher.step(state, (self._tokenizer.token_bytes(token) or b"").removeprefix(again))
                again = b""
                stop = None if met is None else met[0]
        return _Row(state, stop, past, again)

    def rollback(self, steps: int, /) -> None:
        """Undo the last `steps` calls of `accept`. Raises GenerationError beyond what is kept."""
        if steps > len(self._back):
            raise GenerationError(f"stop strings keep the last {len(self._back)} steps, cannot take back {steps}")
        for _ in range(steps):
            self._rows = self._back.pop()

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on as former row `rows[i]`."""
        order = rows.tolist()
        self._rows = [self._rows[i] for i in order]
        self._back = deque(([old[i] for i in order] for old in self._back), maxlen=_KEPT)

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor:
        """Bool [B]: rows whose accepted tokens hold a stop string."""
        return torch.tensor([row.stop is not None for row in self._rows], dtype=torch.bool, device=input_ids.device)

    def why(self, row: int, /) -> str | None:
        """The stop string that ended the row."""
        return self._rows[row].stop

    def past(self, row: int, /) -> int:
        """Tokens of the row accepted after the one that completed the stop string."""
        return self._rows[row].past
