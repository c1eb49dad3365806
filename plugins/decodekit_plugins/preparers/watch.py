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
    """The parameters of the layer it belongs to, by name."""
    name: str
    parameter: nn.Parameter
    version: int | None
    place: int
    probe: Tensor
    """A few elements, as integers: a view, so that edits behind the back of torch's counter show, too."""
    kernel: Plain | None
    """What was made of it, if anything was."""

    @classmethod
    def of(cls, home: dict[str, Any], name: str, kernel: Plain | None) -> Weight:
        """Look at ``home[name]`` now."""
        parameter = home[name]
        return cls(home, name, parameter, version(parameter), parameter.data_ptr(), _probe(parameter), kernel)


class Watch:
    """Cheap to ask before every call: what costs is one small copy of samples of all weights."""

    def __init__(self, weights: Sequence[Weight]) -> None:
        self.weights = weights
        # Plain tuples and lists: this is read before every call.
        self._facts = [(w.home, w.name, w.parameter, w.version, w.place) for w in weights]
        sizes = {weight.probe.element_size() for weight in weights}
        self._groups = [[w for w in weights if w.probe.element_size() == size] for size in sizes]
        self._probes = [[w.probe for w in group] for group in self._groups]
        self._seen = [torch.cat(probes) for probes in self._probes]

    def changed(self) -> list[Weight]:
        """The weights that are not what they were: replaced, moved, written to, or other values in their samples."""
        found = [
            self.weights[index]
            for index, (home, name, parameter, before, place) in enumerate(self._facts)
            if home.get(name) is not parameter
            or (before is not None and parameter._version != before)
            or parameter.data_ptr() != place
        ]
        for group, probes, seen in zip(self._groups, self._probes, self._seen, strict=True):
            if not torch.equal(torch.cat(probes), seen):
                old = seen.split([len(probe) for probe in probes])
                found += [weight for weight, was in zip(group, old, strict=True) if not torch.equal(weight.probe, was)]
        return found


def version(tensor: Tensor) -> int | None:
    """How often torch saw the tensor written to; None for those made in inference mode, which are not counted."""
    return None if tensor.is_inference() else tensor._version


def _probe(parameter: Tensor) -> Tensor:
    data = parameter.detach()
    flat = data.view(-1) if data.is_contiguous() else data.diagonal()
    step = max(1, len(flat) // SAMPLES - 1)
    # An odd step meets other columns in other rows, and a tensor of several gigabytes is read in eight places.
    view: Tensor = flat[step // 2 :: step | 1][:SAMPLES].view(INTEGERS[data.element_size()])
    return view
