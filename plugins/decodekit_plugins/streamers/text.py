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
    """Prints the text of one row as soon as it is final: whole characters, and nothing of a stop string.

    tokenizer: of the model; unset, the one of the call.
    skip_prompt: leave the prompt out. The text is then what follows it, the space between them included.
    decode_kwargs: passed to the tokenizer's decode, such as ``skip_special_tokens=True``.

    Override `on_finalized_text` to do something else with the text.
    """

    def __init__(self, tokenizer: Any = None, skip_prompt: bool = False, **decode_kwargs: Any) -> None:
        self.tokenizer = tokenizer
        self.skip_prompt = skip_prompt
        self.decode_kwargs: dict[str, Any] = {"skip_special_tokens": False, **decode_kwargs}
        self._stops: tuple[str, ...] = ()
        self._wrapped: Any = None if tokenizer is None else as_tokenizer(tokenizer)
        self._padding = 0
        self._dropped: list[int] = []
        self._pieces: TextPieces | None = None

    def bind(self, ctx: BindContext, /) -> TextStreamer:
        """Take the call's stop strings, and its tokenizer where there is none yet.

        Raises InputError for more rows than one, or where no tokenizer is known.
        """
        if ctx.rows > 1:
            raise _one_row(ctx.rows)
        if self._wrapped is None:
            if ctx.tokenizer is None:
                raise InputError(f"{type(self).__name__} needs a tokenizer: pass it one, or tokenizer=... to the call")
            self._wrapped = as_tokenizer(ctx.tokenizer)
        stops = ctx.settings.get("stop_strings") or ()
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        self._padding = ctx.prompt_width - int(ctx.prompt_lengths[0])
        self._dropped = [] if ctx.dropped is None else [int(ctx.dropped[0])]
        self._pieces = None
        return self

    def put(self, value: Tensor | Sequence[int], /) -> None:
        """Take the prompt, then new tokens: [1, n], or [n] of the one row. Raises InputError for several rows."""
        if isinstance(value, Tensor):
            if value.dim() > 1 and value.shape[0] > 1:
                raise _one_row(value.shape[0])
            value = value.reshape(-1).tolist()
        if self._pieces is not None:
            text = self._pieces.push(value)
        else:
            if self._wrapped is None:
                raise InputError(f"{type(self).__name__} needs a tokenizer: pass it one")
            self._pieces = self._wrapped.pieces(self._stops, **self.decode_kwargs)
            text = self._pieces.prompt(value[self._padding :])
            if self._dropped:
                text += self._pieces.repeat(self._dropped)
            if self.skip_prompt:
                return
        if text:
            self.on_finalized_text(text)

    def end(self) -> None:
        """Deliver the rest, and be ready for another call."""
        self.on_finalized_text(self._rest(), stream_end=True)

    def _rest(self) -> str:
        pieces, self._pieces = self._pieces, None
        self._padding, self._dropped = 0, []
        return pieces.finish() if pieces is not None else ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with new text, never to change again; `stream_end` with the last of a call, which may be empty."""
        print(text, flush=True, end="\n" if stream_end else "")


def _one_row(rows: int) -> InputError:
    return InputError(f"a text streamer shows one row, got {rows}: pass one prompt with num_return_sequences=1")
