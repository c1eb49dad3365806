"""How many graphs there are: one for each model and kind of batch, whatever the length; and what they give."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import CompileConfig, generate, plan, stream
from decodekit.models import adapter_for
from torch import Tensor

PROMPTS = [[5, 9, 33, 60, 8, 17, 42], [23, 4, 61], [9]]
KEYS: dict[str, Any] = {"max_new_tokens": 20, "pad_token_id": 0, "eos_token_id": None}


def config(backend: Any, **more: Any) -> CompileConfig:
    return CompileConfig(backend=backend, fullgraph=True, **more)


def same(model: Any, inputs: Any, how: CompileConfig, **keys: Any) -> None:
    keys = {**KEYS, **keys}
    assert torch.equal(generate(model, inputs, compile_config=how, **keys), generate(model, inputs, **keys))


def test_one_graph_for_growing_lengths_and_later_calls(model: Any, counting: Any) -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    for prompt in ([5, 9, 33], [7] * 11, [1]):
        for new in (20, 30, 40):  # buffers of 64 slots
            same(model, [prompt], config(counting), max_new_tokens=new)
    assert counting.graphs == 1
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert not counters["recompile_limit"]


def test_other_sizes_make_few_graphs(model: Any, counting: Any) -> None:
    """A second number of slots makes sizes symbols: one more graph for all others, and one from two rows on."""
    for slots in (64, 100, 200, 130):
        same(model, [[5, 9, 33]], config(counting), max_cache_len=slots, cache_implementation="static")
    assert counting.graphs == 2
    for rows in (2, 3, 5, 8):
        same(model, [[5, 9, 33]] * rows, config(counting))
    assert counting.graphs == 3


def test_padding_is_a_graph_of_its_own(model: Any, counting: Any) -> None:
    same(model, PROMPTS, config(counting))
    same(model, PROMPTS[::-1], config(counting), max_new_tokens=33)
    assert counting.graphs == 1
    same(model, [[1, 2]] * 3, config(counting))
    assert counting.graphs == 2


def test_each_shape_has_a_graph_where_shapes_are_static(model: Any, counting: Any) -> None:
    for rows in (1, 2, 3):
        same(model, [[5, 9, 33]] * rows, config(counting, dynamic=False))
    assert counting.graphs == 3


def test_models_do_not_share_graphs(make: Callable[..., Any], counting: Any) -> None:
    """More of them than torch keeps graphs for one function; each has its own weights and shapes."""
    for seed in range(10):
        same(make(seed, num_hidden_layers=1 + seed % 2), [[5, 9, 33]], config(counting))
    assert counting.graphs == 10


def test_configurations_do_not_share_graphs(model: Any, counting: Any) -> None:
    same(model, [[5, 9]], config(counting))
    same(model, [[5, 9]], config(counting, dynamic=True))
    assert counting.graphs == 2


@pytest.mark.parametrize(
    "keys",
    [
        {"do_sample": True, "seed": 1, "top_k": 5, "num_return_sequences": 2},
        {"num_beams": 4, "num_return_sequences": 2},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"prefill_chunk_size": 2},
        {"max_new_tokens": 1},
    ],
    ids=lambda keys: next(iter(keys)),
)
@pytest.mark.parametrize("inputs", [PROMPTS, [PROMPTS[0]]], ids=["padded", "one"])
def test_strategies(model: Any, counting: Any, keys: dict[str, Any], inputs: Any) -> None:
    """Rows trade places and tokens are taken back between compiled passes."""
    same(model, inputs, config(counting), **keys)


def test_positions_beyond_the_models_tables(make: Callable[..., Any], counting: Any) -> None:
    short = make(max_position_embeddings=16)
    same(short, [[5, 9, 33]], config(counting), max_new_tokens=60)
    assert counting.graphs == 1


def test_windows(make: Callable[..., Any], counting: Any) -> None:
    kinds = ("sliding_attention", "full_attention")
    same(make(sliding_window=6, layer_types=kinds), PROMPTS, config(counting), max_new_tokens=30)
    assert counting.graphs == 1


def test_hidden_states_and_streams(model: Any, counting: Any) -> None:
    keys: dict[str, Any] = {**KEYS, "return_dict_in_generate": True, "output_hidden_states": True}
    got = generate(model, PROMPTS, compile_config=config(counting), **keys)
    want = generate(model, PROMPTS, **keys)
    assert torch.equal(got.sequences, want.sequences)
    for mine, other in zip(got.hidden_states, want.hidden_states, strict=True):
        for one, two in zip(mine, other, strict=True):
            torch.testing.assert_close(one, two)
    steps = list(stream(model, PROMPTS, compile_config=config(counting), **KEYS))
    assert torch.equal(torch.stack([step.tokens for step in steps], 1), want.sequences[:, -KEYS["max_new_tokens"] :])


def test_a_cache_goes_on_compiled_and_not(model: Any, counting: Any) -> None:
    keys: dict[str, Any] = {**KEYS, "return_dict_in_generate": True}
    keys.update(cache_config={"max_cache_len": 100}, cache_implementation="static")
    first = generate(model, [PROMPTS[0]], compile_config=config(counting), **keys)
    want = generate(model, [PROMPTS[0]], **{**KEYS, "max_new_tokens": 40})
    rest: dict[str, Any] = {**KEYS, "cache": first.cache, "max_new_tokens": 10}
    second = generate(model, first.sequences, **rest)
    third = generate(model, second, compile_config=config(counting), **rest)
    assert torch.equal(third, want)
    assert counting.graphs <= 2


def test_weights_that_change_count(make: Callable[..., Any], counting: Any) -> None:
    """Weights are arguments of the graph: nothing stale is ever run."""
    model, other = make(0), make(1)
    same(model, [PROMPTS[0]], config(counting))
    before = generate(model, [PROMPTS[0]], compile_config=config(counting), **KEYS)
    with torch.no_grad():
        model.lm_head.weight.mul_(-1)
    same(model, [PROMPTS[0]], config(counting))
    model.load_state_dict(other.state_dict())
    same(model, [PROMPTS[0]], config(counting))
    assert not torch.equal(before, generate(model, [PROMPTS[0]], compile_config=config(counting), **KEYS))
    assert counting.graphs == 1


def test_a_model_and_its_graphs_go_away(make: Callable[..., Any], counting: Any) -> None:
    model = make()
    generate(model, [[1, 2]], compile_config=config(counting), **KEYS)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_prefill_is_not_compiled(model: Any, counting: Any) -> None:
    generate(model, [[1, 2, 3]], compile_config=config(counting), **{**KEYS, "max_new_tokens": 1})
    assert counting.graphs == 0


def test_gradients_are_left_alone(model: Any, counting: Any) -> None:
    """Outside of a run, where gradients are recorded, a pass is run as it is."""
    pipeline = plan(model, [[1, 2, 3]], compile_config=config(counting), **KEYS)
    tokens: Tensor = torch.tensor([[1, 2, 3]])
    with torch.enable_grad():
        pipeline.adapter.forward(tokens, torch.arange(3)[None], None).logits.sum().backward()
    assert model.lm_head.weight.grad is not None
    assert adapter_for(model).forward(tokens, torch.arange(3)[None], None).logits.requires_grad
