"""DRY: repeating a long run of tokens costs more and more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import at_least, greater_than, option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import id_tuple, numbers, of_rows, whole

LONGEST = 50
"""Runs are followed this far: beyond it the penalty is out of all proportion anyway."""
BREAKERS = ("\n", ":", '"', "*")


def _check_breakers(instance: Any, attribute: Any, value: Any) -> None:
    for item in value if isinstance(value, tuple) else (value,):
        good = item if isinstance(item, str) else type(item) is int
        if not good:
            raise ValueError(f"must be a list of texts or token ids, got {item!r}")


@attrs.frozen
class DRYLogitsProcessor:
    """Lower tokens that would go on with a repetition, by multiplier * base ** (length of the run - allowed length).

    A run is a stretch of tokens that ends the text and occurred before; it ends at a sequence breaker. Of several runs
    that a token would continue, the longest counts. Padding is part of no run. Scores are floating [B, V].
    (p-e-w 2024, "DRY: a modern repetition penalty", text-generation-webui pull request 5677.)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.PENALTY, after=("repetition_penalty", "presence_penalty"), pure=True)

    dry_multiplier: float | tuple[float, ...] = option(
        "Strength of the penalty; 0: off.", default=0.0, check=at_least(0), per_row=True
    )
    dry_base: float = option("Grows the penalty with every token of the run.", default=1.75, check=greater_than(0))
    dry_allowed_length: int = option("Length of the runs that cost nothing.", default=2, check=whole(1))
    dry_penalty_last_n: int = option("Tokens looked back on; -1: all, 0: off.", default=-1, check=whole(-1))
    dry_sequence_breakers: tuple[str | int, ...] = option(
        "Texts or token ids across which no run goes.", default=BREAKERS, converter=id_tuple, check=_check_breakers
    )

    def bind(self, ctx: BindContext, /) -> _Dry | None:
        """Return the form that knows padding and breakers, or None where it is off."""
        if not any(numbers(self.dry_multiplier)) or self.dry_penalty_last_n == 0:
            return None
        return _Dry(self, ctx, ctx.per_row(self.dry_multiplier), breakers(self.dry_sequence_breakers, ctx.tokenizer))

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with repetitions lowered; breakers named by text need `bind`."""
        ids = tuple(item for item in self.dry_sequence_breakers if isinstance(item, int))
        return _Dry(self, None, of_rows(self.dry_multiplier, scores), ids)(input_ids, scores)


def breakers(given: Sequence[str | int], tokenizer: Any) -> tuple[int, ...]:
    """Token ids of the breakers: of a text the last token that ends a text with it."""
    ids = [item for item in given if isinstance(item, int)]
    texts = [item for item in given if isinstance(item, str)]
    if tokenizer is not None:
        ids += [tokenizer.encode("a" + text)[-1] for text in texts]
    elif texts and tuple(given) != BREAKERS:
        raise ValueError(f"dry_sequence_breakers name the texts {texts}: pass tokenizer=..., or token ids")
    return tuple(dict.fromkeys(ids))


class _Dry:
    __slots__ = ("_breakers", "_ctx", "_multiplier", "_options")

    def __init__(
        self, options: DRYLogitsProcessor, ctx: BindContext | None, multiplier: Any, ids: tuple[int, ...]
    ) -> None:
        self._options, self._ctx, self._multiplier, self._breakers = options, ctx, multiplier, ids

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the multiplier of former row `rows[i]`."""
        if isinstance(self._multiplier, Tensor):
            self._multiplier = self._multiplier[rows]

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with tokens lowered that would continue a repetition."""
        options = self._options
        width = input_ids.shape[-1]
        start = max(width - options.dry_penalty_last_n, 0) if options.dry_penalty_last_n > 0 else 0
        ids = input_ids[:, start:]
        if ids.shape[-1] < 2:
            return scores
        usable = ids < scores.shape[-1]
        mask = None if self._ctx is None else self._ctx.history_mask(width)
        if mask is not None:
            usable = usable & mask[:, start:]
        going = usable if not self._breakers else usable & ~torch.isin(ids, torch.tensor(self._breakers).to(ids))
        # run[b, i]: how many tokens up to i, which token i + 1 followed, equal those that end the row.
        alive = going[:, :-1] & going[:, -1:] & (ids[:, :-1] == ids[:, -1:])
        run = alive.long()
        for back in range(1, min(LONGEST, ids.shape[-1] - 1)):
            if not bool(alive.any()):
                break
            older, newest = ids[:, : -1 - back], ids[:, -1 - back : ids.shape[-1] - back]
            same = (older == newest) & going[:, : -1 - back] & going[:, -1 - back : ids.shape[-1] - back]
            alive = torch.nn.functional.pad(same, (back, 0)) & alive
            run += alive
        costly = (run >= options.dry_allowed_length) & usable[:, 1:]
        if not bool(costly.any()):
            return scores
        multiplier = self._multiplier
        multiplier = multiplier.to(scores.dtype) if isinstance(multiplier, Tensor) else multiplier
        over = (run - options.dry_allowed_length).to(scores.dtype)
        cost = torch.pow(options.dry_base, over) * multiplier
        cost = cost.masked_fill(~costly, 0.0)
        worst = scores.new_zeros(scores.shape)
        worst.scatter_reduce_(-1, ids[:, 1:].where(costly, 0), cost, "amax", include_self=True)
        return scores - worst
