"""The shape of a Llama-layout decoder, and how a config.json of transformers says it."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast, get_args

import attrs

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")  # values of `model_type` in a config.json; SmolLM says "llama"
# Type of rotary scaling -> the numbers it needs.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
LayerKind = Literal["full_attention", "sliding_attention"]
_ELSEWHERE = "the native model does not cover it: load this checkpoint through the transformers adapter"


class Unsupported(ValueError):
    """A good checkpoint, but of a kind that this model does not implement."""


@attrs.frozen
class NativeConfig:
    """The shape of a `NativeLM`; `from_hf` reads it out of a config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = attrs.field(default=None, hash=False)
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k and v
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each head's queries and keys before rotation (Qwen3)
    sliding_window: int | None = None
    layer_types: tuple[LayerKind, ...] | None = None  # None: all sliding where there is a window

    def __attrs_post_init__(self) -> None:
        rope = self.rope_scaling or {}
        if (kind := rope_kind(rope)) not in ROPE_TYPES:
            raise Unsupported(f"rope type {kind!r} is not one of {', '.join(ROPE_TYPES)}; {_ELSEWHERE}")
        for name in ROPE_TYPES[kind]:
            _number(name, rope.get(name))
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads must be a multiple of num_key_value_heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, not {self.head_dim}: rotary embedding turns pairs")
        kinds = self.layer_types
        if kinds is not None and (len(kinds) != self.num_hidden_layers or not set(kinds) <= set(get_args(LayerKind))):
            raise ValueError(f"layer_types must name {' or '.join(get_args(LayerKind))} for each layer, not {kinds}")

    def kind(self, layer: int) -> LayerKind:
        """Whether layer number `layer` sees every earlier slot or a window of them."""
        if self.sliding_window is None:
            return "full_attention"
        return self.layer_types[layer] if self.layer_types else "sliding_attention"

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Newest slots that each layer sees, None: all. A window as long as the model's context is none."""
        window = self.sliding_window
        window = None if window is None or window >= self.max_position_embeddings else window
        kinds = map(self.kind, range(self.num_hidden_layers))
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "NativeConfig":
        """Read a transformers config.json, in the old (`rope_theta`) or new (`rope_parameters`) spelling.

        Raises `Unsupported`, naming the key, for whatever this model does not implement, other ValueErrors for
        values that make no sense.
        """
        family = config.get("model_type")
        if family not in SUPPORTED:
            raise Unsupported(f"model_type {family!r} is not one of {', '.join(SUPPORTED)}; {_ELSEWHERE}")
        if (act := config.get("hidden_act", "silu")) != "silu":
            raise Unsupported(f"hidden_act {act!r} is not 'silu'; {_ELSEWHERE}")
        if config.get("quantization_config"):
            raise Unsupported(f"quantization_config says that the weights are quantized; {_ELSEWHERE}")
        fields = attrs.fields(cls)
        known = {f.name: config[f.name] for f in fields if config.get(f.name) is not None}
        for f in fields:
            if f.name in known and f.type in _CHECKS:
                _CHECKS[f.type](f.name, known[f.name])
        known.setdefault("num_key_value_heads", known.get("num_attention_heads"))
        if missing := [f.name for f in fields if f.default is attrs.NOTHING and f.name not in {*known, "head_dim"}]:
            raise Unsupported(f"it lacks {', '.join(missing)}")
        known.setdefault("head_dim", known["hidden_size"] // known["num_attention_heads"])
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(rope, Mapping) or any(isinstance(value, Mapping) for value in rope.values()):
            raise Unsupported(f"rope parameters {rope!r} are not one setting for all layers; {_ELSEWHERE}")
        if (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
            raise Unsupported(f"partial_rotary_factor is not 1; {_ELSEWHERE}")
        theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
        _number("rope_theta", theta)
        rope = {name: value for name, value in rope.items() if name != "rope_theta"}
        bias = family == "qwen2" or bool(config.get("attention_bias"))
        window, kinds = _windows(config, family)
        known.update(
            rope_theta=float(theta),
            rope_scaling=rope if rope_kind(rope) != "default" else None,
            attention_bias=bias,
            attention_output_bias=bias and family != "qwen2",
            qk_norm=family == "qwen3",
            sliding_window=window,
            layer_types=kinds,
        )
        return cls(**known)


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a number above 0, not {value!r}")


def _whole(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number above 0, not {value!r}")


def _switch(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, not {value!r}")


_CHECKS: dict[Any, Callable[[str, Any], None]] = {int: _whole, float: _number, bool: _switch}


def rope_kind(rope: Mapping[str, Any] | None) -> str:
    """The type named by a `rope_scaling` or `rope_parameters` mapping; older files spell the key `type`."""
    return str((rope or {}).get("rope_type") or (rope or {}).get("type") or "default")


def _windows(config: Mapping[str, Any], family: str) -> tuple[int | None, tuple[LayerKind, ...] | None]:
    """Window size and kind of every layer. Llama has no window; Qwen's is off unless `use_sliding_window`."""
    window = config.get("sliding_window")
    if not window or family == "llama" or (family != "mistral" and not config.get("use_sliding_window")):
        return None, None
    _whole("sliding_window", window)
    kinds = config.get("layer_types")
    if kinds is None and family != "mistral":
        layers, full = config["num_hidden_layers"], config.get("max_window_layers", 28)
        kinds = ["full_attention" if i < full else "sliding_attention" for i in range(layers)]
    return window, cast("tuple[LayerKind, ...]", tuple(kinds)) if kinds else None
