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
from .quantized_backends import BACKENDS, PACKS, PackedBlocks
from .quantized_blocks import Blocks
from .quantized_layer import QuantizedLayer, Space

if TYPE_CHECKING:
    from decodekit import BindContext

PER_CHANNEL, PER_TOKEN = -1, 0
"""Values of the axes, as transformers' quanto backend has them."""
AXES = {"hqq": {0: PER_CHANNEL, 1: PER_TOKEN}}
"""Where a backend counts axes otherwise: hqq's 0 is along tokens, 1 along channels."""


def _multiple_of_8(instance: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, int) or value < 8 or value % 8:
        raise ValueError(f"must be a multiple of 8, got {value!r}")


def _named(value: Any) -> Any:
    """``torch.float16`` and ``torch.device("cpu")``, too, are known by their names."""
    return str(value).removeprefix("torch.") if isinstance(value, (torch.dtype, torch.device)) else value


def _device(instance: Any, attribute: Any, value: Any) -> None:
    try:
        torch.device(value or "cpu")
    except (RuntimeError, TypeError):
        raise ValueError(f"must be the name of a device, such as 'cpu' or 'cuda:0', got {value!r}") from None


@attrs.frozen
class Quantized:
    """Keep keys and values in 2, 4 or 8 bits but for the newest tokens (after KIVI, arXiv 2402.02750)."""

    provides: ClassVar[frozenset[str]] = PROVIDES
    backend: str = option(
        "What packs the numbers: torch (our own), or the packages of the extras quanto and hqq.",
        default="torch",
        check=one_of("torch", "quanto", "hqq"),
    )
    nbits: int = option(
        "Bits of a number: 2, 4, 8; quanto has 2 and 4, hqq 1 and 3 as well.", default=4, check=one_of(1, 2, 3, 4, 8)
    )
    axis_key: int | None = option(
        "Groups of keys: -1 along tokens, channel by channel; 0 along channels, token by token; hqq calls them 0 and "
        "1. Unset: along tokens.",
        default=None,
        check=one_of(None, -1, 0, 1),
    )
    axis_value: int | None = option(
        "Groups of values, likewise. Unset: along channels.", default=None, check=one_of(None, -1, 0, 1)
    )
    q_group_size: int = option(
        "Numbers that share a scale, and tokens of a block: a multiple of 8.", default=64, check=_multiple_of_8
    )
    residual_length: int = option("Newest tokens that stay in full precision.", default=128, check=at_least(0))
    compute_dtype: Any = option(
        "Dtype that keys and values are handed out in; unset: the model's.",
        default=None,
        check=one_of(None, "float32", "float16", "bfloat16"),
        converter=_named,
    )
    device: Any = option(
        "Where the packed blocks are kept; unset: beside the model.", default=None, check=_device, converter=_named
    )

    def __attrs_post_init__(self) -> None:
        if self.nbits not in (packs := PACKS[self.backend]):
            able = " and ".join(repr(name) for name, bits in PACKS.items() if self.nbits in bits)
            raise ValueError(
                f"nbits must be one of {', '.join(map(str, packs))} with backend {self.backend!r}; "
                f"{self.nbits} is for backend {able}"
            )
        known = AXES.get(self.backend, {PER_CHANNEL: PER_CHANNEL, PER_TOKEN: PER_TOKEN})
        for name in ("axis_key", "axis_value"):
            if (told := getattr(self, name)) is not None and told not in known:
                raise ValueError(
                    f"{name} must be one of {', '.join(map(str, known))} with backend {self.backend!r}, got {told}"
                )

    @property
    def axes(self) -> tuple[int, int]:
        """`PER_CHANNEL` or `PER_TOKEN` for keys and for values."""
        known = AXES.get(self.backend, {})
        key = PER_CHANNEL if self.axis_key is None else known.get(self.axis_key, self.axis_key)
        value = PER_TOKEN if self.axis_value is None else known.get(self.axis_value, self.axis_value)
        return key, value

    def bind(self, ctx: BindContext, /) -> QuantizedCache:
        """Return an empty cache for one call.

        Raises ValueError for models of which a layer uses the keys of another: they would be opened over by then.
        """
        config = getattr(getattr(ctx.model, "model", None), "config", None)
        if getattr(config, "kv_sharing_modes", None) or getattr(config, "num_kv_shared_layers", None):
            raise ValueError("'quantized' cannot serve a model whose layers share keys; leave cache_implementation out")
        if self.backend in BACKENDS:
            BACKENDS[self.backend](self.nbits)  # what is not installed is said before anything runs
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
        keys, values = (self._blocks(axis == PER_CHANNEL, device) for axis in told.axes)
        return QuantizedLayer((keys, values), size, told.residual_length, dtype, self._reserve, self._space)

    def _blocks(self, per_channel: bool, device: torch.device | None) -> Any:
        told = self.options
        if told.backend == "torch":
            return Blocks(told.nbits, told.q_group_size, per_channel, device)
        return PackedBlocks(told.backend, told.nbits, told.q_group_size, per_channel, device)

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
            names = ("nbits", "q_group_size", "axis_key", "axis_value", "backend")
            told[4:], mine[4:] = ([list(PACKS)[number] for number in numbers[4:]] for numbers in (told, mine))
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
        return torch.tensor([told.nbits, told.q_group_size, *told.axes, list(PACKS).index(told.backend)])
