"""Opens the language model inside the wheel: ``decodekit.load("bundled")``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from decodekit.errors import InputError
from decodekit.registry import registry

DATA = Path(__file__).parent / "data"
PARTS = {"bundled": "lm", "bundled/lm": "lm", "bundled/draft": "draft"}


class Bundled:
    """The ``bundled`` models plugin: a small model of English prose, and ``bundled/draft``, its draft model."""

    def adapt(self, model: Any, /) -> None:
        """None: once opened, it is a model of the ``native`` plugin."""
        return

    def opens(self, ref: str, /) -> bool:
        """Whether `ref` names a model in the wheel; so do wrong names behind ``bundled/``: `open` says so."""
        return ref in PARTS or (ref.startswith("bundled/") and not Path(ref).exists())

    def open(self, ref: str, /, **options: Any) -> Any:
        """Load it through the ``native`` plugin, with the tokenizer both models share. Options are native's."""
        if ref not in PARTS:
            raise InputError(f"there is no bundled model {ref!r}; there are {', '.join(PARTS)}")
        native = registry.load("models", "native")()
        adapter = native.open(str(DATA / PARTS[ref]), **options)
        if adapter.tokenizer is None:
            adapter.tokenizer = registry.load("tokenizers", "huggingface")().open(DATA / "lm")
            adapter.model.tokenizer = adapter.tokenizer
        return adapter
