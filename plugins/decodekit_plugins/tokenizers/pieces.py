"""Text in pieces, while it is made."""

from __future__ import annotations

import codecs
import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from .stops import StopMatcher
from .vocabulary import Fast

_BAD = "\ufffd"
_CONTEXT = 8
"""Tokens decoded again before the new one, where a tokenizer does not say what a token adds."""


class TextPieces:
    """The text of one row, token by token: what `push` and `finish` return, joined, is the whole text.

    The whole text is `tokenizer.decode` of the ids up to the token that completes a stop string, cut before that
    string. What is returned is final: no part of a character, and nothing that may still become a stop.

    tokenizer: a wrapped one (`decodekit.text.as_tokenizer`).
    stop: one stop string or several; which one wins is told at `StopMatcher`. They do not match inside the prompt.
    prompt_ids: the tokens this text continues, so that a space between prompt and text stays. Without them the text
    is on its own, as `decode` of the new ids would give it.
    decode_options: passed to the tokenizer's own `decode`, such as ``clean_up_tokenization_spaces=True``.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: str | Sequence[str] = (),
        skip_special_tokens: bool = True,
        *,
        prompt_ids: Sequence[int] = (),
        **decode_options: Any,
    ) -> None:
        options = {k: v for k, v in decode_options.items() if (k, v) != ("clean_up_tokenization_spaces", False)}
        self._decoder: _ByteLevel | _Pieces | _Window
        scheme = tokenizer.scheme if isinstance(tokenizer, Fast) and not options else ""
        if isinstance(tokenizer, Fast) and scheme:
            self._decoder = (_ByteLevel if scheme == "bytes" else _Pieces)(tokenizer, skip_special_tokens)
        else:
            self._decoder = _Window(tokenizer, skip_special_tokens, options)
        self._matcher = StopMatcher(stop) if stop else None
        self._ends = tuple({text[-1] for text in self._matcher.stops}) if self._matcher else ()
        self._held = b""
        self._sent = 0
        self._again = ""
        self.stopped: str | None = None
        """The stop string that ended the text."""
        if len(prompt_ids):
            self.prompt(prompt_ids if isinstance(self._decoder, _Window) else prompt_ids[-2 * _CONTEXT :])

    def prompt(self, ids: Sequence[int], /) -> str:
        """Take, before any push, the tokens that the text continues. Returns their own text."""
        return self._decoder.seed(ids)

    def repeat(self, ids: Sequence[int], /) -> str:
        """Take, after the prompt, tokens whose text the pushed ones will say again. Returns it; push leaves it out."""
        twin = copy.copy(self._decoder)
        self._again = "".join(map(twin.push, ids)) if isinstance(twin, _Window) else twin.seed(ids)
        return self._again

    def _fresh(self, text: str) -> str:
        """`text` without what of its begin only repeats the prompt."""
        size = min(len(text), len(self._again))
        if text[:size] != self._again[:size]:
            size, self._again = 0, ""
        self._again = self._again[size:]
        return text[size:]

    def push(self, ids: Iterable[int], /) -> str:
        """Take new tokens; return the text that is final now."""
        decoder, matcher = self._decoder, self._matcher
        if matcher is None:
            text = "".join([decoder.push(token) for token in ids])
            return self._fresh(text) if self._again else text
        out = ""
        for token in ids:
            if self.stopped is not None:
                break
            out += self._match(self._fresh(decoder.push(token)), matcher)
            # A run of byte tokens is not text yet, but as the last of the text it would be: it may complete a stop.
            tail = decoder.peek()[len(self._again) :] if self.stopped is None else ""
            if tail.endswith(self._ends) and matcher.step(matcher.state, tail.encode())[1] is not None:
                out += self._match(self._fresh(decoder.finish()), matcher)
        return out

    def finish(self) -> str:
        """No more tokens: return the text held back."""
        text = "" if self.stopped is not None else self._fresh(self._decoder.finish())
        if self._matcher is not None:
            text = self._match(text, self._matcher) + self._held.decode()
            self._held = b""
        return text

    def copy(self) -> TextPieces:
        """An independent continuation."""
        twin = copy.copy(self)
        twin._decoder, twin._matcher = copy.copy(self._decoder), copy.copy(self._matcher)
        return twin

    def _match(self, text: str, matcher: StopMatcher) -> str:
        if not text:
            return ""
        self._held += text.encode()
        hit = matcher.push(self._held[matcher.pushed - self._sent :])
        if hit is not None:
            self.stopped, end = hit[0], hit[1] - self._sent
            out, self._held = self._held[:end], b""
        else:
            end = len(self._held) - matcher.held
            out, self._held = self._held[:end], self._held[end:]
        self._sent += end
        return out.decode()


class _ByteLevel:
    """Tokens are bytes of one stream; bytes that are no UTF-8 become U+FFFD."""

    def __init__(self, tokenizer: Fast, skip_special: bool) -> None:
        self._bytes = tokenizer.token_bytes
        self._special = tokenizer.is_special if skip_special else None
        self._rest = b""

    def push(self, token: int) -> str:
        if self._special is not None and self._special(token):
            return ""
        data = self._rest + (self._bytes(token) or b"")
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._rest = data[used:]
        return text

    def seed(self, ids: Sequence[int]) -> str:
        return "".join([self.push(token) for token in ids])

    def peek(self) -> str:
        return ""

    def finish(self) -> str:
        text, self._rest = self._rest.decode("utf-8", "replace"), b""
        return text


class _Pieces:
    """Tokens are pieces of text; byte tokens in a row are text if together they are UTF-8, else U+FFFD each."""

    def __init__(self, tokenizer: Fast, skip_special: bool) -> None:
        self._unit = tokenizer.unit
        self._special = tokenizer.is_special if skip_special else None
        self._strip = tokenizer.strip
        self._first = True
        self._run = b""

    def push(self, token: int) -> str:
        unit = self._unit(token)
        if unit is None or (self._special is not None and self._special(token)):
            return ""
        first, self._first = self._first, False
        if unit.raw:
            self._run += unit.data
            return ""
        text = unit.first if first else unit.text
        return self.finish() + self._lead(text) if self._run else self._lead(text)

    def _spaces(self, text: str) -> int:
        """How many of the text's first spaces the decoder takes away."""
        return min(self._strip, len(text) - len(text.lstrip(" "))) if self._strip else 0

    def _lead(self, text: str) -> str:
        if self._strip and text:
            cut = self._spaces(text)
            self._strip = self._strip - cut if cut == len(text) else 0
            text = text[cut:]
        return text

    def seed(self, ids: Sequence[int]) -> str:
        text = "".join([self.push(token) for token in ids])
        # Whole characters at the end of a prompt are text already; a cut one goes on with the new tokens.
        whole = codecs.utf_8_decode(self._run, "replace", False)[1]
        self._run, rest = self._run[:whole], self._run[whole:]
        text += self.finish()
        self._run = rest
        return text

    def peek(self) -> str:
        """The run as text, if the text ended here; empty where it is none."""
        try:
            text = self._run.decode()
        except UnicodeDecodeError:
            return ""
        return text[self._spaces(text) :]

    def finish(self) -> str:
        run, self._run = self._run, b""
        try:
            return self._lead(run.decode())
        except UnicodeDecodeError:
            return self._lead(_BAD * len(run))


