"""A cache of keys and values in 2, 4 or 8 bits, with the newest tokens in full precision.

After KIVI (Liu et al. 2024, arXiv 2402.02750): keys have channels of very different size, so they are grouped along
tokens, channel by channel; values are grouped along channels, token by token. Tokens beyond the newest few are packed
in blocks, each once; a layer's blocks are opened when its attention asks, into a buffer that all layers share.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import torch
from decodekit import InputError, at_least, one_of, option
from torch import Tensor

from .dynamic import expected
from .layered import PROVIDES, LayeredCache
from .quantized_blocks import Blocks
from .quantized_layer import QuantizedLayer, Space

if TYPE_CHECKING:
    from decodekit import BindContext

PER_CHANNEL, PER_TOKEN = -1, 0
"""Values of the axes, as transformers' quanto backend has them."""


def _multiple_of_8(instance: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, int) or value < 8 or value % 8:
        raise ValueError(f"must be a multiple of 8, got {value!r}")


@attrs.frozen
class Quantized:
    """Keep keys and values in 2, 4 or 8 bits but for the newest tokens (after KIVI, arXiv 2402.02750)."""

    provides: ClassVar[frozenset[str]] = PROVIDES
    backend: str = option("What packs the numbers.", default="torch", check=one_of("torch"))
    nbits: int = option("Bits of a number.", default=4, check=one_of(2, 4, 8))
    axis_key: int = option(
        "Groups of keys: -1 along tokens, channel by channel; 0 along channels, token by token.",
        default=PER_CHANNEL,
        check=one_of(PER_CHANNEL, PER_TOKEN),
    )
    axis_value: int = option("Groups of values, likewise.", default=PER_TOKEN, check=one_of(PER_CHANNEL, PER_TOKEN))
    q_group_size: int = option(
        "Numbers that share a scale, and tokens of a block: a multiple of 8.", default=64, check=_multiple_of_8
    )
    residual_length: int = option("Newest tokens that stay in full precision.", default=128, check=at_least(0))
    compute_dtype: str | None = option(
        "Dtype that keys and values are handed out in; unset: the model's.",
        default=None,
        check=one_of("float32", "float16", "bfloat16"),
    )
    device: str | None = option("Where the packed blocks are kept; unset: beside the model.", default=None)

    def bind(self, ctx: BindContext, /) -> QuantizedCache:
        """Return an empty cache for one call.

        Raises ValueError for models of which a layer uses the keys of another: they would be opened over by then.
        """
        config = getattr(getattr(ctx.model, "model", None), "config", None)
        if getattr(config, "kv_sharing_modes", None) or getattr(config, "num_kv_shared_layers", None):
            raise ValueError("'quantized' cannot serve a model whose layers share keys; leave cache_implementation out")
        return QuantizedCache(self, expected(ctx) or 0)


class QuantizedCache(LayeredCache):
    """Keys and values of all tokens, packed but for the newest; accepted by transformers models in place of their own.

    The first `update` gives back what it was given; later ones give the packed tokens as they were kept, each number
    off by at most half a step of its group, in a buffer that the next layer's `update` writes over: use it before.
    """

    def __init__(self, options: Quantized | None = None, reserve: int = 0) -> None:
        super().__init__()
        self.options = options or Quantized()
        self._reserve, self._space = reserve, Space()

    def make_layer(self, index: int) -> Any:
        """An empty layer."""
        told = self.options
        device = None if told.device is None else torch.device(told.device)
        dtype = None if told.compute_dtype is None else getattr(torch, told.compute_dtype)
        size = told.q_group_size
        keys, values = (
            Blocks(told.nbits, size, axis == PER_CHANNEL, device) for axis in (told.axis_key, told.axis_value)
        )
        return QuantizedLayer((keys, values), size, told.residual_length, dtype, self._reserve, self._space)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers: codes, scales and newest tokens, room not filled yet included."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def working_nbytes(self) -> int:
        """Bytes of the buffers that one layer at a time is opened into."""
        return self._space.nbytes

    def fork(self) -> QuantizedCache:
        """Return an independent copy."""
        copy = QuantizedCache(self.options, self._reserve)
        copy.load(self.state())
        return copy

    def state(self) -> dict[str, Tensor]:
        """Copies of everything held: ``<layer>.keys.codes`` and so on, and ``layout``, how they are to be read."""
        found = {"layout": self._layout()}
        for index, layer in enumerate(self.layers):
            if layer.is_initialized:
                found.update((f"{index}.{name}", part) for name, part in layer.state())
        return found

    def load(self, state: Mapping[str, Tensor], /) -> None:
        """Take over copies of what `state` returned. Raises `InputError` for what another cache, or one with other
        options, has stored."""
        if "layout" not in state:
            raise InputError("this is no state of a quantized cache: it has no layout")
        if (told := state["layout"].tolist()) != (mine := self._layout().tolist()):
            names = ("nbits", "q_group_size", "axis_key", "axis_value")
            wrong = [f"{n} {a} instead of {b}" for n, a, b in zip(names, told, mine, strict=True) if a != b]
            raise InputError(f"the state is of a quantized cache with {', '.join(wrong)}: set cache_config as it was")
        groups: dict[int, dict[str, Tensor]] = {}
        for name, part in state.items():
            number, _, rest = name.partition(".")
            if number.isdigit():
                groups.setdefault(int(number), {})[rest] = part
        layers = [self.make_layer(index) for index in range(max(groups, default=-1) + 1)]
        try:
            for index, parts in groups.items():
                layers[index].load(parts)
        except KeyError as error:
            raise InputError(f"the state of a quantized cache lacks {error.args[0]}") from error
        self.layers = layers

    def _layout(self) -> Tensor:
        told = self.options
        return torch.tensor([told.nbits, told.q_group_size, told.axis_key, told.axis_value])
