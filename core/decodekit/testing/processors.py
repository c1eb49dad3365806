"""The conformance suite of logits processors: every claim of `Traits`, and the laws that hold for all."""

from __future__ import annotations

from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor

from decodekit.context import BindContext
from decodekit.converter import plain, structure
from decodekit.shortlist import Shortlist
from decodekit.traits import Phase, Traits, traits_of

from .support import context, score_cases


class ProcessorContract:
    """Subclass it in a file that pytest collects, and name what to test::

        class TestSharpen(ProcessorContract):
            def make(self):
                return Sharpen(power=2.0)

    Give `make` options with which the processor has something to do in a context of a six-column prompt and a
    37-token vocabulary whose end token is 2; override `context` where the plugin needs more, such as a tokenizer.
    Each test states in its name which claim it holds the plugin to; a test of a claim not made is skipped.
    """

    vocab_size = 37
    rows = 4
    prompt_width = 6
    width = 9

    def make(self) -> Any:
        """Return a fresh options object (or a plain processor). It is called many times."""
        raise NotImplementedError(f"{type(self).__name__} must define make()")

    def context(self, tokens: Tensor, mask: Tensor | None, **more: Any) -> BindContext:
        """Return the context to bind in; the first `prompt_width` columns of `tokens` [B, T] are the prompt."""
        return context(tokens, mask, **{"prompt_width": self.prompt_width, "vocab_size": self.vocab_size, **more})

    # -- helpers -----------------------------------------------------------------------------------

    @property
    def traits(self) -> Traits:
        """What the plugin claims."""
        return traits_of(self.make())

    def bound(self, tokens: Tensor, mask: Tensor | None = None, **more: Any) -> Any:
        """A fresh runtime: nothing earlier tests did can be in it. None where it has nothing to do."""
        return self._bind(self.make(), self.context(tokens, mask, **more))

    @staticmethod
    def _bind(options: Any, ctx: BindContext) -> Any:
        return options.bind(ctx) if hasattr(options, "bind") else options

    def run(self, tokens: Tensor, scores: Tensor, mask: Tensor | None = None, **more: Any) -> Tensor:
        """What a fresh runtime makes of copies of the arguments."""
        runtime = self.bound(tokens, mask, **more)
        result: Tensor = scores if runtime is None else runtime(tokens.clone(), scores.clone())
        return result

    def tokens(self, rows: int | None = None, seed: int = 1, low: int = 3) -> Tensor:
        """Random token ids int64 [rows, width]."""
        random = torch.Generator().manual_seed(seed)
        low = min(low, self.vocab_size - 1)
        return torch.randint(low, self.vocab_size, (rows or self.rows, self.width), generator=random)

    def cases(self) -> dict[str, Tensor]:
        """Scores to try, by kind."""
        return score_cases(self.rows, self.vocab_size)

    def left_mask(self) -> Tensor:
        """bool [rows, width]: row i begins with i padded columns, at most all of the prompt but one."""
        pads = torch.arange(self.rows).clamp(max=self.prompt_width - 1)
        return torch.arange(self.width) >= pads[:, None]

    @staticmethod
    def _skip(why: str) -> NoReturn:
        import pytest

        pytest.skip(why)

    # -- laws for all ------------------------------------------------------------------------------

    def test_it_acts(self) -> None:
        """`make` gives something to test: it binds, and changes some scores."""
        tokens, cases = self.tokens(), self.cases()
        masks = (None, self.left_mask())
        changed = [name for name, s in cases.items() for mask in masks if not same(self.run(tokens, s, mask), s)]
        assert changed, "make() gives options that change none of the kit's scores, so nothing would be tested"

    def test_shape_and_dtype_stay(self) -> None:
        """float [B, V] in, the same shape and dtype out, and no NaN made of numbers."""
        for name, scores in self.cases().items():
            for dtype in (torch.float32, torch.float64):
                result = self.run(self.tokens(), scores.to(dtype))
                assert isinstance(result, Tensor), f"{name}: returned {type(result).__name__}"
                assert result.shape == scores.shape, f"{name}: shape {tuple(result.shape)}, not {tuple(scores.shape)}"
                assert result.dtype == dtype, f"{name}: dtype {result.dtype}, not {dtype}"
                assert not result.isnan().any(), f"{name}: NaN made of numbers"

    def test_nan_rows_do_not_crash(self) -> None:
        """Rows with NaN or nothing but -inf pass through; the loop reports them."""
        scores = self.cases()["random"]
        scores[0, 1] = torch.nan
        scores[1] = torch.nan
        scores[2] = -torch.inf
        result = self.run(self.tokens(), scores)
        assert result.shape == scores.shape
        runtime = self.bound(self.tokens())
        if hasattr(runtime, "open_shortlist"):
            runtime.open_shortlist(self.tokens(), scores.clone())
        if hasattr(runtime, "shorten"):
            runtime.shorten(self.tokens(), listed(scores, 11))

    def test_padding_is_never_history(self) -> None:
        """Neither the ids under the padding nor the pad token's id show in the result."""
        mask, tokens = self.left_mask(), self.tokens()
        for name, scores in self.cases().items():
            want = self.run(tokens.masked_fill(~mask, 0), scores, mask, pad=0)
            for pad in (4, min(2, self.vocab_size - 1), self.vocab_size - 1):
                got = self.run(tokens.masked_fill(~mask, pad), scores, mask, pad=pad)
                assert close(got, want), (
                    f"{name}: pad token {pad} instead of 0 changes the scores of rows {rows_off(got, want)}"
                )
            # One row, with and without its padding.
            last = self.rows - 1
            pads = int((~mask[last]).sum())
            padded = self.run(tokens[last:], scores[last:], mask[last:])
            alone = self.run(tokens[last:, pads:], scores[last:], prompt_width=self.prompt_width - pads)
            assert close(padded, alone), f"{name}: {pads} padded columns change the scores of a row"

    def test_a_second_run_starts_clean(self) -> None:
        """State of one call does not reach the next, with the same options object."""
        options, tokens = self.make(), self.tokens()
        scores = self.cases()["random"]
        if not hasattr(options, "bind"):
            self._skip("no bind: the loop copies the object for each call")
        first = self._advance(options, tokens, scores)
        second = self._advance(options, tokens, scores)
        assert all(same(a, b) for a, b in zip(first, second, strict=True)), "the second run differs from the first"

    def _advance(self, options: Any, tokens: Tensor, scores: Tensor) -> list[Tensor]:
        """Run three steps as the loop does: scores, accept, scores, ..."""
        ctx = self.context(tokens, None)
        runtime = self._bind(options, ctx)
        seen = []
        for step in range(3):
            seen.append(scores if runtime is None else runtime(ctx.input_ids.clone(), scores.clone()))
            self._accept(ctx, runtime, torch.arange(self.rows) + 3 + step)
        return seen

    def _accept(self, ctx: BindContext, runtime: Any, new: Tensor) -> None:
        new = new % self.vocab_size
        ctx.reserve(ctx.length + 1)
        ctx.tokens[:, ctx.length] = new
        ctx.length += 1
        if hasattr(runtime, "accept"):
            runtime.accept(new, None)

    def test_rollback_undoes_accept(self) -> None:
        """After `rollback(n)` it answers as before the last n tokens."""
        ctx, scores = self.context(self.tokens(), None), self.cases()["random"]
        runtime = self._bind(self.make(), ctx)
        if not hasattr(runtime, "rollback"):
            self._skip("no rollback: either no state, or none that can be taken back")
        self._accept(ctx, runtime, torch.arange(self.rows) + 5)
        want = runtime(ctx.input_ids.clone(), scores.clone())
        for step in range(2):
            self._accept(ctx, runtime, torch.arange(self.rows) + 9 + step)
        ctx.length -= 2
        runtime.rollback(2)
        assert close(runtime(ctx.input_ids.clone(), scores.clone()), want), "rollback(2) after two tokens left a trace"

    def test_reorder_moves_rows(self) -> None:
        """After `reorder(rows)` row i answers as row `rows[i]` did."""
        scores, new = self.cases()["random"], torch.arange(self.rows) + 5
        rows = (torch.arange(self.rows) * 2 + 1) % self.rows
        found = []
        for moved in (False, True):
            ctx = self.context(self.tokens(), self.left_mask())
            runtime = self._bind(self.make(), ctx)
            if runtime is None:
                self._skip("nothing to do in this context")
            self._accept(ctx, runtime, new)
            if moved:
                ctx.reorder(rows)
                if hasattr(runtime, "reorder"):
                    runtime.reorder(rows)
            found.append(runtime(ctx.input_ids.clone(), scores[rows] if moved else scores.clone()))
        want, got = found
        assert close(got, want[rows]), f"rows {rows_off(got, want[rows])} lost their state when rows changed places"

    def test_shortlist_form_equals_dense_form(self) -> None:
        """`open_shortlist` and `shorten` keep exactly the tokens that `__call__` keeps, and their scores.

        Scores agree bit for bit; in phase NORMALIZE, where they are sums of all others, but for rounding.
        """
        runtime = self.bound(self.tokens())
        if not hasattr(runtime, "open_shortlist") and not hasattr(runtime, "shorten"):
            self._skip("works on dense scores only")
        for vocab in (self.vocab_size, 1, 5000):
            for seed in range(3):
                for name, scores in score_cases(self.rows, vocab, seed).items():
                    self._compare(f"{name}, V={vocab}", self.tokens() % vocab, scores, vocab)

    def _compare(self, name: str, tokens: Tensor, scores: Tensor, vocab: int) -> None:
        runtime = self.bound(tokens, vocab_size=vocab, eos=(min(2, vocab - 1),))
        if runtime is None:
            return
        if hasattr(runtime, "open_shortlist"):
            short = runtime.open_shortlist(tokens, scores.clone())
            if short is not None:
                self._equal(f"open_shortlist, {name}", short, runtime(tokens, scores.clone()))
        if hasattr(runtime, "shorten"):
            for size in (1, 2, 11, 300):
                given = listed(scores, size)
                got = runtime.shorten(tokens, given)
                self._equal(f"shorten, {name}, K={size}", got, runtime(tokens, given.dense()))

    def _equal(self, what: str, short: Shortlist, dense: Tensor) -> None:
        equal = close if self.traits.phase is Phase.NORMALIZE else same
        assert short.values.shape == short.ids.shape, f"{what}: values and ids differ in shape"
        ordered = short.ids.sort(-1).values
        assert (ordered[:, 1:] > ordered[:, :-1]).all(), f"{what}: an id occurs twice in a row"
        assert (short.values[:, 1:] <= short.values[:, :-1]).all(), f"{what}: values do not descend"
        got = short.dense()
        assert equal(got, dense), f"{what}: rows {rows_off(got, dense)} differ from the dense form"

    def test_edit_equals_call(self) -> None:
        """`edit` returns what `__call__` does, and writes into the scores only where they are its own."""
        tokens = self.tokens()
        for mask in (None, self.left_mask()):
            runtime = self.bound(tokens, mask)
            if not hasattr(runtime, "edit"):
                self._skip("does not edit scores in place")
            assert self.traits.pure, "has `edit` without claiming pure, so no chain will use it"
            for name, scores in self.cases().items():
                want = runtime(tokens, scores.clone()).clone()
                kept = scores.clone()
                first = runtime.edit(tokens, kept, False)
                assert same(first, want), f"{name}: edit differs from the call in rows {rows_off(first, want)}"
                assert same(kept, scores), f"{name}: edit wrote into scores that are not its own"
                given = scores.clone()
                second = runtime.edit(tokens, given, True)
                assert same(second, want), f"{name}: edit of own scores differs in rows {rows_off(second, want)}"
                for got, whole in ((first, kept), (second, given)):
                    alias = got.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
                    assert got is whole or not alias, f"{name}: edit returned a part or a view of what it was given"
                    got.fill_(7.0)
                got = runtime.edit(tokens, scores.clone(), False)
                assert same(got, want), f"{name}: edit returns a tensor that it also keeps"

    def test_options_survive_a_round_trip(self) -> None:
        """Options are hashable, and plain data rebuilds them equal."""
        options = self.make()
        if not attrs.has(type(options)):
            self._skip("no attrs class, so no options to store")
        assert hash(options) == hash(self.make()), "two equal options have different hashes"
        again = structure(plain(options), type(options))
        assert again == options, f"plain data rebuilt {again!r}, not {options!r}"

    # -- claims ------------------------------------------------------------------------------------

    def test_claim_pure(self) -> None:
        """pure: arguments stay as they are, and the same arguments give the same result again."""
        if not self.traits.pure:
            self._skip("purity is not claimed")
        for name, scores in self.cases().items():
            tokens, runtime = self.tokens(), self.bound(self.tokens())
            if runtime is None:
                continue
            tokens_before, scores_before = tokens.clone(), scores.clone()
            first = runtime(tokens, scores).clone()
            assert same(scores, scores_before), f"{name}: claims pure, but wrote into scores"
            assert same(tokens, tokens_before), f"{name}: claims pure, but wrote into input_ids"
            runtime(self.tokens(seed=2), -scores.nan_to_num(neginf=0.0))
            assert same(runtime(tokens, scores), first), f"{name}: claims pure, but the same call gave another result"

    def test_claim_rowwise(self) -> None:
        """rowwise: a row among others (one of them NaN) gets what it gets alone, bit for bit in truncations."""
        traits = self.traits
        if not traits.rowwise:
            self._skip("independence of rows is not claimed")
        equal = same if traits.phase is Phase.TRUNCATE else close
        tokens, mask = self.tokens(), self.left_mask()
        for name, scores in self.cases().items():
            for spoilt in (False, True):
                if spoilt:
                    scores = scores.clone()
                    scores[0] = torch.nan
                batch = self.run(tokens, scores, mask)
                for row in range(int(spoilt), self.rows):
                    here = slice(row, row + 1)
                    alone = self.run(tokens[here], scores[here], mask[here])
                    assert equal(batch[here], alone), f"{name}: claims rowwise, but row {row} depends on its neighbours"

    def test_claim_keeps_argmax(self) -> None:
        """keeps_argmax: the likeliest token stays the likeliest."""
        if not self.traits.keeps_argmax:
            self._skip("keeping the likeliest token is not claimed")
        for name, scores in self.cases().items():
            result = self.run(self.tokens(), scores)
            best = result.gather(-1, scores.argmax(-1, keepdim=True))
            assert (best >= result).all(), f"{name}: claims keeps_argmax, but another token became the likeliest"

    def test_claim_reads_no_history(self) -> None:
        """reads_history=False: other tokens, and another number of them, change nothing."""
        if self.traits.reads_history:
            self._skip("it may look at the tokens")
        for name, scores in self.cases().items():
            want = self.run(self.tokens(), scores)
            others = (self.tokens(seed=2), self.tokens(seed=3, low=0), self.tokens()[:, : self.prompt_width])
            for other in others:
                assert same(self.run(other, scores), want), (
                    f"{name}: claims to read no history, but other tokens changed it"
                )

    def test_claim_graph_safe(self) -> None:
        """graph_safe: it never asks for the value of a tensor, which would wait for the device."""
        if not self.traits.graph_safe:
            self._skip("safety inside a captured graph is not claimed")
        from torch._subclasses.fake_tensor import FakeTensorMode

        runtime = self.bound(self.tokens())
        if runtime is None:
            return
        try:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                runtime(mode.from_tensor(self.tokens()), mode.from_tensor(self.cases()["random"]))
        except Exception as error:
            raise AssertionError(f"claims graph_safe, but cannot run without values: {error}") from error


def listed(scores: Tensor, size: int) -> Shortlist:
    """The `size` largest of scores [B, V] as a shortlist."""
    values, ids = scores.topk(min(size, scores.shape[-1]))
    return Shortlist(values, ids, scores.shape[-1])


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit that matters; NaN equals NaN."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


def close(a: Tensor, b: Tensor) -> bool:
    """Equal but for rounding; infinities in the same places."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


def rows_off(a: Tensor, b: Tensor) -> list[int]:
    """Rows in which two results differ."""
    off = (a != b) & ~(a.isnan() & b.isnan())
    return off.any(-1).nonzero()[:, 0].tolist()
