"""All layers of a model in one call, for a few tokens: what runs between them costs as much as a small layer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from decodekit_plugins.kernels.library import Keys, library
from decodekit_plugins.twins.shadow import like

from .blocks import RECORDER, BlockForward, is_class
from .steps import MOST_NEW, Steps, dense, mask_of, readable, step

HOME = "decodekit_plugins.models.native.module"
SIZES = ("hidden", "heads", "kv_heads", "dim", "inner", "type", "weights")
NO_KEYS: Any = ((), None, None)


class Stack:
    """Runs layers of one shape. Valid as long as each of `steps` is."""

    def __init__(self, steps: Sequence[Steps]) -> None:
        count = len(steps)
        self.steps = steps
        self._layers = (ctypes.c_void_p * count)(*(one.at for one in steps))
        self._scales = (ctypes.c_float * count)(*(one.facts.scale for one in steps))
        self._keys = NO_KEYS

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any, count: int
    ) -> tuple[Tensor, int]:
        """What stands behind the first layers, [B, T, K], and how many that are: up to `count`.

        Arguments are those of `Steps`.
        """
        first = self.steps[0]
        rows, length, _ = x.shape
        claim, facts = getattr(cache, "claim", None), first.facts
        if (
            claim is None
            or not count
            or length > MOST_NEW
            or rows * length > first.few
            or not first.fit(x, cos)
            or not (mask is None or readable(mask, rows, length, cache.get_mask_sizes(length, 0)[0]))
        ):
            return x, 0
        shape = rows, facts.kv_heads, length, facts.dim
        found: list[Any] = []
        one = None
        while len(found) < count and (one := claim(len(found), shape, facts.dtype)) is not None:
            if mask is not None and one[2] + length != mask.shape[3]:
                break
            found.append(one)
            one = None
        cos, sin = dense(cos, x.dtype), dense(sin, x.dtype)
        if found:
            x = self._run(x.contiguous(), cos, sin, mask, found)
        if one is None:
            return x, len(found)
        done = len(found)  # a layer whose slots are counted already
        return self.steps[done](x, cos, sin, cache, done, mask, False, claimed=one), done + 1

    def __reduce__(self) -> Any:
        return self.steps[0].__reduce__()

    def _run(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, found: Sequence[Any]) -> Tensor:
        rows, length, _ = x.shape
        count = len(found)
        places = [(k.data_ptr(), k.stride(), v.data_ptr(), v.stride()) for k, v, _ in found]
        known = self._keys
        if known[0] != places:
            keys = (Keys * count)(*(Keys(place, *strides[:3]) for place, strides, _, _ in places))
            values = (Keys * count)(*(Keys(place, *strides[:3]) for _, _, place, strides in places))
            known = self._keys = places, keys, values
        starts = (ctypes.c_long * count)(*(start for _, _, start in found))
        y = torch.empty_like(x)
        library().dk_layers(
            self._layers, count, x.data_ptr(), rows, length, cos.data_ptr(), sin.data_ptr(), step(cos), cos.stride(1),
            known[1], known[2], starts, mask_of(mask), self._scales, y.data_ptr(), torch.get_num_threads(),
        )  # fmt: skip
        return y


class TrunkForward:
    """The forward pass of a native model's layers one after the other; their class stands behind it."""

    stack: Stack | None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, views: Sequence[Any], cache: Any, newest: bool = False,
        hidden: Sequence[int] = (),
    ) -> Any:  # fmt: skip
        """As the trunk behind it."""
        own: Any = self
        stack = None if torch.compiler.is_compiling() else own.__dict__.get("stack", self)
        if stack is self:
            stack = own.__dict__["stack"] = _stack(own.layers)
        done = 0
        plain = not newest and not any(hidden) and len({id(view) for view in views}) == 1
        if stack is not None and plain and not (views[0][1] and x.shape[1] > 1) and not any(map(heard, own.layers)):
            behind, done = stack(x, cos, sin, views[0][0], cache, len(views))
        if not done:
            return super().forward(x, cos, sin, views, cache, newest, hidden)  # type: ignore[misc]
        taps = {0: x} if 0 in hidden else {}
        for layer in own.layers[done : len(views)]:
            behind = layer(behind, cos, sin, views[0], cache)
        return behind, taps


def stacked(module: nn.Module) -> nn.Module | None:
    """A trunk like `module` that runs its layers in one call where it can; None for other modules."""
    if not is_class(type(module), HOME, "Trunk") or "forward" in module.__dict__ or module.training:
        return None
    return like(module, _class(type(module)))


def _class(cls: type) -> type:
    return type(f"Stacked{cls.__name__}", (TrunkForward, cls), {"__module__": __name__})


def _stack(layers: nn.ModuleList) -> Stack | None:
    """None where a layer is not a fused one, or is of another shape than others."""
    if not all(isinstance(layer, BlockForward) for layer in layers):
        return None
    return stack_of(layers, [layer.self_attn.layer for layer in layers])  # type: ignore[union-attr]


def stack_of(layers: Iterable[nn.Module], places: Sequence[int]) -> Stack | None:
    """Fused layers in one; None where there are none, or one is of another shape, or has its keys out of order."""
    steps: list[Steps] = [layer.steps for layer in layers]  # type: ignore[misc]
    shapes = {(tuple(getattr(one.layer, name) for name in SIZES), one.facts.dtype, one.few) for one in steps}
    return Stack(steps) if len(shapes) == 1 and list(places) == list(range(len(steps))) else None


def heard(layer: nn.Module) -> bool:
    """Whether somebody listens to a layer, or runs another forward pass in its place."""
    return bool(
        any(getattr(hook, "__name__", "") != RECORDER for hook in layer._forward_hooks.values())
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in layer.__dict__
    )
