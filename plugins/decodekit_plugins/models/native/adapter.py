"""`NativeLM` as the loop sees it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from decodekit.protocols import Forward, ModelSpec
from torch import Tensor

from .module import NativeLM

OFFERS = frozenset({"cache", "positions", "mask", "last", "hidden", "early_exit", "early_logits"})


class NativeAdapter:
    """Adapter of a `NativeLM`. It taps any layer, can leave early, and takes any cache of decodekit."""

    model_kwargs = frozenset({"layers"})

    def __init__(self, model: NativeLM, tokenizer: Any = None, defaults: Mapping[str, Any] | None = None) -> None:
        self.model = model
        self.call: Any = model
        """What runs a pass: the model, or something that stands for it."""
        self.tokenizer = model.tokenizer if tokenizer is None else tokenizer
        self.defaults: Mapping[str, Any] = dict(model.generation_defaults if defaults is None else defaults)
        config, weight = model.config, model.model.embed_tokens.weight
        self.tied_embeddings = config.tie_word_embeddings
        self.spec = ModelSpec(
            vocab_size=config.vocab_size,
            device=weight.device,
            dtype=weight.dtype,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_positions=config.max_position_embeddings,
            layer_windows=config.windows,
        )
        self.default_cache = "hybrid" if any(self.spec.layer_windows or ()) else "dynamic"

    def offers(self) -> frozenset[str]:
        """Everything but attention weights: the fused attention kernel does not give them."""
        return OFFERS

    def make_cache(self, name: str, /, **options: Any) -> Any:
        """None: the model has no cache of its own, it takes decodekit's."""
        return None

    def ready(self, slots: int, /) -> None:
        """Make what passes over as many slots look up: compiled code must not."""
        weight = self.model.model.embed_tokens.weight
        self.model.rotary(torch.zeros(1, 1, dtype=torch.long, device=weight.device), slots, weight.dtype)

    def early_logits(self, hidden: Tensor, /) -> Tensor:
        """Logits [..., V] that the head gives for hidden states [..., H] of any layer, without a norm before it."""
        return self.model.lm_head(hidden)  # type: ignore[no-any-return]

    def normed(self, hidden: Tensor, /) -> Tensor:
        """Hidden states [..., H] of the last layer as the head sees them: behind the final norm."""
        return self.model.model.norm(hidden)  # type: ignore[no-any-return]

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Any,
        /,
        *,
        mask: Tensor | None = None,
        last: int = 1,
        hidden: Sequence[int] = (),
        layers: int | None = None,
    ) -> Forward:
        """Run int64 `tokens` [B, Q] at `positions` [B, Q]; `layers` runs only the first few (early exit)."""
        out = self.call(tokens, positions, cache, mask, last=last, hidden=hidden, layers=layers)
        return Forward(out.logits, out.hidden, cache)
