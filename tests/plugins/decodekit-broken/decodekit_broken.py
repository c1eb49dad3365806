"""A plugin that was built against a library which is gone."""

from __future__ import annotations

import attrs
import library_that_is_gone


@attrs.frozen
class Fragile:
    """Never comes to life."""

    strength: float = 1.0

    def __call__(self, input_ids, scores, /):
        return library_that_is_gone.weaken(scores, self.strength)
