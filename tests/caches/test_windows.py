"""What only caches with windows promise: how little they hold, and what they can take back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import ConfigError, InputError, generate, plan
from decodekit.models import adapter_for
from decodekit.registry import registry
from decodekit.testing import CacheContract, TinyLM, context
from decodekit_caches.buffers import STEP
from decodekit_caches.dynamic import DynamicCache
from decodekit_caches.sliding import SlidingLayer
from decodekit_caches.windows import HybridCache

KEYS: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}


class TestMixedLayers(CacheContract):
    def make(self) -> Any:
        return HybridCache((4, None), rewind=16)


class TestNarrowLayers(CacheContract):
    """Windows smaller than most of what is fed, buffers as small as they get."""

    layers = 3

    def make(self) -> Any:
        return HybridCache((1, 2, 40), rewind=9, reserve=5)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "native"])
def test_models_with_windows_have_it_by_themselves(small: Callable[[str], Any], name: str) -> None:
    """Layers are of the kinds that the model's are; those with a window hold little more than that."""
    model = small(name)
    windows = adapter_for(model).spec.layer_windows
    out = generate(model, [[5, 9, 8]], max_new_tokens=150, **KEYS)
    assert type(out.cache).__name__ == "HybridCache"
    assert [layer.window if layer.is_sliding else None for layer in out.cache.layers] == list(windows)
    assert out.cache.is_sliding == [window is not None for window in windows]
    for layer in out.cache.layers:
        assert layer.get_seq_length() == 152
        assert layer.capacity <= (2 * STEP if layer.is_sliding else 192)
    plain = generate(model, [[5, 9, 8]], max_new_tokens=150, use_cache=False, **KEYS)
    assert torch.equal(out.sequences, plain.sequences)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_models_without_windows_keep_everything(small: Callable[[str], Any], name: str) -> None:
    assert plan(small(name), [[5, 9]]).cache_name == "dynamic"


@pytest.mark.parametrize("name", ["mistral", "gemma3", "native"])
@pytest.mark.parametrize("drafts", [1, 3, 7])
@torch.no_grad()
def test_b20_rejected_drafts_leave_no_trace(small: Callable[[str], Any], name: str, drafts: int) -> None:
    """Three tokens in a pass, some of them wrong and taken back: after each round the logits of a pass without a cache.

    Prompts end before, at and behind the window, and the text grows far enough for buffers to be moved.
    """
    adapter = adapter_for(small(name))
    random = torch.Generator().manual_seed(drafts)
    for prompt in (2, 5, 6, 7, 10):
        tokens = torch.randint(3, 71, (2, prompt), generator=random)
        cache = plan(small(name), tokens, pad_token_id=0, max_new_tokens=200).cache
        adapter.forward(tokens[:, :-1], torch.arange(prompt - 1).expand(2, -1), cache)
        for step in range(120 if prompt == 7 else 12):
            draft = torch.randint(3, 71, (2, drafts), generator=random)
            fed = torch.cat([tokens[:, -1:], draft], 1)
            seen = tokens.shape[1] - 1
            places = torch.arange(seen, seen + drafts + 1).expand(2, -1)
            got = adapter.forward(fed, places, cache, last=drafts + 1).logits
            whole = torch.cat([tokens, draft], 1)
            want = adapter.forward(whole, torch.arange(whole.shape[1]).expand(2, -1), None, last=drafts + 1).logits
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
            right = step % (drafts + 1)
            tokens = torch.cat([tokens, draft[:, :right], torch.randint(3, 71, (2, 1), generator=random)], 1)
            cache.crop(tokens.shape[1] - 1)
            assert cache.get_seq_length() == tokens.shape[1] - 1


def filled(tokens: int, **keys: Any) -> HybridCache:
    cache = HybridCache((4, None), **keys)
    for layer in (0, 1):
        keys_ = torch.arange(float(tokens)).view(1, 1, tokens, 1).expand(1, 1, tokens, 2)
        cache.update(keys_, keys_, layer)
    return cache


