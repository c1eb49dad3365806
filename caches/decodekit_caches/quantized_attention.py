"""Attention to packed keys and values, without opening them first.

Opening a block takes several passes over memory: codes to numbers, times the scale, plus the least value, rounded to
the model's dtype; attention then reads the result once. For a few new tokens that opening is most of the work. But
scales and least values can be left outside of the sums: where s and m are those of a number's group,

    q . k = sum_d q_d (s_d c_d + m_d) = (q * s) . c + q . m
    sum_t p_t v_t = sum_t p_t (s_t c_t + m_t) = sum_t (p_t s_t) c_t + sum_t p_t m_t

so the query, or the probabilities, are scaled instead of every number, and matrix products run over the codes c. A
kernel in C does all of that where it can be built; what is here serves everywhere, and all groupings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from decodekit import InputError
from torch import Tensor
from torch.utils import _pytree as tree

from .quantized_blocks import HALF
from .quantized_kernel import attend

MOST_NEW = 16
"""New tokens that attention to packed tokens pays for; a chunk of a prompt opens them once for all of its tokens."""
AT_ONCE = 1 << 19
"""Numbers handled in one go: few calls, and what is made in between stays in the second cache."""
DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})


def pays(key: Tensor, value: Tensor) -> bool:
    """Whether new keys and values [B, H, Q, D] are worth an attention to packed tokens; measured on CPUs only."""
    return (
        key.shape[2] <= MOST_NEW
        and key.device.type == "cpu"
        and key.dtype in DTYPES
        and not (torch.is_grad_enabled() and (key.requires_grad or value.requires_grad))
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()
    )


class Unopened(Tensor):
    """Keys (side 0) or values (side 1) of a layer, [B, H, T, D], that open when anything but attention reads them.

    Valid until the layer changes; reading them later raises `InputError`.
    """

    layer: Any
    side: int
    version: int

    @staticmethod
    def of(layer: Any, side: int) -> Unopened:
        """What `layer` holds now."""
        tail = layer.tails[side]
        shape = (tail.shape[0], tail.shape[1], layer.length, tail.shape[3])
        new = torch.Tensor._make_wrapper_subclass(Unopened, shape, dtype=tail.dtype, device=tail.device)
        new.layer, new.side, new.version = layer, side, layer.version
        return new

    def opened(self) -> Tensor:
        """The numbers, in a buffer that other layers use, too."""
        if self.version != self.layer.version:
            raise InputError(
                "keys and values of a quantized cache are gone once the cache has changed: use or copy them before"
            )
        return self.layer.opened(self.side)  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Unopened({self.opened()!r})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            found = _attend(*args, **kwargs)
            if found is not None:
                return found
        with torch._C.DisableTorchFunctionSubclass():
            if getattr(func, "__name__", "") == "__get__" or func in _SHAPES:
                return func(*args, **kwargs)
            args, kwargs = tree.tree_map_only(Unopened, Unopened.opened, (tuple(args), kwargs))
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree.tree_map_only(Unopened, Unopened.opened, (args, kwargs or {}))
        return func(*args, **kwargs)


_SHAPES = frozenset({Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__})
"""What is answered without opening; so are attributes, which are read by ``__get__``."""


def _attend(
    query: Tensor, key: Any, value: Any, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor | None:  # fmt: skip
    """What `scaled_dot_product_attention` returns for packed keys and values; None where it must open them."""
    if not (isinstance(key, Unopened) and isinstance(value, Unopened) and key.layer is value.layer):
        return None
    layer, heads = key.layer, key.shape[1]
    if (
        (key.side, value.side) != (0, 1)
        or (key.version, value.version) != (layer.version, layer.version)
        or layer.gaps  # some tokens of a block are not to be seen
        or dropout_p
        or (is_causal and query.shape[2] > 1)
        or query.dim() != 4
        or query.shape[0] != key.shape[0]
        or query.dtype != key.dtype
        or query.device != key.device
        or query.shape[1] % heads
        or (query.shape[1] != heads and not enable_gqa)
        or (torch.is_grad_enabled() and query.requires_grad)
    ):
        return None
    rows, every, new, width = query.shape
    scale = 1 / math.sqrt(width) if scale is None else scale
    if (found := attend(layer, query, attn_mask, scale)) is not None:
        return found
    asked = query.float().mul(scale).reshape(rows, heads, -1, width)
    scores = scores_of(layer, asked)
    if attn_mask is not None:
        seen = scores.view(rows, every, new, -1)
        if attn_mask.dtype == torch.bool:
            seen.masked_fill_(~attn_mask, -torch.inf)
        else:
            seen.add_(attn_mask)
        blind = scores.amax(-1, keepdim=True) == -torch.inf  # padding: zero, as everywhere
        shares = torch.softmax(scores, -1).masked_fill_(blind, 0)
    else:
        shares = torch.softmax(scores, -1)
    found = mixture_of(layer, shares).view(rows, every, new, -1)
    return (found.clamp_(-HALF, HALF) if query.dtype == torch.float16 else found).to(query.dtype)


def scores_of(layer: Any, asked: Tensor) -> Tensor:
    """Products of queries [B, H, R, D], float32, with all keys of a layer: [B, H, R, T]."""
    blocks, tail, size = layer.packed[0], layer.tails[0], layer.size
    rows, heads, count, width = asked.shape
    scores = asked.new_empty(rows, heads, count, layer.length)
    if layer.blocks:
        scale, least = (part.float() for part in blocks.parts(layer.blocks)[1:])  # contiguous, too
        room = scores[..., : layer.sealed]
        if blocks.per_channel:
            asked_of = asked.unsqueeze(2) * scale  # [B, H, N, R, D]
            for start, stop, bytes_ in blocks.bytes_of(tail, layer.blocks, AT_ONCE, layer.space.scratch):
                found = asked_of[:, :, start:stop].reshape(-1, count, width) @ bytes_.view(-1, size, width).mT
                found = found.view(rows, heads, stop - start, count, size).transpose(2, 3)
                room[..., start * size : stop * size].unflatten(3, (stop - start, size)).copy_(found)
            grouped = room.unflatten(3, (layer.blocks, size))
            blocks.differences(grouped)
            grouped += (asked @ least.squeeze(3).mT).unsqueeze(4)
        else:
            groups = scale.shape[-1]
            dots = asked.new_empty(groups, *room.shape)
            for start, stop, bytes_ in blocks.bytes_of(tail, layer.blocks, AT_ONCE, layer.space.scratch):
                numbers = bytes_.flatten(2, 3)
                for found, part, group in zip(dots, asked.chunk(groups, 3), numbers.chunk(groups, 3), strict=True):
                    found[..., start * size : stop * size] = part @ group.mT
            blocks.differences(dots.unflatten(4, (layer.blocks, size)))
            sums = asked.unflatten(3, (groups, -1)).sum(4)  # [B, H, R, G]
            room.copy_(sums @ least.flatten(2, 3).mT)
            for found, part in zip(dots, scale.flatten(2, 3).unbind(3), strict=True):
                room += found.mul_(part.unsqueeze(2))
    scores[..., layer.sealed :] = asked @ tail.narrow(2, 0, layer.recent).float().mT
    return scores


def mixture_of(layer: Any, shares: Tensor) -> Tensor:
    """Sums of all values of a layer, weighted by `shares` [B, H, R, T], float32: [B, H, R, D]."""
    blocks, tail, size = layer.packed[1], layer.tails[1], layer.size
    found = shares[..., layer.sealed :] @ tail.narrow(2, 0, layer.recent).float()
    if not layer.blocks:
        return found
    scale, least = (part.float() for part in blocks.parts(layer.blocks)[1:])
    shares = shares[..., : layer.sealed]
    grouped = shares.unflatten(3, (layer.blocks, size))  # [B, H, R, N, size]
    if blocks.per_channel:
        found += grouped.sum(4) @ least.squeeze(3)
        weights = blocks.differed(grouped).transpose(2, 3)  # [B, H, N, R, size]
        for start, stop, bytes_ in blocks.bytes_of(tail, layer.blocks, AT_ONCE, layer.space.scratch):
            found += (weights[:, :, start:stop] @ bytes_).mul_(scale[:, :, start:stop]).sum(2)
        return found
    groups = scale.shape[-1]
    result = found.unflatten(3, (groups, -1))
    parts = []
    for group, (step, low) in enumerate(zip(scale.flatten(2, 3).unbind(3), least.flatten(2, 3).unbind(3), strict=True)):
        # A product and its sum: with a single column a matrix product takes far longer.
        result[..., group, :] += (shares * low.unsqueeze(2)).sum(3, keepdim=True)
        parts.append(blocks.differed((shares * step.unsqueeze(2)).unflatten(3, (layer.blocks, size))).flatten(3))
    for start, stop, bytes_ in blocks.bytes_of(tail, layer.blocks, AT_ONCE, layer.space.scratch):
        for group, numbers in enumerate(bytes_.flatten(2, 3).chunk(groups, 3)):
            result[..., group, :] += parts[group][..., start * size : stop * size] @ numbers
    return found
