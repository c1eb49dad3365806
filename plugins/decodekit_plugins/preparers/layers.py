"""Linear layers that run a packed weight, and which layers can be."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import attrs
import torch
from decodekit.errors import PipelineError
from torch import Tensor, nn

from decodekit_plugins.twins.shadow import like

from .freed import FreedWeight
from .layouts import Plain

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def turned(module: nn.Module) -> bool:
    """Whether a layer keeps its weight as [K, N], as GPT-2's do in transformers."""
    return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def linear(module: nn.Module) -> bool:
    """Whether this is meant to be a linear layer."""
    return isinstance(module, nn.Linear) or turned(module)


def why_not(module: nn.Module) -> str:
    """What keeps a linear layer from being packed, or an empty string."""
    weight = module._parameters.get("weight")
    if type(module).forward is not nn.Linear.forward and not turned(module):
        return "it has a forward pass of its own"
    if "forward" in module.__dict__:
        return "its forward pass was replaced"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has hooks"
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "its weight is read by the module around it"
    if weight is None or type(weight) not in (nn.Parameter, FreedWeight):
        return "its weight is no plain parameter"
    if weight.device.type != "cpu":
        return f"it is on {weight.device.type}"
    if weight.layout is not torch.strided or weight.dim() != 2 or weight.dtype not in TYPES or not weight.numel():
        return f"its weight is {weight.dtype} {tuple(weight.shape)}"
    return ""


@attrs.frozen
class Pack:
    """What a packed layer runs: a kernel, and for which numbers of rows."""

    kernel: Plain
    takes: torch.dtype
    """Type of the layer's weight, and so of what comes in and goes out."""
    picks: Sequence[bool]
    """By the bit length of the number of rows, the last one for all above: whether the kernel is the faster one."""
    freed: bool
    """Whether there is no other weight."""


class PackedForward:
    """The forward pass of packed layers; a class of linear layers stands behind it in the order of methods."""

    pack: Pack
    bias: Tensor | None
    weight: Tensor
    shape: tuple[int, int]

    def forward(self, x: Tensor) -> Tensor:
        """As the layer behind it: x [..., K] to [..., N]."""
        pack = self.pack
        kernel = pack.kernel
        width = kernel.shape[1]
        if (
            x.dtype is pack.takes
            and x.dim() > 1
            and x.shape[-1] == width
            and pack.picks[min((x.numel() // width).bit_length(), len(pack.picks) - 1)]
            and not torch.is_autocast_enabled("cpu")
            and not (torch.is_grad_enabled() and (x.requires_grad or self.weight.requires_grad))
        ):
            if kernel.dtype is pack.takes or kernel.converts:
                return kernel(x, self.bias)
            y = kernel(x.to(kernel.dtype), None).to(pack.takes)
            return y if self.bias is None else y + self.bias
        return self._otherwise(x)

    def _otherwise(self, x: Tensor) -> Tensor:
        """The layer itself; where its weight was freed, the kernel in whatever way fits the call."""
        pack = self.pack
        kernel = pack.kernel
        if not pack.freed:
            stock: Tensor = super().forward(x)  # type: ignore[misc]
            return stock
        if torch.is_grad_enabled() and x.requires_grad:
            raise PipelineError(
                "no gradient flows through a layer whose weight was freed: call decodekit.release(model)"
            )
        autocast = torch.is_autocast_enabled("cpu")
        if x.shape[-1] != kernel.shape[1] or not (autocast or x.dtype is pack.takes):
            raise RuntimeError(f"a layer of {kernel.shape[1]} inputs in {pack.takes} got {tuple(x.shape)} in {x.dtype}")
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            y = kernel(x if kernel.exact else x.to(kernel.dtype), None)
            y = y if self.bias is None else y.to(pack.takes) + self.bias
        return y.to(torch.get_autocast_dtype("cpu") if autocast else pack.takes)


@functools.cache
def _class(cls: type) -> type:
    return type(f"Packed{cls.__name__}", (PackedForward, cls), {"__module__": __name__})


def packed(module: nn.Module, pack: Pack) -> nn.Module:
    """A layer like `module`, over the same parameters, that runs `pack`."""
    made = like(module, _class(type(module)))
    made.__dict__["pack"] = pack
    return made


def matrix(module: nn.Module) -> Tensor:
    """The weight of a linear layer as [N, K], whichever way it is kept; of a freed one, read back."""
    weight: Any = module._parameters["weight"]
    weight = weight.plain() if isinstance(weight, FreedWeight) else weight.detach()
    found: Tensor = weight.t() if turned(module) else weight
    return found