def test_what_is_forgotten_cannot_be_taken_back() -> None:
    """Neither a wrong window nor a cache of which one layer was cropped: it is refused, with what would do."""
    for cache in (filled(200, rewind=8), filled(200, rewind=0)):
        deep = 9 if cache.layers[0].rewind else 1
        words = rf"{deep} tokens cannot be taken back: a layer that sees 4 .*'rewind': {deep}"
        with pytest.raises(InputError, match=words):
            cache.crop(-deep)
        assert [cache.get_seq_length(layer) for layer in (0, 1)] == [200, 200]
    cache = filled(200, rewind=8)
    cache.crop(-8)
    keys, _ = cache.update(torch.full((1, 1, 1, 2), -1.0), torch.full((1, 1, 1, 2), -1.0), 0)
    assert keys[0, 0, :, 0].tolist() == [189, 190, 191, -1]
    cache.crop(0)
    assert cache.get_mask_sizes(3, 0) == (3, 0)


def test_a_state_remembers_what_it_lacks() -> None:
    state = filled(200, rewind=8).state()
    assert state["keys.0"].shape[2] == 11
    assert int(state["dropped.0"]) == 189
    again = HybridCache((4, None), rewind=8)
    again.load(state)
    assert again.get_mask_sizes(1, 0) == (4, 197)
    with pytest.raises(InputError, match="lacks the first 189 tokens"):
        DynamicCache().load(state)
    with pytest.raises(InputError, match="holds 11 tokens of a layer that sees 64"):
        HybridCache((64, None)).load(state)


def test_windows_that_were_asked_for_forget() -> None:
    """Every layer has the window then, whatever the model's own layers see."""
    model = TinyLM().eval()
    keys = {"cache_implementation": "sliding_window", "max_new_tokens": 30, **KEYS}
    out = generate(model, [[5, 9, 8]], cache_config={"window": 5, "rewind": 2}, **keys)
    assert [(layer.window, layer.rewind) for layer in out.cache.layers] == [(5, 2)] * 2
    want = generate(model, [[5, 9, 8]], max_new_tokens=30, use_cache=False, **KEYS).sequences
    assert not torch.equal(out.sequences, want)
    wide = generate(model, [[5, 9, 8]], cache_config={"window": 40}, **keys)
    assert torch.equal(wide.sequences, want)


def test_a_model_that_says_nothing_of_its_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sliding_window: needs layers with a window, and this model says nothing"):
        plan(TinyLM().eval(), [[5]], cache_implementation="sliding_window")


def test_buffers_move_once_in_many_tokens() -> None:
    layer = SlidingLayer(100, 28)
    new, moves, place = torch.ones(1, 2, 1, 4), 0, 0
    for _ in range(2000):
        layer.append(new, new)
        moves += layer.length <= place
        place = layer.length
    assert moves <= 2000 // STEP + 1
    assert layer.capacity == 192
    assert layer.get_seq_length() == 2000


def test_guidance_asks_another_model_with_its_own_windows(small: Callable[[str], Any]) -> None:
    """Also where it takes back more than a window keeps."""
    processor = registry.load("processors", "guidance_scale")
    keys: dict[str, Any] = {"max_new_tokens": 20, **KEYS}
    for inner, outer in (("mistral", "gemma3"), ("gemma3", "mistral"), ("llama", "mistral")):
        got = [
            generate(
                small(outer), [[5, 9, 8]], logits_processor=[processor(2.0, small(inner))], use_cache=cached, **keys
            )
            for cached in (True, False)
        ]
        assert torch.equal(got[0].sequences, got[1].sequences)
    ids = torch.randint(3, 71, (1, 150), generator=torch.Generator().manual_seed(0))
    ctx = context(ids[:, :3], model=adapter_for(small("mistral")), vocab_size=71, capacity=200)
    ctx.spec = adapter_for(small("mistral")).spec
    bound, plain = (processor(2.0, small("mistral"), use_cache=cached).bind(ctx) for cached in (True, False))
    scores = torch.zeros(1, 71)
    for column in ids[0, 3:]:
        for each in (bound, plain):
            each.accept(column[None], None)
    for width in (150, 80):
        for each in (bound, plain) if width == 80 else ():
            each.rollback(70)
        torch.testing.assert_close(bound(ids[:, :width], scores), plain(ids[:, :width], scores), rtol=1e-3, atol=1e-3)
