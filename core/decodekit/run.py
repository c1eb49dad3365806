"""The bookkeeping of a decoding loop: buffers, state, stop rules, records. Strategies hold the algorithm."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from .chain import Part
from .context import BindContext
from .errors import Cancelled, GenerationError
from .graphs import outside_graphs
from .hooks import hooks
from .options import Choices, Outputs
from .outputs import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput
from .pipeline import Pipeline, cache_offers
from .prompt import filler, places, repeat
from .shortlist import Shortlist


@outside_graphs
def _advance(steps: Iterator[Step]) -> Step | None:
    """The next step. Gradients are off while the model runs, and as the consumer had them in between."""
    with torch.no_grad():
        return next(steps, None)


def _ignore(*_: Any) -> None:
    """What an optional ability does where it is missing."""


def _sheltered(part: Part) -> Any:
    """A criterion that may write into what it gets without harm: objects of the caller promise nothing."""
    if part.traits.pure or part.owner != "caller":
        return part.runtime

    def call(input_ids: Tensor, scores: Any) -> Any:
        return part.runtime(input_ids.clone(), scores)

    return call


@attrs.frozen
class Step:
    """What one step of a strategy made."""

    index: int
    """Number of the step, from 0."""
    tokens: Tensor
    """int64 [rows], or [rows, N] where a step makes several; rows that ended before hold the pad token."""
    finished: tuple[bool, ...]
    """Rows that have ended by now."""
    settled: Tensor | None = None
    """int64 [returned rows, N] tokens that are final, of strategies that may change their mind; None: `tokens` are."""


class Run:
    """One call of one pipeline. Strategies use `prefill`, `forward`, `process`, `select` and `accept`."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.context = ctx = pipeline.context
        self.outputs = pipeline.settings.of(Outputs)
        self.rows = ctx.rows
        self.listened = pipeline.streamer is not None
        """Whether somebody wants tokens as soon as they are settled."""
        self.by_row = hasattr(pipeline.streamer, "put_rows") and pipeline.streamed.rows > 1
        """Whether the streamer takes tokens of some rows only, and hears of their ends."""
        self.chain = pipeline.chain
        self.finished = False
        self.steps = 0
        self.cache = pipeline.cache
        self.candidates = tuple(part.runtime for part in pipeline.candidates)
        self.reasons = [""] * self.rows
        self.details: list[Any] = [None] * self.rows
        self.lengths = [0] * self.rows
        names = ("scores", "logits", "attentions", "cross_attentions", "hidden_states")
        self.records: dict[str, list[Any]] = {name: [] for name in names}
        self._encoded: dict[str, Any] = {}
        width = ctx.prompt_width
        # A huge limit is no reason to take memory for it now: the buffer grows.
        ctx.reserve(max(width + 64, min(ctx.max_length or 0, width + 4096)))
        self._past = pipeline.prompt.past
        self._use_cache = pipeline.settings.of(Choices).use_cache
        self._fill = filler(pipeline.settings)
        self._known = ctx.spec.num_embeddings or ctx.spec.vocab_size
        self._running = torch.ones(self.rows, dtype=torch.bool, device=ctx.tokens.device)
        self._flags = [False] * self.rows
        self._positions = pipeline.prompt.positions[:, -1:].clone()
        self._past_mask = pipeline.prompt.past_mask
        self._criteria = [(part, _sheltered(part)) for part in pipeline.criteria]
        stateful = [*(p.runtime for p in self.chain.parts), *self.candidates]
        # Criteria may look at candidates in rows of their own: then they follow those.
        stateful += [part.runtime for part in pipeline.criteria if pipeline.judged is ctx]
        self._accepts = [item.accept for item in stateful if hasattr(item, "accept")]
        self._reorders = [item for item in stateful if hasattr(item, "reorder")]
        self._last_logits: Tensor | None = None
        out = self.outputs
        self.extra = {**({"output_attentions": True} if out.output_attentions else {}), **pipeline.model_kwargs}
        """What every pass of the model gets beside tokens: from `prefill` on with a row for each row."""
        self.taps: Sequence[int] = range(1 + (ctx.spec.num_layers or 0)) if out.output_hidden_states else ()
        """Layers whose states every pass adds to `records`; a strategy may ask for some, and take them out again."""

    def __iter__(self) -> Iterator[Step]:
        """Drive the strategy: stream, hooks and errors included. Closing the iterator cancels the run."""
        pipeline, streamer = self.pipeline, self.pipeline.streamer
        with hooks.around(pipeline):
            steps: Any = None
            try:
                steps = pipeline.strategy.decode(self)
                if streamer is not None:
                    streamer.put(pipeline.streamed.tokens[:, : self.context.prompt_width].to("cpu", copy=True))
                while (step := _advance(steps)) is not None:
                    yield step
                if not self.finished:
                    raise GenerationError(f"strategy {pipeline.strategy_name!r} ended before every row was finished")
                getattr(streamer, "end", _ignore)()
            except GeneratorExit:
                raise
            except Cancelled:  # the consumer of the streamer went away: not an error of this call
                return
            except BaseException as error:
                told = hooks.call.run_failed(pipeline=pipeline, step=self.steps, error=error) or error
                getattr(streamer, "fail", _ignore)(told)
                if told is error:
                    raise
                raise told from error
            finally:
                getattr(steps, "close", _ignore)()
        if hooks.call.run_finished.get_hookimpls():
            hooks.call.run_finished(pipeline=pipeline, output=self.output())

    # -- the model ---------------------------------------------------------------------------------

    def prefill(self) -> Tensor:
        """Run the prompt and return the logits after it: float32 [rows, V]."""
        pipeline, prompt = self.pipeline, self.pipeline.prompt
        if (encode := getattr(pipeline.adapter, "encode", None)) is not None:
            more = {"output_hidden_states": True} if self.outputs.output_hidden_states else {}
            self.extra, self._encoded = encode({**self.extra, **more})
        self.extra = repeat(self.extra, self.rows // pipeline.copies, pipeline.copies)
        tokens, positions = prompt.tokens, prompt.positions
        if self._past and not prompt.fresh:
            tokens, positions = tokens[:, self._past :], positions[:, self._past :]
        size = pipeline.settings.of(Choices).prefill_chunk_size or tokens.shape[1]
        while tokens.shape[1] > size and self.cache is not None:
            self._forward(tokens[:, :size], positions[:, :size], tokens.shape[1] - size)
            tokens, positions = tokens[:, size:], positions[:, size:]
        logits, states = self._forward(tokens, positions), self.records["hidden_states"]
        # Whoever wants the states of the prompt shall not care how it was read.
        states[:] = [tuple(torch.cat(layer, 1) for layer in zip(*states, strict=True))] if len(states) > 1 else states
        return logits

    def forward(self, tokens: Tensor) -> Tensor:
        """Run the newest tokens int64 [rows] and return the logits after them: float32 [rows, V]."""
        if self.cache is None:
            return self._forward(self.context.input_ids, places(self.whole()))
        self._positions += 1
        return self._forward(tokens.unsqueeze(1) if tokens.dim() == 1 else tokens, self._positions)

    def whole(self) -> Tensor:
        """bool [rows, K]: which of all tokens are real, those before `tokens` that a cache holds included."""
        mask, held = self.context.history_mask(), self._past_mask
        real = torch.ones_like(self.context.input_ids, dtype=torch.bool) if mask is None else mask
        before = self._past if self.pipeline.prompt.fresh else 0
        held = real.new_ones(self.rows, before) if held is None else held
        return torch.cat([held, real], dim=1)

    def _forward(self, tokens: Tensor, positions: Tensor, ahead: int = 0) -> Tensor:
        mask = self.context.history_mask() if self._past_mask is None else self.whole()
        if ahead and mask is not None:
            mask = mask[:, : mask.shape[1] - ahead]
        result = self.pipeline.adapter.forward(
            tokens, positions, self.cache, mask=mask, last=1, hidden=self.taps, **self.extra
        )
        if self._use_cache and result.cache is not None:
            self.cache = result.cache
        if self.taps:
            self.records["hidden_states"].append(tuple(result.hidden[layer] for layer in self.taps))
        if self.outputs.output_attentions:
            for name in ("attentions", "cross_attentions"):
                self.records[name].append(result.extra.get(name))
        logits = result.logits
        if logits.dim() != 3 or logits.shape[0] != self.rows or not logits.is_floating_point():
            got = f"{logits.dtype} {tuple(logits.shape)}"
            raise GenerationError(f"the model must give floating logits [{self.rows}, n, V], got {got}")
        return logits.select(1, -1).float()

    # -- scores and tokens -------------------------------------------------------------------------

    def process(self, logits: Tensor, normalise: bool = False) -> Tensor | Shortlist:
        """Apply the chain to float32 logits [rows, V]; `normalise`: to their log-probabilities."""
        if self.outputs.output_logits:
            self.records["logits"].append(logits.clone())
        self._last_logits = logits
        scores = self.chain(self.context.input_ids, logits.log_softmax(-1) if normalise else logits)
        if self.outputs.output_scores:
            self.records["scores"].append(scores.dense() if isinstance(scores, Shortlist) else scores.clone())
        return scores

    def select(self, scores: Tensor | Shortlist) -> Tensor:
        """Pick one token of every row: int64 [rows], -1 where a row has none to pick."""
        return self.pipeline.selector(scores, self.context)

    def accept(self, tokens: Tensor) -> Step:
        """Write new tokens [rows] or [rows, N], advance all state and find out which rows end.

        Several tokens are taken one by one, so that a row ends at the same token however many a step makes.
        """
        if tokens.dim() == 1:
            tokens = self._accept(tokens)
        else:
            columns = []
            for column in tokens.unbind(1):
                columns.append(self._accept(column))
                if self.finished:
                    break
            tokens = torch.stack(columns, dim=1)
        self.steps += 1
        return Step(self.steps - 1, tokens, tuple(self._flags))

    def _accept(self, tokens: Tensor) -> Tensor:
        if tokens.shape != (self.rows,):
            who = f"strategy {self.pipeline.strategy_name!r}, or selector {self.pipeline.selector_name!r},"
            raise GenerationError(f"{who} gave tokens {tuple(tokens.shape)} where there are {self.rows} rows")
        if True in self._flags:
            tokens = tokens.masked_fill(~self._running, self._fill)
        self._check(tokens.tolist())
        self.context.append(tokens)
        for accept in self._accepts:
            accept(tokens, None)
        going = [row for row, done in enumerate(self._flags) if not done] if self.by_row else None
        self._stop()
        self.put(tokens if going is None else tokens[going], going, [row for row in going or () if self._flags[row]])
        return tokens

    def put(self, tokens: Tensor, rows: Sequence[int] | None = None, ended: Sequence[int] = ()) -> None:
        """Hand new tokens [N] to the streamer. Only strategies that settle tokens late need to.

        rows: where `by_row`, the returned row of each; else the tokens are one for every row. ended: rows that have
        their last token now.
        """
        streamer: Any = self.pipeline.streamer
        if self.by_row and rows is not None:
            streamer.put_rows(tokens.cpu(), rows)
            for row in ended:
                streamer.end_row(row)
        elif streamer is not None:
            streamer.put(tokens.cpu())

    def advance(self, rows: Sequence[int], new: Sequence[int], finished: Sequence[bool], start: int = 0) -> Step:
        """Row i becomes former row `rows[i]` and goes on with token `new[i]`; criteria are not asked.

        finished: rows that need not go on; the run ends with the last one. start: columns before it are the same in
        the rows that trade places.
        """
        tokens = torch.tensor(new, device=self.context.tokens.device)
        self._check(new)
        if any(i != row for i, row in enumerate(rows)):
            self.reorder(torch.tensor(rows, device=tokens.device), start)
        self.context.append(tokens)
        for accept in self._accepts:
            accept(tokens, None)
        self.steps += 1
        self._flags, self.finished = list(finished), all(finished)
        return Step(self.steps - 1, tokens, tuple(finished))

    def ask(self, ctx: BindContext) -> list[tuple[Part, Tensor]]:
        """The criteria that have something to say of the rows of `ctx`, and what: bool [rows], true where one ends."""
        record = tuple(self.records["scores"]) if self.outputs.output_scores else None
        said = [(part, call(ctx.input_ids, record)) for part, call in self._criteria]
        return [(part, self._verdict(part, verdict, ctx.rows)) for part, verdict in said if verdict is not False]

    def _stop(self) -> None:
        verdicts = self.ask(self.context)
        if not verdicts:
            return
        newly = functools.reduce(torch.logical_or, [verdict for _, verdict in verdicts]) & self._running
        if not bool(newly.any()):
            return
        for row in newly.nonzero()[:, 0].tolist():
            part = next(part for part, verdict in verdicts if bool(verdict[row]))
            self.reasons[row] = part.name
            if hasattr(part.runtime, "why"):
                self.details[row] = part.runtime.why(row)
            self.lengths[row] = self.context.length - self.context.prompt_width
            self._flags[row] = True
        self._running &= ~newly
        self.finished = all(self._flags)

    def _verdict(self, part: Any, verdict: Any, rows: int) -> Tensor:
        device = self._running.device
        if isinstance(verdict, Tensor) and verdict.shape == (rows,) and verdict.dtype == torch.bool:
            return verdict if verdict.device == device else verdict.to(device)
        verdict = torch.tensor(verdict) if isinstance(verdict, bool) else verdict
        if isinstance(verdict, Tensor) and verdict.numel() in (1, rows) and not verdict.is_floating_point():
            return verdict.to(device).bool().reshape(-1).expand(rows)
        raise GenerationError(
            f"stopping criterion {part.name!r} ({part.owner}) must return a bool tensor of shape [{rows}], "
            f"got {f'{verdict.dtype} {tuple(verdict.shape)}' if isinstance(verdict, Tensor) else repr(verdict)}"
        )

    def _check(self, tokens: Sequence[int]) -> None:
        if self.finished:
            raise GenerationError(f"strategy {self.pipeline.strategy_name!r} went on when every row was finished")
        if min(tokens) >= 0 and max(tokens) < self._known:
            return
        row, token = next((row, token) for row, token in enumerate(tokens) if not 0 <= token < self._known)
        if token == -1 and self._last_logits is not None:
            told = hooks.call.nothing_left(pipeline=self.pipeline, logits=self._last_logits, row=row, step=self.steps)
            raise told or GenerationError(f"no token can be chosen (row {row}, step {self.steps})")
        raise GenerationError(
            f"strategy {self.pipeline.strategy_name!r} accepted token {token}, which is outside the model's vocabulary "
            f"of {self._known} (row {row}, step {self.steps})"
        )

    # -- rows --------------------------------------------------------------------------------------

    def reorder(self, rows: Tensor, start: int = 0) -> None:
        """Row i becomes a copy of former row `rows[i]` everywhere: buffers, cache, plugin state.

        start: columns before it are the same in the rows that trade places.
        """
        self.context.reorder(rows)
        if self._past_mask is not None:
            self._past_mask = self._past_mask[rows]
        if self.context.mask is not None or self._past_mask is not None:  # else they are the same everywhere
            self._positions = self._positions[rows]
        if start and "reorder_tail" in cache_offers(self.cache):
            self.cache.reorder_tail(rows, start + (self._past if self.pipeline.prompt.fresh else 0))
        elif self.cache is not None:
            self.cache.reorder_cache(rows)
        for item in self._reorders:
            item.reorder(rows)
        if True in self._flags:  # who has ended, and why, goes along
            self._running, order = self._running[rows], rows.tolist()
            for name in ("_flags", "reasons", "details", "lengths"):
                setattr(self, name, [getattr(self, name)[row] for row in order])

    # -- the end -----------------------------------------------------------------------------------

    def output(self) -> GenerateDecoderOnlyOutput:
        """Everything recorded so far."""
        ctx = self.context
        new = ctx.length - ctx.prompt_width
        kept: dict[str, Any] = {name: tuple(record) or None for name, record in self.records.items()}
        cross, kind = kept.pop("cross_attentions"), GenerateDecoderOnlyOutput
        if ctx.spec.is_encoder_decoder:
            kind = GenerateEncoderDecoderOutput
            inner = {f"decoder_{name}": kept.pop(name) for name in ("attentions", "hidden_states")}
            kept |= {**self._encoded, **inner, "cross_attentions": cross}
        output = kind(
            sequences=ctx.input_ids.clone(), **kept, cache=self.cache, stop_details=tuple(self.details),
            stop_reasons=tuple(reason or "cancelled" for reason in self.reasons), prompt_width=ctx.prompt_width,
            lengths=tuple(n if done else new for n, done in zip(self.lengths, self._flags, strict=True)),
        )  # fmt: skip
        finish = getattr(self.pipeline.strategy, "finish", None)
        return output if finish is None else finish(self, output)
