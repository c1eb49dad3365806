"""What preparers know of models: forgotten with the model, and made once however many threads ask."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from torch import nn

T = TypeVar("T")


class Table(Generic[T]):
    """Values by model and key. A value must not hold its model, or neither is ever freed."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._rows: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, T]] = weakref.WeakKeyDictionary()

    def get(self, model: nn.Module, key: Hashable, renew: Callable[[T | None], T]) -> T:
        """What `renew` makes of the value there is, None at first; it returns that value where it is still right."""
        with self._lock:
            row = self._rows.setdefault(model, {})
            row[key] = renew(row.get(key))
            return row[key]

    def values(self, model: nn.Module) -> list[T]:
        """All values of a model."""
        with self._lock:
            return list(self._rows.get(model, {}).values())

    def pop(self, model: nn.Module) -> list[T]:
        """Forget a model; returns what was known of it."""
        with self._lock:
            return list(self._rows.pop(model, {}).values())


def module_of(model: Any) -> nn.Module | None:
    """The caller's module behind a model, an adapter or an LM; None where there is no module."""
    own = getattr(model, "__decodekit_adapter__", None)
    model = own() if callable(own) else model
    model = getattr(model, "unprepared", model)
    found = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    return found if isinstance(found, nn.Module) else None
