"""What is not quite a layer that the kernels know runs as it is, whether it was so before or is so afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import generate
from decodekit.models import adapter_for
from decodekit.registry import registry
from decodekit_plugins.kernels import library
from torch import nn

from .test_kernels import llama, native

NO_COMPILER = library.why_not()
pytestmark = pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER or "kernels can be built")
KEYS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PROMPTS = [[5, 9, 3], [7]]


def same(model: nn.Module) -> None:
    keys = {**KEYS, "output_logits": True, "return_dict_in_generate": True}
    want, got = (generate(model, PROMPTS, **keys, **more) for more in ({}, {"prepare": "kernels"}))
    assert torch.equal(got.sequences, want.sequences)
    for one, other in zip(got.logits, want.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def layer_of(model: Any) -> Any:
    return model.model.layers[0]


def subclass(part: nn.Module) -> None:
    """Another class, made for this instance only."""
    cls = type(part)

    class Mine(cls):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **keys: Any) -> Any:
            found = super().forward(*args, **keys)
            return (found[0] * 0.5, *found[1:]) if isinstance(found, tuple) else found * 0.5

    part.__class__ = Mine


class Own(nn.Module):
    """A feed-forward with the names of another."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj, self.act_fn = old.gate_proj, old.up_proj, old.down_proj, nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


class SiLU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


def own_feed_forward(model: Any) -> None:
    layer_of(model).mlp = Own(layer_of(model).mlp)


def own_activation(model: Any) -> None:
    layer_of(model).mlp.act_fn = SiLU()


def not_causal(model: Any) -> None:
    layer_of(model).self_attn.is_causal = False


def bias_added(model: Any) -> None:
    layer_of(model).self_attn.o_proj.bias = nn.Parameter(torch.ones(64))


def one_bias_for_all(model: Any) -> None:
    layer_of(model).self_attn.o_proj.bias = nn.Parameter(torch.ones(1))
    model.lm_head.bias = nn.Parameter(torch.ones(1))


def one_weight_for_all(model: Any) -> None:
    model.model.norm.weight = nn.Parameter(torch.full((1,), 0.5))
    layer_of(model).input_layernorm.weight = nn.Parameter(torch.full((1,), 0.5))


def pruned_heads(model: Any) -> None:
    """Half of the heads, as tools that prune leave them: the configuration tells the old number."""
    attention = layer_of(model).self_attn
    for name, keep in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16)):
        part = getattr(attention, name)
        part.weight = nn.Parameter(part.weight[:keep].detach().clone())
        part.out_features = keep
    attention.o_proj.weight = nn.Parameter(attention.o_proj.weight[:, :32].detach().clone())
    attention.o_proj.in_features = 32


def of_class(part: str) -> Callable[[Any], None]:
    return lambda model: subclass(getattr(layer_of(model), part))


CHANGES = {
    "feed-forward of another class": of_class("mlp"),
    "attention of another class": of_class("self_attn"),
    "norm of another class": of_class("input_layernorm"),
    "layer of another class": lambda model: subclass(layer_of(model)),
    "own feed-forward": own_feed_forward,
    "own activation": own_activation,
    "not causal": not_causal,
    "bias added": bias_added,
    "one bias for all": one_bias_for_all,
    "one weight for all": one_weight_for_all,
    "pruned heads": pruned_heads,
}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_layers_of_transformers(change: str, when: str) -> None:
    model = llama("Llama")
    if when == "after":
        same(model)
    CHANGES[change](model)
    same(model)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("part", ["mlp", "self_attn", "input_layernorm"])
def test_native_layers(part: str, when: str) -> None:
    model = native()
    if when == "after":
        same(model)
    subclass(getattr(layer_of(model), part))
    same(model)
    model = native()
    if when == "after":
        same(model)
    layer_of(model).mlp.down_proj.bias = nn.Parameter(torch.ones(64))
    same(model)


def test_patched_classes_and_hooks_on_all_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    model = llama("Llama")
    same(model)
    stock = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: stock(self, x) * 0.5)
    same(model)
    same(llama("Llama"))
    monkeypatch.undo()
    same(model)
    heard: list[str] = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: heard.append(type(module).__name__)
    )
    try:
        generate(model, PROMPTS, **KEYS, prepare="kernels")
    finally:
        handle.remove()
    assert any("LlamaMLP" in name for name in heard)


def test_inputs_of_another_width_are_refused_as_ever() -> None:
    model = llama("Llama")
    adapter = registry.load("preparers", "kernels")().prepare(adapter_for(model))
    with pytest.raises(RuntimeError), torch.no_grad():
        adapter.model(inputs_embeds=torch.ones(1, 3, 32))


@pytest.mark.parametrize(("off", "runs"), [("builders:c", False), ("preparers:kernels", False), ("nothing", True)])
def test_switched_off(monkeypatch: pytest.MonkeyPatch, off: str, runs: bool) -> None:
    import os
    import subprocess
    import sys

    code = """
import torch
from decodekit import load, plan
from decodekit_plugins.models.native.module import NativeConfig, NativeLM
model = NativeLM(NativeConfig(300, 256, 300, 2, 4, 2, 16)).eval()
print(any(row["form"].startswith("kernel") for row in plan(load(model), [[5]]).describe().get("prepared", [])))
"""
    env = {**os.environ, "DECODEKIT_DISABLE": off}
    found = subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True, text=True)
    assert found.stdout.strip() == str(runs)
