"""Which modules are layers that `Steps` can run, and what runs them in their place."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from decodekit_plugins.kernels import library
from decodekit_plugins.twins.shadow import like

from .layouts import Plain
from .steps import Facts, Norm, Part, Steps, able
from .streamed import Streamed

Kernels = Mapping[int, Plain]
"""What runs the weight of a linear layer, by the layer's id."""
LAYERS = "decodekit_plugins.models.native.layers"
"""Where the native model's layers are."""
SILU = {("torch.nn.modules.activation", "SiLU"), ("transformers.activations", "SiLUActivation")}
RECORDER = "output_capturing_hook"
"""transformers' own hook for attention weights, which its fused kernels do not give either."""
ALIKE = {
    f"transformers.models.{name.lower()}.modeling_{name.lower()}": name
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3")
}
"""Modules of transformers whose layers' forward pass is that of Llama's: what their classes are called after."""


class BlockForward:
    """The forward pass of a native model's layers; their class stands behind it in the order of methods."""

    steps: Steps

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, view: Any, cache: Any, newest: bool = False) -> Tensor:
        """As the layer behind it."""
        if not self.steps.fit(x, cos):
            stock: Tensor = super().forward(x, cos, sin, view, cache, newest)  # type: ignore[misc]
            return stock
        return self.steps(x, cos, sin, cache, self.self_attn.layer, *view, newest)  # type: ignore[attr-defined]