class _Window:
    """Text by decoding the last tokens again: the only way where a tokenizer does not say what a token adds."""

    def __init__(self, tokenizer: Any, skip_special: bool, options: Mapping[str, Any]) -> None:
        self._decode: Callable[[Sequence[int]], str] = partial(
            tokenizer.decode, skip_special_tokens=skip_special, **options
        )
        self._special = tokenizer.is_special if skip_special else None
        self._lag = 2 if options.get("clean_up_tokenization_spaces") else 0
        """Clean-up joins words across tokens: text of the last ones may still change."""
        self._ids: tuple[int, ...] = ()
        self._done = 0
        """Characters of the window's text that were returned."""

    def push(self, token: int) -> str:
        if self._special is not None and self._special(token):
            return ""
        self._ids += (token,)
        return self._new(self._decode(self._ids))

    def _new(self, text: str) -> str:
        # A cut character shows as U+FFFD, in some decoders with all bytes before it. It is waited for, not for ever.
        end = len(text.rstrip(_BAD))
        if len(self._ids) > 8 * _CONTEXT:
            end = max(end, len(text) - 3)
        if self._lag:
            earlier = self._decode(self._ids[: -self._lag])
            same = (n for n, (a, b) in enumerate(zip(earlier, text, strict=False)) if a != b)
            end = min(end, next(same, len(earlier)))
        out = text[self._done : end]
        self._done = max(self._done, end)
        forced = len(self._ids) > 8 * _CONTEXT
        if forced or (len(self._ids) > 2 * _CONTEXT and end == len(text)):
            pending = max(0, len(text) - self._done)
            # The shorter window must read the same, so it begins with a character, at most four tokens long.
            for size in range(_CONTEXT, _CONTEXT + 4):
                short = self._decode(self._ids[-size:])
                if len(short) >= pending and text.endswith(short):
                    break
            if forced or text.endswith(short):
                self._ids, self._done = self._ids[-size:], max(0, len(short) - pending)
        return out

    def seed(self, ids: Sequence[int]) -> str:
        self._ids = tuple(ids)
        return self._new(self._decode(self._ids))

    def peek(self) -> str:
        return ""

    def finish(self) -> str:
        text = self._decode(self._ids)[self._done :]
        self._done += len(text)
        return text
