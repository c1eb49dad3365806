"""Constrained beam search: every hypothesis has the phrases that were asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.errors import GenerationError, InputError
from decodekit.fields import option
from decodekit.shortlist import Shortlist
from torch import Tensor

from .beam import DEAD, Beams, BeamSearch, Found, configured, refuse_draws
from .constraints import Constraint, DisjunctiveConstraint, PhrasalConstraint
from .judging import longest

if TYPE_CHECKING:
    from decodekit.run import Run, Step
    from decodekit.settings import Settings

METHODS = ("advance", "does_advance", "update", "remaining", "copy")
"""What an object must have to be a constraint."""


class _Constraints:
    """Validator: a list of one or more constraints; None passes (unset)."""

    def __call__(self, instance: Any, attribute: Any, value: Any) -> None:
        if value is None:
            return
        if not isinstance(value, (list, tuple)) or not value:
            raise ValueError(f"must be a list of one or more constraints, got {value!r}")
        for item in value:
            if isinstance(item, type) or not all(callable(getattr(item, name, None)) for name in METHODS):
                raise ValueError(f"must be {self}, got {item!r}")

    def __str__(self) -> str:
        return f"objects with {', '.join(METHODS)}"


@attrs.frozen
class ConstrainedBeamSearch:
    """Beam search for texts in which all given phrases appear.

    Beams with as much of the phrases done form a bank, and places go round the banks, the fullest first: so those that
    make progress have places beside the likelier ones that do not. Candidates are each beam's likeliest tokens and all
    tokens that go on with a phrase. Only what has every phrase may end. The prompt does not count.
    (Post and Vilar 2018, arXiv 1804.06609; Hu et al. 2019, "Improved Lexically Constrained Decoding".)
    """

    needs: ClassVar[frozenset[str]] = frozenset({"cache:reorder"})
    needs_pure: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset(attrs.fields_dict(BeamSearch))
    samples: ClassVar[bool] = False

    force_words_ids: tuple[tuple[int, ...] | tuple[tuple[int, ...], ...], ...] | None = option(
        "Phrases that must all appear, as token ids; a list of phrases in the place of one: any of these will do.",
        default=None,
    )
    constraints: Any = option(
        "Constraints as a list of objects (`PhrasalConstraint`, `DisjunctiveConstraint`, your own) beside "
        "force_words_ids.",
        default=None,
        check=_Constraints(),
    )

    def rows_per_prompt(self, settings: Settings, /) -> int:
        """Rows of the batch that belong to one prompt."""
        return configured(settings).num_beams

    def bind(self, ctx: BindContext, /) -> _Constrained:
        """Return the search of one call. Raises ValueError for phrases that no text of this model can have."""
        refuse_draws(ctx)
        if (ctx.settings.get("num_beam_groups") or 1) > 1:
            raise ValueError("constraints and num_beam_groups cannot be had together; leave one of them out")
        return _Constrained(ctx, self._all(ctx))

    def _all(self, ctx: BindContext) -> list[Constraint]:
        if self.force_words_ids == ():
            raise ValueError("is empty; name a phrase, or leave it out")
        found: list[Constraint] = []
        for item in self.force_words_ids or ():
            several = bool(item) and isinstance(item[0], tuple)
            found.append(DisjunctiveConstraint(item) if several else PhrasalConstraint(item))  # type: ignore[arg-type]
        found += [given.copy() for given in self.constraints or ()]
        if not found:
            raise ValueError("constrained beam search needs force_words_ids or constraints")
        known = min(ctx.spec.vocab_size, ctx.spec.num_embeddings or ctx.spec.vocab_size)
        for phrase in chain.from_iterable(map(_phrases, found)):
            if max(phrase) >= known:
                raise ValueError(f"{list(phrase)} has a token outside the model's vocabulary of {known}")
            if ends := set(phrase[:-1]) & set(ctx.spec.eos_token_ids):
                raise ValueError(f"{list(phrase)} goes on behind {min(ends)}, which ends every text")
        return found


def _phrases(constraint: Constraint) -> list[tuple[int, ...]]:
    """The phrases any of which will do; nothing where a constraint of another kind does not say."""
    return getattr(constraint, "phrases", [])


def least(constraints: Sequence[Constraint]) -> int:
    """New tokens without which no text can have everything: a bound, which takes phrases to overlap as they like."""
    sizes, counts = [0], Counter[int]()
    for phrases in filter(None, map(_phrases, constraints)):
        sizes.append(min(map(len, phrases)))
        common = Counter(phrases[0])
        for phrase in phrases[1:]:
            common &= Counter(phrase)
        counts |= common
    return max(*sizes, sum(counts.values()))


def _advanced(constraint: Constraint, token: int) -> Constraint:
    if constraint.completed or (getattr(constraint, "idle", False) and not constraint.does_advance(token)):
        return constraint
    constraint = constraint.copy(stateful=True)
    constraint.update(token)
    return constraint


@attrs.frozen(eq=False)
class _Candidate:
    value: float
    token: int
    row: int
    state: tuple[Constraint, ...]
    bank: int


class _Constrained(Beams):
    """Beams, each with what it has of every constraint."""

    def __init__(self, ctx: BindContext, constraints: list[Constraint]) -> None:
        options = configured(ctx.settings)
        super().__init__(options, ctx, further=options.num_beams)
        self.constraints = tuple(constraints)
        self.sizes = [constraint.remaining() for constraint in constraints]
        self.states = [self.constraints] * ctx.rows
        self.followed: list[tuple[Constraint, ...]] = []
        """For each candidate what it has of the constraints."""
        self.may_end: list[bool] = []
        """For each candidate whether it has everything and is among the best of these."""

    def decode(self, run: Run, /) -> Iterator[Step]:
        """Yield one step for each token of the running beams. Raises InputError for phrases that find no room."""
        most = longest(run)
        if most is not None and (need := least(self.constraints)) > most:
            raise InputError(
                f"force_words_ids or constraints need {need} new tokens, but there are {most} at most; raise "
                f"max_new_tokens"
            )
        yield from super().decode(run)

    def bank(self, state: Sequence[Constraint]) -> int:
        """Steps done: of complete constraints all, and of the others those of the one that is furthest.

        Its next step always leads to a fuller bank, even where it undoes steps of others.
        """
        pairs = list(zip(self.sizes, state, strict=True))
        whole = sum(size for size, constraint in pairs if constraint.completed)
        return whole + max((size - c.remaining() for size, c in pairs if not c.completed), default=0)

    def candidates(self, scores: Tensor | Shortlist) -> Found:
        """Round the banks, the fullest first; then the likeliest that have everything, which may end here."""
        scores = scores.dense() if isinstance(scores, Shortlist) else scores
        result, self.followed, self.may_end = Found([], [], []), [], []
        options = self.options_of(scores)
        for search in range(len(self.pools)):
            rows = range(search * self.width, (search + 1) * self.width)
            mine = [option for row in rows for option in options.get(row, ())]
            broken = [option for option in mine if option.value != option.value]
            banks: dict[int, list[_Candidate]] = {}
            for candidate in sorted(mine, key=lambda option: -option.value):
                banks.setdefault(candidate.bank, []).append(candidate)
            round_ = zip_longest(*(banks[bank] for bank in sorted(banks, reverse=True)))
            order = [candidate for turn in round_ for candidate in turn if candidate is not None]
            whole = banks.get(sum(self.sizes), [])[: self.width]
            chosen = [*broken, *order[: self.enough]]
            chosen = [*chosen, *(candidate for candidate in whole if candidate not in chosen)][: self.judged]
            found = Found([c.value for c in chosen], [c.token for c in chosen], [c.row for c in chosen])
            result += self.filled(search, found)
            short = self.judged - len(chosen)
            self.followed += [candidate.state for candidate in chosen] + [()] * short
            self.may_end += [candidate in whole for candidate in chosen] + [False] * short
        return result

    def options_of(self, scores: Tensor) -> dict[int, list[_Candidate]]:
        """What each running beam could go on with: its likeliest tokens, and those that go on with a phrase."""
        values, ids = (found.tolist() for found in scores.topk(min(self.enough, scores.shape[-1])))
        live = [row for row, total in enumerate(self.totals) if total != DEAD]
        steps = [(row, token) for row in live for token in self.steps_of(row, scores.shape[-1])]
        at = torch.tensor(steps, device=scores.device).T if steps else torch.empty(2, 0, dtype=torch.long)
        further = iter(scores[at[0], at[1]].tolist())
        each = {row: dict(zip(ids[row], values[row], strict=True)) for row in live}
        for row, token in steps:
            each[row][token] = next(further)
        found: dict[int, list[_Candidate]] = {}
        for row, options in each.items():
            found[row] = []
            for token, value in options.items():
                if value != DEAD:
                    state = tuple(_advanced(constraint, token) for constraint in self.states[row])
                    found[row].append(_Candidate(self.totals[row] + value, token, row, state, self.bank(state)))
        return found

    def steps_of(self, row: int, vocabulary: int) -> set[int]:
        """The tokens that are a step of some constraint."""
        tokens: set[int] = set()
        for constraint in self.states[row]:
            step = None if constraint.completed else constraint.advance()
            tokens.update([step] if isinstance(step, int) else step or ())
        if wrong := [token for token in tokens if not 0 <= token < vocabulary]:
            raise GenerationError(f"a constraint asks for token {wrong[0]}: outside the model's vocabulary")
        return tokens

    def sort(self, run: Run, search: int, found: Found, ranked: Sequence[int]) -> list[int]:
        """Keep what has everything and ends among the best of these; return what goes on."""
        going: list[int] = []
        for at in ranked:
            if found.values[at] == DEAD:
                break
            if found.codes[at] < 0:
                going.append(at)
            elif self.may_end[at]:
                self.pools[search].add(self.hypothesis(run, found, at))
        return going[: self.width]

    def choose(self, run: Run, found: Found) -> tuple[list[int], list[int], int]:
        """As ever; states follow. Raises GenerationError where a prompt's last beam ends without all phrases."""
        some = {search for search in range(len(self.pools)) if found.values[search * self.judged] != DEAD}
        chosen = super().choose(run, found)
        for search, pool in enumerate(self.pools):
            if search in some and not pool.open and not pool.found:
                raise GenerationError(
                    f"no text of prompt {search} has everything that force_words_ids or constraints ask for; raise "
                    f"max_new_tokens or num_beams, or loosen what forbids their tokens or ends texts early"
                )
        self.states = [
            self.followed[place] if total != DEAD else state
            for place, total, state in zip(self.places, self.totals, self.states, strict=True)
        ]
        return chosen
