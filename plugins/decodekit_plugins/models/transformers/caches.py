"""The caches that transformers models make themselves, in the form decodekit's loops expect."""

from __future__ import annotations

import copy
import functools
from typing import Any

from .facts import text_config

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


ASKED = (
    "update", "get_seq_length", "get_query_offset", "get_mask_sizes", "get_max_length", "crop", "reset",
    "reorder_cache", "batch_repeat_interleave", "batch_select_indices", "activate_past_recording",
    "is_recording_past",
)  # fmt: skip
"""What models and their masks may call."""


@functools.cache
def _shell_class() -> type:
    from transformers import Cache

    class Shell(Cache):  # type: ignore[misc]
        """Any cache, as an instance of the class that masks of several kinds of layers are looked up by."""

        def __init__(self, own: Any) -> None:
            # Not the base's. Methods of the instance hide those of the class: calls go straight to `own`.
            self.own = own
            for name in ASKED:
                if hasattr(own, name):
                    setattr(self, name, getattr(own, name))

    def told(name: str) -> property:
        return property(lambda shell: getattr(shell.own, name))

    flags = ("layers", "is_sliding", "is_linear", "is_dummy", "is_initialized", "is_compileable", "is_croppable")
    for name in (*flags, "batch_size"):
        setattr(Shell, name, told(name))
    return Shell


def in_shell(cache: Any) -> Any:
    """The cache as an instance of transformers' class, without which models with layers of several kinds size the
    masks of all of them by the first layer."""
    from transformers import Cache

    return cache if isinstance(cache, Cache) or not hasattr(cache, "is_sliding") else _shell_class()(cache)


def default_cache(model: Any, takes_cache: bool, windows: tuple[int | None, ...] | None) -> str:
    """ "dynamic" or, for layers with windows, "hybrid", where that is right for this model; else "model"."""
    if not takes_cache or windows is None or _own_class(model):
        return "model"
    return "hybrid" if any(windows) else "dynamic"


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
