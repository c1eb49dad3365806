"""Wrong arguments of a call are refused in words, and nothing explicit is dropped in silence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from decodekit import InputError, generate, load, plan
from decodekit.registry import Registry, Switches
from decodekit_plugins.stopping.length import MaxLengthCriteria
from decodekit_processors.truncation import TopPLogitsWarper

IDS = torch.tensor([[40, 52, 79]])


def ask(*args: Any, **keys: Any) -> Any:
    return generate(*args, **keys)


@pytest.fixture(scope="module")
def lm() -> Any:
    return load("bundled")


def test_a_cache_that_holds_more_than_the_inputs_is_refused(lm: Any) -> None:
    out = ask(lm, IDS, max_new_tokens=3, return_dict_in_generate=True)
    with pytest.raises(InputError, match="the cache holds 5 tokens and inputs are 3; pass the whole sequence, or only"):
        ask(lm, IDS, cache=out.cache)


@pytest.mark.parametrize(
    ("inputs", "keys", "words"),
    [
        (IDS, {"attention_mask": torch.tensor([[0.0, 0.0, -1e9]])}, "must hold 1 or True"),
        (IDS, {"attention_mask": "aaa"}, "attention_mask cannot be used"),
        ([[2**70]], {}, "cannot be used"),
        (b"text", {}, "not bytes"),
        ([b"text"], {}, "whole numbers"),
        ([], {}, "no prompt"),
        (IDS, {"streamer": 5}, "streamer must be an object with put and end"),
        (IDS, {"strategy": 5}, "strategy must be an object with decode"),
        (IDS, {"adapter": "native"}, "has its adapter already"),
    ],
)
def test_wrong_arguments(lm: Any, inputs: Any, keys: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ask(lm, inputs, **keys)


def test_numbers_of_numpy_and_a_single_processor_are_taken(lm: Any) -> None:
    keys: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    want = ask(lm, [40, 52], **keys)
    assert torch.equal(ask(lm, [np.int64(40), np.int64(52)], **keys), want)
    assert torch.equal(ask(lm, [40, 52], logits_processor=lambda ids, scores: scores, **keys), want)


def test_an_explicit_limit_stays_beside_a_criterion_of_its_class(lm: Any) -> None:
    out = ask(lm, IDS, max_new_tokens=3, stopping_criteria=[MaxLengthCriteria(max_length=30)])
    assert out.shape[1] == 6


def test_the_model_of_an_lm_brings_its_tokenizer(lm: Any) -> None:
    bare = load(lm.model, tokenizer=lm.tokenizer)
    call = {"max_new_tokens": 2, "seed": 1}
    assert load(bare).generate("Hello", **call) == bare.generate("Hello", **call)
    for name in ("inputs", "tokenizer"):
        with pytest.raises(InputError, match=f"{name}: an LM takes the prompt first"):
            bare.plan("Hello", **{name: None})


def test_a_repr_that_fails_does_not_break_describe(lm: Any) -> None:
    class Loud:
        def __call__(self, ids: Any, scores: Any) -> Any:
            return scores

        def __repr__(self) -> str:
            raise RuntimeError

    rows = plan(lm, IDS, logits_processor=[Loud()]).describe()["processors"]
    assert [row["options"] for row in rows if row["name"] == "Loud"] == ["Loud"]


def test_an_explicit_value_that_an_object_replaces_is_named(lm: Any) -> None:
    with pytest.warns(UserWarning, match=r"top_p=0.9 \(call\) is replaced by an object of the same class"):
        plan(lm, IDS, do_sample=True, top_p=0.9, logits_processor=[TopPLogitsWarper(0.5)])


def test_switches_that_say_no_or_match_nothing() -> None:
    assert not Switches.from_environment({"DECODEKIT_STRICT": "false"}).strict
    with pytest.warns(UserWarning, match="DECODEKIT_DISABLE names 'top_pp'.*did you mean"):
        Registry(Switches(disable=("top_pp",))).plugins()
