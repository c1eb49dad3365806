"""No n-gram twice: a token that would complete one again is forbidden."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import numbers, of_rows, whole
from .repeats import as_input, input_of, rows_of

Grams = dict[tuple[int, ...], tuple[int, ...]]
"""The tokens that followed each run of n - 1 tokens."""


def add(grams: Grams, tokens: Sequence[int], size: int) -> None:
    """Note every n-gram of `tokens`."""
    for end in range(size - 1, len(tokens)):
        prefix = tuple(tokens[end - size + 1 : end])
        grams[prefix] = (*grams.get(prefix, ()), tokens[end])


def ban(scores: Tensor, banned: Iterable[tuple[int, Sequence[int]]]) -> Tensor:
    """Scores [B, V] with -inf at the tokens of each (row, tokens); ids that the scores do not have are passed over."""
    vocab = scores.shape[-1]
    places = [(row, token) for row, tokens in banned for token in tokens if 0 <= token < vocab]
    if not places:
        return scores
    index = torch.tensor(places, device=scores.device).T
    return scores.index_put((index[0], index[1]), scores.new_tensor(-torch.inf))


@attrs.frozen
class NoRepeatNGramLogitsProcessor:
    """Forbid every token that would complete an n-gram which the row, prompt included, holds already.

    Inside `generate` the n-grams are kept from step to step, so a step costs the same however long the text is, and
    padding is part of none. Scores are floating [B, V]. (Paulus et al. 2017, arXiv 1705.04304.)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.PENALTY, after=("repetition_penalty", "presence_penalty", "dry"),
                                      pure=True)  # fmt: skip

    ngram_size: int | tuple[int, ...] = option(
        "Length of the runs that may not occur twice; 0: off.", check=whole(0), per_row=True
    )

    def bind(self, ctx: BindContext, /) -> _NoRepeat | None:
        """Return the form that keeps the n-grams, or None where it is off."""
        return _NoRepeat(self, ctx) if any(numbers(self.ngram_size)) else None

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with -inf at tokens that would repeat an n-gram of `input_ids` [B, T]."""
        sizes = of_rows(self.ngram_size, scores)
        if isinstance(sizes, Tensor):
            return ban(
                scores, [(i, found(ids, int(n))) for i, (ids, n) in enumerate(zip(input_ids, sizes, strict=True))]
            )
        return ban(scores, [(row, found(ids, sizes)) for row, ids in enumerate(input_ids)])


def found(ids: Tensor, size: int) -> list[int]:
    """The tokens that would repeat an n-gram of one row [T]."""
    if size == 0 or len(ids) < size:
        return []
    if size == 1:
        return ids.tolist()
    windows = ids.unfold(0, size, 1)
    again = (windows[:, :-1] == ids[1 - size :]).all(-1)
    return windows[again, -1].tolist()


Undo = tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...]]
"""Tail before a token, the n-gram's beginning that it completed, and what followed that before."""


@attrs.define
class _Row:
    """The n-grams of one row and its newest n - 1 tokens."""

    size: int
    grams: Grams
    tail: tuple[int, ...]

    def take(self, token: int) -> Undo:
        """Note a token; returns what `back` needs to undo it."""
        tail, room = self.tail, self.size - 1
        prefix = tail if self.size and len(tail) == room else None
        old = () if prefix is None else self.grams.get(prefix, ())
        if prefix is not None:
            self.grams[prefix] = (*old, token)
        self.tail = (*tail, token)[-room:] if room > 0 else ()
        return tail, prefix, old

    def back(self, undo: Undo) -> None:
        """Forget a token."""
        self.tail, prefix, old = undo
        if prefix is not None:
            self.grams[prefix] = old

    def copy(self) -> _Row:
        """The same, apart."""
        return _Row(self.size, dict(self.grams), self.tail)


