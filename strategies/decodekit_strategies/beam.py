"""Beam search and beam sampling: several continuations of each prompt side by side, the best of which are kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs
import torch
from decodekit.context import BindContext, RowRandom, mix_seed
from decodekit.errors import warn
from decodekit.fields import at_least, between, one_of, option
from decodekit.outputs import (
    GenerateBeamDecoderOnlyOutput,
    GenerateBeamEncoderDecoderOutput,
    GenerateEncoderDecoderOutput,
)
from decodekit.prompt import filler
from decodekit.settings import CALLER
from decodekit.shortlist import Shortlist
from torch import Tensor

from .judging import Judge, longest, made
from .largest import largest_sums
from .pools import Hypothesis, Pool, length_weight

if TYPE_CHECKING:
    from decodekit.outputs import GenerateDecoderOnlyOutput
    from decodekit.run import Run, Step
    from decodekit.settings import Settings

DEAD = float("-inf")


@attrs.frozen
class BeamSearch:
    """Keep the `num_beams` likeliest continuations of every prompt; with `do_sample`, draw them (stochastic beams).

    A hypothesis is scored by the sum of its tokens' processed log-probabilities over length ** length_penalty, where
    length counts its new tokens, the one that ended it included, and never the prompt. Prompts do not wait for each
    other: each stops searching by its own scores. (Lowerre 1976, "The HARPY speech recognition system";
    length penalty after Wu et al. 2016, arXiv 1609.08144.)
    """

    needs: ClassVar[frozenset[str]] = frozenset({"cache:reorder"})
    needs_pure: ClassVar[bool] = True
    samples: ClassVar[bool | None] = None
    """As `do_sample` says."""

    num_beams: int = option("Continuations kept for each prompt; 1: no beam search.", default=1, check=at_least(1))
    length_penalty: float = option(
        "Exponent of the length that scores are divided by: above 0 favours long hypotheses.",
        default=1.0,
        check=between(-torch.inf, torch.inf, low_open=True, high_open=True),
    )
    early_stopping: bool | Literal["never"] = option(
        "True: stop at `num_beams` finished hypotheses; False: when no better one is likely; 'never': when none is "
        "possible.",
        default=False,
        check=one_of(True, False, "never"),
    )

    def rows_per_prompt(self, settings: Settings, /) -> int:
        """Rows of the batch that belong to one prompt."""
        return self.num_beams

    def bind(self, ctx: BindContext, /) -> Beams:
        """Return the search of one call. Raises ValueError for more sequences than beams."""
        return Beams(self, ctx)


def configured(settings: Settings) -> BeamSearch:
    """The keys that belong to `BeamSearch`, for other searches with beams."""
    values = {name: settings.get(name) for name in attrs.fields_dict(BeamSearch)}
    return BeamSearch(**{name: value for name, value in values.items() if value is not None})


def refuse_draws(ctx: BindContext) -> None:
    """Raise ValueError where the caller wants draws of a search that makes none; a model's own wish yields."""
    if ctx.settings.origin("do_sample") in CALLER and ctx.settings.get("do_sample"):
        raise ValueError("do_sample=True: nothing is drawn in this search; leave it out, or set do_sample=False")


@attrs.define
class Found:
    """What could follow the beams, `judged` candidates for every search, best first; the last ones may be dead."""

    values: list[float]
    """Summed scores, -inf: dead."""
    tokens: list[int]
    rows: list[int]
    """Which row each would continue."""
    codes: Sequence[int] = ()
    """What the criteria say (`Judge`)."""

    def __iadd__(self, more: Found) -> Found:
        self.values += more.values
        self.tokens += more.tokens
        self.rows += more.rows
        return self


