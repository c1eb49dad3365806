"""What each token of a tokenizer adds to a text: tokenizers of several makes, read through one interface.

In byte-level vocabularies every token is a few bytes of one UTF-8 stream. In vocabularies of pieces (sentencepiece,
WordPiece, ...) every token is a piece of text, and byte-fallback tokens form runs that are text only when whole. Other
vocabularies do not say: their text is known only by decoding.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from decodekit.errors import DecodekitError, InputError

from .chat import checked, refused, render_chat, whole

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_SHAPE = re.compile("[MW]?|R*B?(FS?)?")
"""Decoder steps, by initial, that add text token by token; Strip counts only on the whole, fused text."""
_PLAIN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_ALPHABET = {chr(byte): byte for byte in _PLAIN} | {
    chr(256 + n): byte for n, byte in enumerate(b for b in range(256) if b not in _PLAIN)
}
"""Byte-level vocabularies write every byte as one printable character."""


class _Unit(NamedTuple):
    text: str
    data: bytes
    raw: bool
    """A byte of a run, or of a byte-level stream."""
    first: str
    """Its text where it is the first token of all."""


def _alphabetic(name: str) -> bytes:
    """The bytes that a byte-level name stands for; of a name with other characters, an added token's, its own."""
    try:
        return bytes(map(_ALPHABET.__getitem__, name))
    except KeyError:
        return name.encode()


class Plain:
    """A tokenizer of unknown make."""

    scheme = ""

    def __init__(self, wrapped: Any, chat_template: str | None = None, tokens: Mapping[str, str] | None = None) -> None:
        self.wrapped = wrapped
        self.chat_template = chat_template
        self.tokens = dict(tokens or {})
        self._units: dict[int, _Unit | None] = {}
        self._data: dict[int, bytes] = {}

    def encode(self, text: str, /) -> list[int]:
        return list(self.wrapped.encode(whole(text)))

    def encode_whole(self, text: str, /) -> list[int]:
        return list(self.wrapped.encode(whole(text)))

    def decode(self, ids: Sequence[int], /, skip_special_tokens: bool = True, **options: Any) -> str:
        if options or "skip_special_tokens" in self._decode_options:
            options["skip_special_tokens"] = skip_special_tokens
        return str(self.wrapped.decode(list(ids), **options))

    @cached_property
    def _decode_options(self) -> frozenset[str]:
        code = getattr(self.wrapped.decode, "__code__", None)
        return frozenset(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount] if code else ())

    def token_bytes(self, token: int, /) -> bytes | None:
        own = getattr(self.wrapped, "token_bytes", None)
        return None if own is None else own(token)

    def is_special(self, token: int, /) -> bool:
        return token in self._special

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(getattr(self.wrapped, "all_special_ids", ()))

    def chat(self, messages: Sequence[Mapping[str, Any]], /) -> list[int]:
        return self._closed(self._render(checked(messages)))

    def _closed(self, text: str) -> list[int]:
        return self.encode(text)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        if not self.chat_template:
            raise InputError(
                "the tokenizer has no chat template: set its chat_template, "
                "put chat_template.jinja beside tokenizer.json, or pass the prompt as text"
            )
        return render_chat(self.chat_template, messages, self.tokens)


