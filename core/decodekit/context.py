"""What a plugin may know about the call it is bound to, in buffers that the loop writes in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.nn.functional import pad

from .protocols import ModelAdapter, ModelSpec
from .settings import Settings

_BLOCK = 64
_MASK64 = (1 << 64) - 1


def mix_seed(seed: int, index: int, salt: int = 0) -> int:
    """A seed for stream `index` of `seed`; stream 0 with salt 0 is `seed` itself (splitmix64 steps)."""
    if index == 0:
        return seed & (_MASK64 >> 1)
    z = (seed + (index + (salt << 32)) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) >> 1


def column(numbers: Sequence[float], device: torch.device) -> Tensor:
    """Numbers of rows as Tensor [rows, 1]: float64 where any is a float, else int64."""
    kind = torch.float64 if any(isinstance(number, float) for number in numbers) else torch.int64
    return torch.tensor(numbers, dtype=kind, device=device)[:, None]


class RowRandom:
    """One independent random stream per row, so that a row's draws do not depend on its neighbours.

    Streams are drawn on the CPU whatever the model's device: the same seed gives the same draws everywhere.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._device = device
        self._block = torch.empty(0, len(seeds))
        self._used = _BLOCK

    def uniform(self) -> Tensor:
        """The next number of every row's stream: float64 [rows] in [0, 1)."""
        if self._used == _BLOCK:
            block = [torch.rand(_BLOCK, generator=g, dtype=torch.float64) for g in self._generators]
            self._block = torch.stack(block, dim=1).to(self._device)
            self._used = 0
        self._used += 1
        return self._block[self._used - 1]

    def reorder(self, rows: Tensor) -> None:
        """Row i goes on with a copy of the stream of former row `rows[i]`."""
        order = rows.tolist()
        self._generators = [self._generators[i].clone_state() for i in order]
        self._block = self._block[:, rows.to(self._block.device)]


@attrs.define(kw_only=True, eq=False, slots=False)
class BindContext:
    """Facts and buffers of one call.

    The loop writes tokens into `tokens` and moves `length`; a run without a known limit may replace `tokens` and
    `mask` by larger ones, so read them through the context each time instead of keeping them.
    """

    spec: ModelSpec
    settings: Settings
    tokens: Tensor
    """int64 [rows, capacity]; the first `length` columns are filled."""
    mask: Tensor | None
    """bool [rows, capacity], False at padding; None where no row has any. Padding is never history."""
    prompt_width: int
    """Columns of the prompt, padding included."""
    model: ModelAdapter | None = None
    tokenizer: Any = None
    samples: bool = False
    seeds: Sequence[int] | None = None
    slots: Sequence[int] = attrs.Factory(lambda self: range(self.tokens.shape[0]), takes_self=True)
    """Request of each row: several rows may belong to one request."""
    dropped: Tensor | None = None
    """int64 [rows] as the run begins: a token taken off the end of each prompt, -1 for none. New text begins by
    saying it again, which is no new text."""
    encoder_input_ids: Tensor | None = None
    """int64 [rows, S] tokens that the encoder of an encoder-decoder model reads, -1 at padding."""
    max_length: int | None = None
    """Total width at which the run ends at the latest; None where no criterion knows. Set before binding."""
    length: int = attrs.field(init=False)
    rows: int = attrs.field(init=False)
    prompt_lengths: Tensor = attrs.field(init=False)
    """int64 [rows]: real tokens of each prompt."""
    _random: RowRandom | None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.length, self.rows = self.prompt_width, self.tokens.shape[0]
        whole = self.tokens.new_full((self.rows,), self.prompt_width)
        self.prompt_lengths = whole if self.mask is None else self.mask[:, : self.prompt_width].sum(-1)

    @property
    def prompts(self) -> int:
        """Number of requests that the rows belong to."""
        return max(self.slots) + 1

    @property
    def input_ids(self) -> Tensor:
        """int64 [rows, length]: everything so far (a view)."""
        return self.tokens.narrow(1, 0, self.length)

    def history_mask(self, width: int | None = None) -> Tensor | None:
        """bool [rows, width] True at real tokens of the first `width` columns; None: all are real."""
        return None if self.mask is None else self.mask[:, : self.length if width is None else width]

    def per_row(self, value: Any) -> Any:
        """An option of which there may be one for each prompt: a tuple as Tensor [rows, 1] on the tokens' device
        (float64 or int64; cast it to the scores' dtype before use), anything else as it is.

        Raises ValueError where the tuple is not as long as there are prompts.
        """
        if not isinstance(value, tuple):
            return value
        count = self.prompts
        if len(value) != count:
            words = f"has {len(value)} values for {count} prompt{'s'[: count != 1]}"
            raise ValueError(f"{words}; give one number, or one each")
        return column([value[slot] for slot in self.slots], self.tokens.device)

    def uniform(self) -> Tensor:
        """One random number per row: float64 [rows] in [0, 1), from the row's own stream."""
        if self._random is None:
            # Unseeded: torch.manual_seed still decides, as people expect.
            base = int(torch.randint(0, 2**62, ()).item()) if self.seeds is None else 0
            own = self.seeds or [mix_seed(base, row) for row in range(self.rows)]
            self._random = RowRandom(own, self.tokens.device)
        return self._random.uniform()

    def reorder(self, rows: Tensor) -> None:
        """Rows change places: row i continues former row `rows[i]`."""
        filled = self.input_ids
        filled.copy_(filled.index_select(0, rows))
        if self.mask is not None:  # without one, all prompts are equally long
            self.mask, self.prompt_lengths = self.mask[rows], self.prompt_lengths[rows]
        if self._random is not None:
            self._random.reorder(rows)

    def append(self, tokens: Tensor) -> None:
        """Write one token for each row, int64 [rows], behind the others."""
        if self.length == self.tokens.shape[1]:
            self.reserve(self.length + 1)
        self.tokens.select(1, self.length).copy_(tokens)
        self.length += 1

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` columns."""
        held = self.tokens.shape[1]
        if held < capacity:
            more = (0, max(capacity, 2 * held) - self.length)
            self.tokens = pad(self.tokens[:, : self.length], more)
            self.mask = None if self.mask is None else pad(self.mask[:, : self.length], more, value=True)
