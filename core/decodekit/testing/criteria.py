"""The conformance suite of stopping criteria: what a row is told depends on that row and its accepted tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import attrs
import torch
from torch import Tensor

from decodekit.context import BindContext
from decodekit.converter import plain, structure

from .support import Letters, context

FAR = 1000
"""New tokens up to which a criterion's `limit` is walked to."""


class CriterionContract:
    """Subclass it in a file that pytest collects, and name what to test::

        class TestAtMost(CriterionContract):
            def make(self):
                return AtMost(tokens=4)

    Give `make` options with which some row of `tokens` ends within `steps` new tokens. The vocabulary has 37 tokens,
    the end token is 2, token t is a letter for criteria that read text, and row i meets token 2 as one of its new
    tokens; override `tokens` or `context` where the plugin needs something else. Tests of abilities that the criterion
    does not offer are skipped.
    """

    vocab_size = 37
    rows = 4
    prompt_width = 6
    steps = 12

    def make(self) -> Any:
        """Return a fresh options object (or a plain criterion). It is called many times."""
        raise NotImplementedError(f"{type(self).__name__} must define make()")

    def context(self, tokens: Tensor, mask: Tensor | None, **more: Any) -> BindContext:
        """Return the context to bind in; `tokens` [B, T] is the prompt."""
        return context(tokens, mask, **{"vocab_size": self.vocab_size, "tokenizer": Letters(), **more})

    def tokens(self, seed: int = 1) -> Tensor:
        """Prompt and new tokens int64 [rows, prompt_width + steps]; each row meets token 2 at a place of its own."""
        random = torch.Generator().manual_seed(seed)
        found = torch.randint(3, self.vocab_size, (self.rows, self.prompt_width + self.steps), generator=random)
        at = torch.arange(self.rows)
        found[at, self.prompt_width + (at * 5 + seed) % self.steps] = 2
        return found

    # -- helpers -----------------------------------------------------------------------------------

    def left_mask(self) -> Tensor:
        """bool [rows, prompt_width]: row i begins with i padded columns, at most all of the prompt but one."""
        pads = torch.arange(self.rows).clamp(max=self.prompt_width - 1)
        return torch.arange(self.prompt_width) >= pads[:, None]

    def start(self, tokens: Tensor, mask: Tensor | None = None, options: Any = None, **more: Any) -> Walk:
        """A criterion bound to the prompts of `tokens`, before the first new token."""
        options = self.make() if options is None else options
        width = self.prompt_width if mask is None else mask.shape[1]
        ctx = self.context(tokens[:, :width].clone(), None if mask is None else mask.clone(), **more)
        return Walk(ctx, options.bind(ctx) if hasattr(options, "bind") else options, tokens[:, width:])

    def ends(self, tokens: Tensor, mask: Tensor | None = None, fill: int = 0, **more: Any) -> list[int | None]:
        """New tokens each row has when it ends, as the loop sees it; None: it never does."""
        walk = self.start(tokens, mask, **more)
        return walk.ends(fill) if walk.runtime is not None else [None] * tokens.shape[0]

    def need(self, ability: str) -> None:
        """Skip the test where the bound criterion does not have this method."""
        if not hasattr(self.start(self.tokens()).runtime, ability):
            self._skip(f"no {ability}")

    @staticmethod
    def _skip(why: str) -> NoReturn:
        import pytest

        pytest.skip(why)

    # -- what it is --------------------------------------------------------------------------------

    def test_it_acts(self) -> None:
        """`make` gives something to test: some row ends."""
        words = f"make() gives options that end no row within {self.steps} tokens, so nothing would be tested"
        assert any(end is not None for end in self.ends(self.tokens())), words

    def test_bind_gives_a_criterion_or_none(self) -> None:
        """`bind` returns something to call, or None for nothing to do."""
        runtime = self.start(self.tokens()).runtime
        assert runtime is None or callable(runtime), f"bind returned {runtime!r}, which cannot be called"

    def test_verdict_is_bool_per_row(self) -> None:
        """Bool [B] on the device of the tokens, or the plain False that says cheaply: no row."""
        devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        for device in devices:
            walk = self.start(self.tokens().to(device), device=device)
            while walk.runtime is not None and walk.left:
                walk.accept()
                said = walk.say()
                if said is False:
                    continue
                assert isinstance(said, Tensor), f"returned {said!r}; a tensor of bool [B] is needed, or plain False"
                assert said.dtype == torch.bool, f"returned {said.dtype}, not bool"
                assert said.shape == (self.rows,), f"returned shape {tuple(said.shape)}, not ({self.rows},)"
                assert said.device == walk.ctx.tokens.device, f"answered on {said.device}, the tokens are on {device}"

    def test_options_are_frozen_and_survive_a_round_trip(self) -> None:
        """Options cannot change, are hashable, and plain data rebuilds them equal."""
        options = self.make()
        if not attrs.has(type(options)):
            self._skip("no attrs class, so no options to store")
        for field in attrs.fields(type(options)):
            try:
                setattr(options, field.name, getattr(options, field.name))
            except AttributeError:
                continue
            raise AssertionError(f"{field.name} can be set: make the options class attrs.frozen")
        assert hash(options) == hash(self.make()), "two equal options have different hashes"
        again = structure(plain(options), type(options))
        assert again == options, f"plain data rebuilt {again!r}, not {options!r}"

    # -- laws --------------------------------------------------------------------------------------

    def test_arguments_stay(self) -> None:
        """Tokens, mask and recorded scores are not written to, neither by a call nor by `accept`."""
        walk = self.start(self.tokens(), self.left_mask())
        scores: tuple[Tensor, ...] = ()
        while walk.runtime is not None and walk.left:
            new = walk.write()
            scores = (*scores, torch.zeros(self.rows, self.vocab_size))
            assert walk.ctx.mask is not None
            held = (walk.ctx.tokens, walk.ctx.mask, new, *scores)
            before = [tensor.clone() for tensor in held]
            if hasattr(walk.runtime, "accept"):
                walk.runtime.accept(new, None)
            walk.runtime(walk.ctx.input_ids, scores)
            changed = [i for i, (a, b) in enumerate(zip(held, before, strict=True)) if not torch.equal(a, b)]
            assert not changed, f"wrote into {('tokens', 'the mask', 'accepted tokens', 'scores')[min(changed[0], 3)]}"

    def test_rows_do_not_depend_on_each_other(self) -> None:
        """A row ends in a batch where it ends alone, whoever its neighbours are."""
        mask = self.left_mask()
        for seed in (1, 2):
            tokens = self.tokens(seed)
            for given in (None, mask):
                batch = self.ends(tokens, given)
                for row in range(self.rows):
                    here = slice(row, row + 1)
                    alone = self.ends(tokens[here], None if given is None else given[here])
                    words = f"row {row} ends after {batch[row]} tokens in a batch, after {alone[0]} alone"
                    assert batch[row] == alone[0], words

    def test_padding_does_not_matter(self) -> None:
        """Neither the number of padded columns, nor the ids under them, nor those after a row's end, change an end."""
        mask, tokens = self.left_mask(), self.tokens()
        for row in range(self.rows):
            here, pads = slice(row, row + 1), int((~mask[row]).sum())
            bare = tokens[here, pads:]
            want = self.ends(bare, torch.ones(1, self.prompt_width - pads, dtype=torch.bool))
            for pad in (0, 2, 4, self.vocab_size - 1):
                filled = torch.cat([torch.full((1, pads), pad), bare], 1)
                got = self.ends(filled, mask[here], fill=pad, pad=pad)
                words = f"{pads} columns of pad token {pad}: row {row} ends after {got[0]} tokens, not {want[0]}"
                assert got == want, words

    def test_calls_change_nothing(self) -> None:
        """State advances in `accept` alone: asking again, or more often, gives the same."""
        rare, often = self.start(self.tokens()), self.start(self.tokens())
        while rare.runtime is not None and rare.left:
            rare.accept()
            often.accept()
            want = rare.verdict()
            for time in ("once", "twice", "three times"):
                assert torch.equal(often.verdict(), want), f"the verdict changed when asked {time}: {often.where()}"

    def test_two_binds_are_independent(self) -> None:
        """What one call leaves behind reaches neither a later call nor one that runs at the same time."""
        options = self.make()
        if not hasattr(options, "bind"):
            self._skip("no bind: the loop copies the object for each call")
        tokens, others = self.tokens(), self.tokens(seed=2)
        want = self.ends(tokens)
        waiting = self.start(tokens, options=options)
        if waiting.runtime is None:
            self._skip("nothing to do in this context")
        self.start(others, options=options).ends()
        assert waiting.ends() == want, "a call that was bound before another one ran ends elsewhere"
        again = self.start(tokens, options=options).ends()
        assert again == want, "the second call with the same options ends elsewhere"

    # -- abilities ---------------------------------------------------------------------------------

    def test_several_tokens_equal_one_by_one(self) -> None:
        """`accept` of [B, N] leaves the state of N times [B]."""
        self.need("accept")
        for size in (1, 2, 3, 5):
            one, several = self.start(self.tokens()), self.start(self.tokens())
            while one.left >= size:
                for _ in range(size):
                    one.accept()
                several.accept(size)
                words = f"{size} tokens in one accept: another verdict than one by one, {one.where()}"
                assert torch.equal(several.verdict(), one.verdict()), words

    def test_named_rows_equal_all_in_order(self) -> None:
        """`accept(tokens, rows)` gives the tokens to the rows named, in any order."""
        self.need("accept")
        whole, parts = self.start(self.tokens()), self.start(self.tokens())
        while whole.left:
            whole.accept()
            new = parts.write()
            for rows in (torch.arange(self.rows - 1, 0, -1), torch.tensor([0])):
                parts.runtime.accept(new[rows], rows)
            assert torch.equal(parts.verdict(), whole.verdict()), f"tokens went to other rows: {whole.where()}"

    def test_rollback_undoes_accept(self) -> None:
        """After `rollback(n)` everything goes on as if the last n calls of `accept` had not been."""
        self.need("rollback")
        plain_, back = self.start(self.tokens()), self.start(self.tokens())
        while plain_.left >= 4:
            want = plain_.verdict() if plain_.started else None
            for sizes in ((1,), (1, 1), (2, 1)):
                here = back.ctx.length
                for size in sizes:
                    back.accept(size)
                back.verdict()
                back.ctx.length = here
                back.runtime.rollback(len(sizes))
                words = f"rollback({len(sizes)}) left a trace: {plain_.where()}"
                assert want is None or torch.equal(back.verdict(), want), words
            plain_.accept()
            back.accept()
            assert torch.equal(back.verdict(), plain_.verdict()), f"rollback left a trace: {plain_.where()}"

    def test_reorder_moves_rows(self) -> None:
        """After `reorder(rows)` row i goes on as row `rows[i]` would have."""
        walk = self.start(self.tokens(), self.left_mask())
        if hasattr(walk.runtime, "accept") and not hasattr(walk.runtime, "reorder"):
            self._skip("state without reorder: it works where rows stay in place")
        rows = (torch.arange(self.rows) * 2 + 1) % self.rows
        for place in range(1, self.steps):
            stays, moves = (self.start(self.tokens(), self.left_mask()) for _ in range(2))
            if stays.runtime is None:
                self._skip("nothing to do in this context")
            for walk in (stays, moves):
                for _ in range(place):
                    walk.accept()
                    walk.verdict()
            moves.reorder(rows)
            while stays.left:
                got, want = moves.verdict(), stays.verdict()[rows]
                off = (got != want).nonzero()[:, 0].tolist()
                words = f"rows changed places after {place} tokens; rows {off} are off"
                assert torch.equal(got, want), f"{words}, {stays.where()}"
                stays.accept()
                moves.accept()

    def test_limit_is_kept(self) -> None:
        """At the width `limit` names, every row has ended."""
        self.need("limit")
        mask = self.left_mask()
        for given in (None, mask):
            walk = self.start(self.tokens(), given)
            limit = walk.runtime.limit(self.prompt_width)
            assert isinstance(limit, int), f"limit is {limit!r}, not a whole number"
            assert limit > self.prompt_width, f"limit is {limit}: no token fits after a prompt of {self.prompt_width}"
            if limit - self.prompt_width > FAR:
                self._skip(f"the limit of {limit} is too far to walk to")
            # Tokens that end nothing by themselves, as far as the kit knows.
            walk.new = self.tokens()[:, :1].clamp(min=3).expand(-1, limit - self.prompt_width)
            late = [row for row, end in enumerate(walk.ends()) if end is None]
            assert not late, f"limit promises that no row passes {limit}; rows {late} go on"

    def test_why_of_rows_that_ended(self) -> None:
        """`why(row)` says something of every row that it ended, and the same again."""
        self.need("why")

        def ask(runtime: Any, row: int) -> None:
            first = runtime.why(row)
            assert first is not None, f"why({row}) says nothing of a row that ended"
            assert runtime.why(row) == first, f"why({row}) says something else when asked again"

        for seed in (1, 2):
            self.start(self.tokens(seed)).ends(ended=ask)


