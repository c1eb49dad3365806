"""Modules of a user's own, through the `module` plugin: whatever their forward pass looks like."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from decodekit import ConfigError, GenerationConfig, GenerationMixin, InputError, PipelineError, generate
from decodekit.models import adapter_for
from decodekit.testing import ScriptedLM, TinyLM
from torch import Tensor, nn

V = 19
PROMPTS = [[5, 9], [7, 3, 4, 11, 6], [8]]


class Recurrent(nn.Module):
    """Tokens in, logits out."""

    def __init__(self, how: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.rnn, self.out = nn.Embedding(V, 12), nn.GRU(12, 12, batch_first=True), nn.Linear(12, V)
        nn.init.normal_(self.out.weight, std=2.0)
        self.how = how

    def forward(self, ids: Tensor) -> Any:
        logits = self.out(self.rnn(self.embed(ids))[0])
        named = SimpleNamespace(logits=logits)
        return {"tensor": logits, "tuple": (logits, None), "dict": {"logits": logits}, "object": named}[self.how]


def greedy(model: Any, inputs: Any, new: int = 6, **keys: Any) -> Tensor:
    return generate(model, inputs, max_new_tokens=new, **keys)


@pytest.mark.parametrize("how", ["tensor", "tuple", "dict", "object"])
def test_any_form_of_output(how: str) -> None:
    assert torch.equal(greedy(Recurrent(how), [[5, 9]]), greedy(Recurrent(), [[5, 9]]))


def test_ragged_prompts_without_a_mask_argument_run_apart() -> None:
    model = Recurrent()
    batch = greedy(model, PROMPTS, eos_token_id=None)
    for row, prompt in enumerate(PROMPTS):
        assert torch.equal(batch[row, -6:], greedy(model, [prompt], eos_token_id=None)[0, -6:])


class CacheWithoutMask(TinyLM):
    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:  # type: ignore[override]
        return super().forward(tokens, cache=cache)


def test_ragged_prompts_with_a_cache_need_a_mask_argument() -> None:
    model = CacheWithoutMask(V).eval()
    with pytest.raises(PipelineError, match=r"takes no attention_mask.*use_cache=False"):
        greedy(model, PROMPTS)
    assert torch.equal(greedy(model, PROMPTS, use_cache=False), greedy(TinyLM(V).eval(), PROMPTS))
    assert torch.equal(greedy(model, PROMPTS[:1]), greedy(TinyLM(V).eval(), PROMPTS[:1]))


def test_torch_style_padding_masks_are_true_at_padding() -> None:
    class Torch(TinyLM):
        def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
            mask = None if key_padding_mask is None else ~key_padding_mask
            places = None if mask is None else (mask.long().cumsum(-1) - 1).clamp_min(0)
            return super().forward(tokens, mask, places)

    assert torch.equal(greedy(Torch(V).eval(), PROMPTS), greedy(TinyLM(V).eval(), PROMPTS))


def test_a_cache_for_a_module_that_takes_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes no cache"):
        greedy(Recurrent(), [[5, 9]], cache_implementation="dynamic")


def test_own_caches_are_used() -> None:
    made = []

    class Own(TinyLM):
        def make_cache(self) -> Any:
            from decodekit_caches.dynamic import DynamicCache

            made.append(DynamicCache())
            return made[-1]

    model = Own(V).eval()
    assert torch.equal(greedy(model, [[5, 9]]), greedy(TinyLM(V).eval(), [[5, 9]]))
    assert made[0].get_seq_length() == 7


# -- the vocabulary --------------------------------------------------------------------------------


class Hidden(nn.Module):
    """Nothing says how large the vocabulary is."""

    def __init__(self) -> None:
        super().__init__()
        self.rest = nn.Sequential(nn.Embedding(V, 8), nn.Dropout(0.5), nn.Linear(8, V))

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(x)


def test_vocabulary_is_found() -> None:
    head, stated, configured = Hidden(), Hidden(), Hidden()
    head.lm_head = nn.Linear(8, V)
    stated.vocab_size = V
    configured.config = {"vocab_size": V, "max_position_embeddings": 99}
    for model in (head, stated, configured, Hidden()):
        assert adapter_for(model).spec.vocab_size == V
    assert adapter_for(configured).spec.max_positions == 99


def test_looking_for_the_vocabulary_leaves_no_trace() -> None:
    model = Hidden()
    model.rest[1].eval()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    adapter_for(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert [m.training for m in model.modules()] == [True, True, True, False, True]


def test_wrong_vocabulary_is_named() -> None:
    model = Recurrent()
    model.vocab_size = 50
    with pytest.raises(PipelineError, match=r"gives 19 logits, but a vocabulary of 50.*set vocab_size = 19"):
        greedy(model, [[5]])


def test_wrong_output_is_named() -> None:
    class Flat(Recurrent):
        def forward(self, ids: Tensor) -> Any:
            return super().forward(ids).mean(-1)

    with pytest.raises(PipelineError, match=r"must return logits \[B, T, V\].*returned \(1, 1\)"):
        greedy(Flat(), [[5]])


# -- defaults and names ----------------------------------------------------------------------------


def test_defaults_come_from_the_module() -> None:
    table = torch.zeros(4, V)
    table[range(4), [7, 8, 2, 9]] = 5.0
    for given in ({"max_new_tokens": 9}, GenerationConfig(max_new_tokens=9)):
        model = ScriptedLM(table)
        model.eos_token_id, model.generation_config = 2, given
        assert generate(model, [[5]]).tolist() == [[5, 7, 8, 2]]
        model.generation_config = {"max_new_tokens": 2}
        assert generate(model, [[5]]).tolist() == [[5, 7, 8]]
        model.generation_config = {"eos_token_id": [8, 2]}
        assert generate(model, [[5]]).tolist() == [[5, 7, 8]]


def test_mixin() -> None:
    class Mine(GenerationMixin, Recurrent):
        generation_config = GenerationConfig(max_new_tokens=3)

    model = Mine()
    assert torch.equal(model.generate([[5, 9]]), greedy(model, [[5, 9]], 3))
    assert [step.index for step in model.stream([[5, 9]])] == [0, 1, 2]


def test_other_arguments_are_passed_on() -> None:
    class Scaled(Recurrent):
        def forward(self, ids: Tensor, boost: Tensor | None = None) -> Any:  # type: ignore[override]
            logits = super().forward(ids)
            return logits if boost is None else logits + boost

    boost = torch.zeros(V)
    boost[7] = 1e4
    assert greedy(Scaled(), [[5]], 2, boost=boost).tolist() == [[5, 7, 7]]


def test_compiled_models_keep_their_signature() -> None:
    model = TinyLM(V).eval()
    compiled = torch.compile(model, backend="eager")
    adapter = adapter_for(compiled)
    assert adapter.offers() == adapter_for(model).offers() == {"cache", "mask", "positions", "last"}
    assert adapter.model is compiled
    assert torch.equal(greedy(compiled, PROMPTS, 3), greedy(model, PROMPTS, 3))


def test_nothing_to_open() -> None:
    from decodekit.registry import registry

    plugin = registry.load("models", "module")()
    assert not plugin.opens("anything")
    assert plugin.adapt(object()) is None
    with pytest.raises(PipelineError):
        plugin.open("anything")


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises((InputError, ValueError), match="boost"):
        greedy(Recurrent(), [[5]], boost=1)