class LayerForward:
    """The forward pass of Llama-like layers of transformers."""

    steps: Steps

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the layer behind it."""
        attention: Any = self.self_attn  # type: ignore[attr-defined]
        mask, tables = kwargs.get("attention_mask"), kwargs.get("position_embeddings")
        if (
            args
            or not isinstance(tables, tuple)
            or not self.steps.fit(hidden_states, tables[0])
            or attention.config._attn_implementation != "sdpa"
            or not attention.is_causal
            or not (mask is None or (isinstance(mask, Tensor) and mask.dim() == 4))
        ):
            stock: Tensor = super().forward(hidden_states, *args, **kwargs)  # type: ignore[misc]
            return stock
        cache = kwargs.get("cache")
        if cache is None:
            cache = kwargs.get("past_key_values")
        cos, sin = tables
        return self.steps(hidden_states, cos, sin, cache, attention.layer_idx, mask, mask is None)


class NormForward:
    """The forward pass of RMS norms with a weight, of whichever class stands behind it."""

    norm: Norm

    def forward(self, x: Tensor) -> Tensor:
        """As the norm behind it: [..., K]."""
        if not able(x, self.norm.weight.dtype) or x.shape[-1] != self.norm.weight.shape[0]:
            stock: Tensor = super().forward(x)  # type: ignore[misc]
            return stock
        return library.norm(x, self.norm.weight, self.norm.eps)


def fused(module: nn.Module, kernels: Kernels) -> nn.Module | None:
    """A layer or norm like `module`, over the same parameters, in a few kernels; None where it is none or cannot be."""
    if (norm := _norm(module)) is not None and _bare(module):
        made = like(module, _class(NormForward, type(module)))
        made.__dict__["norm"] = norm
        return made
    found = _forward_of(type(module))
    if found is None or not _bare(module):
        return None
    forward, read = found
    try:
        facts = read(module, kernels)
    except (AttributeError, KeyError, ValueError):  # not made as its class makes them
        return None
    made = like(module, _class(forward, type(module)))
    made.__dict__["steps"] = Steps(facts)
    return made


@functools.cache
def _class(forward: type, cls: type) -> type:
    return type(f"Fused{cls.__name__}", (forward, cls), {"__module__": __name__})


def _forward_of(cls: type) -> tuple[type, Callable[[Any, Kernels], Facts]] | None:
    if is_class(cls, LAYERS, "Block"):
        return BlockForward, _native
    if cls.__module__ in ALIKE and is_class(cls, cls.__module__, f"{ALIKE[cls.__module__]}DecoderLayer"):
        return LayerForward, _llama
    return None


def is_class(cls: type, module: str, name: str) -> bool:
    """Whether a class is the one of this name, with the forward pass that was written for it."""
    forward: Any = getattr(cls, "forward", None)
    told = getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")
    return (cls.__module__, cls.__qualname__) == (module, name) and told == (module, f"{name}.forward")


def _bare(module: nn.Module) -> bool:
    """Whether nobody listens to what happens inside of a layer, or changed it, and it is not in training."""
    if module.training or "forward" in module.__dict__:
        return False
    for part in module.modules():
        hooks = [*part._forward_hooks.values(), *part._forward_pre_hooks.values()]
        if part is not module and [hook for hook in hooks if getattr(hook, "__name__", "") != RECORDER]:
            return False
        if "forward" in part.__dict__ or part._backward_hooks:
            return False
    return True


def _part(layer: nn.Module, kernels: Kernels) -> Part:
    """Raises `KeyError` or `ValueError` for a layer that runs no kernel of ours."""
    kernel, bias = kernels[id(layer)], layer._parameters.get("bias")
    if not isinstance(kernel, Streamed):
        raise ValueError("not a kernel")
    return Part(kernel, None if bias is None else bias.detach())


def _facts(
    sizes: tuple[int, int, int], parts: Mapping[str, Any], qkv: tuple[Part, ...], gate_up: tuple[Part, ...],
    o: Part, down: Part,
) -> Facts:  # fmt: skip
    """Raises `ValueError` where anything has another shape, type or place than kernels take for granted."""
    heads, kv_heads, dim = sizes
    facts = Facts(heads=heads, kv_heads=kv_heads, dim=dim, qkv=qkv, gate_up=gate_up, o=o, down=down, **parts)
    hidden, inner = facts.norm1.weight.shape[0], down.weight.shape[1]
    outer, narrow = heads * dim, kv_heads * dim
    rows = (outer, narrow, narrow) if len(qkv) == 3 else (outer + 2 * narrow,)
    wide = (inner, inner) if len(gate_up) == 2 else (2 * inner,)
    wanted = [*((n, hidden) for n in (*rows, *wide)), (hidden, outer), (hidden, inner)]
    linear = [*qkv, *gate_up, o, down]
    if [tuple(part.weight.shape) for part in linear] != wanted or dim % 2 or heads % kv_heads:
        raise ValueError("parts of other shapes")
    if any(part.bias is not None and part.bias.shape != part.weight.shape[:1] for part in linear):
        raise ValueError("biases of other shapes")
    norms = [(facts.norm1, hidden), (facts.norm2, hidden), (facts.q_norm, dim), (facts.k_norm, dim)]
    if any(norm is not None and norm.weight.shape != (size,) for norm, size in norms):
        raise ValueError("norms of other shapes")
    small = [norm.weight for norm, _ in norms if norm is not None]
    small += [part.bias for part in linear if part.bias is not None]
    if len({part.weight.dtype for part in linear}) > 1 or any(t.dtype is not facts.dtype for t in small):
        raise ValueError("parts of several types")
    if any(t.device.type != "cpu" or not t.is_contiguous() for t in [*small, *(part.weight for part in linear)]):
        raise ValueError("parts in other places or orders")
    return facts


def _native(block: Any, kernels: Kernels) -> Facts:
    attention, mlp = block.self_attn, block.mlp
    if not (is_class(type(attention), LAYERS, "Attention") and is_class(type(mlp), LAYERS, "MLP")):
        raise ValueError("other parts")
    parts = {
        "scale": attention.head_dim**-0.5, "dtype": block.input_layernorm.weight.dtype,
        "norm1": _rms(block.input_layernorm), "norm2": _rms(block.post_attention_layernorm),
        "q_norm": _rms(attention.q_norm), "k_norm": _rms(attention.k_norm),
    }  # fmt: skip
    return _facts(
        (attention.heads, attention.kv_heads, attention.head_dim), parts, (_part(attention.qkv_proj, kernels),),
        (_part(mlp.gate_up_proj, kernels),), _part(attention.o_proj, kernels), _part(mlp.down_proj, kernels),
    )  # fmt: skip


def _llama(layer: Any, kernels: Kernels) -> Facts:
    attention, mlp = layer.self_attn, layer.mlp
    home, act = type(layer).__module__, type(mlp.act_fn)
    name = ALIKE[home]
    if not (is_class(type(attention), home, f"{name}Attention") and is_class(type(mlp), home, f"{name}MLP")):
        raise ValueError("other parts")
    if (act.__module__, act.__qualname__) not in SILU:
        raise ValueError("another activation")
    dim, heads = attention.head_dim, attention.config.num_attention_heads
    parts = {
        "scale": attention.scaling, "dtype": layer.input_layernorm.weight.dtype,
        "norm1": _rms(layer.input_layernorm), "norm2": _rms(layer.post_attention_layernorm),
        "q_norm": _rms(getattr(attention, "q_norm", None)), "k_norm": _rms(getattr(attention, "k_norm", None)),
    }  # fmt: skip
    qkv = tuple(_part(getattr(attention, f"{part}_proj"), kernels) for part in "qkv")
    gate_up = tuple(_part(getattr(mlp, f"{part}_proj"), kernels) for part in ("gate", "up"))
    sizes = heads, heads // attention.num_key_value_groups, dim
    return _facts(sizes, parts, qkv, gate_up, _part(attention.o_proj, kernels), _part(mlp.down_proj, kernels))


def _rms(module: nn.Module | None) -> Any:
    if module is None:
        return None
    found = _norm(module)
    if found is None:
        raise ValueError("a norm of another kind")
    return found


def _norm(module: Any) -> Norm | None:
    """What an RMS norm is made of; None for modules that are none, or have no weight [K] on a CPU."""
    cls = type(module)
    if cls is nn.RMSNorm:
        eps = module.eps
    elif cls.__module__ in ALIKE and is_class(cls, cls.__module__, f"{ALIKE[cls.__module__]}RMSNorm"):
        eps = module.variance_epsilon
    else:
        return None
    weight = module._parameters.get("weight")
    if (
        type(weight) is not nn.Parameter
        or weight.dim() != 1
        or not isinstance(eps, float)
        or weight.device.type != "cpu"
    ):
        return None
    return Norm(weight.detach(), eps) if weight.is_contiguous() and weight.dtype in library.TYPES else None
