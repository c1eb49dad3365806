"""No n-gram twice: a token that would complete one again is forbidden."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import all_scored, numbers, of_rows, whole
from .edits import Editing, mine
from .penalties import strike
from .repeats import as_input, input_of, rows_of

Grams = dict[tuple[int, ...], tuple[int, ...]]
"""The tokens that followed each run of n - 1 tokens, each once."""


_FEW = 3
"""Places up to which it is faster to write them one by one."""


def add(grams: Grams, tokens: Sequence[int], size: int) -> None:
    """Note every n-gram of `tokens`."""
    for end in range(size - 1, len(tokens)):
        prefix, token = tuple(tokens[end - size + 1 : end]), tokens[end]
        old = grams.get(prefix, ())
        if token not in old:
            grams[prefix] = (*old, token)


def ban(scores: Tensor, places: list[int], own: bool) -> Tensor:
    """Scores [B, V] with -inf at `places`, counted through all rows: row * V + token. `own`: they may be written to."""
    if not places:
        return scores
    result = mine(scores, own)
    line = result if len(result) == 1 else result.view(1, -1)
    if len(places) > _FEW:
        line.index_fill_(-1, torch.tensor(places, device=scores.device), -torch.inf)
        return result
    for place in places:  # a tensor of indices takes longer where caches are cold
        line.select(-1, place).fill_(-torch.inf)
    return result


def shift(scores: Tensor, places: list[int], amounts: list[float], own: bool) -> Tensor:
    """Scores [B, V] with `amounts`, cut to what their dtype holds, added at `places`, counted through all rows.

    `own`: they may be written to.
    """
    limit = torch.finfo(scores.dtype)
    # An infinite amount is meant.
    within = [x if math.isinf(x) else min(max(x, limit.min), limit.max) for x in amounts]
    more = torch.tensor(within, dtype=scores.dtype, device=scores.device)
    result = mine(scores, own)
    result.view(-1).index_add_(0, torch.tensor(places, device=scores.device), more)
    return result


def tails(ctx: BindContext | None, input_ids: Tensor, count: int) -> list[list[int]]:
    """The newest `count` real tokens of each row of `input_ids` [B, T], fewer where it has not so many."""
    width = input_ids.shape[-1]
    found: list[list[int]] = input_ids[:, max(width - count, 0) :].tolist()
    if ctx is None or ctx.mask is None or width - ctx.prompt_width >= count:
        return found
    mask = ctx.mask[:, :width]
    for row, whole_tail in enumerate(mask[:, max(width - count, 0) :].all(-1).tolist()):
        if not whole_tail:
            found[row] = input_ids[row][mask[row]][-count:].tolist()
    return found


class RowState(Protocol):
    """What one row remembers."""

    log: list[Any]
    """What `back` needs, for each step."""

    def take(self, tokens: Sequence[int], /) -> None:
        """One step: note tokens, negative ones left out."""

    def back(self) -> None:
        """Forget the newest step."""

    def copy(self) -> Any:
        """The same, apart."""


class KeepsRows:
    """A runtime with a state for each row, which follows what the run does with the rows."""

    __slots__ = ("_rows",)
    _rows: Sequence[RowState]

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        """Take accepted tokens int64 [B] or [B, N], negative ones left out, of all rows or of the named ones."""
        new = tokens.tolist()
        steps = new if tokens.dim() > 1 else [(token,) for token in new]
        if rows is not None:
            named = dict(zip(rows.tolist(), steps, strict=True))
            steps = [named.get(row, ()) for row in range(len(self._rows))]
        for state, step in zip(self._rows, steps, strict=True):
            state.take(step)

    def rollback(self, steps: int, /) -> None:
        """Undo the last `steps` calls of `accept`. Raises ValueError where there were not so many."""
        for state in self._rows:
            if steps > len(state.log):
                raise ValueError(f"cannot take {steps} steps back: there were {len(state.log)}")
            for _ in range(steps):
                state.back()

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on as former row `rows[i]`, and can go back as that row could."""
        seen: set[int] = set()
        moved = []
        for row in rows.tolist():
            moved.append(self._rows[row].copy() if row in seen else self._rows[row])
            seen.add(row)
        self._rows = moved


Undo = tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...]]
"""Tail before a token, the beginning of the n-gram that it made new (None: of none), and what followed that before."""


