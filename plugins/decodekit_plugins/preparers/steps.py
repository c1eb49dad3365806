"""A decoder layer as a few kernels: everything between two matrix products in one pass, or all of it at once."""

from __future__ import annotations

import ctypes
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from decodekit.errors import PipelineError
from torch import Tensor
from torch.nn.modules.module import _global_forward_hooks, _global_forward_pre_hooks

from decodekit_plugins.kernels.library import TYPES, Keys, Layer, Mask, library, wide

from .streamed import ALL, Streamed

MOST_NEW = 31
"""New tokens up to which the slots of keys are shared among threads, rather than queries."""
NOTHING = ctypes.byref(Mask())


@attrs.frozen
class Part:
    """A linear layer's weight [N, K], as a kernel has it, and its bias [N] or None; the tensors that it runs."""

    kernel: Streamed
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """Give [..., N] in the type of x, by torch's layer."""
        return self.kernel.stock(x, self.bias)

    @property
    def weight(self) -> Tensor:
        """What kernels read."""
        return self.kernel.data

    def split(self, *rows: int) -> list[tuple[Tensor, Tensor | None]]:
        """Weights and biases of so many outputs each."""
        biases = [None] * len(rows) if self.bias is None else self.bias.split(rows)
        return list(zip(self.weight.split(rows), biases, strict=True))


@attrs.frozen
class Norm:
    """An RMS norm's weight and what it adds to the mean of squares."""

    weight: Tensor
    eps: float


@attrs.frozen
class Facts:
    """What a Llama-layout layer is made of."""

    heads: int
    kv_heads: int
    dim: int
    scale: float
    dtype: torch.dtype
    """Of what comes in and goes out, of norms and biases."""
    norm1: Norm
    norm2: Norm
    q_norm: Norm | None
    k_norm: Norm | None
    qkv: tuple[Part, ...]
    """One part, or three."""
    o: Part
    gate_up: tuple[Part, ...]
    """One part, or two."""
    down: Part


