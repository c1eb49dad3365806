"""How weights are fetched changes no bit, and is chosen by time where that is clear."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decodekit_plugins.kernels import library

NO_COMPILER = library.why_not()
pytestmark = pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER or "kernels can be built")
TYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library, "_tuned", [])
    yield
    library.library().dk_fetch(-1)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", range(1, 9))
def test_the_same_bits(dtype: torch.dtype, rows: int) -> None:
    random = torch.Generator().manual_seed(rows)
    weight = torch.randn(203, 137, generator=random).to(dtype)
    x = torch.randn(rows, 137, generator=random)
    found = []
    for how in (-1, 0, 1):
        library.library().dk_fetch(how)
        found.append(library.linear(x, weight, None))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[1], found[2])


class Timed:
    """Kernels that take as long as they are told, by their way of fetching."""

    def __init__(self, *seconds: float) -> None:
        self.seconds, self.now, self.how, self.said = seconds, 0.0, -1, list[int]()

    def dk_fetch(self, how: int) -> None:
        self.how = how
        self.said.append(how)

    def dk_linear(self, *_: Any) -> None:
        self.now += self.seconds[self.how]

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(("near", "far", "chosen"), [(2.0, 1.0, 1), (1.0, 2.0, 0), (1.0, 1.02, -1), (1.02, 1.0, -1)])
def test_the_faster_one_is_chosen_once(monkeypatch: pytest.MonkeyPatch, near: float, far: float, chosen: int) -> None:
    timed = Timed(near, far)
    monkeypatch.setattr(library, "library", lambda: timed)
    monkeypatch.setattr(library, "time", timed)
    monkeypatch.setattr(library, "LARGE", 64)
    weight = torch.ones(4, 4)
    library.tune(weight[:2])
    assert not timed.said, "a cache would hold so small a weight"
    library.tune(weight)
    assert timed.said[-1] == chosen
    assert set(timed.said[:-1]) == {0, 1}
    count = len(timed.said)
    library.tune(weight)
    assert len(timed.said) == count


def test_preparing_a_model_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    from decodekit.models import adapter_for
    from decodekit.registry import registry

    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(library, "tune", lambda weight: seen.append(tuple(weight.shape)))
    model = torch.nn.Sequential(torch.nn.Embedding(7, 8), torch.nn.Linear(8, 9), torch.nn.Linear(9, 7)).eval()
    model.requires_grad_(False)
    for name in ("kernels", "packed"):
        registry.load("preparers", name)().prepare(adapter_for(model))
    assert seen == [(9, 8)], "the largest weight, and only of kernels"