class Fast(Plain):
    """A `tokenizers.Tokenizer`."""

    def __init__(
        self,
        wrapped: Any,
        chat_template: str | None = None,
        tokens: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
    ) -> None:
        super().__init__(wrapped, chat_template, tokens)
        self._core = wrapped
        self._add_bos = add_bos
        ids = {name: wrapped.token_to_id(token) for name, token in self.tokens.items()}
        self.bos_token_id: int | None = ids.get("bos_token")
        self.eos_token_id: int | None = ids.get("eos_token")
        self.pad_token_id: int | None = ids.get("pad_token")

    def encode(self, text: str, /) -> list[int]:
        found = self._core.encode(whole(text))
        ids, bos = _open_end(found.ids, found.special_tokens_mask, self.bos_token_id), self.bos_token_id
        if self._add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        elif self._add_bos is False and bos is not None and found.special_tokens_mask[:1] == [1] and ids[:1] == [bos]:
            ids = ids[1:]
        return ids

    def encode_whole(self, text: str, /) -> list[int]:
        return list(self._core.encode(whole(text)).ids)

    def _closed(self, text: str) -> list[int]:
        return list(self._core.encode(whole(text), add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], /, skip_special_tokens: bool = True, **options: Any) -> str:
        return str(self._core.decode(list(ids), skip_special_tokens=skip_special_tokens, **options))

    @cached_property
    def _special(self) -> frozenset[int]:
        return frozenset(i for i, token in self._core.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _steps(self) -> list[dict[str, Any]]:
        decoder = self._core.decoder
        steps = json.loads(decoder.__getstate__()) if decoder is not None else {"decoders": []}
        return list(steps.get("decoders", [steps]))

    @cached_property
    def scheme(self) -> str:  # type: ignore[override]
        """``bytes``, ``pieces``, or empty: unknown."""
        kinds = [step["type"] for step in self._steps]
        if kinds == ["ByteLevel"]:
            return "bytes"
        known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace", "WordPiece"}
        strips = [step for step in self._steps if step["type"] == "Strip"]
        odd = any(step["stop"] or step["content"] != " " for step in strips) or not known.issuperset(kinds)
        return "pieces" if not odd and _SHAPE.fullmatch("".join(kind[0] for kind in kinds)) else ""

    @cached_property
    def strip(self) -> int:
        """Spaces taken from the begin of a whole text."""
        return next((int(step["start"]) for step in self._steps if step["type"] == "Strip"), 0)

    @cached_property
    def _falls_back(self) -> bool:
        return any(step["type"] == "ByteFallback" for step in self._steps)

    def unit(self, token: int) -> _Unit | None:
        """What a token adds; None for an id without a token. Only for a known scheme."""
        if token not in self._units:
            self._units[token] = self._unit(token)
        return self._units[token]

    def _unit(self, token: int) -> _Unit | None:
        name = self._core.id_to_token(token) if token >= 0 else None
        if name is None:
            return None
        if self.scheme == "bytes":
            return _Unit("", _alphabetic(name), True, "")
        byte = _BYTE_TOKEN.fullmatch(name) if self._falls_back else None
        if byte is not None:
            return _Unit("", bytes.fromhex(byte[1]), True, "")
        # These decoders go token by token, so the token's second copy shows what it adds inside a text.
        first, both = (self._core.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        text = both[len(first) :]
        return _Unit(text, text.encode(), False, text if self.strip else first)

    def token_bytes(self, token: int, /) -> bytes | None:
        data = self._data.get(token)
        if data is None and self.scheme:
            # Only bytes are kept: a whole vocabulary of units would slow every garbage collection.
            if self.scheme == "bytes":
                data = _alphabetic((self._core.id_to_token(token) if token >= 0 else None) or "")
            else:
                unit = self._unit(token)
                data = b"" if unit is None else unit.data
            self._data[token] = data
        return data


class Transformers(Fast):
    """A tokenizer of transformers; where it is a plain shell of `tokenizers`, its tokens are read from there."""

    def __init__(self, wrapped: Any, chat_template: str | None = None) -> None:
        Plain.__init__(self, wrapped, chat_template)
        raw = getattr(sys.modules.get("tokenizers"), "Tokenizer", ())
        core = getattr(wrapped, "_tokenizer", None)
        # Some classes change the decoded text in Python: then only their own decode knows it.
        own = {method.__module__ for method in (type(wrapped).decode, type(wrapped)._decode)}
        shell = all(module.startswith("transformers.tokenization_") for module in own)
        self._core = core if isinstance(core, raw) and shell and "decode" not in vars(core) else None
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            setattr(self, name, getattr(wrapped, name, None))

    def encode(self, text: str, /) -> list[int]:
        found = self.wrapped(whole(text), return_special_tokens_mask=True, verbose=False)
        return _open_end(found["input_ids"], found["special_tokens_mask"], self.bos_token_id)

    def encode_whole(self, text: str, /) -> list[int]:
        return list(self.wrapped(whole(text), verbose=False)["input_ids"])

    def decode(self, ids: Sequence[int], /, skip_special_tokens: bool = True, **options: Any) -> str:
        if self._core is not None and not options:
            return super().decode(ids, skip_special_tokens)
        options = {"clean_up_tokenization_spaces": False, **options}
        return str(self.wrapped.decode(list(ids), skip_special_tokens=skip_special_tokens, **options))

    @cached_property
    def _special(self) -> frozenset[int]:
        return super()._special if self._core is not None else frozenset(self.wrapped.all_special_ids)

    @cached_property
    def scheme(self) -> str:  # type: ignore[override]
        return super().scheme if self._core is not None else ""

    def chat(self, messages: Sequence[Mapping[str, Any]], /) -> list[int]:
        template = self.chat_template or getattr(self.wrapped, "chat_template", None)
        if not template:
            self._render(messages)  # says how to get one
        try:
            found = self.wrapped.apply_chat_template(
                [dict(message) for message in checked(messages)],
                chat_template=self.chat_template,
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
            )
        except (DecodekitError, ImportError, MemoryError):
            raise
        except Exception as error:
            raise refused(error) from error
        return list(found)


def _open_end(ids: Sequence[int], added: Sequence[int], bos: int | None) -> list[int]:
    """Drop the special tokens that were added (1 in `added`) behind a text: a prompt is to be continued."""
    end = len(ids)
    while end and added[end - 1] and (end > 1 or ids[0] != bos):
        end -= 1
    return list(ids[:end])
