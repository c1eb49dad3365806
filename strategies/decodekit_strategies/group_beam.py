"""Diverse beam search: groups of beams that are kept from saying the same."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import attrs
from decodekit.context import BindContext
from decodekit.fields import at_least, between, option

from .beam import DEAD, Beams, BeamSearch, Found, configured, refuse_draws

if TYPE_CHECKING:
    from decodekit.run import Run
    from decodekit.settings import Settings


@attrs.frozen
class GroupBeamSearch:
    """Split `num_beams` into groups that advance in turn, each away from what the groups before it chose.

    At every step a token's score is lowered by `diversity_penalty` for each beam of an earlier group of the prompt that
    took it at this step, to go on or to end (Hamming diversity); the scores of hypotheses have that in them. Otherwise
    each group is a beam search of its own, by `length_penalty` and `early_stopping`; the best of all are returned.
    (Vijayakumar et al. 2016, "Diverse Beam Search", arXiv 1610.02424.)
    """

    needs: ClassVar[frozenset[str]] = frozenset({"cache:reorder"})
    needs_pure: ClassVar[bool] = True
    reads: ClassVar[frozenset[str]] = frozenset(attrs.fields_dict(BeamSearch))
    samples: ClassVar[bool] = False

    num_beam_groups: int = option("Groups that the beams are split into; 1: no groups.", default=1, check=at_least(1))
    diversity_penalty: float = option(
        "What a token's score loses for each beam of an earlier group that took it at the same step.",
        default=0.0,
        check=between(0, math.inf, high_open=True),
    )

    def rows_per_prompt(self, settings: Settings, /) -> int:
        """Rows of the batch that belong to one prompt."""
        return configured(settings).num_beams

    def bind(self, ctx: BindContext, /) -> _Groups:
        """Return the search of one call. Raises ValueError for groups that are unequal or nothing keeps apart."""
        options, groups = configured(ctx.settings), self.num_beam_groups
        if options.num_beams % groups:
            raise ValueError(f"num_beam_groups={groups} must divide num_beams={options.num_beams}")
        if groups > 1 and not self.diversity_penalty:
            raise ValueError("without a diversity_penalty above 0 every group would find the same; set it")
        refuse_draws(ctx)
        return _Groups(options, ctx, groups, self.diversity_penalty)


class _Groups(Beams):
    """Searches side by side. Which candidates end is asked once a step, before any group has chosen: each group looks
    at so many that enough are left whatever the groups before it take."""

    def __init__(self, options: BeamSearch, ctx: BindContext, groups: int, penalty: float) -> None:
        beams = options.num_beams
        width = beams // groups
        super().__init__(options, ctx, groups=groups, further=width * (beams - width))
        self.penalty = penalty
        self.taken: Counter[int] = Counter()
        """Tokens that the groups before this one took, and how many beams did."""
        self.turn = (-1, -1)
        """The step and the prompt of that."""

    def sort(self, run: Run, search: int, found: Found, ranked: Sequence[int]) -> list[int]:
        """Let a group choose by its own scores less the penalty."""
        if self.turn != (turn := (run.steps, search // self.groups)):  # groups that are done take no turn
            self.turn, self.taken = turn, Counter()
        for at in ranked:
            found.values[at] -= self.penalty * self.taken[found.tokens[at]]
        if run.outputs.output_scores:
            mine = run.records["scores"][-1][search * self.width : (search + 1) * self.width]
            for token, times in self.taken.items():
                mine[:, token] -= self.penalty * times
        ranked = sorted(ranked, key=lambda at: -found.values[at])[: self.enough]
        going = super().sort(run, search, found, ranked)
        ended = [at for at in ranked[: self.width] if found.codes[at] >= 0 and found.values[at] > DEAD]
        self.taken.update(found.tokens[at] for at in (*going, *ended))
        return going
