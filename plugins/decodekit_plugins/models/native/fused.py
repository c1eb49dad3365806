"""Linear layers that read the same input, as one: a matrix product costs less the fewer there are of it."""

from typing import Any

import torch
from torch import Tensor, nn

KINDS = ("weight", "bias")


class Fused(nn.Module):
    """A module with fused linear layers whose weights load and save under the names of their parts.

    A state that is loaded may name the parts, as published checkpoints do, or the fused layer; `state_dict` names the
    parts, which are views of the fused weight.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[str, dict[str, int]] = {}
        """Fused layer -> part -> number of its rows, in order."""

    def fuse(self, name: str, width: int, parts: dict[str, int], bias: bool) -> nn.Linear:
        """Make the layer that has the rows of all `parts`, to be assigned to the attribute `name`."""
        self.parts[name] = parts
        return nn.Linear(width, sum(parts.values()), bias=bias)

    def join(self, state: dict[str, Any], prefix: str, dtype: torch.dtype | None = None) -> None:
        """Replace parts in `state` by what they make together, where all are there and fit; as `dtype`, if given."""
        for whole, own, parts in self._tensors(prefix):
            found = [state.get(name) for name in parts]
            if all(_fits(value, mine) for value, mine in zip(found, own.split(list(parts.values())), strict=True)):
                state[whole] = _cat([value if dtype is None else value.to(dtype) for value in found])
                for name in parts:
                    del state[name]

    def _tensors(self, prefix: str) -> list[tuple[str, Tensor, dict[str, int]]]:
        """The fused weights and biases: name in a state, tensor, names of its parts -> their rows."""
        found = []
        for name, parts in self.parts.items():
            for kind in KINDS:
                own = getattr(getattr(self, name), kind, None)
                if isinstance(own, Tensor):
                    rows = {f"{prefix}{part}.{kind}": number for part, number in parts.items()}
                    found.append((f"{prefix}{name}.{kind}", own, rows))
        return found

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:
        """As of any module, with the names and the order of the parts."""
        found: dict[str, Any] = super().state_dict(*args, prefix=prefix, **kwargs)
        own = {name: found.pop(name) for name in list(found) if name.startswith(prefix)}
        for name, parts in self.parts.items():
            there = [kind for kind in KINDS if f"{prefix}{name}.{kind}" in own]
            pieces = {kind: own.pop(f"{prefix}{name}.{kind}").split(list(parts.values())) for kind in there}
            for number, part in enumerate(parts):
                found.update({f"{prefix}{part}.{kind}": pieces[kind][number] for kind in there})
        found.update(own)
        return found

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self.join(state_dict, prefix)
        for whole, own, parts in self._tensors(prefix):
            if whole in state_dict:
                continue
            # Some parts are missing or do not fit: that is said under their own names, and they keep their values.
            given = {name: state_dict.pop(name) for name in parts if name in state_dict}
            missing_keys += [name for name in parts if name not in given]
            pieces = list(own.detach().split(list(parts.values())))
            for place, name in enumerate(parts):
                if name in given and _fits(given[name], pieces[place]):
                    pieces[place] = given[name]
                elif name in given:
                    told, mine = getattr(given[name], "shape", type(given[name])), pieces[place].shape
                    error_msgs.append(f"size mismatch for {name}: {told} in the checkpoint, {mine} in this model.")
            state_dict[whole] = own if own.is_meta else _cat([piece.to(own.device) for piece in pieces])
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def _fits(value: Any, own: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == own.shape


def _cat(pieces: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return torch.cat(pieces)
