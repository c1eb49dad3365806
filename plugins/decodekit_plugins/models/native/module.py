"""A Llama-layout decoder in plain PyTorch: one file, no dependency on transformers.

Parameter names are those of the published checkpoints (`model.layers.0.self_attn.q_proj.weight`), so the
safetensors files of Llama, Mistral, Qwen2, Qwen3 and SmolLM models load strictly into `NativeLM`.

A *position* is what rotary embedding sees: the number of real tokens before this one in its row. A *slot* is a
place in the key/value cache, padding included; causality is a matter of slots.
Shapes: B rows, Q query tokens of this call, K key slots, H hidden size, D head size, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import SUPPORTED, LayerKind, NativeConfig, Unsupported
from .layers import Block, LayerCache, Rotary, View

__all__ = ["SUPPORTED", "NativeConfig", "NativeLM", "NativeOutput", "Unsupported"]


class NativeOutput(NamedTuple):
    """What one forward pass gives (a tuple: torch.compile traces it, which it does not a frozen attrs class)."""

    logits: Tensor
    """[B, min(last, Q), V], in the dtype of the weights."""
    hidden: dict[int, Tensor]
    """Requested layer -> [B, Q, H] residual stream: 0 is the embeddings, n what layer n put out (no final norm)."""


class Trunk(nn.Module):
    """Embeddings, layers and final norm: everything whose name in a checkpoint starts with `model.`."""

    layers: nn.ModuleList

    def __init__(self, config: NativeConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, views: Sequence[View], cache: LayerCache | None,
        newest: bool = False, hidden: Sequence[int] = (),
    ) -> tuple[Tensor, dict[int, Tensor]]:  # fmt: skip
        """Run a layer for each of `views` over [B, Q, H]: the stream behind them, and that behind layers `hidden`.

        newest: whether only the last place goes on behind the last layer, [B, 1, H].
        """
        taps = {0: x} if 0 in hidden else {}
        for done, view in enumerate(views, 1):
            layer = self.layers[done - 1]
            if newest and done == len(views):
                mine = None if view[0] is None else view[0][:, :, -1:]
                x = layer(x, cos, sin, (mine, False), cache, True)
            else:
                x = layer(x, cos, sin, view, cache)
            if done in hidden:
                taps[done] = x
        return x, taps


class NativeLM(nn.Module):
    """The whole decoder: int64 tokens in, next-token logits out."""

    tokenizer: Any  # of the checkpoint it was opened from, and how that wants to generate: `adapt` passes both on
    generation_defaults: Mapping[str, Any]

    def __init__(self, config: NativeConfig) -> None:
        super().__init__()
        self.config = config
        self.tokenizer, self.generation_defaults = None, {}
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary = Rotary(config)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
            self.register_load_state_dict_post_hook(_tie)  # type: ignore[no-untyped-call]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: LayerCache | None = None,
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
        # Of the last layer only what is asked for is computed.
        newest = last == 1 < length and depth not in hidden
        x = self.model.embed_tokens(tokens)
        slots = length if cache is None else sum(cache.get_mask_sizes(length, 0))
        cos, sin = self.rotary(positions, slots, x.dtype)
        views: dict[LayerKind, View] = {}
        kinds = [self.config.kind(i) for i in range(depth)]
        for i, kind in enumerate(kinds):
            if kind not in views:
                views[kind] = self._view(kind, i, x, cache, mask)
        x, taps = self.model(x, cos, sin, [views[kind] for kind in kinds], cache, newest, hidden)
        if last is not None:
            x = x[:, max(x.shape[1] - last, 0) :]
        return NativeOutput(self.lm_head(self.model.norm(x)), taps)

    def _view(self, kind: LayerKind, layer: int, x: Tensor, cache: LayerCache | None, padding: Tensor | None) -> View:
        """What the layers of one kind see of `x` [B, Q, H] and of what came before."""
        length, device = x.shape[1], x.device
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
            seen = seen[None]
        else:
            real = F.pad(padding[:, offset : offset + keys], (0, max(offset + keys - padding.shape[1], 0)))
            # Every query sees itself: no change for real tokens, and a padding query is never left without a key.
            seen = seen & real[:, None, :] | (key == query)
        # As the kernel adds it, so that it is not converted in every layer.
        return torch.zeros_like(seen, dtype=x.dtype).masked_fill_(~seen, -torch.inf)[:, None], False


def _tie(module: nn.Module, keys: Any) -> None:
    """After loading: share the head's weight again, whether or not the file had a copy of it."""
    lm = cast(NativeLM, module)
    lm.lm_head.weight = lm.model.embed_tokens.weight
    if "lm_head.weight" in keys.missing_keys:
        keys.missing_keys.remove("lm_head.weight")