class Steps:
    """Runs a layer. Valid as long as the tensors in `facts` are the model's."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        # Where torch's own product of many rows is the faster one, that runs, with kernels between.
        kernel = facts.o.kernel
        self.few = ALL if (kernel.exact or kernel.dtype is torch.float32) and wide() else kernel.few
        outer, narrow = facts.heads * facts.dim, facts.kv_heads * facts.dim
        qkv, gate_up = facts.qkv, facts.gate_up
        inner = facts.down.weight.shape[1]
        q, k, v = [(p.weight, p.bias) for p in qkv] if len(qkv) == 3 else qkv[0].split(outer, narrow, narrow)
        gate, up = [(p.weight, p.bias) for p in gate_up] if len(gate_up) == 2 else gate_up[0].split(inner, inner)
        self.layer = Layer(
            hidden=facts.norm1.weight.shape[0], heads=facts.heads, kv_heads=facts.kv_heads, dim=facts.dim, inner=inner,
            type=TYPES[facts.dtype], weights=TYPES[facts.o.weight.dtype],
        )  # fmt: skip
        for name, norm in (("1", facts.norm1), ("2", facts.norm2), ("_q", facts.q_norm), ("_k", facts.k_norm)):
            if norm is not None:
                setattr(self.layer, f"eps{name}", norm.eps)
                setattr(self.layer, f"norm{name}" if name in "12" else f"{name[1:]}_norm", norm.weight.data_ptr())
        o, down = (facts.o.weight, facts.o.bias), (facts.down.weight, facts.down.bias)
        parts = {"q": q, "k": k, "v": v, "o": o, "gate": gate, "up": up, "down": down}
        for name, (weight, bias) in parts.items():
            setattr(self.layer, name, weight.data_ptr())
            if bias is not None:
                setattr(self.layer, f"b{name[0]}", bias.data_ptr())
        self.at = ctypes.addressof(self.layer)
        self._one = (ctypes.c_void_p * 1)(self.at), (ctypes.c_float * 1)(facts.scale)

    def __reduce__(self) -> Any:
        raise PipelineError(
            "a prepared model cannot be copied or pickled, since kernels read the memory of this one: copy the model "
            "that it was made of (adapter.unprepared.model), and prepare the copy"
        )

    def fit(self, x: Tensor, cos: Tensor) -> bool:
        """Whether kernels can run on x [B, T, K], with tables as wide as a head, here and now."""
        return (
            able(x, self.facts.dtype)
            and x.dim() == 3
            and x.shape[2] == self.layer.hidden
            and cos.shape[-1] == self.facts.dim
            and cos.shape[1] == x.shape[1]
            and cos.shape[0] in (1, x.shape[0])
        )

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any, index: int, mask: Tensor | None, causal: bool,
        newest: bool = False, claimed: Any = None,
    ) -> Tensor:  # fmt: skip
        """The answer [B, T, K] of layer number `index`; `newest`: of the last token only, [B, 1, K], as `mask` is.

        cos, sin: [B or 1, T, ..., D], each of `D` elements side by side; sin may have its first half negated.
        cache: gets new keys and values and gives all of them; None: these are all. Where it has a method `claim`, they
        are written where they belong; `claimed`: what that gave already.
        """
        run = self._whole if claimed or x.shape[0] * x.shape[1] <= self.few else self._between
        return run(
            x.contiguous(),
            dense(cos, x.dtype),
            dense(sin, x.dtype),
            cache,
            index,
            mask,
            causal and x.shape[1] > 1,
            newest,
            claimed,
        )

    # -- matrix products of our own ----------------------------------------------------------------

    def _whole(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: Any,
        index: int,
        mask: Tensor | None,
        causal: bool,
        newest: bool,
        found: Any,
    ) -> Tensor:
        facts, kernels, threads = self.facts, library(), torch.get_num_threads()
        rows, length, _ = x.shape
        few = length <= MOST_NEW and not causal and not newest
        if found is None and few and (claim := getattr(cache, "claim", None)) is not None:
            found = claim(index, (rows, facts.kv_heads, length, facts.dim), facts.dtype)
        if found is not None:
            keys, values, start = found
            if readable(mask, rows, length, start + length):
                y = torch.empty_like(x)
                kernels.dk_layers(
                    self._one[0], 1, x.data_ptr(), rows, length, cos.data_ptr(), sin.data_ptr(), step(cos),
                    cos.stride(1), _keys(keys), _keys(values), ctypes.byref(ctypes.c_long(start)), mask_of(mask),
                    self._one[1], y.data_ptr(), threads,
                )  # fmt: skip
                return y
            key, value = keys.narrow(2, start, length), values.narrow(2, start, length)
        else:
            key, value = x.new_empty(2, rows, length, facts.kv_heads, facts.dim).transpose(2, 3).unbind()
        query = torch.empty(rows, length, facts.heads, facts.dim)
        kernels.dk_enter(
            self.at, x.data_ptr(), rows, length, cos.data_ptr(), sin.data_ptr(), step(cos), cos.stride(1),
            query.data_ptr(), _keys(key), _keys(value), threads,
        )  # fmt: skip
        if found is not None:
            key, value = keys.narrow(2, 0, start + length), values.narrow(2, 0, start + length)
        elif cache is not None:
            key, value = cache.update(key, value, index)
        if newest:
            query, x, length, causal = query[:, -1:].contiguous(), x[:, -1:].contiguous(), 1, False
        out = self._attend(query, key, value, mask, causal)
        y = torch.empty_like(x)
        kind = TYPES[out.dtype]
        kernels.dk_leave(self.at, x.data_ptr(), out.data_ptr(), kind, rows * length, y.data_ptr(), threads)
        return y

    def _attend(self, query: Tensor, keys: Any, values: Any, mask: Tensor | None, causal: bool) -> Tensor:
        """For float32 queries [B, T, heads, D] as many answers, dense."""
        facts = self.facts
        rows, length, heads, dim = query.shape
        kind = facts.dtype, rows, facts.kv_heads, dim
        plain = _plain(keys, *kind) and _plain(values, *kind) and keys.shape == values.shape
        shape = heads, facts.kv_heads, keys.shape[2], dim, facts.scale
        if plain and not causal and length <= MOST_NEW and readable(mask, rows, length, keys.shape[2]):
            out = torch.empty_like(query)
            library().dk_attend(
                query.data_ptr(), _keys(keys), _keys(values), self.layer.type, mask_of(mask), rows, length, *shape,
                out.data_ptr(), torch.get_num_threads(),
            )  # fmt: skip
            return out
        if plain and mask is None and length > MOST_NEW and facts.dtype is torch.float32:
            out = torch.empty_like(query)
            library().dk_prompt(
                query.data_ptr(), _keys(keys), _keys(values), self.layer.type, causal, rows, length, *shape,
                out.data_ptr(), torch.get_num_threads(),
            )  # fmt: skip
            return out
        return self._stock(query.to(facts.dtype).transpose(1, 2), keys, values, mask, causal).contiguous()

    def _stock(self, query: Tensor, keys: Any, values: Any, mask: Tensor | None, causal: bool) -> Tensor:
        """torch's attention: queries [B, heads, T, D] to [B, T, heads, D]."""
        facts = self.facts
        rows, heads, length, dim = query.shape
        if length == 1 and (mask is None or mask.shape[1] == 1):
            query = query.reshape(rows, facts.kv_heads, -1, dim)
            out = F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=facts.scale)
            return out.reshape(rows, 1, heads, dim)
        return F.scaled_dot_product_attention(
            query, keys, values, mask, is_causal=causal, scale=facts.scale, enable_gqa=heads != facts.kv_heads
        ).transpose(1, 2)

    # -- torch's matrix products, and kernels between them -----------------------------------------

    def _between(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: Any,
        index: int,
        mask: Tensor | None,
        causal: bool,
        newest: bool,
        _: Any,
    ) -> Tensor:
        facts, kernels, threads = self.facts, library(), torch.get_num_threads()
        kind = self.layer.type
        rows, length, width = x.shape
        tokens = rows * length
        normal = torch.empty_like(x)
        kernels.dk_norm(
            x.data_ptr(),
            facts.norm1.weight.data_ptr(),
            kind,
            facts.norm1.eps,
            normal.data_ptr(),
            tokens,
            width,
            threads,
        )
        made = [part(normal) for part in facts.qkv]
        heads, kv_heads, dim = facts.heads, facts.kv_heads, facts.dim
        if len(made) == 1:
            made = list(made[0].split([heads * dim, kv_heads * dim, kv_heads * dim], -1))

        def turn(flat: Tensor, count: int, norm: Norm | None) -> Tensor:
            out = x.new_empty(rows, count, length, dim)
            kernels.dk_turn(
                flat.data_ptr(), flat.stride(1), norm and norm.weight.data_ptr(), norm.eps if norm else 0.0,
                cos.data_ptr(), sin.data_ptr(), step(cos), cos.stride(1), kind, out.data_ptr(), rows, length, count,
                dim, threads,
            )  # fmt: skip
            return out

        query, key = turn(made[0], heads, facts.q_norm), turn(made[1], kv_heads, facts.k_norm)
        keys, values = key, made[2].view(rows, length, kv_heads, dim).transpose(1, 2)
        if cache is not None:
            keys, values = cache.update(keys, values, index)
        if newest:
            query, x, length, causal = query[:, :, -1:], x[:, -1:].contiguous(), 1, False
        out = self._stock(query, keys, values, mask, causal)
        more = facts.o(out.reshape(rows, length, heads * dim))
        normal = torch.empty_like(x)
        kernels.dk_add_norm(
            x.data_ptr(), more.data_ptr(), facts.norm2.weight.data_ptr(), kind, facts.norm2.eps, more.data_ptr(),
            normal.data_ptr(), rows * length, width, threads,
        )  # fmt: skip
        wide = [part(normal) for part in facts.gate_up]
        gate, up = wide[0].chunk(2, -1) if len(wide) == 1 else wide
        inner = x.new_empty(rows, length, gate.shape[-1])
        kernels.dk_gate(
            gate.data_ptr(),
            up.data_ptr(),
            gate.stride(1),
            kind,
            inner.data_ptr(),
            rows * length,
            gate.shape[-1],
            threads,
        )
        return facts.down(inner).add_(more)


