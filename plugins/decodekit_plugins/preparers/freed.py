"""What stands where a weight was whose memory has been given back."""

from __future__ import annotations

from typing import Any

import torch
from decodekit.errors import PipelineError
from torch import Tensor, nn

from .layouts import Plain

_FACTS = """shape dtype ndim dim size numel stride layout requires_grad requires_grad_ grad grad_fn is_leaf element_size
    is_floating_point is_complex is_sparse is_quantized is_mkldnn is_nested is_contiguous is_inference names __len__
    _version data_ptr nbytes itemsize is_cuda is_xpu is_mps is_xla __hash__ _is_view retains_grad"""
FACTS = frozenset(_FACTS.split())
"""What can be asked of a weight without reading it."""


class FreedWeight(nn.Parameter):
    """A parameter without memory, beside the packed form that holds its values.

    It tells its shape and type, gives rows to an embedding, and becomes an ordinary weight again where it is copied
    or pickled. Anything else raises `PipelineError`: the model runs prepared only.
    """

    kernel: Plain
    turned: bool
    part: slice

    def __new__(cls, weight: Tensor, kernel: Plain, turned: bool = False, part: slice = slice(None)) -> FreedWeight:
        """Stand in for `weight` [N, K] ([K, N] where `turned`), whose values `kernel` holds in its rows of `part`."""
        empty = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        made: FreedWeight = torch.Tensor._make_subclass(cls, empty, weight.requires_grad)
        made.kernel, made.turned, made.part = kernel, turned, part
        return made

    def plain(self) -> Tensor:
        """The weight itself, in memory of its own. Raises `PipelineError` where it was rounded."""
        if self.kernel.dtype != self.dtype and not self.kernel.exact:
            raise PipelineError(
                f"this weight was freed in {str(self.kernel.dtype).removeprefix('torch.')}, and its {self.dtype} "
                f"values are gone: load the model again"
            )
        whole = self.kernel.plain().to(self.dtype)
        return (
            whole.t().contiguous() if self.turned else whole if self.part == slice(None) else whole[self.part].clone()
        )

    def restored(self) -> nn.Parameter:
        """An ordinary parameter of the same values."""
        return nn.Parameter(self.plain(), requires_grad=self.requires_grad)

    def _parts(self, sizes: list[int]) -> tuple[FreedWeight, ...]:
        if self.turned or self.part != slice(None):
            raise PipelineError("only whole weights are split: call decodekit.release(model)")
        found, start = [], 0
        for size in sizes:
            empty = torch.empty(size, self.shape[1], dtype=self.dtype, device="meta", requires_grad=self.requires_grad)
            found.append(FreedWeight(empty, self.kernel, part=slice(start, start + size)))
            start += size
        return tuple(found)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo[id(self)] = self.restored()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.restored().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:
        return f"FreedWeight({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__self__.__name__ if func.__name__ == "__get__" else func.__name__
        kwargs = kwargs or {}
        if name in ("device", "is_cpu", "is_meta"):
            return {"device": torch.device("cpu"), "is_cpu": True, "is_meta": False}[name]
        if name in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "embedding" and len(args) > 1 and isinstance(args[1], cls):
            return args[1].kernel.rows(args[0]).to(args[1].dtype)
        if name == "detach":  # what a state dict holds; memory is taken only where it is saved
            return cls(args[0], args[0].kernel, args[0].turned, args[0].part)
        if name == "split" and isinstance(args[1], list) and (kwargs or {"dim": 0}) == {"dim": 0} and len(args) == 2:
            return args[0]._parts(args[1])  # fused layers are saved as what they were made of
        raise PipelineError(
            f"{name} was asked of a weight that the preparer freed: use the model prepared (prepare='packed', as "
            f"before), or call decodekit.release(model) to get its weights back"
        )
