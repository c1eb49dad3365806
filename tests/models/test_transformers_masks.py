"""A step of padded rows gets its mask ready made, and answers as with the mask that the model builds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit import generate
from decodekit_caches.dynamic import DynamicCache
from decodekit_plugins.models.transformers import adapter as module
from decodekit_plugins.models.transformers.adapter import TransformersAdapter
from decodekit_plugins.models.transformers.masks import PLAIN

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "eos_token_id": None,
    "pad_token_id": 0,
}
NAMES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def made(family: str, attention: str = "sdpa", **more: Any) -> Any:
    torch.manual_seed(0)
    window = {"sliding_window": None} if family == "mistral" else {}
    config = getattr(transformers, f"{NAMES[family]}Config")(**{**SMALL, **window, **more})
    model = getattr(transformers, f"{NAMES[family]}ForCausalLM")(config).eval()
    model.set_attn_implementation(attention)
    return model


def step(adapter: TransformersAdapter, cache: Any, at: int) -> Any:
    tokens = torch.arange(3 * (at + 1)).view(3, at + 1) % 90
    mask = torch.arange(at + 1) >= torch.tensor([0, 2, 5])[:, None]
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    start = cache.get_seq_length()
    return adapter.forward(tokens[:, start:], places[:, start:], cache, mask=mask).logits


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", PLAIN)
@torch.no_grad()
def test_logits_are_those_with_the_models_own_mask(
    family: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made(family, attention)
    given: list[int] = []
    model.model.register_forward_pre_hook(
        lambda _, __, call: given.append(call["attention_mask"].dim()), with_kwargs=True
    )
    ours = TransformersAdapter(model)
    cache = DynamicCache()
    found = [step(ours, cache, at) for at in (6, 7, 8)]
    assert given == [2, 4, 4]
    monkeypatch.setattr(module, "ready_mask", lambda *_: None)
    cache = DynamicCache()
    for at, mine in zip((6, 7, 8), found, strict=True):
        torch.testing.assert_close(mine, step(ours, cache, at), rtol=1e-5, atol=1e-5)
    assert given[3:] == [2, 2, 2]


@pytest.mark.parametrize("kind", ["static cache", "window", "subclass", "autocast"])
@torch.no_grad()
def test_others_build_their_own(kind: str) -> None:
    model = made("mistral", sliding_window=4) if kind == "window" else made("llama")
    if kind == "subclass":
        model.__class__ = type("Other", (type(model),), {})
        model.__class__.__module__ = "elsewhere"
    dims: list[int] = []
    model.model.register_forward_pre_hook(
        lambda _, __, call: dims.append(call["attention_mask"].dim()), with_kwargs=True
    )
    adapter = TransformersAdapter(model)
    cache: Any = DynamicCache()
    if kind == "static cache":
        cache = transformers.StaticCache(config=model.config, max_cache_len=12)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        for at in (6, 7):
            step(adapter, cache, at)
    assert dims == [2, 2]


@pytest.mark.parametrize("family", PLAIN)
def test_ragged_rows_give_the_tokens_of_transformers(family: str) -> None:
    model = made(family)
    ids = torch.randint(1, 97, (3, 7), generator=torch.Generator().manual_seed(3))
    mask = (torch.arange(7) >= torch.tensor([0, 2, 5])[:, None]).long()
    for keys in ({}, {"num_beams": 3}):
        mine: Any = generate(model, ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **keys)
        theirs = model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False, **keys)
        assert torch.equal(mine, theirs)