class Beams:
    """The state of one run. Candidates are few, so what happens to them happens in plain Python.

    A prompt's beams are one search, or `groups` of them side by side, each with rows and hypotheses of its own.
    """

    needs = BeamSearch.needs
    needs_pure = True

    def __init__(self, options: BeamSearch, ctx: BindContext, *, groups: int = 1, further: int = 0) -> None:
        """further: candidates that each search looks at beyond those that suffice to go on."""
        self.options, self.samples = options, ctx.samples
        self.beams, self.groups = options.num_beams, groups
        self.width = self.beams // groups
        """Beams of a search."""
        self.prompts, searches = ctx.rows // self.beams, ctx.rows // self.width
        self.returned = int(ctx.settings.get("num_return_sequences") or 1)
        if self.returned > self.beams:
            raise ValueError(f"num_return_sequences={self.returned} needs num_beams of at least as many")
        # Each kept beam may have been followed by every end token: enough candidates for beams to go on beside them.
        self.enough = max(2, 1 + len(ctx.spec.eos_token_ids)) * self.width
        self.judged = self.enough + further
        self.judged_per_prompt = self.judged * groups
        self.pools = [Pool(self.width, options.length_penalty, options.early_stopping) for _ in range(searches)]
        self.totals = [0.0 if row % self.width == 0 else DEAD for row in range(ctx.rows)]
        self.places = [row // self.width * self.judged for row in range(ctx.rows)]
        """For each beam its row among the candidates judged last."""
        self.shared = [[ctx.prompt_width] * self.width for _ in range(ctx.rows)]
        """Columns that each beam has in common with each beam of its search."""
        self.parents: list[list[int]] = []
        """For each step the row that each beam continued."""
        self.streamed_per_prompt = self.returned
        self.sure: list[list[int]] = [[] for _ in range(self.prompts * self.returned)]
        """For each sequence returned the tokens that a streamer has got."""
        self.over = [False] * len(self.sure)
        """Whether that is all of them."""
        self.settled = 0
        """New tokens that all sequences are sure of."""
        self.random: RowRandom | None = None
        if self.samples:
            seeds = ctx.seeds
            base = int(torch.randint(0, 2**62, ()).item()) if seeds is None else 0
            own = [mix_seed(base, i) if seeds is None else seeds[i * self.beams] for i in range(self.prompts)]
            self.random = RowRandom(own, torch.device("cpu"))

    # -- the algorithm -----------------------------------------------------------------------------

    def decode(self, run: Run, /) -> Iterator[Step]:
        """Yield one step for each token of the running beams, until no prompt can find anything better."""
        self.judge, logits = Judge(run), run.prefill()
        while True:
            found = self.candidates(run.process(logits, normalise=True))
            found.codes = self.judge([self.places[row] for row in found.rows], found.tokens)
            kept, new, start = self.choose(run, found)
            self.parents.append(kept)
            over = [not pool.open for pool in self.pools for _ in range(self.width)]
            step = run.advance(kept, new, over, start)
            yield attrs.evolve(step, settled=self.settle(run)) if run.listened else step
            if run.finished:
                return
            logits = run.forward(step.tokens)

    def candidates(self, scores: Tensor | Shortlist) -> Found:
        """The best continuations of each search's beams, or drawn ones."""
        wanted, searches = self.judged, len(self.pools)
        values = scores.values if isinstance(scores, Shortlist) else scores
        totals = torch.tensor(self.totals, device=values.device, dtype=values.dtype)
        if self.random is None:
            best, rows, tokens = largest_sums(values, totals, searches, wanted)
        else:
            sums = (values + totals[:, None]).float().reshape(searches, -1)
            place = self.draw(sums, wanted)
            drawn, order = sums.gather(1, place.clamp(min=0)).masked_fill(place < 0, DEAD).sort(-1, descending=True)
            place, columns = place.gather(1, order).clamp_(min=0), values.shape[-1]
            best, rows, tokens = drawn.tolist(), (place // columns).tolist(), (place % columns).tolist()
        if isinstance(scores, Shortlist):
            where = torch.tensor(rows) * values.shape[-1] + torch.tensor(tokens)
            tokens = scores.ids.reshape(searches, -1).gather(1, where.to(scores.ids.device)).tolist()
        found = Found([], [], [])
        for search, (score, token, place_) in enumerate(zip(best, tokens, rows, strict=True)):
            found += self.filled(search, Found(score, token, [search * self.width + row for row in place_]))
        return found

    def filled(self, search: int, found: Found) -> Found:
        """`judged` candidates of a search: those given, and dead ones."""
        short = self.judged - len(found.values)
        found += Found([DEAD] * short, [0] * short, [search * self.width] * short)
        return found

    def draw(self, sums: Tensor, wanted: int) -> Tensor:
        """Draw `wanted` different places from each row of `sums` [B, N], by their softmax; -1 where there are no more.

        One by one: a place that was drawn counts no longer, as if its weight were cut out of the cumulative sum.
        """
        assert self.random is not None
        top = sums.amax(-1, keepdim=True)
        edges = (sums - top).exp().cumsum(-1, dtype=torch.float64).cpu()
        numbers = torch.stack([self.random.uniform() for _ in range(wanted)], 1).tolist()
        result = []
        for row, mine in zip(edges, numbers, strict=True):
            taken: list[tuple[int, float, float]] = []  # place, sum before it, weight
            left = float(row[-1])
            for number in mine:
                goal = number * left
                for _, before, weight in sorted(taken):
                    if before <= goal:
                        goal += weight
                place = int(torch.searchsorted(row, goal, right=True)) if left > 0 else len(row)
                if place >= len(row) or any(place == old for old, _, _ in taken):
                    break  # nothing is left but rounding
                before = float(row[place - 1]) if place else 0.0
                weight = float(row[place]) - before
                taken.append((place, before, weight))
                left -= weight
            result.append([place for place, _, _ in taken] + [-1] * (wanted - len(taken)))
        return torch.tensor(result, device=sums.device)

    def choose(self, run: Run, found: Found) -> tuple[list[int], list[int], int]:
        """Sort candidates into finished hypotheses and beams that go on.

        Returns for each row the row it continues, its token, and the columns that rows trading places share.
        """
        kept, new, start = list(range(run.rows)), [filler(run.pipeline.settings)] * run.rows, run.context.length
        self.totals = [DEAD] * run.rows
        for search, pool in enumerate(self.pools):
            if not pool.open:
                continue
            first, at = search * self.width, search * self.judged
            if found.values[at] != found.values[at]:
                new[found.rows[at]] = -1  # the run says which processor made NaN of it
                return kept, new, 0
            going = self.sort(run, search, found, range(at, at + self.judged))
            for row, at in self.seats(first, going, found.rows).items():
                kept[row], new[row] = found.rows[at], found.tokens[at]
                self.totals[row], self.places[row] = found.values[at], at
                start = min(start, self.shared[row][found.rows[at] - first])
            self.look_back(first, kept, run.context.length)
            pool.look(max(self.totals[first : first + self.width]), made(run) + 1, longest(run))
            if not any(pool.open or pool.found for pool in self.pools_of(search // self.groups)):
                new[first] = -1
        return kept, new, start

    def sort(self, run: Run, search: int, found: Found, ranked: Sequence[int]) -> list[int]:
        """Keep the hypotheses that end among candidates `ranked`, best first; return those that go on."""
        going: list[int] = []
        for rank, at in enumerate(ranked):
            if found.values[at] == DEAD or len(going) == self.width:
                break
            if found.codes[at] < 0:
                going.append(at)
            elif rank < self.width:
                self.pools[search].add(self.hypothesis(run, found, at))
        return going

    def pools_of(self, prompt: int) -> list[Pool]:
        """The hypotheses of a prompt."""
        return self.pools[prompt * self.groups : (prompt + 1) * self.groups]

    def beams_of(self, prompt: int) -> range:
        """The rows of a prompt."""
        return range(prompt * self.beams, (prompt + 1) * self.beams)

    def seats(self, first: int, going: Sequence[int], rows: Sequence[int]) -> dict[int, int]:
        """Which row each candidate goes on in: its own where it can stay, so that little of the cache is copied."""
        placed: dict[int, int] = {}
        late = [at for at in going if placed.setdefault(rows[at], at) != at]
        free = (row for row in range(first, first + self.width) if row not in placed)
        return {**placed, **dict(zip(free, late, strict=False))}

    def look_back(self, first: int, kept: Sequence[int], length: int) -> None:
        """Note how many columns each two beams of a search have in common now."""
        old, beams = self.shared, range(first, first + self.width)
        now = [[length if kept[a] == kept[b] else old[kept[a]][kept[b] - first] for b in beams] for a in beams]
        self.shared[first : first + self.width] = now

    def hypothesis(self, run: Run, found: Found, at: int) -> Hypothesis:
        """What candidate `at` is, all of it: it ends here."""
        step = row = found.rows[at]
        history = [row]
        for parents in reversed(self.parents):
            step = parents[step]
            history.append(step)
        new = [*run.context.tokens[row, run.context.prompt_width : run.context.length].tolist(), found.tokens[at]]
        reason, detail = self.judge.reason(found.codes[at], at)
        score = found.values[at] / length_weight(len(new), self.options.length_penalty)
        return Hypothesis(score, tuple(new), tuple(reversed(history)), reason, detail)

    # -- what comes out ----------------------------------------------------------------------------

    def settle(self, run: Run) -> Tensor:
        """Give the streamer what no later choice can change; returns what all sequences have of it by now.

        While a prompt is searched that is what all its hypotheses share, for as many sequences as are sure to be
        found. int64 [sequences returned, N], the newest N tokens.
        """
        new, rows, ended = list[int](), list[int](), list[int]()
        for row, sure in enumerate(self.sure):
            prompt, rank = divmod(row, self.returned)
            found, more = self.best(prompt), list[int]()
            still = any(pool.open for pool in self.pools_of(prompt))
            if not still and not self.over[row]:
                more = list(found[rank].tokens[len(sure) :]) if rank < len(found) else []
                ended.append(row)
            elif still and rank < max(1, len(found)):
                more = self.common(run, prompt, len(sure))
            sure += more
            new += more
            rows += [row] * len(more)
            self.over[row] = not still
        if run.by_row and (new or ended):
            run.put(torch.tensor(new, dtype=torch.long), rows, ended)
        known = [len(sure) for sure, over in zip(self.sure, self.over, strict=True) if not over]
        start, self.settled = self.settled, min(known) if known else max(map(len, self.sure))
        fill = filler(run.pipeline.settings)
        columns = torch.tensor([[*sure, *[fill] * self.settled][start : self.settled] for sure in self.sure])
        for column in () if run.by_row else columns.unbind(1):
            run.put(column)
        return columns.long()

    def common(self, run: Run, prompt: int, start: int) -> list[int]:
        """The new tokens from number `start` on in which all hypotheses of a prompt agree."""
        ctx = run.context
        live = [row for row in self.beams_of(prompt) if self.totals[row] != DEAD]
        texts = ctx.tokens[live, ctx.prompt_width + start : ctx.length].tolist()
        texts += [item.tokens[start:] for item in self.best(prompt)]
        return [column[0] for column in itertools.takewhile(lambda at: len(set(at)) == 1, zip(*texts, strict=False))]

    def finish(self, run: Run, output: GenerateDecoderOnlyOutput) -> GenerateBeamDecoderOnlyOutput:
        """The best hypotheses of every prompt, `num_return_sequences` each, best first."""
        found = [hypothesis for prompt in range(self.prompts) for hypothesis in self._returned(run, prompt)]
        longest = max(len(item.tokens) for item in found)
        fill, ctx = filler(run.pipeline.settings), run.context
        prompts = ctx.tokens[:: self.beams, : ctx.prompt_width].repeat_interleave(self.returned, 0)
        new = torch.tensor([[*item.tokens, *[fill] * (longest - len(item.tokens))] for item in found])
        rows = torch.tensor([[*item.rows, *[-1] * (longest - len(item.rows))] for item in found], dtype=torch.int32)
        encodes = isinstance(output, GenerateEncoderDecoderOutput)
        kind = GenerateBeamEncoderDecoderOutput if encodes else GenerateBeamDecoderOnlyOutput
        return kind(
            **{
                **attrs.asdict(output, recurse=False),
                "sequences": torch.cat([prompts, new.to(prompts)], 1),
                "sequences_scores": torch.tensor([item.score for item in found], device=prompts.device),
                "beam_indices": rows.to(prompts.device),
                "stop_reasons": tuple(item.reason for item in found),
                "stop_details": tuple(item.detail for item in found),
                "lengths": tuple(len(item.tokens) for item in found),
            }
        )

    def best(self, prompt: int) -> list[Hypothesis]:
        """All hypotheses of a prompt, best first."""
        found = [item for pool in self.pools_of(prompt) for item in pool.found]
        return sorted(found, key=lambda item: -item.score)

    def _returned(self, run: Run, prompt: int) -> list[Hypothesis]:
        """The sequences returned of one prompt; a run that was cancelled returns its beams as they are."""
        found = self.best(prompt)
        for row in self.beams_of(prompt):
            if len(found) >= self.returned:
                break
            if made(run) and self.totals[row] != DEAD and not run.finished:
                place = run.context.tokens[row, run.context.prompt_width : run.context.length]
                found.append(Hypothesis(self.totals[row], tuple(place.tolist()), (), "cancelled", None))
        if run.finished and len(found) < self.returned:
            warn(
                f"prompt {prompt}: only {len(found)} of {self.returned} sequences can be found with these processors "
                "and limits; the others are empty, with the score -inf"
            )
        nothing = Hypothesis(DEAD, (), (), "no continuation", None)
        return [*found, *[nothing] * self.returned][: self.returned]
