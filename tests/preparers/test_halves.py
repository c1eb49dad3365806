"""Float32 weights that a type of half the size holds exactly: read in that, with the same answers."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from decodekit import generate, release
from decodekit.models import adapter_for
from decodekit.registry import registry
from decodekit_plugins.kernels import library
from decodekit_plugins.models.native.module import NativeConfig, NativeLM
from decodekit_plugins.preparers.streamed import Halved, Streamed, half_of
from torch import nn

NO_COMPILER = library.why_not()
pytestmark = pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER or "kernels can be built")
KINDS = (torch.bfloat16, torch.float16)
FINE = 1 + 2**-10  # float16 holds it, bfloat16 does not
FREED: dict[str, Any] = {"preparers": {"kernels": {"free": True}}}


def model(kind: torch.dtype | None, **shape: Any) -> NativeLM:
    """A small model in float32 of numbers that `kind` holds; of any where it is None."""
    facts: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = NativeLM(NativeConfig(**{**facts, **shape}))
        for name, weight in made.named_parameters():
            nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    made = made if kind is None else made.to(kind).float()
    with torch.no_grad():
        if kind is torch.float16:
            made.lm_head.weight[0, 0] = FINE
    return made.eval().requires_grad_(False)


def prepared(found: nn.Module, **options: Any) -> Any:
    return registry.load("preparers", "kernels")(**options).prepare(adapter_for(found))


def forms(adapter: Any) -> set[str]:
    return {line["form"] for line in adapter.prepared() if line["form"].startswith("kernel")}


def logits(runs: Any, ids: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        return runs(ids, positions).logits


def ids(rows: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(0))


def test_which_type_holds_all() -> None:
    coarse, fine = torch.tensor([[1.5, -0.0, 3e38]]), torch.tensor([[FINE]])
    assert half_of([coarse.bfloat16().float()]) is torch.bfloat16
    assert half_of([torch.ones(1, 1), fine]) is torch.float16
    assert half_of([torch.ones(1, 1), fine], [torch.bfloat16]) is None
    assert half_of([coarse.bfloat16().float(), fine]) is None, "too large for one, too fine for the other"
    assert half_of([torch.tensor([[1 + 2**-20]])]) is None
    assert half_of([torch.tensor([[float("nan")]])]) is None
    last = torch.ones(3 << 19)
    last[-1] = 1 + 2**-20
    assert half_of([last]) is None, "every number is looked at"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_same_bits_as_of_the_whole_weight(kind: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 51, generator=random).to(kind).float()
    half, whole = Halved(weight, kind), Streamed(weight)
    bias = torch.randn(70, generator=random)
    assert half.data.dtype is kind
    assert half.data.nbytes * 2 == whole.data.nbytes
    for rows in range(1, 9):
        x = torch.randn(rows, 51, generator=random)
        assert torch.equal(half(x, bias), whole(x, bias))
    for rows in (9, 40, 300):  # by other kernels
        x = torch.randn(rows, 51, generator=random)
        assert torch.allclose(half(x, bias), whole(x, bias), atol=1e-5)
        assert torch.allclose(half.stock(x, bias), whole(x, bias), atol=1e-5)
    half.source = None
    assert torch.allclose(half.stock(x, bias), whole(x, bias), atol=1e-5), "x was rounded"
    again = pickle.loads(pickle.dumps(half))
    assert again.exact
    assert torch.equal(again.data, half.data)


@pytest.mark.parametrize("kind", [*KINDS, None], ids=str)
def test_models(kind: torch.dtype | None) -> None:
    found = model(kind)
    adapter = prepared(found)
    wanted = "kernel of float32" if kind is None else f"kernel of {str(kind).removeprefix('torch.')}, exactly"
    assert forms(adapter) == {wanted}
    for shape in ((1, 1), (2, 9), (1, 40), (3, 130)):
        assert torch.allclose(logits(adapter.model, ids(*shape)), logits(found, ids(*shape)), atol=2e-4)
    keys: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    assert torch.equal(generate(found, ids(), prepare="kernels", **keys), generate(found, ids(), **keys))


def test_asked_for_another_type() -> None:
    found = model(torch.bfloat16)
    assert forms(prepared(found, dtype="float32")) == {"kernel of float32"}
    assert forms(prepared(found, dtype="bfloat16")) == {"kernel of bfloat16"}
    assert forms(prepared(found)) == {"kernel of bfloat16, exactly"}


def test_a_weight_that_no_longer_fits() -> None:
    """What an adapter leaves when it is merged: the whole model is read in float32 again, and the other way round."""
    found = model(torch.bfloat16)
    prepared(found)
    weight = found.model.layers[1].mlp.down_proj.weight
    before = weight.clone()
    weight += 0.001
    adapter = prepared(found)
    assert forms(adapter) == {"kernel of float32"}
    assert torch.allclose(logits(adapter.model, ids()), logits(found, ids()), atol=2e-4)
    weight.copy_(before)
    assert forms(prepared(found)) == {"kernel of bfloat16, exactly"}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_originals_are_freed_and_come_back(kind: torch.dtype) -> None:
    found, twin = model(kind), model(kind)
    keys: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    want = generate(twin, ids(), **keys)
    assert torch.equal(generate(found, ids(), **FREED, **keys), want)
    with pytest.raises(Exception, match="freed"):
        found(ids(), torch.arange(9).expand(2, 9))
    assert torch.equal(generate(found, ids(), prepare="auto", **keys), want), "of what is left"
    assert torch.equal(generate(copy.deepcopy(found), ids(), **keys), want)
    assert release(found)
    for (name, got), (_, whole) in zip(found.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(got, whole), name
        assert got.dtype is torch.float32, name
    assert torch.equal(generate(found, ids(), **keys), want)