@attrs.define
class Walk:
    """One call as the loop makes it: tokens are written, then accepted, then the criterion is asked."""

    ctx: BindContext
    runtime: Any
    new: Tensor
    """int64 [B, N]: the tokens that the rows will get."""

    @property
    def made(self) -> int:
        """New tokens so far."""
        return self.ctx.length - self.ctx.prompt_width

    @property
    def started(self) -> bool:
        """Whether there is a new token to ask about: the loop never asks about a prompt."""
        return self.made > 0

    @property
    def left(self) -> int:
        """New tokens to come."""
        return self.new.shape[1] - self.made

    def where(self) -> str:
        """The place, for messages."""
        return f"at new token {self.made}"

    def write(self, count: int = 1, new: Tensor | None = None) -> Tensor:
        """Put the next tokens into the buffer and return them: [B], or [B, count]."""
        new = self.new[:, self.made : self.made + count] if new is None else new
        end = self.ctx.length + count
        self.ctx.reserve(end)
        self.ctx.tokens[:, self.ctx.length : end] = new
        self.ctx.length = end
        return (new if count > 1 else new[:, 0]).clone()

    def accept(self, count: int = 1, new: Tensor | None = None) -> None:
        """Write the next tokens and hand them to the criterion."""
        new = self.write(count, new)
        if hasattr(self.runtime, "accept"):
            self.runtime.accept(new, None)

    def say(self) -> Any:
        """What the criterion says, as it says it."""
        return self.runtime(self.ctx.input_ids.clone(), None)

    def verdict(self) -> Tensor:
        """What the criterion says, as bool [B] on the CPU."""
        said = self.say()
        return torch.as_tensor(said).bool().cpu().reshape(-1).expand(self.ctx.rows).clone()

    def reorder(self, rows: Tensor) -> None:
        """Rows change places, in the buffers, in the state and in what is to come."""
        self.ctx.reorder(rows)
        self.new = self.new[rows]
        if hasattr(self.runtime, "reorder"):
            self.runtime.reorder(rows)

    def ends(self, fill: int = 0, ended: Callable[[Any, int], None] | None = None) -> list[int | None]:
        """Go on to the end: the number of new tokens with which each row ends. Rows that ended get `fill`.

        ended: called with the runtime and the row, as soon as a row ends.
        """
        found: list[int | None] = [None] * self.ctx.rows
        while self.left and None in found:
            over = torch.tensor([end is not None for end in found])
            self.accept(new=self.new[:, self.made : self.made + 1].masked_fill(over[:, None], fill))
            for row in (self.verdict() & ~over).nonzero()[:, 0].tolist():
                found[row] = self.made
                if ended is not None:
                    ended(self.runtime, row)
        return found