@attrs.define
class _Row:
    """The n-grams of one row and its newest n - 1 tokens. `size` 0 and 1 keep none."""

    size: int
    grams: Grams
    tail: tuple[int, ...]
    log: list[list[Undo]] = attrs.Factory(list)

    def take(self, tokens: Sequence[int]) -> None:
        undo: list[Undo] = []
        room = self.size - 1
        for token in tokens if room > 0 else ():
            if token < 0:
                continue
            tail = self.tail
            if len(tail) < room:
                undo.append((tail, None, ()))
                self.tail = (*tail, token)
                continue
            old = self.grams.get(tail, ())
            if token in old:
                undo.append((tail, None, ()))
            else:
                undo.append((tail, tail, old))
                self.grams[tail] = (*old, token)
            self.tail = (*tail[1:], token)
        self.log.append(undo)

    def back(self) -> None:
        for tail, prefix, old in reversed(self.log.pop()):
            self.tail = tail
            if prefix is not None:
                self.grams[prefix] = old

    def copy(self) -> _Row:
        return _Row(self.size, dict(self.grams), self.tail, list(self.log))


@attrs.frozen
class NoRepeatNGramLogitsProcessor:
    """Forbid every token that would complete an n-gram which the row, prompt included, holds already.

    Inside `generate` the n-grams are kept from step to step, so a step costs the same however long the text is, and
    padding is part of none. Called on its own, all of `input_ids` [B, T] is searched. Ids at or above V are never
    forbidden. Scores are floating [B, V] and not written to. Raises ValueError for a size that is no whole number of 0
    or more. (Paulus et al. 2017, arXiv 1705.04304.)
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.PENALTY, after=("repetition_penalty", "presence_penalty", "dry"), pure=True
    )

    ngram_size: int | tuple[int, ...] = option(
        "Length of the runs that may not occur twice; 0: off.", check=whole(0), per_row=True
    )

    def bind(self, ctx: BindContext, /) -> _NoRepeat | None:
        """Return the form that keeps the n-grams, or None where it is off."""
        return _NoRepeat(self, ctx) if any(numbers(self.ngram_size)) else None

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with -inf at tokens that would repeat an n-gram of `input_ids` [B, T]."""
        sizes = of_rows(self.ngram_size, scores)
        if not isinstance(sizes, Tensor):
            return search(input_ids, scores, sizes)
        each = [search(input_ids[i : i + 1], scores[i : i + 1], int(n)) for i, n in enumerate(sizes)]
        return torch.cat(each) if each else scores


def search(ids: Tensor, scores: Tensor, size: int) -> Tensor:
    """Scores [B, V] with -inf at tokens that would repeat an n-gram of `ids` [B, T]."""
    if size == 0 or ids.shape[-1] < size:
        return scores
    inside = ids < scores.shape[-1]
    if size == 1:
        return strike(scores, ids, inside)
    windows = ids.unfold(-1, size, 1)
    again = (windows[..., :-1] == ids[:, None, 1 - size :]).all(-1)
    return strike(scores, ids[:, size - 1 :], again & inside[:, size - 1 :])


class _NoRepeat(KeepsRows, Editing):
    __slots__ = ("_ctx", "_known", "_options", "_singles")

    def __init__(self, options: NoRepeatNGramLogitsProcessor, ctx: BindContext) -> None:
        self._options, self._ctx = options, ctx
        sizes = ctx.per_row(options.ngram_size)
        # Runs of one token are the tokens of the run: no table says it faster.
        self._singles: Tensor | bool = sizes == 1
        self._known = all_scored(ctx)
        mask = ctx.history_mask()
        self._rows: list[_Row] = []
        for row, ids in enumerate(ctx.input_ids):
            size = int(sizes[row]) if isinstance(sizes, Tensor) else sizes
            state = _Row(size, {}, ())
            if size > 1:
                tokens = (ids if mask is None else ids[mask[row]]).tolist()
                add(state.grams, tokens, size)
                state.tail = tuple(tokens[max(len(tokens) - size + 1, 0) :])
            self._rows.append(state)

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on as former row `rows[i]`."""
        super().reorder(rows)
        if isinstance(self._singles, Tensor):
            self._singles = self._singles[rows]

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return scores [B, V] with -inf at tokens that would repeat an n-gram."""
        if self._singles is not False:
            given, scores = scores, self._once(input_ids, scores, own)
            own = own or scores is not given
        if self._singles is True:
            return scores
        vocab = scores.shape[-1]
        places: list[int] = []
        for i, row in enumerate(self._rows):
            if row.size > 1 and (again := row.grams.get(row.tail)):
                start = i * vocab
                places += [start + token for token in again if token < vocab]
        return ban(scores, places, own)

    def _once(self, input_ids: Tensor, scores: Tensor, own: bool) -> Tensor:
        real = self._ctx.history_mask(input_ids.shape[-1])
        for more in (
            None if self._known else input_ids < scores.shape[-1],
            self._singles if isinstance(self._singles, Tensor) else None,
        ):
            real = more if real is None else real if more is None else real & more
        return strike(scores, input_ids, None if real is None else real.expand(input_ids.shape), own)


