"""What tests of processors beside transformers' classes share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decodekit.testing import score_cases
from hypothesis import strategies as st
from torch import Tensor

SIZES = (11, 60, 1000)
KINDS = ("random", "flat", "peaked", "negative", "mostly -inf", "one token")


def both(ours: type, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Our object and transformers' of the same class name, made alike."""
    reference = pytest.importorskip("transformers.generation.logits_process")
    return ours(*args, **kwargs), getattr(reference, ours.__name__)(*args, **kwargs)


def scores_of(rows: int, vocab: int, seed: int, kinds: tuple[str, ...] = KINDS) -> Iterator[Tensor]:
    """Scores [rows, vocab] of each kind."""
    made = score_cases(rows, vocab, seed)
    return (made[kind] for kind in kinds)


def ids_of(rows: int, width: int, vocab: int = 11, seed: int = 0) -> Tensor:
    """Random token ids int64 [rows, width]."""
    return torch.randint(0, vocab, (rows, width), generator=torch.Generator().manual_seed(seed))


@st.composite
def rows_of_scores(draw: st.DrawFn, vocabs: list[int], most: int, wide: int | None = None) -> Tensor:
    """[B, V]: random, tied, flat, peaked, mostly removed, of one token; at most `most` rows, two of the `wide` size."""
    vocab = draw(st.sampled_from(vocabs))
    rows = draw(st.integers(1, 2 if vocab == wide else most))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scores = torch.randn(rows, vocab, generator=random) * draw(st.sampled_from([0.0, 0.01, 1.0, 3.0, 30.0]))
    step = draw(st.sampled_from([0.0, 0.0, 0.125, 1.0]))
    if step:
        scores = (scores / step).round() * step
    if draw(st.booleans()):
        dead = torch.rand(rows, vocab, generator=random) < draw(st.sampled_from([0.3, 0.9, 1.0]))
        dead[:, draw(st.integers(0, vocab - 1))] = False
        scores = scores.masked_fill(dead, -torch.inf)
    return scores + draw(st.sampled_from([0.0, -100.0, 1e4]))
