"""Tokens that must never appear, or not as the first ones."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import option
from decodekit.shortlist import Shortlist
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import device_option, id_tuple, whole
from .edits import Editing
from .ends import Named, by_prompt, forbid, usable, write
from .rowwise import resorted
from .steps import AtStep

Lists = tuple[int, ...] | tuple[tuple[int, ...], ...]
"""Token ids for all prompts, or some for each."""


def _ids(value: Any) -> Any:
    """Token ids of any collection as a tuple, of collections of them as tuples; other values pass unchanged."""
    value = tuple(value) if isinstance(value, range) else id_tuple(value)
    return tuple(map(_ids, value)) if isinstance(value, tuple) else value


def _check_ids(instance: Any, attribute: Any, value: Any) -> None:
    """Raise ValueError unless every value is a whole number, or every one a tuple of them."""
    nested = by_prompt(value)
    for token in value if isinstance(value, tuple) else (value,):
        if nested and isinstance(token, tuple):
            _check_ids(instance, attribute, token)
        elif nested or not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"must be a list of token ids, or one such list for each prompt, got {token!r}")


def _without(scores: Tensor, lists: Lists) -> Tensor:
    """Scores [B, V] with the tokens at -inf, outside of a run: of all rows, or those of each row.

    Raises ValueError where there are not as many lists as rows.
    """
    vocab = scores.shape[-1]
    if not by_prompt(lists):
        return forbid(scores, usable(lists, vocab))
    if len(lists) != len(scores):
        raise ValueError(f"has {len(lists)} lists for {len(scores)} rows; give one list, or one for each row")
    return torch.cat([forbid(scores[i : i + 1], usable(row, vocab)) for i, row in enumerate(lists)])


@attrs.frozen
class SuppressTokensLogitsProcessor:
    """Forbid tokens at every step.

    Scores are floating [B, V]; the result has those tokens at -inf. `suppress_tokens` may hold one list for each
    prompt. Ids outside the vocabulary are ignored, and with none inside it `bind` leaves the processor out. Raises
    ValueError for what is no token id, and for as many lists as there are no prompts.
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.CONSTRAIN,
        after=("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
        reads_history=False,
        pure=True,
        graph_safe=True,
    )

    suppress_tokens: tuple[int, ...] | tuple[tuple[int, ...], ...] = option(
        "Tokens that never appear, or a list of them for each prompt; ids outside the vocabulary are ignored.",
        converter=_ids,
        check=_check_ids,
    )
    device: str = device_option()

    def bind(self, ctx: BindContext, /) -> _Suppress | None:
        """Return the form with the ids at hand, or None where there are none in the vocabulary."""
        found = Named.of(ctx, self.suppress_tokens)
        return None if found is None else _Suppress(self, found)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with the tokens at -inf."""
        return _without(scores, self.suppress_tokens)


class _Suppress(Editing):
    """Ids as a tensor: one copy of the scores at most, and as many writes as there are ids."""

    __slots__ = ("_options", "_tokens")

    def __init__(self, options: SuppressTokensLogitsProcessor, tokens: Named) -> None:
        self._options = options
        self._tokens = tokens

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on without the tokens of former row `rows[i]`."""
        self._tokens.reorder(rows)

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return scores with the tokens at -inf."""
        return write(scores, self._tokens.ids, -math.inf, self._tokens.own, own)

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist without the tokens."""
        ids, own = self._tokens.ids, self._tokens.own
        drop = torch.isin(shortlist.ids, ids)
        if own is not None:
            drop = ((shortlist.ids[:, :, None] == ids) & own[:, None]).any(-1)
        return resorted(shortlist, drop)


@attrs.frozen
class SuppressTokensAtBeginLogitsProcessor:
    """Forbid tokens as the first token of a text.

    Scores are floating [B, V]; at one step the result has those tokens at -inf, at all others they pass untouched. That
    step is the one at which a text has `begin_index` tokens: inside `generate` a row's real tokens are counted and the
    default is the end of its prompt, one later where a forced first token comes before; called on its own, it is the
    width T of `input_ids` [B, T]. There may be one list of tokens for each prompt. Ids outside the vocabulary are
    ignored. Raises ValueError for what is no token id, and for as many lists as there are no prompts.
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.CONSTRAIN, after=("suppress_tokens",), pure=True)

    begin_suppress_tokens: tuple[int, ...] | tuple[tuple[int, ...], ...] = option(
        "Tokens that are not the first of a text, or a list of them for each prompt; ids outside the vocabulary are"
        " ignored.",
        converter=_ids,
        check=_check_ids,
    )
    begin_index: int | None = option(
        "Number of tokens before the one concerned; unset: the prompt's, and one more where a first token is forced.",
        default=None,
        check=whole(0),
    )
    device: str = device_option()

    def bind(self, ctx: BindContext, /) -> _AtBegin | None:
        """Return the form that knows where each row begins, or None where no row will get there."""
        found = Named.of(ctx, self.begin_suppress_tokens)
        if self.begin_index is not None:
            begins = self.begin_index - ctx.prompt_lengths
        else:
            forced = ctx.settings.get("forced_bos_token_id") is not None
            begins = ((ctx.prompt_lengths <= 1) & forced).long()
        if found is None or bool((begins < 0).all()):
            return None
        return _AtBegin(self, ctx, found, begins)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores with the tokens at -inf where T is `begin_index`. Raises ValueError where that is unset."""
        if self.begin_index is None:
            raise ValueError("begin_index is needed where the processor is called on its own")
        if input_ids.shape[-1] != self.begin_index:
            return scores
        return _without(scores, self.begin_suppress_tokens)


class _AtBegin(AtStep):
    """Tokens forbidden where a row begins."""

    __slots__ = ("_tokens",)

    def __init__(self, options: Any, ctx: BindContext, tokens: Named, begins: Tensor) -> None:
        super().__init__(options, ctx, begins)
        self._tokens = tokens

    def reorder(self, rows: Tensor, /) -> None:
        """Row i acts when former row `rows[i]` would have, and on its tokens."""
        super().reorder(rows)
        self._tokens.reorder(rows)

    def _act(self, scores: Tensor, rows: Tensor | None, own: bool) -> Tensor:
        theirs = self._tokens.own
        rows = theirs if rows is None else rows if theirs is None else rows & theirs
        return write(scores, self._tokens.ids, -math.inf, rows, own)
