"""Beam search and beam sampling: several continuations of each prompt side by side, the best of which are kept."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import attrs
import torch
from decodekit.context import BindContext, RowRandom, mix_seed
from decodekit.fields import at_least, one_of, option
from decodekit.outputs import GenerateBeamDecoderOnlyOutput, beam_output
from decodekit.prompt import filler
from decodekit.shortlist import Shortlist
from torch import Tensor

from .pools import Hypothesis, Pool

if TYPE_CHECKING:
    from decodekit.outputs import GenerateDecoderOnlyOutput
    from decodekit.run import Run, Step

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
        "Exponent of the length that scores are divided by: above 0 favours long hypotheses.", default=1.0
    )
    early_stopping: bool | Literal["never"] = option(
        "True: stop at `num_beams` finished hypotheses; False: when no better one is likely; 'never': when none is "
        "possible.",
        default=False,
        check=one_of(True, False, "never"),
    )

    @property
    def rows_per_prompt(self) -> int:
        """Rows of the batch that belong to one prompt."""
        return self.num_beams

    def bind(self, ctx: BindContext, /) -> _Beams:
        """Return the search of one call. Raises ValueError for more sequences than beams."""
        return _Beams(self, ctx)


class _Beams:
    """The state of one search. Candidates are few, so what happens to them happens in plain Python."""

    needs = BeamSearch.needs
    needs_pure = True

    def __init__(self, options: BeamSearch, ctx: BindContext) -> None:
        self.options, self.samples = options, ctx.samples
        self.width = options.num_beams
        self.prompts = ctx.rows // self.width
        self.returned = int(ctx.settings.get("num_return_sequences") or 1)
        if self.returned > self.width:
            raise ValueError(f"num_return_sequences={self.returned} needs num_beams of at least as many")
        # Each kept beam may have been followed by every end token: enough candidates for beams to go on beside them.
        self.judged_per_prompt = max(2, 1 + len(ctx.spec.eos_token_ids)) * self.width
        self.pools = [Pool(self.width, options.length_penalty, options.early_stopping) for _ in range(self.prompts)]
        self.totals = [0.0 if row % self.width == 0 else DEAD for row in range(ctx.rows)]
        self.places = [row // self.width * self.judged_per_prompt for row in range(ctx.rows)]
        """For each beam its row among the candidates judged last."""
        self.shared = [[ctx.prompt_width] * self.width for _ in range(ctx.rows)]
        """Columns that each beam has in common with each beam of its prompt."""
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
            own = [mix_seed(base, i) if seeds is None else seeds[i * self.width] for i in range(self.prompts)]
            self.random = RowRandom(own, torch.device("cpu"))

    # -- the algorithm -----------------------------------------------------------------------------

    def decode(self, run: Run, /) -> Iterator[Step]:
        """Yield one step for each token of the running beams, until no prompt can find anything better."""
        logits = run.prefill()
        while True:
            values, tokens, rows = self.candidates(run.process(logits, normalise=True))
            codes = run.judge(torch.tensor([self.places[row] for row in rows]), torch.tensor(tokens))
            kept, new, start = self.choose(run, values, tokens, rows, codes)
            self.parents.append(kept)
            over = [not pool.open for pool in self.pools for _ in range(self.width)]
            step = run.advance(kept, new, over, start)
            yield attrs.evolve(step, settled=self.settle(run)) if run.listened else step
            if run.finished:
                return
            logits = run.forward(step.tokens)

    def candidates(self, scores: Tensor | Shortlist) -> tuple[list[float], list[int], list[int]]:
        """The best continuations of each prompt's beams, or drawn ones: summed scores, tokens and rows continued.

        All three have `judged_per_prompt` entries for every prompt, best first; where there are fewer, the rest are
        dead: their score is -inf.
        """
        wanted, width = self.judged_per_prompt, self.width
        if isinstance(scores, Shortlist):
            values, ids = scores.values, scores.ids
        elif self.random is not None:
            values, ids = scores, torch.arange(scores.shape[-1], device=scores.device).expand_as(scores)
        else:  # the best of all beams are among the best of each
            values, ids = scores.topk(min(wanted, scores.shape[-1]))
        sums = (values + torch.tensor(self.totals, device=values.device, dtype=values.dtype)[:, None]).float()
        sums = sums.view(self.prompts, -1)
        flat = ids.reshape(self.prompts, -1)
        if self.random is None:
            best, place = sums.topk(min(wanted, sums.shape[-1]))
        else:
            place = self.draw(sums, wanted)
            best, order = sums.gather(1, place.clamp(min=0)).masked_fill(place < 0, DEAD).sort(-1, descending=True)
            place = place.gather(1, order).clamp_(min=0)
        found, each = flat.gather(1, place).tolist(), values.shape[-1]
        short = wanted - place.shape[1]
        found_values: list[float] = []
        tokens: list[int] = []
        rows: list[int] = []
        for prompt, (score, token, where) in enumerate(zip(best.tolist(), found, place.tolist(), strict=True)):
            first = prompt * width
            found_values += score + [DEAD] * short
            tokens += token + [0] * short
            rows += [first + at // each for at in where] + [first] * short
        return found_values, tokens, rows

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

    def choose(
        self, run: Run, values: Sequence[float], tokens: Sequence[int], rows: Sequence[int], codes: Sequence[int]
    ) -> tuple[list[int], list[int], int]:
        """Sort candidates into finished hypotheses and beams that go on.

        Returns for each row the row it continues, its token, and the columns that rows trading places share.
        """
        kept, new, start = list(range(run.rows)), [filler(run.pipeline.settings)] * run.rows, run.context.length
        self.totals = [DEAD] * run.rows
        for prompt, pool in enumerate(self.pools):
            if not pool.open:
                continue
            first, going = prompt * self.width, list[int]()
            for rank, at in enumerate(range(prompt * self.judged_per_prompt, (prompt + 1) * self.judged_per_prompt)):
                if values[at] != values[at]:
                    new[rows[at]] = -1  # the run says which processor made NaN of it
                    return kept, new, 0
                if values[at] == DEAD or len(going) == self.width:
                    break
                if codes[at] < 0:
                    going.append(at)
                elif rank < self.width:
                    pool.add(self.hypothesis(run, values[at], tokens[at], rows[at], codes[at], at))
            for row, at in self.seats(first, going, rows).items():
                kept[row], new[row] = rows[at], tokens[at]
                self.totals[row], self.places[row] = values[at], at
                start = min(start, self.shared[row][rows[at] - first])
            self.look_back(first, kept, run.context.length)
            pool.look(max(self.totals[first : first + self.width]), run.made + 1, run.longest)
            if not pool.open and not pool.found:
                new[first] = -1
        return kept, new, start

    def beams_of(self, prompt: int) -> range:
        """The rows of a prompt."""
        return range(prompt * self.width, (prompt + 1) * self.width)

    def seats(self, first: int, going: Sequence[int], rows: Sequence[int]) -> dict[int, int]:
        """Which row each candidate goes on in: its own where it can stay, so that little of the cache is copied."""
        placed: dict[int, int] = {}
        late = [at for at in going if placed.setdefault(rows[at], at) != at]
        free = (row for row in range(first, first + self.width) if row not in placed)
        return {**placed, **dict(zip(free, late, strict=False))}

    def look_back(self, first: int, kept: Sequence[int], length: int) -> None:
        """Note how many columns each two beams of a prompt have in common now."""
        old, beams = self.shared, range(first, first + self.width)
        now = [[length if kept[a] == kept[b] else old[kept[a]][kept[b] - first] for b in beams] for a in beams]
        self.shared[first : first + self.width] = now

    def hypothesis(self, run: Run, total: float, token: int, row: int, code: int, at: int) -> Hypothesis:
        """What candidate `at` is, all of it: it ends here."""
        history, step = [row], row
        for parents in reversed(self.parents):
            step = parents[step]
            history.append(step)
        new = [*run.context.tokens[row, run.context.prompt_width : run.context.length].tolist(), token]
        reason, detail = run.reason(code, at)
        score = total / len(new) ** self.options.length_penalty
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
            pool, more = self.pools[prompt], list[int]()
            if not pool.open and not self.over[row]:
                more = list(pool.found[rank].tokens[len(sure) :]) if rank < len(pool.found) else []
                ended.append(row)
            elif pool.open and rank < max(1, len(pool.found)):
                more = self.common(run, prompt, len(sure))
            sure += more
            new += more
            rows += [row] * len(more)
            self.over[row] = not pool.open
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
        texts += [item.tokens[start:] for item in self.pools[prompt].found]
        return [column[0] for column in itertools.takewhile(lambda at: len(set(at)) == 1, zip(*texts, strict=False))]

    def finish(self, run: Run, output: GenerateDecoderOnlyOutput) -> GenerateBeamDecoderOnlyOutput:
        """The best hypotheses of every prompt, `num_return_sequences` each, best first."""
        found = [hypothesis for pool in self.pools for hypothesis in self._best(run, pool)]
        longest = max(len(item.tokens) for item in found)
        fill, ctx = filler(run.pipeline.settings), run.context
        prompts = ctx.tokens[:: self.width, : ctx.prompt_width].repeat_interleave(self.returned, 0)
        new = torch.tensor([[*item.tokens, *[fill] * (longest - len(item.tokens))] for item in found])
        rows = torch.tensor([[*item.rows, *[-1] * (longest - len(item.rows))] for item in found], dtype=torch.int32)
        return beam_output(
            output,
            sequences=torch.cat([prompts, new.to(prompts)], 1),
            sequences_scores=torch.tensor([item.score for item in found], device=prompts.device),
            beam_indices=rows.to(prompts.device),
            stop_reasons=tuple(item.reason for item in found),
            stop_details=tuple(item.detail for item in found),
            lengths=tuple(len(item.tokens) for item in found),
        )

    def _best(self, run: Run, pool: Pool) -> list[Hypothesis]:
        """The sequences returned of one prompt; a run that was cancelled returns its beams as they are."""
        found = list(pool.found)
        first = self.pools.index(pool) * self.width
        for row in range(first, first + self.width):
            if len(found) >= self.returned:
                break
            if run.made and self.totals[row] != DEAD and not run.finished:
                place = run.context.tokens[row, run.context.prompt_width : run.context.length]
                found.append(Hypothesis(self.totals[row], tuple(place.tolist()), (), "cancelled", None))
        nothing = Hypothesis(DEAD, (), (), "no continuation", None)
        return [*found, *[nothing] * self.returned][: self.returned]
