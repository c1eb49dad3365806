"""Wraps and opens tokenizers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from decodekit.errors import InputError

from .chat import load_tokenizer
from .pieces import TextPieces
from .stops import StopMatcher
from .vocabulary import Fast, Plain, Transformers


class _Texts:
    """What every wrapped tokenizer can make."""

    def pieces(
        self,
        stop: str | Sequence[str] = (),
        /,
        *,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
        **decode_options: Any,
    ) -> TextPieces:
        """The text of a new row; see `TextPieces`."""
        return TextPieces(self, stop, skip_special_tokens, prompt_ids=prompt_ids, **decode_options)

    def matcher(self, stops: Iterable[str], /) -> StopMatcher:
        """A matcher of stop strings. Raises InputError for an empty one."""
        return StopMatcher(stops)


class PlainTokenizer(_Texts, Plain):
    """An object of unknown make with `encode` and `decode`."""


class FastTokenizer(_Texts, Fast):
    """A `tokenizers.Tokenizer`."""


class TransformersTokenizer(_Texts, Transformers):
    """A tokenizer of transformers."""


class HuggingFace:
    """The ``huggingface`` tokenizers plugin."""

    def adapt(self, tokenizer: Any, /, chat_template: str | None = None) -> Any:
        """Wrap `tokenizer`. Raises InputError for an object that is none."""
        base = getattr(sys.modules.get("transformers.tokenization_utils_base"), "PreTrainedTokenizerBase", ())
        if isinstance(tokenizer, base):
            return TransformersTokenizer(tokenizer, chat_template)
        raw = getattr(sys.modules.get("tokenizers"), "Tokenizer", ())
        if isinstance(inner := getattr(tokenizer, "_tokenizer", tokenizer), raw):
            return FastTokenizer(inner, chat_template or getattr(tokenizer, "chat_template", None))
        if all(callable(getattr(tokenizer, name, None)) for name in ("encode", "decode")):
            return PlainTokenizer(tokenizer, chat_template)
        if isinstance(inner := getattr(tokenizer, "tokenizer", None), (base, raw)):
            return self.adapt(inner, chat_template)  # a multimodal processor
        raise InputError(
            f"{type(tokenizer).__name__} is no tokenizer: pass one of transformers or tokenizers, or an object with "
            "encode(text) -> ids and decode(ids) -> text"
        )

    def open(self, folder: str | Path, /) -> FastTokenizer:
        """Open a folder with tokenizer.json. Raises InputError where there is none."""
        return load_tokenizer(Path(folder), FastTokenizer)
