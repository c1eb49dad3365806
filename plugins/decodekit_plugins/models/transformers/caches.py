"""The caches that transformers models make themselves, in the form decodekit's loops expect."""

from __future__ import annotations

import copy
import functools
from typing import Any

from .facts import keeps_every_token, text_config

SPECIAL = ("minimax", "xlstm")
"""Values of `model_type` whose models insist on a cache class of their own making."""


class SelfMade:
    """Stands for a cache that only the model can make: its first forward pass returns the real one."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing is held yet."""
        return 0

    def offers(self) -> frozenset[str]:
        """Nothing is promised."""
        return frozenset()


@functools.cache
def shell() -> type:
    """transformers' DynamicCache with the abilities and the `crop` of decodekit's protocol."""
    from transformers import DynamicCache

    class ModelCache(DynamicCache):  # type: ignore[misc]
        """The cache a transformers model makes for itself."""

        def offers(self) -> frozenset[str]:
            """reorder, select and fork; crop where no layer has forgotten anything."""
            found = {"reorder", "select", "fork"}
            return frozenset(found | {"crop"} if self.is_croppable else found)

        def crop(self, length: int, /) -> None:
            """Keep the first `length` tokens; a negative number drops that many; 0 keeps nothing."""
            held = int(self.get_seq_length())
            surplus = -length if length < 0 else held - length
            if surplus >= held:
                self.reset()
            elif surplus > 0:
                super().crop(-surplus)

        def fork(self) -> Any:
            """Return an independent copy."""
            return copy.deepcopy(self)

        def __bool__(self) -> bool:
            return True

    return ModelCache


def default_cache(model: Any, takes_cache: bool) -> str:
    """ "dynamic" where decodekit's cache is right and no slower for this model, else "model"."""
    ours = takes_cache and not _own_class(model) and keeps_every_token(model)
    return "dynamic" if ours else "model"


def make_cache(model: Any, takes_cache: bool) -> Any:
    """The cache the model would make; None where its forward pass takes none."""
    if not takes_cache:
        return None
    if _own_class(model):
        return SelfMade()
    return shell()(config=model.config)


def _own_class(model: Any) -> bool:
    if text_config(model).model_type in SPECIAL:
        return True
    hook = getattr(type(model), "_prepare_cache_for_generation", None)
    return hook is not None and not hook.__module__.startswith("transformers.generation")
