"""Forms of a weight matrix that a CPU reads faster than the rows it comes in.

Each is made of a weight [N, K] and called like a linear layer: x [..., K] and bias [N] or None give [..., N].
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 8
"""Rows of x that blocks are laid out for: measured for 1 to 512 rows, these serve all of them; those for one row do
not serve several."""
PERIOD = 256
"""Rows after which places in blocks repeat: a multiple of every block in use."""


class Plain:
    """The rows as they are, perhaps in another type: for where nothing else is at hand."""

    name = "rows"
    converts = False
    """Whether it takes and gives other types than its own."""
    exact = False
    """Whether it holds each number of a weight of another type, and gives what products with that would give."""

    def __init__(self, weight: Tensor) -> None:
        self.shape, self.dtype = tuple(weight.shape), weight.dtype
        self.data = self._pack(weight.detach())

    def _pack(self, weight: Tensor) -> Tensor:
        return weight

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Give [..., N] for x [..., K]; both are of the weight's type."""
        return F.linear(x, self.data, bias)

    def plain(self) -> Tensor:
        """The weight [N, K] that it was made of, bit for bit, in memory of its own."""
        return self.data.clone()

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight by int64 ids [...]: [..., K]."""
        return self.data[ids]

    def reads_rows(self, weight: Tensor) -> bool:
        """Whether `rows` gives the rows of the weight that this was made of."""
        return True

    def is_part_of(self, weight: Tensor) -> bool:
        """Whether it runs the memory of `weight` itself."""
        return False

    def __reduce__(self) -> Any:
        return type(self), (self.plain(),)


class Columns(Plain):
    """The transpose in memory: fast for a few rows of small layers."""

    name = "columns"

    def _pack(self, weight: Tensor) -> Tensor:
        return weight.t().contiguous()

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Give [..., N] for x [..., K]; both are of the weight's type."""
        return F.linear(x, self.data.t(), bias)

    def plain(self) -> Tensor:
        """The weight again."""
        return self.data.t().contiguous()

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight by their ids."""
        return self.data[:, ids].movedim(0, -1)


class Blocked(Plain):
    """oneDNN's blocks, in the order in which its kernels read them."""

    name = "blocks"

    def _pack(self, weight: Tensor) -> Tensor:
        # Rows behind each other, or oneDNN would reorder a strided weight slowly.
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
        return packed

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Give [..., N] for x [..., K]; both are of the weight's type."""
        y: Tensor = _linear()(x, self.data, bias, "none", [], "")
        return y

    def plain(self) -> Tensor:
        """The weight again."""
        return self.data.to_dense()

    def rows(self, ids: Tensor) -> Tensor:
        """Rows of the weight by their ids."""
        memory, row, column = self._places
        return memory[row[ids][..., None] + column]

    def reads_rows(self, weight: Tensor) -> bool:
        """Tried on rows of every block: blocks are oneDNN's own affair, and may be others in another version."""
        try:
            ids = torch.arange(0, self.shape[0], 13)
            return torch.equal(self.rows(ids), weight[ids].to(self.dtype)) and torch.equal(
                self.rows(torch.tensor(self.shape[0] - 1)), weight[-1].to(self.dtype)
            )
        except Exception:  # of whichever op is missing or refuses
            return False

    @functools.cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor]:
        """The memory as a flat tensor, and what to add of each row [N] and column [K] to find an element."""
        count, width = self.shape
        probed = min(count, 2 * PERIOD)
        row, column = _offsets(probed, width, self.dtype)
        if count > probed:
            tiles = torch.arange(count).div(PERIOD, rounding_mode="floor")
            row = row[:PERIOD][torch.arange(count) % PERIOD] + tiles * (row[PERIOD] - row[0])
        memory = _memory(self.data, self.dtype)
        if int(row.max() + column.max()) >= len(memory) or int(row.min()) < 0 or int(column.min()) < 0:
            raise RuntimeError("places outside the memory of the blocks")
        return memory, row, column


@functools.cache
def _linear() -> Any:
    return torch.ops.mkldnn._linear_pointwise.default


def _memory(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The memory of a packed weight, flat. The caller keeps `packed` alive."""
    size = torch.ops.mkldnn._nbytes(packed)
    return torch.frombuffer((ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(packed)), dtype=dtype)


@functools.lru_cache(64)
def _offsets(count: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Where the elements of each row and column of blocks are, found with weights that name their own places.

    Places are told in digits of base 128, which every type holds exactly; one is added, since padding is zero.
    """

    def read(numbers: Tensor) -> Tensor:
        packed = torch.ops.mkldnn._reorder_linear_weight(numbers.to(dtype).contiguous(), ROWS)
        return _memory(packed, dtype).long()

    def told(numbers: Tensor) -> Tensor:
        digits = [read((numbers >> (7 * place)) % 128 + 1) - 1 for place in range(3)]
        return digits[0] + (digits[1] << 7) + (digits[2] << 14)

    rows = torch.arange(count)[:, None].expand(count, width)
    columns = torch.arange(width).expand(count, width)
    real = read(torch.ones(count, width)) > 0
    place = torch.full((count, width), -1)
    place[told(rows)[real], told(columns)[real]] = real.nonzero()[:, 0]
    row, column = place[:, 0], place[0] - place[0, 0]
    if not torch.equal(place, row[:, None] + column):
        raise RuntimeError("blocks whose places are no sum of row and column")
    return row, column


@functools.cache
def usable(kind: type[Plain], dtype: torch.dtype) -> bool:
    """Whether this build of torch, on this processor, gives right results in this form and type."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        weight, x = torch.randn(40, 24).to(dtype), torch.randn(3, 24).to(dtype)
        try:
            got, kept = (made := kind(weight))(x, None).float(), made.plain()
        except Exception:  # the op is missing, or refuses: it does not say in one type of error
            return False
        want = F.linear(x.float(), weight.float())
        return torch.equal(kept, weight) and bool(((got - want).abs() <= 0.05 * (1 + want.abs())).all())
