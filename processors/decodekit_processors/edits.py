"""Changes at a few places of the scores: in place where they belong to the chain, in a copy where they do not."""

from __future__ import annotations

import torch
from torch import Tensor


class Editing:
    """A runtime that changes scores [B, V] at a few places; subclasses say how in `edit`."""

    __slots__ = ()

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return `scores` themselves where nothing changes, else new scores, or the changed ones where `own`."""
        raise NotImplementedError

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V], changed; what was given stays as it is."""
        return self.edit(input_ids, scores, False)


def mine(scores: Tensor, own: bool) -> Tensor:
    """The scores where they may be written to, else a copy of them, row after row in memory."""
    return scores if own and scores.is_contiguous() else scores.clone(memory_format=torch.contiguous_format)
