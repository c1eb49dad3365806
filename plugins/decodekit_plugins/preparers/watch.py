"""Notices that a weight changed after it was packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from .layouts import Plain

SAMPLES = 8
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@attrs.frozen(eq=False)
class Weight:
    """A weight as it was when its kernel was made."""

    home: dict[str, Any]
    """The parameters of the layer it belongs to."""
    parameter: nn.Parameter
    version: int
    place: int
    probe: Tensor
    """A few elements, as integers: a view, so that edits behind the back of torch's counter show, too."""
    kernel: Plain

    @classmethod
    def of(cls, home: dict[str, Any], kernel: Plain) -> Weight:
        """Look at ``home["weight"]`` now."""
        parameter = home["weight"]
        return cls(home, parameter, version(parameter), parameter.data_ptr(), _probe(parameter), kernel)


class Watch:
    """Cheap to ask before every call: what costs is one small copy of samples of all weights."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = weights
        self._seen = self._samples()

    def changed(self) -> list[Weight]:
        """The weights that are not what they were: replaced, moved, written to, or other values in their samples."""
        found = [
            weight
            for weight in self.weights
            if weight.home.get("weight") is not weight.parameter
            or version(weight.parameter) != weight.version
            or weight.parameter.data_ptr() != weight.place
        ]
        for size, now in self._samples().items():
            if not torch.equal(now, self._seen[size]):
                mine = [weight for weight in self.weights if weight.probe.element_size() == size]
                before = self._seen[size].split([len(weight.probe) for weight in mine])
                found += [w for w, old in zip(mine, before, strict=True) if not torch.equal(w.probe, old)]
        return found

    def _samples(self) -> dict[int, Tensor]:
        sizes = {weight.probe.element_size() for weight in self.weights}
        return {n: torch.cat([w.probe for w in self.weights if w.probe.element_size() == n]) for n in sizes}


def version(tensor: Tensor) -> int:
    """How often torch saw the tensor written to; tensors made in inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _probe(parameter: Tensor) -> Tensor:
    data = parameter.detach()
    flat = data.view(-1) if data.is_contiguous() else data.diagonal()
    step = max(1, len(flat) // SAMPLES - 1)
    # An odd step meets other columns in other rows, and a tensor of several gigabytes is read in eight places.
    view: Tensor = flat[step // 2 :: step | 1][:SAMPLES].view(INTEGERS[data.element_size()])
    return view
