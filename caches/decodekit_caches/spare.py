"""Buffers of cache layers that are gone, kept for the next cache of the same model."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor

_users = getattr(torch._C, "_storage_Use_Count", None)
"""How many tensors look at some memory. Where torch does not tell, nothing is kept."""
_ALONE = 2
"""The answer for memory of one tensor: that tensor, and the storage object that the question is asked of."""

_spare: weakref.WeakKeyDictionary[Any, dict[int, list[Tensor]]] = weakref.WeakKeyDictionary()
"""Model -> layer -> buffers that nobody uses. They go away with the model."""
_lock = threading.RLock()
"""Reentrant: the garbage collector may end one cache while another takes its buffers."""


class Spares:
    """Where the buffers of one layer of one model wait. Whoever takes one has it alone."""

    def __init__(self, model: Any, layer: int) -> None:
        self._model, self._layer = weakref.ref(model), layer

    def take(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor | None:
        """A buffer of exactly this kind, with whatever was written into it; None where there is none."""
        model = self._model()
        with _lock:
            waiting = [] if model is None else _spare.get(model, {}).get(self._layer, [])
            for place, buffer in enumerate(waiting):
                if buffer.shape == shape and buffer.dtype == dtype and buffer.device == device:
                    return waiting.pop(place)
        return None

    def give(self, buffers: list[Tensor]) -> None:
        """Keep buffers for the next cache, instead of those kept so far; not those that somebody still looks at."""
        model = self._model()
        if model is None or _users is None:
            return
        free = [buffer for buffer in buffers if _users(buffer.untyped_storage()._cdata) <= _ALONE]
        if free:
            with _lock:
                _spare.setdefault(model, {})[self._layer] = free
