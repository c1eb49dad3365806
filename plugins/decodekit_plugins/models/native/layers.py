"""The layers of a Llama-layout decoder.

Shapes: B rows, Q query tokens of this call, K key slots, H hidden size, D head size.
"""

from typing import Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import NativeConfig, rope_kind
from .fused import Fused

View = tuple[Tensor | None, bool]
"""Added to the scores, [B or 1, 1, Q, K] in the dtype of the weights, or None; and whether to attend causally."""


class LayerCache(Protocol):
    """What attention asks of a key/value cache."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]:
        """Store new keys and values [B, H, Q, D], give all, [B, H, K, D]."""
        ...

    def get_mask_sizes(self, query_length: int, layer_idx: int, /) -> tuple[int, int]:
        """(keys that `update` will give, slot of the first)."""
        ...

    def get_seq_length(self, layer_idx: int = 0, /) -> int:
        """Slots filled."""
        ...


class Rotary:
    """Rotary cos/sin tables, computed once in float32, kept as the weights' dtype on their device; doubled when a
    position lies beyond them."""

    def __init__(self, config: NativeConfig) -> None:
        self.config = config
        self._table: Tensor | None = None

    def __call__(self, positions: Tensor, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cos and signed sin, [B, Q, 1, D], for int64 positions [B, Q], none negative.

        `slots` bounds the positions without a look at them. On a CPU, where looking is free, larger ones work too.
        """
        table = self._table
        if table is None or table.shape[0] < slots or table.dtype != dtype or table.device != positions.device:
            table = self._build(slots, positions.device, dtype)
        try:
            found = table.index_select(0, positions.flatten())
        except IndexError:  # raised on a CPU only
            table = self._build(int(positions.max()) + 1, positions.device, dtype)
            found = table.index_select(0, positions.flatten())
        cos, sin = found.view(*positions.shape, 2, -1).split(1, 2)
        return cos, sin

    def _build(self, slots: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Make and keep [positions, 2, D] for at least `slots` of them."""
        c, scaling = self.config, self.config.rope_scaling or {}
        size = max(min(c.max_position_embeddings, 4096), 1 << (slots - 1).bit_length())
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
            table = torch.stack([angles.cos().repeat(1, 2), torch.cat([-sin, sin], -1)], 1).to(device, dtype)
        self._table = table
        return table


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each (i, i + D/2) pair of x [B, Q, heads, D]; the sign of the swap is in `sin`."""
    first, second = x.chunk(2, -1)
    return torch.cat([second, first], -1).mul_(sin).addcmul_(x, cos)


class Attention(Fused):
    """Grouped-query attention over [B, Q, H], keys and values kept in the cache if there is one."""

    def __init__(self, config: NativeConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        width, wide, narrow = config.hidden_size, self.heads * self.head_dim, self.kv_heads * self.head_dim
        parts = {"q_proj": wide, "k_proj": narrow, "v_proj": narrow}
        self.qkv_proj = self.fuse("qkv_proj", width, parts, config.attention_bias)
        self.o_proj = nn.Linear(wide, width, bias=config.attention_output_bias)
        self.q_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(self.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, view: View, cache: LayerCache | None, newest: bool = False
    ) -> Tensor:
        """Attend; `newest`: give the last query's answer only, [B, 1, H], of what `view` was made for."""
        rows, length, _ = x.shape
        heads, kv_heads = self.heads, self.kv_heads
        both = heads + kv_heads
        qkv = self.qkv_proj(x).view(rows, length, both + kv_heads, self.head_dim)
        turned, value = qkv.narrow(2, 0, both), qkv.narrow(2, both, kv_heads).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            turned = torch.cat([self.q_norm(turned[:, :, :heads]), self.k_norm(turned[:, :, heads:])], 2)
        if cos.dtype != turned.dtype:  # autocast
            cos, sin = cos.to(turned.dtype), sin.to(turned.dtype)
        turned = rotate(turned, cos, sin)
        query, key = turned.narrow(2, 0, heads), turned.narrow(2, heads, kv_heads).transpose(1, 2)
        if cache is not None:
            key, value = cache.update(key, value, self.layer)
        if newest:
            query, length = query.narrow(1, length - 1, 1), 1
        mask, causal = view
        if length == 1:
            # The queries that share a key are as good as that many places, and the kernel reads keys once for all.
            query = query.reshape(rows, kv_heads, heads // kv_heads, self.head_dim)
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        else:
            grouped = heads != kv_heads
            query = query.transpose(1, 2)
            out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=grouped)
            out = out.transpose(1, 2)
        return cast(Tensor, self.o_proj(out.reshape(rows, length, -1)))


class MLP(Fused):
    """SwiGLU feed-forward over [B, Q, H]."""

    def __init__(self, config: NativeConfig) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_up_proj = self.fuse("gate_up_proj", width, {"gate_proj": inner, "up_proj": inner}, bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Run [B, Q, H]."""
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return cast(Tensor, self.down_proj(F.silu(gate) * up))


class Block(nn.Module):
    """One decoder layer: attention and feed-forward, each on the normed residual stream."""

    def __init__(self, config: NativeConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, view: View, cache: LayerCache | None, newest: bool = False
    ) -> Tensor:
        """Run [B, Q, H]; `newest`: all keys and values are kept, but only the last place goes on, [B, 1, H]."""
        attended = self.self_attn(self.input_layernorm(x), cos, sin, view, cache, newest)
        x = (x[:, -1:] if newest else x) + attended
        return cast(Tensor, x + self.mlp(self.post_attention_layernorm(x)))