@attrs.frozen
class EncoderNoRepeatNGramLogitsProcessor:
    """Forbid every token that would complete an n-gram of the input: the text shall not copy it.

    The input is `encoder_input_ids` [B, T], or, inside `generate`, the encoder's input and for decoder-only models the
    prompt; padding and negative ids are part of no n-gram. Scores are floating [B, V] and not written to. Raises
    ValueError for a size that is no whole number of 0 or more, and for rows that do not fit the batch.
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.PENALTY, after=("no_repeat_ngram_size",), pure=True)

    encoder_ngram_size: int | tuple[int, ...] = option(
        "Length of the runs of the input that may not be generated; 0: off.", check=whole(0), per_row=True
    )
    encoder_input_ids: Any = option(
        "Token ids [B, T] of the input; unset: those of the running call.", default=None, converter=as_input
    )

    def bind(self, ctx: BindContext, /) -> _NoCopy | None:
        """Return the form that holds the input's n-grams; None where it is off, or an encoder's input not known."""
        if not any(numbers(self.encoder_ngram_size)):
            return None
        found = input_of(ctx, self.encoder_input_ids, "encoder_no_repeat_ngram_size")
        sizes = ctx.per_row(self.encoder_ngram_size)
        return None if found is None else _NoCopy(self, *found, sizes, ctx.spec.vocab_size, ctx)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with -inf at tokens that would copy an n-gram. Raises ValueError without the input."""
        if self.encoder_input_ids is None:
            raise ValueError("encoder_input_ids is needed where the processor is called on its own")
        ids = rows_of(self.encoder_input_ids, scores)
        sizes = of_rows(self.encoder_ngram_size, scores)
        return _NoCopy(self, ids, ids >= 0, sizes, scores.shape[-1], None)(input_ids, scores)


class _NoCopy(Editing):
    __slots__ = ("_ctx", "_grams", "_options", "_single", "_sizes", "_widest")

    def __init__(
        self, options: Any, ids: Tensor, real: Tensor, sizes: Any, vocab: int, ctx: BindContext | None
    ) -> None:
        self._options, self._ctx = options, ctx
        self._sizes = [int(n) for n in sizes] if isinstance(sizes, Tensor) else [sizes] * len(ids)
        self._widest = max(self._sizes)
        # Rows of runs of one token: the same tokens at every step.
        self._single: tuple[Tensor, Tensor] | None = None
        if 1 in self._sizes:
            self._single = ids, real & (ids < vocab) & (sizes == 1)
        self._grams: list[Grams] = []
        for row, keep, size in zip(ids, real, self._sizes, strict=True):
            grams: Grams = {}
            if size > 1:
                add(grams, row[keep].tolist(), size)
            self._grams.append(grams)

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the input of former row `rows[i]`."""
        order = rows.tolist()
        self._grams, self._sizes = [self._grams[i] for i in order], [self._sizes[i] for i in order]
        self._widest = max(self._sizes)
        if self._single is not None:
            self._single = self._single[0][rows], self._single[1][rows]

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return scores [B, V] with -inf at tokens that would copy an n-gram of the input."""
        if self._single is not None:
            given, scores = scores, strike(scores, *self._single, own)
            own = own or scores is not given
        if self._widest < 2:
            return scores
        vocab = scores.shape[-1]
        places: list[int] = []
        for i, tail in enumerate(tails(self._ctx, input_ids, self._widest - 1)):
            room = self._sizes[i] - 1
            if room > 0 and (again := self._grams[i].get(tuple(tail[-room:]))):
                start = i * vocab
                places += [start + token for token in again if token < vocab]
        return ban(scores, places, own)
