"""Llama-like models of transformers whose layers run in one call: the same bits as one after the other, and only where
nobody listens, asks or masks otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit import generate
from decodekit.models import adapter_for
from decodekit.registry import registry
from decodekit_caches.dynamic import DynamicCache
from decodekit_plugins.kernels import library
from decodekit_plugins.preparers import stack

NO_COMPILER = library.why_not()
pytestmark = pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER or "kernels can be built")
KEYS: dict[str, Any] = {
    "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "output_logits": True, "return_dict_in_generate": True,
}  # fmt: skip
LAYERS, STEPS = 3, 5
"""Layers of a model, and steps behind the prompt's."""


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call for several took."""
    made: list[int] = []

    class Counted:
        def dk_layers(self, layers: Any, count: int, *rest: Any) -> None:
            made.append(count)
            library.library().dk_layers(layers, count, *rest)

    monkeypatch.setattr(stack, "library", Counted)
    return made


def llama(kind: str = "Llama", **more: Any) -> Any:
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": LAYERS, "bos_token_id": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": None, "pad_token_id": 0,
        "initializer_range": 0.3,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**shape, **more})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return getattr(transformers, f"{kind}ForCausalLM")(config).eval().requires_grad_(False)


def run(model: Any, prompts: Any = ([5, 9, 3, 8], [7, 2]), prepare: str | None = "kernels", **keys: Any) -> Any:
    return generate(model, [list(row) for row in prompts], **{**KEYS, **keys}, prepare=prepare)


def prepared(model: Any) -> Any:
    return registry.load("preparers", "kernels")().prepare(adapter_for(model))


def close(got: Any, want: Any) -> None:
    assert torch.equal(got.sequences, want.sequences)
    for one, other in zip(got.logits, want.logits, strict=True):
        assert float((one - other).abs().max()) < 1e-4


@pytest.mark.parametrize(
    ("kind", "more"),
    [("Llama", {"attention_bias": True}), ("Mistral", {"sliding_window": None}), ("Qwen2", {}), ("Qwen3", {})],
)
@pytest.mark.parametrize("prompts", [[[5, 9, 3]], [[5, 9, 3, 8], [7, 2], [4] * 9]], ids=["one row", "padded rows"])
def test_the_same_bits(counts: list[int], kind: str, more: dict[str, Any], prompts: Any) -> None:
    model = llama(kind, **more)
    got = run(model, prompts)
    assert counts == [LAYERS] * STEPS
    close(got, run(model, prompts, None))
    heard: list[int] = []
    model.model.layers[1].register_forward_hook(lambda *_: heard.append(1))
    want = run(model, prompts)
    assert len(counts) == STEPS, "a layer that somebody listens to is not passed over"
    assert len(heard) == STEPS + 1
    assert all(torch.equal(one, other) for one, other in zip(got.logits, want.logits, strict=True))


@pytest.mark.parametrize("cache", [None, "dynamic"])
def test_windows_are_masked_by_the_model(counts: list[int], cache: str | None) -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    for model in (
        llama("Mistral", sliding_window=3),
        llama("Qwen2", sliding_window=3, use_sliding_window=True, layer_types=kinds),
    ):
        for prompts in ([[5, 9, 3, 8], [7, 2]], [[5, 9, 3, 8]]):
            got, want = (run(model, prompts, how, cache_implementation=cache) for how in ("kernels", None))
            close(got, want)
    assert not counts


def test_a_window_that_is_set_later(counts: list[int]) -> None:
    model = llama("Mistral", sliding_window=None)
    run(model)
    assert counts == [LAYERS] * STEPS
    model.config.sliding_window = 2
    got, want = (run(model, [[5, 9, 3]], how, past_key_values=DynamicCache()) for how in ("kernels", None))
    close(got, want)
    assert len(counts) == STEPS


def test_several_tokens_without_a_mask_see_only_those_before_them(counts: list[int]) -> None:
    model = llama()
    keys: dict[str, Any] = {"prompts": [[5, 9, 3, 8, 7, 6, 2]], "prefill_chunk_size": 3}
    close(run(model, **keys), run(model, prepare=None, **keys))
    assert set(counts) == {LAYERS}


@pytest.mark.parametrize("cache", ["static", "quantized", "model"])
def test_caches_that_lend_no_buffers(counts: list[int], cache: str) -> None:
    model = llama()
    close(run(model, cache_implementation=cache), run(model, prepare=None, cache_implementation=cache))
    assert set(counts) <= {LAYERS}


@pytest.mark.parametrize("first", [1, 2])
def test_a_cache_that_lends_some_buffers(counts: list[int], first: int) -> None:
    class Shy(DynamicCache):
        def claim(self, layer_idx: int, shape: Any, dtype: Any) -> Any:
            return None if layer_idx >= first else super().claim(layer_idx, shape, dtype)

    got = run(llama(), past_key_values=Shy())
    assert counts == [first] * STEPS
    want = run(llama())
    assert all(torch.equal(one, other) for one, other in zip(got.logits, want.logits, strict=True))


def test_without_a_cache(counts: list[int]) -> None:
    model = llama("Mistral", sliding_window=None)
    close(run(model, use_cache=False), run(model, prepare=None, use_cache=False))
    cache, adapter = DynamicCache(), prepared(model)
    for tokens, places in (([[5, 9]], [[0, 1]]), ([[3]], [[2]])):
        given = {"input_ids": torch.tensor(tokens), "position_ids": torch.tensor(places), adapter.facts.cache: cache}
        with torch.no_grad():
            out = adapter.model(**given, use_cache=False)
    assert adapter.facts.cache not in out
    assert not counts


def test_hidden_states_and_then_none(counts: list[int]) -> None:
    """transformers puts hooks on its layers for good when states are first asked for: they record nothing later."""
    model = llama()
    got, want = (run(model, prepare=how, output_hidden_states=True) for how in ("kernels", None))
    assert not counts
    for mine, yours in zip(got.hidden_states, want.hidden_states, strict=True):
        assert len(mine) == LAYERS + 1
        assert all(torch.allclose(one, other, atol=1e-4) for one, other in zip(mine, yours, strict=True))
    close(run(model), want)
    assert counts == [LAYERS] * STEPS
    model.config.output_hidden_states = True
    close(run(model), want)
    assert len(counts) == STEPS


def test_eager_attention_is_the_models_own(counts: list[int]) -> None:
    model = llama(attn_implementation="eager")
    close(run(model), run(model, prepare=None))
    assert not counts
    model.set_attn_implementation("sdpa")
    close(run(model), run(model, prepare=None))
    assert counts == [LAYERS] * STEPS


def test_beams_and_embeddings_in_place_of_tokens(counts: list[int]) -> None:
    model = llama()
    close(run(model, num_beams=3), run(model, prepare=None, num_beams=3))
    assert set(counts) == {LAYERS}
    embeds = model.get_input_embeddings()(torch.tensor([[5, 9, 3]]))
    got, want = (generate(model, inputs_embeds=embeds, **KEYS, prepare=how) for how in ("kernels", None))
    close(got, want)


def test_hooks_and_changes_of_the_model_around_the_layers(counts: list[int]) -> None:
    model, heard = llama(), []
    want = run(model)
    for part in (model.model, model.model.norm, model.model.embed_tokens, model.model.rotary_emb):
        part.register_forward_hook(lambda part, *_: heard.append(type(part).__name__))
    got = run(model)
    assert all(torch.equal(one, other) for one, other in zip(got.logits, want.logits, strict=True))
    assert len(heard) == 4 * (STEPS + 1)
    stock = type(model.model).forward
    model.model.forward = lambda **given: stock(model.model, **given)
    counts.clear()
    close(run(model), want)
    assert not counts


def test_a_prepared_decoder_compiles(counts: list[int]) -> None:
    """Also in one piece, and before any layers have run in one call."""
    model = llama()
    adapter, cache = prepared(model), DynamicCache()
    tokens, places = torch.tensor([[5, 9, 3]]), torch.arange(3)[None]
    with torch.no_grad():
        model.model(input_ids=tokens[:, :2], position_ids=places[:, :2], use_cache=True, cache=cache)
        compiled = torch.compile(adapter.model.model, backend="eager", fullgraph=True)
        got = compiled(input_ids=tokens[:, 2:], position_ids=places[:, 2:], use_cache=True, cache=cache)
        want = model.model(input_ids=tokens).last_hidden_state[:, -1:]
    assert torch.allclose(got.last_hidden_state, want, atol=1e-4)
    assert not counts
