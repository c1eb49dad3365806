"""What a model class can take and give, read from its signature once."""

from __future__ import annotations

import inspect
from typing import Any

import attrs

OURS = frozenset(
    {
        "self", "input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "use_cache", "labels",
        "cache_position", "logits_to_keep", "num_logits_to_keep", "return_dict", "output_hidden_states"
    }
)  # fmt: skip
"""Arguments of a forward pass that the adapter fills in, or that have no meaning while generating."""


@attrs.frozen
class Facts:
    """The arguments of a forward pass that matter here; a name is None where there is no such argument."""

    cache: str | None
    keep: str | None
    """Argument that says for how many trailing positions logits are wanted."""
    mask: bool
    positions: bool
    use_cache: bool
    others: frozenset[str]
    """Further arguments, which a caller may pass through."""


_known: dict[type, Facts] = {}


def facts_of(cls: type) -> Facts:
    """Facts about a model class, computed once."""
    found = _known.get(cls)
    if found is None:
        parameters = inspect.signature(cls.forward).parameters  # type: ignore[attr-defined]
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())

        def first(*names: str) -> str | None:
            return next((name for name in names if name in parameters), None)

        plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        found = _known[cls] = Facts(
            cache=first("cache", "past_key_values"),
            keep=first("logits_to_keep", "num_logits_to_keep"),
            mask="attention_mask" in parameters,
            positions="position_ids" in parameters,
            use_cache="use_cache" in parameters or open_ended,
            others=frozenset(n for n, p in parameters.items() if p.kind in plain) - OURS,
        )
    return found


def text_config(model: Any) -> Any:
    """The configuration of the part of a model that makes text."""
    config = model.config
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def fact(config: Any, name: str, default: Any = None, unclear: Any = None) -> Any:
    """What a configuration says: `default` where it says nothing, `unclear` where asking is an error, as it is of what
    differs from layer to layer (their `AmbiguousGlobalPerLayerAttributeError` is no AttributeError)."""
    try:
        return getattr(config, name, default)
    except Exception:  # a property of a configuration raises what it likes
        return unclear


def recurrent(model: Any) -> bool:
    """Whether no layer attends to earlier tokens: all that is known of them is a state of fixed size.

    Such layers multiply what they read by the mask, which must be that of the tokens fed and of no others.
    """
    kinds = fact(text_config(model), "layer_types")
    return bool(kinds) and all(kind == "linear_attention" for kind in kinds)


def windows_of(model: Any) -> tuple[int | None, ...] | None:
    """Newest tokens that each layer attends to, None: all of them.

    None for models whose layers hold something else than the keys and values of tokens, each layer its own: recurrent
    states, shared keys and compressed or chunked layers need the model's own cache. A window as long as the model's
    context is none.
    """
    config = text_config(model)
    if getattr(type(model), "_is_stateful", False) or fact(config, "kv_sharing_modes", unclear=True) is not None:
        return None
    if fact(config, "num_kv_shared_layers", unclear=True) or fact(config, "attention_chunk_size", unclear=True):
        return None
    window, context = fact(config, "sliding_window", unclear="unclear"), fact(config, "max_position_embeddings")
    if window == "unclear":
        return None
    short = window if window is not None and (context is None or window < context) else None
    kinds = fact(config, "layer_types", unclear=("unclear",))
    if kinds is None:
        return (short,) * (fact(config, "num_hidden_layers") or 0)
    sees = {"full_attention": None, "sliding_attention": short}
    return tuple(sees[kind] for kind in kinds) if sees.keys() >= set(kinds) else None
