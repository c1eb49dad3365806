"""A preparer of a third party: it remembers what it was asked before."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import attrs
import decodekit


@attrs.frozen
class Hurry:
    """Remembers the logits of rows of tokens that it saw without a cache."""

    devices: ClassVar = frozenset({"cpu"})
    dtypes: ClassVar = frozenset()
    frozen: ClassVar = True
    memory: ClassVar = 0.5

    rows: int = decodekit.option("Rows that are remembered.", default=100, check=decodekit.at_least(1))

    def prepare(self, adapter: Any, /) -> Any:
        made = copy.copy(adapter)
        made.inner, made.known, made.rows = adapter, {}, self.rows
        made.__class__ = type("Hurried", (Remembers, type(adapter)), {})
        return made


class Remembers:
    def forward(self, tokens: Any, positions: Any, cache: Any, /, **keys: Any) -> Any:
        asked = (str(tokens.tolist()), str(positions.tolist()), str(sorted(keys.items(), key=str)))
        if cache is not None or keys.get("mask") is not None:
            return self.inner.forward(tokens, positions, cache, **keys)
        if asked not in self.known and len(self.known) < self.rows:
            self.known[asked] = self.inner.forward(tokens, positions, cache, **keys)
        return self.known.get(asked) or self.inner.forward(tokens, positions, cache, **keys)

    def prepared(self) -> list[dict[str, Any]]:
        return [{"rows": self.rows}]
