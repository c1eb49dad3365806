"""Tokenizers and text in pieces, as the core and the plugins see them; how they work belongs to plugins."""

# A method of a protocol is its docstring.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

from .errors import InputError
from .models import claimant

if TYPE_CHECKING:
    from .context import BindContext


class StopMatcher(Protocol):
    """Finds stop strings in UTF-8 bytes. The stop that ends first wins; of several that end together the longest."""

    stops: tuple[str, ...]

    def step(self, state: int, data: bytes, /) -> tuple[int, tuple[str, int] | None]:
        """From `state` (0 at the start) over `data`: the new state, and the stop met with the bytes up to its end."""


class TextPieces(Protocol):
    """The text of one row, token by token: what `push` and `finish` return, joined, is the whole text.

    What is returned is final: no part of a character, and nothing that may still become a stop string.
    """

    stopped: str | None
    """The stop string that ended the text."""

    def prompt(self, ids: Sequence[int], /) -> str:
        """Take, before any push, the tokens that the text continues. Returns their own text."""

    def repeat(self, ids: Sequence[int], /) -> str:
        """Take, after the prompt, tokens whose text the pushed ones will say again. Returns it; push leaves it out."""

    def push(self, ids: Iterable[int], /) -> str:
        """Take new tokens; return the text that is final now."""

    def finish(self) -> str:
        """No more tokens: return the text held back."""

    def copy(self) -> TextPieces:
        """An independent continuation."""


class Tokenizer(Protocol):
    """A tokenizer, wrapped by a plugin of kind ``tokenizers``."""

    def encode(self, text: str, /) -> list[int]:
        """Token ids of a prompt, with the special tokens that open it; never one that ends it."""

    def encode_whole(self, text: str, /) -> list[int]:
        """Token ids of a text that an encoder reads: with all special tokens, those that end it included."""

    def decode(self, ids: Sequence[int], /, skip_special_tokens: bool = True) -> str:
        """Text of token ids, spaces untouched."""

    def token_bytes(self, token: int, /) -> bytes | None:
        """The bytes a token adds inside a text (UTF-8; unknown ids: none); None where no token of this kind says."""

    def is_special(self, token: int, /) -> bool:
        """Whether `decode` leaves the token out."""

    def chat(self, messages: Sequence[Mapping[str, Any]], /) -> list[int]:
        """Token ids of a conversation, up to where the assistant begins. Raises InputError without a template."""

    def pieces(
        self, stop: str | Sequence[str] = (), /, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = (),
        **decode_options: Any,
    ) -> TextPieces:  # fmt: skip
        """The text of a new row, continuing `prompt_ids`; it ends before the first of the `stop` strings."""

    def matcher(self, stops: Iterable[str], /) -> StopMatcher:
        """A matcher of stop strings. Raises InputError for an empty one."""


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """Wrap a tokenizer of any make that a plugin claims; pass on one that is wrapped already.

    Raises InputError where nobody can use the object.
    """
    if all(callable(getattr(tokenizer, name, None)) for name in ("pieces", "matcher", "token_bytes")):
        return cast(Tokenizer, tokenizer)
    plugin = claimant(tokenizer, "tokenizers")
    if plugin is None:
        raise InputError(f"no tokenizers plugin can use {tokenizer!r}; pass one of transformers or tokenizers")
    return cast(Tokenizer, plugin.load()().adapt(tokenizer))


def row_pieces(
    tokenizer: Tokenizer, ctx: BindContext, row: int, stops: str | Sequence[str], **options: Any
) -> TextPieces:
    """The new text of one row of a run: it continues the row's prompt, and leaves out what that says already."""
    prompt = ctx.tokens[row, ctx.prompt_width - int(ctx.prompt_lengths[row]) : ctx.prompt_width]
    pieces = tokenizer.pieces(stops, prompt_ids=prompt.tolist(), **options)
    if ctx.dropped is not None and ctx.dropped[row] >= 0:
        pieces.repeat([int(ctx.dropped[row])])
    return pieces
