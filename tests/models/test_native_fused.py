"""Fused projections of the native decoder: named, saved, loaded and trained as the parts that they are."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from decodekit_caches.dynamic import DynamicCache
from decodekit_plugins.models.native.module import NativeConfig, NativeLM
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
}
ATTENTION = "model.layers.1.self_attn"


def model(seed: int = 0, **more: Any) -> NativeLM:
    torch.manual_seed(seed)
    return NativeLM(NativeConfig(**{**SHAPE, **more})).eval()


def logits(lm: NativeLM, last: int | None = None) -> Tensor:
    tokens = torch.arange(14).view(2, 7)
    return lm(tokens, torch.arange(7).expand(2, 7), last=last).logits


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_state_has_the_published_names_and_loads(bias: bool, assign: bool, tmp_path: Path) -> None:
    first, second = (model(seed, attention_bias=bias, mlp_bias=bias) for seed in (0, 1))
    names = [name.removeprefix(ATTENTION + ".") for name in first.state_dict() if name.startswith(ATTENTION)]
    kinds = ("weight", "bias") if bias else ("weight",)
    assert names == [f"{part}_proj.{kind}" for part in "qkv" for kind in kinds] + ["o_proj.weight"]
    save_file({name: value.contiguous() for name, value in first.state_dict().items()}, tmp_path / "w.safetensors")
    given = load_file(tmp_path / "w.safetensors")
    before = dict(given)
    assert second.load_state_dict(given, assign=assign) == ([], [])
    assert given.keys() == before.keys()
    assert torch.equal(logits(first), logits(second))


def test_a_copy_saves_and_loads_as_its_original() -> None:
    lm = model()
    for other in (copy.deepcopy(lm), pickle.loads(pickle.dumps(lm))):
        assert list(other.state_dict()) == list(lm.state_dict())
        assert torch.equal(logits(other), logits(lm))
        other.load_state_dict(model(3).state_dict())
        assert not torch.equal(logits(other), logits(lm))


def test_a_state_under_the_fused_name_loads() -> None:
    lm, other = model(), model(1)
    state = {
        name: value for name, value in lm.state_dict().items() if ".self_attn.o" in name or "self_attn" not in name
    }
    state |= {
        f"model.layers.{i}.self_attn.qkv_proj.weight": lm.model.layers[i].self_attn.qkv_proj.weight for i in (0, 1)
    }
    other.load_state_dict(state)
    assert torch.equal(logits(other), logits(lm))


def test_parts_are_views_of_what_runs() -> None:
    lm = model()
    lm.state_dict()[f"{ATTENTION}.v_proj.weight"].zero_()
    assert not lm.model.layers[1].self_attn.qkv_proj.weight[-12:].any()
    kept = lm.state_dict(keep_vars=True)[f"{ATTENTION}.k_proj.weight"]
    kept.sum().backward()
    grad = lm.model.layers[1].self_attn.qkv_proj.weight.grad
    assert grad is not None
    assert [bool(piece.any()) for piece in grad.split([24, 12, 12])] == [False, True, False]


def test_what_is_missing_unknown_or_misshapen_is_named_as_in_the_file() -> None:
    lm, other = model(), model(1)
    state = lm.state_dict()
    del state[f"{ATTENTION}.k_proj.weight"]
    state[f"{ATTENTION}.k_proj.scale"] = torch.ones(1)
    missing, unknown = other.load_state_dict(state, strict=False)
    assert (missing, unknown) == ([f"{ATTENTION}.k_proj.weight"], [f"{ATTENTION}.k_proj.scale"])
    mine, theirs = (each.model.layers[1].self_attn.qkv_proj.weight for each in (other, lm))
    untouched = model(1).model.layers[1].self_attn.qkv_proj.weight
    assert torch.equal(mine[:24], theirs[:24])
    assert torch.equal(mine[24:36], untouched[24:36])
    assert torch.equal(mine[36:], theirs[36:])
    for wrong in (torch.ones(3, 3), "no tensor"):
        with pytest.raises(RuntimeError, match=r"size mismatch for .*1\.mlp\.up_proj\.weight"):
            other.load_state_dict({**lm.state_dict(), "model.layers.1.mlp.up_proj.weight": wrong})
    assert other.load_state_dict({}, strict=False).missing_keys == list(lm.state_dict())


def test_gradients_are_those_of_separate_layers() -> None:
    lm = model(attention_bias=True)
    attention, mlp = lm.model.layers[0].self_attn, lm.model.layers[0].mlp
    x = torch.randn(2, 5, 24)
    parts = [nn.Linear(24, size) for size in (24, 12, 12)]
    for part, weight, bias in zip(
        parts, attention.qkv_proj.weight.split([24, 12, 12]), attention.qkv_proj.bias.split([24, 12, 12]), strict=True
    ):
        part.load_state_dict({"weight": weight, "bias": bias})
    torch.testing.assert_close(attention.qkv_proj(x), torch.cat([part(x) for part in parts], -1))
    logits(lm).square().mean().backward()
    for layer in (attention.qkv_proj, mlp.gate_up_proj):
        assert all(bool(piece.any()) for piece in layer.weight.grad.split(12))
    step = torch.optim.SGD(lm.parameters(), 0.1)
    before = float(logits(lm).square().mean().detach())
    step.step()
    assert float(logits(lm).square().mean().detach()) < before


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_only_the_last_place_of_the_last_layer_is_computed(padded: bool, window: int | None) -> None:
    lm = model(sliding_window=window)
    seen: list[tuple[int, ...]] = []
    for block in lm.model.layers:
        block.mlp.register_forward_hook(lambda _, given, __: seen.append(tuple(given[0].shape)))
    tokens = torch.arange(14).view(2, 7)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[0, :3] = False
    places = (mask.cumsum(-1) - 1).clamp(min=0) if padded else torch.arange(7).expand(2, 7)
    given = mask if padded else None
    whole = lm(tokens, places, mask=given).logits
    seen.clear()
    caches = DynamicCache(), DynamicCache()
    with torch.no_grad():
        torch.testing.assert_close(lm(tokens, places, caches[0], given, last=1).logits, whole[:, -1:])
        assert seen == [(2, 7, 24), (2, 1, 24)]
        lm(tokens, places, caches[1], given, last=1, hidden=(2,))  # somebody wants to see all of it
        assert seen[2:] == [(2, 7, 24)] * 2
    for name, value in caches[0].state().items():
        torch.testing.assert_close(value, caches[1].state()[name])


def test_one_token_of_grouped_heads_attends_as_several_do() -> None:
    lm = model()
    cache = DynamicCache()
    tokens = torch.arange(14).view(2, 7)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[1, :2] = False
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = lm(tokens, places, mask=mask).logits
    with torch.no_grad():
        for at in range(7):
            one = slice(at, at + 1)
            out = lm(tokens[:, one], places[:, one], cache, mask[:, : at + 1], last=1).logits
            rows = [0, 1] if at > 1 else [0]
            torch.testing.assert_close(out[rows, 0], whole[rows, at], rtol=1e-5, atol=1e-5)


def test_tables_follow_dtype_and_positions() -> None:
    lm = model().double()
    tokens = torch.arange(3)[None]
    near = lm(tokens, torch.arange(3)[None]).logits
    torch.testing.assert_close(lm(tokens, torch.arange(6000, 6003)[None]).logits, near, rtol=1e-4, atol=1e-4)
    assert lm.bfloat16()(tokens, torch.arange(3)[None]).logits.dtype == torch.bfloat16
