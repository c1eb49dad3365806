"""DRY: repeating a long run of tokens costs more and more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import at_least, greater_than, option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import id_tuple, numbers, of_rows, whole
from .edits import Editing
from .ngrams import KeepsRows, shift

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

    A run is a stretch of tokens that ends the text and occurred before; it ends at a sequence breaker, and what is a
    breaker itself costs nothing. Of several runs that a token would continue, the longest counts, up to 50 tokens of
    it. Padding is part of no run. Inside `generate` the runs are kept from step to step. The breakers that are there
    by default, texts, act where there is a tokenizer; a text of several tokens breaks at its last one. Scores are
    floating [B, V] and not written to. Raises ValueError for other breakers named by text without a tokenizer.
    (p-e-w 2024, "DRY: a modern repetition penalty", text-generation-webui pull request 5677; koboldcpp pull request
    982, by pi6am.)
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
        """Return the form that knows padding and breakers and keeps the runs, or None where it is off."""
        if not any(numbers(self.dry_multiplier)) or self.dry_penalty_last_n == 0:
            return None
        mask, breaks = ctx.history_mask(), breakers(self.dry_sequence_breakers, ctx.tokenizer)
        rows = [(ids if mask is None else ids[mask[row]]).tolist() for row, ids in enumerate(ctx.input_ids)]
        return _Dry(self, rows, ctx.per_row(self.dry_multiplier), breaks)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with repetitions lowered; all of `input_ids` [B, T] counts."""
        multiplier = of_rows(self.dry_multiplier, scores)
        breaks = breakers(self.dry_sequence_breakers, None)
        if self.dry_penalty_last_n == 0:
            return scores
        return _Dry(self, input_ids.tolist(), multiplier, breaks)(input_ids, scores)


def breakers(given: Sequence[str | int], tokenizer: Any) -> frozenset[int]:
    """Token ids of the breakers: of a text the last token that ends a text with it."""
    ids = {item for item in given if isinstance(item, int)}
    texts = [item for item in given if isinstance(item, str)]
    if tokenizer is not None:
        ids |= {int(tokenizer.encode("a" + text)[-1]) for text in texts}
    elif texts and tuple(given) != BREAKERS:
        raise ValueError(f"dry_sequence_breakers name the texts {texts}: pass tokenizer=..., or token ids")
    return frozenset(ids)


class _Row:
    """The tokens of one row, where each of them stands, and the runs that end it.

    runs: place of an earlier token like the last one -> how many tokens up to it equal those that end the row.
    """

    __slots__ = ("breaks", "log", "places", "runs", "tokens")

    def __init__(self, tokens: list[int], breaks: frozenset[int]) -> None:
        self.tokens, self.breaks = tokens, breaks
        self.places: dict[int, list[int]] = {}
        for place, token in enumerate(tokens):
            self.places.setdefault(token, []).append(place)
        self.runs = self.search()
        self.log: list[int] = []

    def search(self) -> dict[int, int]:
        """The runs, from the tokens alone."""
        tokens, breaks = self.tokens, self.breaks
        if not tokens or tokens[-1] in breaks:
            return {}
        found, last = {}, len(tokens) - 1
        for place in self.places[tokens[-1]][:-1]:
            run = 1
            while run < LONGEST and run <= place and tokens[place - run] == tokens[last - run] not in breaks:
                run += 1
            found[place] = run
        return found

    def take(self, tokens: Sequence[int]) -> None:
        """One step: note tokens, negative ones left out."""
        count = 0
        for token in tokens:
            if token < 0:
                continue
            count += 1
            before = self.places.setdefault(token, [])
            known = self.runs.get
            # One longer than the run that ended a place earlier.
            self.runs = {} if token in self.breaks else {i: min(known(i - 1, 0) + 1, LONGEST) for i in before}
            before.append(len(self.tokens))
            self.tokens.append(token)
        self.log.append(count)

    def back(self) -> None:
        """Forget the newest step."""
        for _ in range(self.log.pop()):
            self.places[self.tokens.pop()].pop()
        self.runs = self.search()

    def copy(self) -> _Row:
        """The same, apart."""
        twin = _Row.__new__(_Row)
        twin.tokens, twin.breaks, twin.log, twin.runs = list(self.tokens), self.breaks, list(self.log), self.runs
        twin.places = {token: list(places) for token, places in self.places.items()}
        return twin

    def longest(self, allowed: int, last_n: int, vocab: int) -> dict[int, int]:
        """The longest run that each token would continue, of those as long as `allowed` in the newest `last_n`."""
        tokens, found = self.tokens, dict[int, int]()
        start = max(len(tokens) - last_n, 0) if last_n > 0 else 0
        for place, run in self.runs.items():
            run = min(run, place - start + 1)
            token = tokens[place + 1]
            if run >= allowed and token < vocab and token not in self.breaks and run > found.get(token, 0):
                found[token] = run
        return found


class _Dry(KeepsRows, Editing):
    __slots__ = ("_most", "_multipliers", "_options")

    def __init__(
        self, options: DRYLogitsProcessor, rows: list[list[int]], multiplier: Any, breaks: frozenset[int]
    ) -> None:
        self._options = options
        each = multiplier[:, 0].tolist() if isinstance(multiplier, Tensor) else [multiplier] * len(rows)
        self._multipliers: list[float] = each
        self._rows: list[_Row] = [_Row(tokens, breaks) for tokens in rows]
        base = options.dry_base
        # The power stays within what float32 holds.
        self._most = math.log(torch.finfo(torch.float32).max) / math.log(base) if base > 1 else math.inf

    def __repr__(self) -> str:
        return repr(self._options)

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on as former row `rows[i]`."""
        super().reorder(rows)
        self._multipliers = [self._multipliers[i] for i in rows.tolist()]

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return scores [B, V] with tokens lowered that would continue a repetition."""
        options, vocab = self._options, scores.shape[-1]
        allowed, last_n = options.dry_allowed_length, options.dry_penalty_last_n
        places: list[int] = []
        costs: list[float] = []
        for i, (row, multiplier) in enumerate(zip(self._rows, self._multipliers, strict=True)):
            if not multiplier or not row.runs:
                continue
            for token, run in row.longest(allowed, last_n, vocab).items():
                places.append(i * vocab + token)
                costs.append(-multiplier * options.dry_base ** min(run - allowed, self._most))
        return shift(scores, places, costs, own) if places else scores