class _NoRepeat:
    __slots__ = ("_log", "_options", "_rows")

    def __init__(self, options: NoRepeatNGramLogitsProcessor, ctx: BindContext) -> None:
        self._options = options
        sizes = ctx.per_row(options.ngram_size)
        mask = ctx.history_mask()
        self._rows: list[_Row] = []
        for row, ids in enumerate(ctx.input_ids):
            tokens = (ids if mask is None else ids[mask[row]]).tolist()
            size = int(sizes[row]) if isinstance(sizes, Tensor) else sizes
            grams: Grams = {}
            if size:
                add(grams, tokens, size)
            self._rows.append(_Row(size, grams, tuple(tokens[len(tokens) - size + 1 :]) if size > 1 else ()))
        self._log: list[list[tuple[int, Any]]] = []

    def __repr__(self) -> str:
        return repr(self._options)

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        """Take accepted tokens int64 [B] or [B, N], negative ones left out, of all rows or of the named ones."""
        undo = []
        places = range(len(tokens)) if rows is None else rows.tolist()
        for row, new in zip(places, tokens.reshape(len(tokens), -1).tolist(), strict=True):
            undo += [(row, self._rows[row].take(token)) for token in new if token >= 0]
        self._log.append(undo)

    def rollback(self, steps: int, /) -> None:
        """Undo the last `steps` calls of `accept`."""
        for _ in range(steps):
            for row, undo in reversed(self._log.pop()):
                self._rows[row].back(undo)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on as former row `rows[i]`. What was accepted before can then not be taken back."""
        order = rows.tolist()
        seen: set[int] = set()
        moved = []
        for row in order:
            moved.append(self._rows[row].copy() if row in seen else self._rows[row])
            seen.add(row)
        self._rows, self._log = moved, []

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with -inf at tokens that would repeat an n-gram."""
        return ban(scores, [
            (i, row.grams.get(row.tail, ())) for i, row in enumerate(self._rows)
            if row.size and len(row.tail) == row.size - 1
        ])  # fmt: skip


@attrs.frozen
class EncoderNoRepeatNGramLogitsProcessor:
    """Forbid every token that would complete an n-gram of the input: the text shall not copy it.

    The input is `encoder_input_ids` [B, T], or, inside `generate`, the encoder's input and for decoder-only models the
    prompt; padding is part of no n-gram. Scores are floating [B, V].
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.PENALTY, after=("no_repeat_ngram_size",), pure=True)

    encoder_ngram_size: int | tuple[int, ...] = option(
        "Length of the runs of the input that may not be generated; 0: off.", check=whole(0), per_row=True
    )
    encoder_input_ids: Any = option(
        "Token ids [B, T] of the input; unset: those of the running call.", default=None, converter=as_input
    )

    def bind(self, ctx: BindContext, /) -> _NoCopy | None:
        """Return the form that holds the input's n-grams, or None where it is off."""
        if not any(numbers(self.encoder_ngram_size)):
            return None
        ids, real = input_of(ctx, self.encoder_input_ids)
        sizes = ctx.per_row(self.encoder_ngram_size)
        return _NoCopy(self, ids, real, sizes, ctx)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with -inf at tokens that would copy an n-gram. Raises ValueError without the input."""
        if self.encoder_input_ids is None:
            raise ValueError("encoder_input_ids is needed where the processor is called on its own")
        ids = rows_of(self.encoder_input_ids, scores)
        sizes = of_rows(self.encoder_ngram_size, scores)
        return _NoCopy(self, ids, ids >= 0, sizes, None)(input_ids, scores)


class _NoCopy:
    __slots__ = ("_ctx", "_grams", "_options", "_sizes", "_widest")

    def __init__(self, options: Any, ids: Tensor, real: Tensor, sizes: Any, ctx: BindContext | None) -> None:
        self._options, self._ctx = options, ctx
        self._sizes = [int(n) for n in sizes] if isinstance(sizes, Tensor) else [sizes] * len(ids)
        self._widest = max(self._sizes)
        self._grams: list[Grams] = []
        for row, keep, size in zip(ids, real, self._sizes, strict=True):
            grams: Grams = {}
            if size:
                add(grams, row[keep].tolist(), size)
            self._grams.append(grams)

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the input of former row `rows[i]`."""
        order = rows.tolist()
        self._grams, self._sizes = [self._grams[i] for i in order], [self._sizes[i] for i in order]

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with -inf at tokens that would copy an n-gram of the input."""
        tails = input_ids[:, -(self._widest - 1) :].tolist() if self._widest > 1 else [[]] * len(input_ids)
        lengths = real_lengths(self._ctx, input_ids)
        banned = []
        for row, (grams, size) in enumerate(zip(self._grams, self._sizes, strict=True)):
            if size and lengths[row] >= size - 1:
                tail = tails[row]
                banned.append((row, grams.get(tuple(tail[len(tail) - size + 1 :]), ())))
        return ban(scores, banned)


def real_lengths(ctx: BindContext | None, input_ids: Tensor) -> list[int]:
    """Real tokens of each row of `input_ids` [B, T], at its end."""
    width = input_ids.shape[-1]
    if ctx is None or ctx.mask is None:
        return [width] * len(input_ids)
    made = width - ctx.prompt_width
    return [length + made for length in ctx.prompt_lengths.tolist()]
