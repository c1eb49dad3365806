"""A Llama-layout decoder in plain PyTorch: one file, no dependency on transformers.

Parameter names are those of the published checkpoints (`model.layers.0.self_attn.q_proj.weight`), so the
safetensors files of Llama, Mistral, Qwen2, Qwen3 and SmolLM models load strictly into `NativeLM`.

A *position* is what rotary embedding sees: the number of real tokens before this one in its row. A *slot* is a
place in the key/value cache, padding included; causality is a matter of slots.
Shapes: B rows, Q query tokens of this call, K key slots, H hidden size, D head size, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast, get_args

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["SUPPORTED", "NativeConfig", "NativeLM", "NativeOutput", "Unsupported"]

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")  # values of `model_type` in a config.json; SmolLM says "llama"
# Type of rotary scaling -> the numbers it needs.
ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
LayerKind = Literal["full_attention", "sliding_attention"]
View = tuple[Tensor | None, bool]  # bool mask [B or 1, 1, Q, K] or None, and whether plain causal attention will do
_ELSEWHERE = "the native model does not cover it: load this checkpoint through the transformers adapter"


class Unsupported(ValueError):
    """A good checkpoint, but of a kind that this model does not implement."""


class _LayerCache(Protocol):
    """What attention asks of a key/value cache."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]: ...  # store new, give all
    def get_mask_sizes(self, query_length: int, layer_idx: int, /) -> tuple[int, int]: ...  # keys, slot of the first
    def get_seq_length(self, layer_idx: int = 0, /) -> int: ...  # slots filled


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


class NativeOutput(NamedTuple):
    """What one forward pass gives (a tuple: torch.compile traces it, which it does not a frozen attrs class)."""

    logits: Tensor
    """[B, min(last, Q), V], in the dtype of the weights."""
    hidden: dict[int, Tensor]
    """Requested layer -> [B, Q, H] residual stream: 0 is the embeddings, n what layer n put out (no final norm)."""


class _Rotary:
    """Rotary cos/sin tables in float32: computed once, kept per device, doubled when a position lies beyond them."""

    def __init__(self, config: NativeConfig) -> None:
        self.config = config
        self._table: Tensor | None = None

    def __call__(self, positions: Tensor, slots: int) -> tuple[Tensor, Tensor]:
        """Cos and signed sin, float32 [B, 1, Q, D], for int64 positions [B, Q], none negative.

        `slots` bounds the positions without a look at them. On a CPU, where looking is free, larger ones work too.
        """
        if positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
            slots = max(slots, int(positions.max()) + 1)
        table = self._table
        if table is None or table.shape[1] < slots or table.device != positions.device:
            start = min(self.config.max_position_embeddings, 4096)
            table = self._table = self._build(max(start, 1 << (slots - 1).bit_length()), positions.device)
        cos, sin = table[:, positions].unsqueeze(2)
        return cos, sin

    def _build(self, size: int, device: torch.device) -> Tensor:
        c, scaling = self.config, self.config.rope_scaling or {}
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):  # fit for training later
            waves = 1.0 / c.rope_theta ** (torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim)
            if rope_kind(scaling) == "linear":
                waves = waves / scaling["factor"]
            elif rope_kind(scaling) == "llama3":  # slow waves are stretched, fast ones kept, those between blended
                low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
                turns = scaling["original_max_position_embeddings"] * waves / (2 * torch.pi)
                keep = ((turns - low) / (high - low)).clamp(0, 1)
                waves = waves * (keep + (1 - keep) / scaling["factor"])
            angles = torch.outer(torch.arange(size, dtype=torch.float32), waves)
            sin = angles.sin()
            return torch.stack([angles.cos().repeat(1, 2), torch.cat([-sin, sin], -1)]).to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each (i, i + D/2) pair of x [B, heads, Q, D]; the sign of the swap is in `sin`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


class _Attention(nn.Module):
    """Grouped-query attention over [B, Q, H], keys and values kept in the cache if there is one."""

    def __init__(self, config: NativeConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.grouped = config.num_attention_heads != config.num_key_value_heads
        width, bias = config.hidden_size, config.attention_bias
        wide, narrow = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(width, wide, bias=bias)
        self.k_proj = nn.Linear(width, narrow, bias=bias)
        self.v_proj = nn.Linear(width, narrow, bias=bias)
        self.o_proj = nn.Linear(wide, width, bias=config.attention_output_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, view: View, cache: _LayerCache | None) -> Tensor:
        rows, length, _ = x.shape
        heads = (rows, length, -1, self.head_dim)
        q, k, v = self.q_proj(x).view(heads), self.k_proj(x).view(heads), self.v_proj(x).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        mask, causal = view
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=self.grouped)
        return cast(Tensor, self.o_proj(out.transpose(1, 2).reshape(rows, length, -1)))


