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
from .ends import forbid, usable, write
from .rowwise import resorted
from .steps import AtStep


def _ids(value: Any) -> Any:
    """Token ids of any collection as a tuple; other values pass unchanged."""
    return tuple(value) if isinstance(value, range) else id_tuple(value)


def _check_ids(instance: Any, attribute: Any, value: Any) -> None:
    """Raise ValueError unless every value is a whole number."""
    for token in value if isinstance(value, tuple) else (value,):
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(f"must be a list of token ids, got {token!r}")


@attrs.frozen
class SuppressTokensLogitsProcessor:
    """Forbid tokens at every step.

    Scores are floating [B, V]; the result has those tokens at -inf. Ids outside the vocabulary are ignored, and with
    none inside it `bind` leaves the processor out. Raises ValueError for what is no token id.
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.CONSTRAIN,
        after=("forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"),
        reads_history=False,
        pure=True,
        graph_safe=True,
    )

    suppress_tokens: tuple[int, ...] = option(
        "Tokens that never appear; ids outside the vocabulary are ignored.", converter=_ids, check=_check_ids
    )
    device: str = device_option()

    def bind(self, ctx: BindContext, /) -> _Suppress | None:
        """Return the form with the ids at hand, or None where there are none in the vocabulary."""
        ids = usable(self.suppress_tokens, ctx.spec.vocab_size)
        return _Suppress(self, torch.tensor(ids, device=ctx.tokens.device)) if ids else None

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with the tokens at -inf."""
        return forbid(scores, usable(self.suppress_tokens, scores.shape[-1]))


class _Suppress(Editing):
    """Ids as a tensor: one copy of the scores at most, and as many writes as there are ids."""

    __slots__ = ("_ids", "_options")

    def __init__(self, options: SuppressTokensLogitsProcessor, ids: Tensor) -> None:
        self._options = options
        self._ids = ids

    def __repr__(self) -> str:
        return repr(self._options)

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return scores with the tokens at -inf."""
        return write(scores, self._ids, -math.inf, None, own)

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist without the tokens."""
        return resorted(shortlist, torch.isin(shortlist.ids, self._ids))


@attrs.frozen
class SuppressTokensAtBeginLogitsProcessor:
    """Forbid tokens as the first token of a text.

    Scores are floating [B, V]; at one step the result has those tokens at -inf, at all others they pass untouched. That
    step is the one at which a text has `begin_index` tokens: inside `generate` a row's real tokens are counted and the
    default is the end of its prompt, one later where a forced first token comes before; called on its own, it is the
    width T of `input_ids` [B, T]. Ids outside the vocabulary are ignored. Raises ValueError for what is no token id.
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.CONSTRAIN, after=("suppress_tokens",), pure=True)

    begin_suppress_tokens: tuple[int, ...] = option(
        "Tokens that are not the first one of a text; ids outside the vocabulary are ignored.",
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
        ids = usable(self.begin_suppress_tokens, ctx.spec.vocab_size)
        if self.begin_index is not None:
            begins = self.begin_index - ctx.prompt_lengths
        else:
            forced = ctx.settings.get("forced_bos_token_id") is not None
            begins = ((ctx.prompt_lengths <= 1) & forced).long()
        if not ids or bool((begins < 0).all()):
            return None
        return _AtBegin(self, ctx, torch.tensor(ids, device=ctx.tokens.device), begins)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores with the tokens at -inf where T is `begin_index`. Raises ValueError where that is unset."""
        if self.begin_index is None:
            raise ValueError("begin_index is needed where the processor is called on its own")
        if input_ids.shape[-1] != self.begin_index:
            return scores
        return forbid(scores, usable(self.begin_suppress_tokens, scores.shape[-1]))


class _AtBegin(AtStep):
    """Tokens forbidden where a row begins."""

    __slots__ = ("_ids",)

    def __init__(self, options: Any, ctx: BindContext, ids: Tensor, begins: Tensor) -> None:
        super().__init__(options, ctx, begins)
        self._ids = ids

    def _act(self, scores: Tensor, rows: Tensor | None, own: bool) -> Tensor:
        return write(scores, self._ids, -math.inf, rows, own)
