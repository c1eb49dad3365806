"""All layers of a native model in one call: the same bits as one after the other, and only where nobody listens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from decodekit import generate
from decodekit.errors import PipelineError
from decodekit.models import adapter_for
from decodekit.registry import registry
from decodekit_caches.dynamic import DynamicCache
from decodekit_plugins.kernels import library
from decodekit_plugins.models.native.module import NativeConfig, NativeLM
from decodekit_plugins.preparers import stack
from torch import nn

NO_COMPILER = library.why_not()
pytestmark = pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER or "kernels can be built")


class Counted:
    """The kernels, with a count of layers in each call for all layers."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def dk_layers(self, layers: Any, count: int, *rest: Any) -> None:
        self.calls.append(count)
        library.library().dk_layers(layers, count, *rest)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    made = Counted()
    monkeypatch.setattr(stack, "library", lambda: made)
    return made


def model(**shape: Any) -> NativeLM:
    facts: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 4, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = NativeLM(NativeConfig(**{**facts, **shape}))
        for name, weight in made.named_parameters():
            nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    return made.eval().requires_grad_(False)


def prepared(found: nn.Module) -> Any:
    return registry.load("preparers", "kernels")().prepare(adapter_for(found))


def step(
    adapter: Any, rows: int = 2, length: int = 1, past: int = 12, cache: Any = None, mask: Any = None, **more: Any
) -> Any:
    """A prompt, and new tokens behind it: what these give."""
    random = torch.Generator().manual_seed(rows)
    tokens = torch.randint(3, 97, (rows, past + length), generator=random)
    places = torch.arange(past + length).expand_as(tokens)
    cache = DynamicCache() if cache is None else cache
    with torch.no_grad():
        adapter.forward(tokens[:, :past], places[:, :past], cache, mask=None if mask is None else mask[:, :past])
        return adapter.forward(tokens[:, past:], places[:, past:], cache, mask=mask, **more)


def listened(found: NativeLM, place: int, heard: list[int]) -> NativeLM:
    found.model.layers[place].register_forward_hook(lambda *_: heard.append(place))
    return found


@pytest.mark.parametrize("rows", [1, 2, 7, 12])
@pytest.mark.parametrize("past", [3, 300])
def test_the_same_bits(counted: Counted, rows: int, past: int) -> None:
    got = step(prepared(model()), rows, past=past)
    assert counted.calls == [4]
    heard: list[int] = []
    want = step(prepared(listened(model(), 0, heard)), rows, past=past)
    assert counted.calls == [4]
    assert heard == [0, 0], "a layer that somebody listens to is not passed over"
    assert torch.equal(got.logits, want.logits)
    assert torch.allclose(got.logits, step(adapter_for(model()), rows, past=past).logits, atol=1e-3)


def test_several_new_tokens_and_padding(counted: Counted) -> None:
    mask = torch.ones(3, 17, dtype=torch.bool)
    mask[1, :4] = mask[2, :9] = False
    got = step(prepared(model()), 3, 5, mask=mask, last=5)
    want = step(adapter_for(model()), 3, 5, mask=mask, last=5)
    assert counted.calls == [4]
    assert torch.allclose(got.logits, want.logits, atol=1e-4)


def test_early_exit_and_taps(counted: Counted) -> None:
    adapter, plain = prepared(model()), adapter_for(model())
    assert torch.allclose(step(adapter, layers=2).logits, step(plain, layers=2).logits, atol=1e-4)
    assert counted.calls == [2]
    got, want = step(adapter, hidden=(0, 3)), step(plain, hidden=(0, 3))
    assert counted.calls == [2], "what is asked for behind a layer is there layer by layer only"
    assert all(torch.allclose(got.hidden[layer], want.hidden[layer], atol=1e-4) for layer in (0, 3))


@pytest.mark.parametrize("first", [0, 1, 3])
def test_a_cache_that_lends_some_buffers(counted: Counted, first: int) -> None:
    class Shy(DynamicCache):
        def claim(self, layer_idx: int, shape: Any, dtype: Any) -> Any:
            return None if layer_idx >= first else super().claim(layer_idx, shape, dtype)

    got = step(prepared(model()), cache=Shy())
    assert counted.calls == ([first] if first else [])
    assert torch.equal(got.logits, step(prepared(model())).logits)


def test_layers_with_windows_of_their_own() -> None:
    kinds = ["full_attention", "sliding_attention"] * 2
    shape: dict[str, Any] = {"layer_types": kinds, "sliding_window": 5}
    keys: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    prompt = [[5, 9, 3, 8, 7, 6, 2], [4, 4]]
    got = generate(model(**shape), prompt, prepare="kernels", **keys)
    assert torch.equal(got, generate(model(**shape), prompt, **keys))


def test_what_changes_later(counted: Counted) -> None:
    found = model()
    adapter = prepared(found)
    step(adapter)
    assert counted.calls == [4]
    heard: list[int] = []
    listened(found, 2, heard)
    step(prepared(found))
    assert counted.calls == [4]
    assert heard == [2, 2]
    found.model.forward = lambda x, *_: (x, {})
    assert torch.allclose(step(prepared(found)).logits, step(adapter_for(found)).logits, atol=1e-5)


def test_what_changes_in_the_prepared_model_itself(counted: Counted) -> None:
    adapter = prepared(model())
    want = step(adapter).logits
    heard: list[int] = []
    handle = adapter.model.model.layers[1].register_forward_hook(lambda *_: heard.append(1))
    assert torch.equal(step(adapter).logits, want)
    assert counted.calls == [4]
    assert heard == [1, 1]
    handle.remove()
    adapter.model.model.layers[1].forward = lambda x, *_: x * 0
    assert not torch.equal(step(adapter).logits, want)


def test_an_update_of_this_very_cache(counted: Counted) -> None:
    def halved() -> DynamicCache:
        cache = DynamicCache()
        stock = cache.update
        cache.update = lambda key, value, layer, *rest: stock(key * 0.5, value, layer, *rest)  # type: ignore[method-assign]
        return cache

    got, want = step(prepared(model()), cache=halved()), step(adapter_for(model()), cache=halved())
    assert not counted.calls
    assert torch.allclose(got.logits, want.logits, atol=1e-4)


def test_compiled_before_its_first_call() -> None:
    found = model()
    tokens, places = torch.tensor([[5, 9, 3]]), torch.arange(3)[None]
    with torch.no_grad():
        want = found(tokens, places).logits
        compiled = torch.compile(prepared(found).model, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(tokens, places).logits, want, atol=1e-4)


def test_a_prepared_model_is_not_copied() -> None:
    adapter = prepared(model())
    step(adapter)
    with pytest.raises(PipelineError, match=r"adapter\.unprepared\.model"):
        copy.deepcopy(adapter.model)
    assert torch.equal(step(prepared(copy.deepcopy(adapter.unprepared.model))).logits, step(adapter).logits)
