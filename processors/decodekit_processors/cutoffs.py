"""Cutoffs by probability: drop what is less likely than a fixed number, or than one that follows the entropy."""

from __future__ import annotations

import math
from typing import ClassVar

import attrs
import torch
from decodekit.fields import between, option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import device_option
from .entropy import entropy, level, profile
from .listing import largest
from .nucleus import mass, weights
from .rowwise import Knob, Scanning, filter_value, min_tokens


class _Cutoff(Scanning):
    """Cuts where `_floor` says; the best `min_tokens_to_keep` stay anyway, and all that tie with the last of them."""

    __slots__ = ()
    min_tokens_to_keep: int

    def _number(self, value: float) -> float:
        return math.log(value) if value else -math.inf

    def _dense_floor(self, scores: Tensor, top: Tensor, log_p: Knob) -> Tensor:
        """The score of the smallest probability kept: float64 [B, 1]; `top` [B, 1] are the best scores of [B, V]."""
        raise NotImplementedError

    def _list_floor(self, values: Tensor, log_p: Knob) -> Tensor:
        """The same for a descending list [B, K]."""
        return self._dense_floor(values, values[:, :1], log_p)

    def _list_cut(self, values: Tensor, log_p: Knob) -> Tensor:
        k = min(self.min_tokens_to_keep, values.shape[-1])
        return torch.minimum(self._list_floor(values, log_p).to(values.dtype), values[:, k - 1 : k])

    def _scan(self, scores: Tensor, log_p: Knob) -> Tensor:
        k = min(self.min_tokens_to_keep, scores.shape[-1])
        if k == 1:
            top = last = scores.amax(-1, keepdim=True)
        else:
            best = largest(scores, k)[0]
            top, last = best[:, :1], best[:, -1:]
        return torch.minimum(self._dense_floor(scores, top, log_p).to(scores.dtype), last)


@attrs.frozen
class EpsilonLogitsWarper(_Cutoff):
    """Drop tokens less likely than `epsilon` (Hewitt, Manning and Liang 2022, arXiv 2210.15191); 0 keeps all.

    The likeliest token stays even if it is below. Compared as scores, the sum of the weights being float64.
    Scores are floating [B, V]. Raises ValueError for an epsilon outside of [0, 1).
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.TRUNCATE,
        after=("top_n_sigma", "top_h", "top_k", "top_p", "min_p", "typical_p"),
        reads_history=False,
        keeps_argmax=True,
        pure=True,
        graph_safe=True,
    )
    knob: ClassVar[str] = "epsilon"
    off: ClassVar[float | None] = 0

    epsilon: float | tuple[float, ...] = option(
        "Drop tokens less likely than this; 0 keeps all.", check=between(0, 1, high_open=True), per_row=True
    )
    filter_value: float = filter_value()
    min_tokens_to_keep: int = min_tokens()

    def _dense_floor(self, scores: Tensor, top: Tensor, log_p: Knob) -> Tensor:
        return level(top, mass(scores, top)) + log_p

    def _list_floor(self, values: Tensor, log_p: Knob) -> Tensor:
        top = values[:, :1]
        return level(top, weights(values, top).sum(-1, keepdim=True, dtype=torch.float64)) + log_p


@attrs.frozen
class EtaLogitsWarper(_Cutoff):
    """Drop tokens less likely than min(epsilon, sqrt(epsilon) * exp(-entropy)); 0 keeps all.

    The flatter the distribution, the less likely a kept token may be; the likeliest always stays. Entropy is in nats,
    its sums are float64. Scores are floating [B, V]. Raises ValueError for an epsilon outside of [0, 1).
    (Hewitt, Manning and Liang 2022, arXiv 2210.15191.)
    """

    traits: ClassVar[Traits] = Traits(
        phase=Phase.TRUNCATE,
        after=("top_n_sigma", "top_h", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff"),
        reads_history=False,
        keeps_argmax=True,
        pure=True,
        graph_safe=True,
    )
    knob: ClassVar[str] = "epsilon"
    off: ClassVar[float | None] = 0

    epsilon: float | tuple[float, ...] = option(
        "Drop tokens less likely than this, and less still where the distribution is flat; 0 keeps all.",
        check=between(0, 1, high_open=True),
        per_row=True,
    )
    filter_value: float = filter_value()
    min_tokens_to_keep: int = min_tokens()
    device: str = device_option("numbers")

    def _dense_floor(self, scores: Tensor, top: Tensor, log_p: Knob) -> Tensor:
        total, mean = profile(scores, top)
        falling = log_p / 2 - entropy(total, mean)
        lowest = torch.minimum(falling, log_p) if isinstance(log_p, Tensor) else falling.clamp_(max=log_p)
        return level(top, total) + lowest
