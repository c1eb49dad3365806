"""`attach`: `model.generate` is decodekit's, with transformers' arguments, for one object, until it is undone."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from decodekit import ConfigError, GenerationMixin, InputError, PipelineError, attach
from decodekit.keys import keys
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")


def test_the_arguments_are_those_of_transformers(llama: Any) -> None:
    theirs = inspect.signature(llama.generate)
    with attach(llama) as model:
        ours = inspect.signature(model.generate)
    assert list(ours.parameters) == list(theirs.parameters)
    assert {p.default for p in ours.parameters.values()} == {p.default for p in theirs.parameters.values()}
    assert list(inspect.signature(GenerationMixin.generate).parameters)[1:] == list(theirs.parameters)


def test_it_generates_what_transformers_generates(llama: Any, padded: Any) -> None:
    calls: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.4}, {"num_beams": 3}, {"min_new_tokens": 5}]
    want = [llama.generate(**padded, **call, max_new_tokens=9, do_sample=False) for call in calls]
    with attach(llama) as model:
        got = [model.generate(**padded, **call, max_new_tokens=9) for call in calls]
        ends = model.generate(**padded, max_new_tokens=9, return_dict_in_generate=True).stop_reasons
    for one, other in zip(want, got, strict=True):
        width = min(one.shape[1], other.shape[1])
        assert torch.equal(one[:, :width].masked_fill(one[:, :width] == 2, 0), other.masked_fill(other == 2, 0))
    assert set(ends) <= {"eos", "max_length"}, "only decodekit says why"


def test_a_configuration_of_transformers_and_every_argument(llama: Any, padded: Any) -> None:
    config = transformers.GenerationConfig(max_new_tokens=4, do_sample=False)
    heard: list[Any] = []

    class Ear:
        def put(self, value: Tensor) -> None:
            heard.append(value)

        def end(self) -> None:
            heard.append(None)

    with attach(llama) as model:
        assert model.generate(padded["inputs"][1:], config).shape == (1, 8)
        # By position, as in transformers.
        assert model.generate(padded["inputs"][1:], config, [lambda ids, scores: -scores]).shape == (1, 8)
        stop = model.generate(padded["inputs"][1:], config, stopping_criteria=[lambda ids, scores: ids.shape[1] > 5])
        assert stop.shape == (1, 6)
        only = model.generate(padded["inputs"][1:], config, prefix_allowed_tokens_fn=lambda row, ids: [7])
        assert only[0, 4:].tolist() == [7, 7, 7, 7]
        model.generate(padded["inputs"][1:], config, streamer=Ear())
        assert len(heard) == 6
        plain = model.generate(padded["inputs"][1:], config)
        negative = torch.tensor([[11, 12]])
        guided = model.generate(
            padded["inputs"][1:],
            config,
            guidance_scale=3.0,
            negative_prompt_ids=negative,
            negative_prompt_attention_mask=torch.ones_like(negative),
        )
        assert not torch.equal(plain, guided)
        assert torch.equal(model.generate(input_ids=padded["inputs"][1:], generation_config=config), plain)
        assert torch.equal(model.generate(padded["inputs"][1:], config, synced_gpus=False), plain)


def test_what_decodekit_lacks_is_refused_by_name(llama: Any, padded: Any) -> None:
    with attach(llama) as model:
        for name, value in (("custom_generate", "owner/repo"), ("no_such_key", 1)):
            with pytest.raises(ConfigError, match=name):
                model.generate(**padded, **{name: value})
        if "assistant_model" not in keys:
            with pytest.raises(ConfigError, match="assistant_model"):
                model.generate(**padded, assistant_model=llama)


def test_it_is_undone(llama: Any, padded: Any) -> None:
    own = type(llama)
    handle = attach(llama)
    assert type(llama) is not own
    assert type(llama).__name__ == own.__name__
    assert isinstance(llama, own)
    handle.detach()
    assert type(llama) is own
    assert llama.generate.__func__ is own.generate
    handle.detach()  # nothing is left to undo
    with pytest.raises(ZeroDivisionError), attach(llama):
        raise ZeroDivisionError
    assert type(llama) is own


def test_only_this_object_changes(llama: Any) -> None:
    other = copy.deepcopy(llama)
    with attach(llama):
        assert other.generate.__func__ is type(other).generate


def test_twice_is_harmless(llama: Any) -> None:
    own = type(llama)
    with attach(llama):
        attached = type(llama)
        with attach(llama):
            assert type(llama) is attached
        assert type(llama) is attached, "the outer block is not over"
    assert type(llama) is own
    attach(llama)
    attach(llama).detach()
    assert type(llama) is own


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles(llama: Any, padded: Any, make: Any) -> None:
    with attach(llama):
        other = make(llama)
    assert other is not llama
    assert other.generate.__self__ is other
    other.generation_config = transformers.GenerationConfig(max_new_tokens=2, do_sample=False)
    assert other.generate(padded["inputs"][1:]).shape == (1, 6), "it goes by its own configuration"
    assert torch.equal(other.lm_head.weight, llama.lm_head.weight)
    attach(other).detach()
    assert type(other) is type(llama)


def test_saved_with_torch_and_with_transformers(llama: Any, padded: Any, tmp_path: Any) -> None:
    with attach(llama) as model:
        want = model.generate(**padded, max_new_tokens=5)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert torch.equal(torch.load(file, weights_only=False).generate(**padded, max_new_tokens=5), want)
        model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is type(llama)


def test_generate_that_an_object_has_itself(llama: Any, padded: Any) -> None:
    llama.generate = lambda *args, **kwargs: "mine"
    with attach(llama) as model:
        assert model.generate(**padded, max_new_tokens=2).shape == (2, 6)
        with pytest.raises(AttributeError, match="detach"):
            model.generate = None
    assert llama.generate() == "mine"


def test_a_module_of_ones_own(counter: Any) -> None:
    with attach(counter) as model:
        assert model.generate([[3]], max_new_tokens=3).tolist() == [[3, 4, 5, 6]]
        assert copy.deepcopy(model).generate([[3]], max_new_tokens=1).tolist() == [[3, 4]]
    assert not hasattr(counter, "generate")


def test_a_class_that_others_changed_since(counter: Any) -> None:
    handle = attach(counter)
    own = type(counter)
    counter.__class__ = type("Sharded", (own,), {})
    with pytest.raises(PipelineError, match="changed after attach"):
        handle.detach()
    counter.__class__ = own
    handle.detach()


def test_what_cannot_be_attached(llama: Any) -> None:
    with pytest.raises(InputError, match="nn.Module"):
        attach("gpt2")  # type: ignore[arg-type]
    unknown = type("Unknown", (object,), {})()
    with pytest.raises(InputError, match=r"nn\.Module, not Unknown"):
        attach(unknown)
    encoder = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
        )
    )
    with pytest.raises(PipelineError, match="no causal language model"):
        attach(encoder)
    assert type(encoder) is transformers.BertForMaskedLM


def test_the_mixin_scores_transitions() -> None:
    class Mine(GenerationMixin, nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.likes = nn.Parameter(torch.randn(9, 9, generator=torch.Generator().manual_seed(1)))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.likes[tokens]

    model = Mine()
    out = model.generate([[3], [4]], max_new_tokens=4, output_scores=True)
    found = model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert found.shape == (2, 4)
    assert bool((found < 0).all())
