"""Print the text while it is generated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from decodekit.context import BindContext
from decodekit.errors import InputError
from decodekit.text import TextPieces, as_tokenizer
from torch import Tensor


class BaseStreamer:
    """What every streamer has."""

    def put(self, value: Tensor, /) -> None:
        """Take the prompt [B, T] once, then the new tokens of every step, int64 on the CPU."""
        raise NotImplementedError

    def end(self) -> None:
        """The generation is over; deliver whatever was held back."""
        raise NotImplementedError


class TextStreamer(BaseStreamer):
    """Prints the text of a row as soon as it is final: whole characters, and nothing of a stop string.

    tokenizer: of the model; unset, the one of the call.
    skip_prompt: leave the prompt out. The text is then what follows it, the space between them included.
    rows: take as many rows as a call has. They are printed one after another, each with a line break at its end: the
        first as it is made, those behind it when their turn comes. Unset, a call with several rows is refused.
    decode_kwargs: passed to the tokenizer's decode, such as ``skip_special_tokens=True``.

    Override `on_finalized_text` to do something else with the text, or `on_finalized_row` to get that of all rows as
    it is made. Rows are numbered as those of the output: sequences of one prompt are neighbours.
    """

    def __init__(
        self, tokenizer: Any = None, skip_prompt: bool = False, *, rows: bool = False, **decode_kwargs: Any
    ) -> None:
        self.tokenizer = tokenizer
        self.skip_prompt = skip_prompt
        self.rows = rows
        self.decode_kwargs: dict[str, Any] = {"skip_special_tokens": False, **decode_kwargs}
        self._stops: tuple[str, ...] = ()
        self._wrapped: Any = None if tokenizer is None else as_tokenizer(tokenizer)
        self._clear()

    def _clear(self) -> None:
        self._starts: list[tuple[int, int]] = []
        """For each row the columns of padding before it, and the token that the new text says again, or -1."""
        self._pieces: list[TextPieces] = []
        self._over: set[int] = set()
        self._turn = 0
        self._held: dict[int, str] = {}

    def bind(self, ctx: BindContext, /) -> TextStreamer:
        """Take the call's stop strings, and its tokenizer where there is none yet.

        Raises InputError for more rows than one unless `rows` is set, or where no tokenizer is known.
        """
        self._check(ctx.rows)
        if self._wrapped is None:
            if ctx.tokenizer is None:
                raise InputError(f"{type(self).__name__} needs a tokenizer: pass it one, or tokenizer=... to the call")
            self._wrapped = as_tokenizer(ctx.tokenizer)
        stops = ctx.settings.get("stop_strings") or ()
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        self._clear()
        dropped = [-1] * ctx.rows if ctx.dropped is None else ctx.dropped.tolist()
        self._starts = [(ctx.prompt_width - n, dropped[row]) for row, n in enumerate(ctx.prompt_lengths.tolist())]
        return self

    def _check(self, rows: int) -> None:
        if rows > 1 and not self.rows:
            raise InputError(
                f"this {type(self).__name__} shows one row, got {rows}: make it with rows=True, or pass one prompt "
                f"with num_return_sequences=1"
            )

    # -- tokens come in ----------------------------------------------------------------------------

    def put(self, value: Tensor | Sequence[int], /) -> None:
        """Take the prompts [rows, T], then new tokens [rows], or any number of them where there is one row.

        Raises InputError for several rows unless `rows` is set.
        """
        if isinstance(value, Tensor):
            several = value.shape[0] if value.dim() > 1 else 1
            self._check(several)
            tokens = value.reshape(len(self._pieces) or several, -1).tolist()
        else:
            tokens = [list(value)]
        if not self._pieces:
            self._begin(tokens)
            return
        for row, new in enumerate(tokens):
            self._push(row, new)

    def put_rows(self, tokens: Tensor, rows: Sequence[int], /) -> None:
        """Take new tokens [N], of which token i goes on with row `rows[i]`."""
        for row, token in zip(rows, tokens.tolist(), strict=True):
            self._push(row, [token])

    def end_row(self, row: int, /) -> None:
        """Deliver the rest of a row: it has ended, others have not."""
        if row not in self._over:
            self._over.add(row)
            self._say(row, self._pieces[row].finish(), True)

    def end(self) -> None:
        """Deliver the rest, and be ready for another call."""
        for row in range(len(self._pieces)):
            self.end_row(row)
        if not self._pieces and not self.rows:
            self.on_finalized_text("", stream_end=True)
        self._clear()

    def _begin(self, prompts: Sequence[Sequence[int]]) -> None:
        if self._wrapped is None:
            raise InputError(f"{type(self).__name__} needs a tokenizer: pass it one")
        starts = self._starts or [(0, -1)] * len(prompts)
        self._pieces = [self._wrapped.pieces(self._stops, **self.decode_kwargs) for _ in prompts]
        for row, ((padding, dropped), prompt) in enumerate(zip(starts, prompts, strict=True)):
            text = self._pieces[row].prompt(prompt[padding:])
            if dropped >= 0:
                text += self._pieces[row].repeat([dropped])
            if not self.skip_prompt:
                self._say(row, text)

    def _push(self, row: int, tokens: Sequence[int]) -> None:
        if row not in self._over:
            self._say(row, self._pieces[row].push(tokens))

    def _flush(self) -> None:
        """Deliver what was held back, of a call that goes no further."""
        for row, pieces in enumerate(self._pieces):
            if row not in self._over:
                self._say(row, pieces.finish())
        self._clear()

    # -- text goes out -----------------------------------------------------------------------------

    def _say(self, row: int, text: str, end: bool = False) -> None:
        if not text and not end:
            return
        if self.rows:
            self.on_finalized_row(row, text, row_end=end)
        else:
            self.on_finalized_text(text, stream_end=end)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with new text, never to change again; `stream_end` with the last of a row, which may be empty."""
        print(text, flush=True, end="\n" if stream_end else "")

    def on_finalized_row(self, row: int, text: str, row_end: bool = False) -> None:
        """With `rows`, called with new text of a row in place of `on_finalized_text`; `row_end` with the last of it.

        As it is, it passes the rows on to `on_finalized_text` one after another.
        """
        self._held[row] = self._held.get(row, "") + text
        while self._turn in self._held:
            over = self._turn in self._over
            if (ready := self._held.pop(self._turn)) or over:
                self.on_finalized_text(ready, stream_end=over)
            if not over:
                return
            self._turn += 1