class _MLP(nn.Module):
    """SwiGLU feed-forward over [B, Q, H]."""

    def __init__(self, config: NativeConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class _Block(nn.Module):
    """One decoder layer: attention and feed-forward, each on the normed residual stream."""

    def __init__(self, config: NativeConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = _Attention(config, layer)
        self.mlp = _MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, view: View, cache: _LayerCache | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, view, cache)
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))


class _Trunk(nn.Module):
    """Embeddings, layers and final norm: everything whose name in a checkpoint starts with `model.`."""

    def __init__(self, config: NativeConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)


class NativeLM(nn.Module):
    """The whole decoder: int64 tokens in, next-token logits out."""

    tokenizer: Any  # of the checkpoint it was opened from, and how that wants to generate: `adapt` passes both on
    generation_defaults: Mapping[str, Any]

    def __init__(self, config: NativeConfig) -> None:
        super().__init__()
        self.config = config
        self.tokenizer, self.generation_defaults = None, {}
        self.model = _Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = _Rotary(config)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.register_load_state_dict_post_hook(_tie)  # type: ignore[no-untyped-call]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: _LayerCache | None = None,
        mask: Tensor | None = None,
        *,
        last: int | None = None,
        hidden: Sequence[int] = (),
        layers: int | None = None,
    ) -> NativeOutput:
        """Run the decoder over the tokens that follow what the cache holds.

        tokens, positions: int64 [B, Q]. mask: bool [B, K], True for real tokens, over every slot (those in the
        cache and these), or None where there is no padding. last: how many trailing places get logits (None:
        all). hidden: layers whose output is wanted. layers: stop after this many, then final norm and head
        (early exit). Rows of padding give finite numbers of no meaning. Only the cache is written to.
        """
        depth = self.config.num_hidden_layers if layers is None else layers
        if not 0 <= depth <= self.config.num_hidden_layers:
            raise ValueError(f"layers={layers} is outside 0..{self.config.num_hidden_layers}")
        if any(not 0 <= tap <= depth for tap in hidden):
            raise ValueError(f"hidden={tuple(hidden)} asks for a layer outside 0..{depth}")
        length = tokens.shape[1]
        cos, sin = self.rotary(positions, length)
        views: dict[LayerKind, View] = {}
        x = self.model.embed_tokens(tokens)
        taps = {0: x} if 0 in hidden else {}
        for i in range(depth):
            kind = self.config.kind(i)
            if kind not in views:
                views[kind] = self._view(kind, i, tokens, cache, mask)
            x = self.model.layers[i](x, cos, sin, views[kind], cache)
            if i + 1 in hidden:
                taps[i + 1] = x
        if last is not None:
            x = x[:, max(length - last, 0) :]
        return NativeOutput(self.lm_head(self.model.norm(x)), taps)

    def _view(
        self, kind: LayerKind, layer: int, tokens: Tensor, cache: _LayerCache | None, padding: Tensor | None
    ) -> View:
        """What the layers of one kind see."""
        length, device = tokens.shape[1], tokens.device
        window = self.config.sliding_window if kind == "sliding_attention" else None
        past: int | Tensor = 0 if cache is None else cache.get_seq_length(layer)
        keys, offset = (length, 0) if cache is None else cache.get_mask_sizes(length, layer)
        # A cache that counts on the device, or that returns unwritten slots, always gets a mask.
        exact = isinstance(past, int) and offset + keys == past + length
        if padding is None and exact and (window is None or keys <= window):
            if length == 1:
                return None, False
            if keys == length:
                return None, True
        key = torch.arange(offset, offset + keys, device=device)
        query = (torch.arange(length, device=device) + past)[:, None]
        seen = key <= query
        if window is not None:
            seen &= key > query - window
        if padding is None:
            return seen[None, None], False
        real = F.pad(padding[:, offset : offset + keys], (0, max(offset + keys - padding.shape[1], 0)))
        # Every query sees itself: no change for real tokens, and a padding query is never left without a key.
        return (seen & real[:, None, :] | (key == query))[:, None], False


def _tie(module: nn.Module, keys: Any) -> None:
    """After loading: share the head's weight again, whether or not the file had a copy of it."""
    lm = cast(NativeLM, module)
    lm.lm_head.weight = lm.model.embed_tokens.weight
    if "lm_head.weight" in keys.missing_keys:
        keys.missing_keys.remove("lm_head.weight")
