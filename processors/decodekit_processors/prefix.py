"""A function of the caller's says which tokens may follow."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import whole
from .ends import ends_of
from .undo import Past

_KEPT = 256
"""Calls of `accept` that can be taken back."""
_LONG = 1024
"""Length from which turning a list into a tensor is worth remembering."""


def _check(instance: Any, attribute: Any, value: Any) -> None:
    if not callable(value):
        raise ValueError(f"must be a function of (prompt number, token ids) that returns token ids, got {value!r}")


@attrs.frozen
class PrefixConstrainedLogitsProcessor:
    """Allow only the tokens that `prefix_allowed_tokens_fn(prompt number, token ids [T])` returns for each row.

    The function returns token ids (list, tuple, set, range or tensor); None, or every id, allows all. The ids it gets
    are a copy of the row's own real tokens, int64: inside `generate` no padding is among them, and rows that ended with
    an end token are not asked about. Scores are floating [B, V]. Where other processors have forbidden everything that
    is allowed (with beams: in all rows of a prompt), what is allowed gets score 0, so that the constraint holds.

    Raises ValueError, naming row, step and prefix, where a row that needs a token is allowed none, and for an id
    outside the vocabulary. One of several beams that is allowed none ends quietly.
    (De Cao et al. 2021, "Autoregressive entity retrieval", arXiv 2010.00904.)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.CONSTRAIN, after=("min_length", "min_new_tokens"), pure=True)

    prefix_allowed_tokens_fn: Any = option(
        "Function of (prompt number, token ids) that returns the token ids that may follow.", check=_check
    )
    num_beams: int | None = option(
        "Rows that belong to one prompt; unset: as in the running call.", default=None, check=whole(1)
    )

    def bind(self, ctx: BindContext, /) -> _Prefix:
        """Return the form that knows prompts, padding and which rows have ended."""
        return _Prefix(self, ctx)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with -inf at tokens that are not allowed; row i is of prompt i // num_beams."""
        each, known = self.num_beams or 1, _Known(scores.shape[-1])
        allowed: list[Tensor | None] = []
        for row, prefix in enumerate(input_ids):
            found = known.ids(self.prefix_allowed_tokens_fn(row // each, prefix.clone()), scores.device, row)
            if found is not None and found.numel() == 0:
                raise ValueError(_nothing(row, None, prefix))
            allowed.append(found)
        return keep_allowed(scores, allowed, [row // each for row in range(scores.shape[0])] if each > 1 else None)


def _nothing(row: int, step: int | None, prefix: Tensor) -> str:
    """The words for a row that may take no token."""
    place = f"row {row}" if step is None else f"row {row}, step {step}"
    tail = prefix[-8:].tolist()
    shown = f"[..., {', '.join(map(str, tail))}]" if prefix.shape[-1] > len(tail) else str(tail)
    return (
        f"prefix_allowed_tokens_fn allows no token at all ({place}, prefix {shown} of {prefix.shape[-1]} tokens); "
        "let it return the end token where a text is complete"
    )


def keep_allowed(scores: Tensor, allowed: Sequence[Tensor | None], groups: Sequence[int] | None) -> Tensor:
    """Scores [B, V] with -inf at all but the allowed int64 ids of each row; None allows all.

    A row whose allowed scores are all -inf already gets 0 there, with `groups` only where that is so in every row of
    its group; a row that allows nothing is -inf throughout.
    """
    asked = [row for row, ids in enumerate(allowed) if ids is not None]
    if not asked:
        return scores
    if len(asked) == len(allowed):
        result = torch.full_like(scores, -torch.inf)
    else:
        result = scores.index_fill(0, torch.tensor(asked, device=scores.device), -torch.inf)
    best = {}
    for row in asked:
        ids = allowed[row]
        if ids is not None and ids.numel():
            old = scores[row].index_select(0, ids)
            result[row].index_copy_(0, ids, old)
            best[row] = old.amax()
    if not best:
        return result
    tops = torch.stack(list(best.values())).tolist()
    dead = {row for row, top in zip(best, tops, strict=True) if top == -torch.inf}
    if dead and groups is not None:
        alive = {groups[row] for row in range(len(allowed)) if row in best and row not in dead}
        alive |= {groups[row] for row, ids in enumerate(allowed) if ids is None}
        dead = {row for row in dead if groups[row] not in alive}
    for row in dead:
        ids = allowed[row]
        assert ids is not None
        result[row].index_fill_(0, ids, 0.0)
    return result


class _Known:
    """Turns what the function returns into tensors, long lists that come again only once."""

    __slots__ = ("_lists", "_vocab")

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._lists: deque[tuple[Any, list[int] | None, Tensor | None]] = deque(maxlen=16)

    def ids(self, allowed: Any, device: torch.device, row: int) -> Tensor | None:
        """int64 [N], the allowed tokens; None: all of them."""
        if allowed is None or (isinstance(allowed, range) and allowed == range(self._vocab)):
            return None
        if not isinstance(allowed, (list, tuple)) or len(allowed) < _LONG:
            return self._tensor(allowed, device, row)
        for seen, held, ids in self._lists:
            # A list may hold something else by now; comparing equal objects is a walk over pointers.
            if seen is allowed and (held is None or held == allowed):
                return ids
        ids = self._tensor(allowed, device, row)
        self._lists.append((allowed, None if isinstance(allowed, tuple) else list(allowed), ids))
        return ids

    def _tensor(self, allowed: Any, device: torch.device, row: int) -> Tensor | None:
        vocab = self._vocab
        try:
            ids = allowed if isinstance(allowed, Tensor) else torch.tensor(_plain(allowed), device=device)
            if ids.numel() == 0:
                return ids.new_zeros(0, dtype=torch.long)
            if ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.uint8):
                raise TypeError(ids.dtype)
            ids = ids.to(device=device, dtype=torch.long).reshape(-1)
        except (TypeError, ValueError, RuntimeError):
            shown = f"{allowed!r:.80}"
            raise ValueError(
                f"prefix_allowed_tokens_fn must return token ids (row {row}), got {type(allowed).__name__} {shown}"
            ) from None
        low, high = map(int, ids.aminmax())
        if low < 0 or high >= vocab:
            bad = low if low < 0 else high
            raise ValueError(
                f"prefix_allowed_tokens_fn allows token {bad} (row {row}), which is outside the vocabulary of {vocab}"
            )
        # Every id, each of them perhaps more than once: nothing is forbidden.
        return None if ids.numel() >= vocab and int(torch.bincount(ids).count_nonzero()) == vocab else ids


def _plain(allowed: Any) -> list[Any]:
    return allowed.tolist() if hasattr(allowed, "tolist") else list(allowed)


class _Prefix:
    """The function inside a run. Of the tokens it keeps only which rows have met an end token."""

    __slots__ = ("_ctx", "_empty", "_ends", "_group", "_known", "_options", "_over", "_past", "_slots")

    def __init__(self, options: PrefixConstrainedLogitsProcessor, ctx: BindContext) -> None:
        self._options = options
        self._ctx = ctx
        self._slots = list(ctx.slots)
        beams = options.num_beams or ctx.settings.get("num_beams") or 1
        self._group = beams > 1
        self._known = _Known(ctx.spec.vocab_size)
        ends = ends_of(ctx, None)
        all_ends = [] if ends is None else ends.ids.tolist()
        own = None if ends is None or ends.own is None else ends.own.tolist()
        self._ends = [
            frozenset(token for i, token in enumerate(all_ends) if own is None or own[row][i])
            for row in range(ctx.rows)
        ]
        self._over = torch.zeros(ctx.rows, dtype=torch.bool)
        self._past = Past(_KEPT)
        self._empty: set[tuple[int, int]] = set()

    def __repr__(self) -> str:
        return repr(self._options)

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        """Take accepted tokens int64 [B] or [B, N], of all rows or of the named ones."""
        self._past.push(self._over)
        over = [
            row
            for row, new in zip(range(len(self._over)) if rows is None else rows.tolist(), tokens.tolist(), strict=True)
            if not self._ends[row].isdisjoint(new if isinstance(new, list) else (new,))
        ]
        if over:
            self._over = self._over.index_fill(0, torch.tensor(over), True)

    def rollback(self, steps: int, /) -> None:
        """Undo the last `steps` calls of `accept`. Raises ValueError beyond what is kept."""
        state = self._past.back(steps) if steps else None
        self._over = self._over if state is None else state
        self._empty.clear()

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on as former row `rows[i]`."""
        order = rows.tolist()
        self._slots = [self._slots[i] for i in order]
        self._ends = [self._ends[i] for i in order]
        self._past.reorder(rows.cpu())
        self._over = self._over[rows.cpu()]
        self._empty.clear()

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with -inf at tokens that are not allowed.

        A row that may take none is left empty the first time: another rule may have ended it, and nobody asks it for a
        token. If the run needs one, it asks again to find out who emptied the row, and is told with an error.
        """
        width = input_ids.shape[-1]
        mask = self._ctx.history_mask(width)
        allowed: list[Tensor | None] = []
        for row, (ids, over) in enumerate(zip(input_ids, self._over.tolist(), strict=True)):
            if over:
                allowed.append(None)
                continue
            prefix = ids.clone() if mask is None else ids[mask[row]]
            answer = self._options.prefix_allowed_tokens_fn(self._slots[row], prefix)
            found = self._known.ids(answer, scores.device, row)
            if found is not None and found.numel() == 0:
                if (row, width) in self._empty:
                    raise ValueError(_nothing(row, width - self._ctx.prompt_width, prefix))
                self._empty.add((row, width))
            allowed.append(found)
        return keep_allowed(scores, allowed, self._slots if self._group else None)