def able(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether kernels for elements of `dtype` can run on `x` here and now."""
    return (
        x.dtype is dtype
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and type(x) is Tensor
        and x.numel() > 0
        and not _global_forward_hooks
        and not _global_forward_pre_hooks
    )


def dense(table: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotary tables as kernels read them: elements side by side, in the layers' type."""
    return table if table.stride(-1) == 1 and table.dtype is dtype else table.to(dtype).contiguous()


def step(tensor: Tensor) -> int:
    """Elements from one row of a batch to the next; 0 where all share one."""
    return 0 if tensor.shape[0] == 1 else tensor.stride(0)


def _plain(keys: Any, dtype: torch.dtype, rows: int, heads: int, dim: int) -> bool:
    """Whether keys or values are such as kernels read; those of a cache may be of a kind of their own."""
    return (
        type(keys) is Tensor
        and keys.dtype is dtype
        and (keys.shape[0], keys.shape[1], keys.shape[3], keys.stride(3)) == (rows, heads, dim, 1)
        and keys.device.type == "cpu"
    )


def readable(mask: Tensor | None, rows: int, length: int, slots: int) -> bool:
    """Whether kernels read a mask [B or 1, 1, T or 1, S]."""
    if mask is None:
        return True
    shape = mask.shape
    return (
        shape[0] in (1, rows) and shape[1] == 1 and shape[2] in (1, length) and shape[3] == slots
        and mask.stride(3) == 1 and mask.dtype in TYPES
    )  # fmt: skip


def _keys(keys: Tensor) -> Any:
    return ctypes.byref(Keys(keys.data_ptr(), *keys.stride()[:3]))


def mask_of(mask: Tensor | None) -> Any:
    """A mask for kernels, which must be `readable`."""
    if mask is None:
        return NOTHING
    query = 0 if mask.shape[2] == 1 else mask.stride(2)
    return ctypes.byref(Mask(mask.data_ptr(), TYPES[mask.dtype], step(mask), query))
