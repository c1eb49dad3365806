"""Strategies of decodekit in plain transformers, and loops written for transformers in decodekit."""

from __future__ import annotations

from typing import Any

import decodekit
import pytest
import torch
from decodekit import ConfigError, GenerationError, InputError, as_custom_generate, attach
from decodekit_strategies.sample import Sample
from torch import Tensor

CALLS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    {"min_new_tokens": 6, "bad_words_ids": [[44], [74]]},
    {"eos_token_id": [44, 54]},
    {"use_cache": False},
    {"max_length": 9, "max_new_tokens": None},
]

# -- decodekit in transformers -----------------------------------------------------------------------


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_greedy_is_transformers_own(llama: Any, padded: Any, call: dict[str, Any]) -> None:
    call = {"max_new_tokens": 9, "do_sample": False, **call}
    want = llama.generate(**padded, **call)
    got = llama.generate(**padded, **call, custom_generate=as_custom_generate("greedy"))
    assert torch.equal(got, want)


def test_beams_take_prompts_once(llama: Any, padded: Any) -> None:
    keys: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "length_penalty": 0.5, "max_new_tokens": 7}
    want = llama.generate(**padded, **keys, do_sample=False, pad_token_id=0)
    by_call = llama.generate(**padded, **keys, do_sample=False, custom_generate=as_custom_generate("beam"))
    asked = {key: keys.pop(key) for key in ("num_beams", "num_return_sequences", "length_penalty")}
    by_keys = llama.generate(**padded, **keys, do_sample=False, custom_generate=as_custom_generate("beam", **asked))
    for got in (by_call, by_keys):
        assert torch.equal(got.masked_fill(got == 2, 0), want[:, : got.shape[1]].masked_fill(want == 2, 0))


def test_keys_of_decodekit_act(llama: Any, padded: Any) -> None:
    def run(**keys: Any) -> Tensor:
        loop = as_custom_generate("sample", **keys)
        return llama.generate(**padded, max_new_tokens=8, do_sample=True, custom_generate=loop)

    assert torch.equal(run(seed=4), run(seed=4))
    assert not torch.equal(run(seed=4), run(seed=5))
    calm = run(seed=4, top_n_sigma=0.001)
    assert torch.equal(calm, llama.generate(**padded, max_new_tokens=8, do_sample=False))
    out = run(seed=4, return_dict_in_generate=True)
    assert len(out.stop_reasons) == 2
    with pytest.raises(ConfigError, match="top_p"):
        run(top_p=7.0)


def test_nothing_is_truncated_that_nobody_asked_for(llama: Any, padded: Any) -> None:
    """The library's own top_k must not come back where transformers was told to have none."""
    plans: list[Any] = []

    class Looking(Sample):
        def decode(self, run: Any, /) -> Any:
            plans.append(run.pipeline.describe())
            return super().decode(run)

    for top_k in (0, 7):
        loop = as_custom_generate(Looking())
        llama.generate(**padded, max_new_tokens=2, do_sample=True, top_k=top_k, custom_generate=loop)
    assert [[row["name"] for row in plan["processors"]] for plan in plans] == [[], ["TopKLogitsWarper"]]
    assert {row["name"] for row in plans[0]["criteria"]} == {"eos", "max_length"}


def test_processors_and_criteria_of_the_caller(llama: Any, padded: Any) -> None:
    loop = as_custom_generate("greedy", logits_processor=[lambda ids, scores: -scores])
    got = llama.generate(
        **padded,
        max_new_tokens=8,
        do_sample=False,
        logits_processor=[lambda ids, scores: scores * -1],
        stopping_criteria=[lambda ids, scores, **_: torch.full((ids.shape[0],), ids.shape[1] >= 7)],
        custom_generate=loop,
    )
    assert torch.equal(got, llama.generate(**padded, max_new_tokens=3, do_sample=False)), "both minus signs acted"


def test_a_cache_that_is_passed(llama: Any, padded: Any) -> None:
    from transformers import DynamicCache

    ids = padded["inputs"][1:]
    loop, cache = as_custom_generate("greedy"), DynamicCache(config=llama.config)
    first = llama.generate(ids, cache=cache, max_new_tokens=3, do_sample=False, custom_generate=loop)
    assert cache.get_seq_length() == 6
    more = llama.generate(first, cache=cache, max_new_tokens=3, do_sample=False, custom_generate=loop)
    assert torch.equal(more, llama.generate(ids, max_new_tokens=6, do_sample=False))


def test_in_an_attached_model_too(llama: Any, padded: Any) -> None:
    loop = as_custom_generate("sample", seed=3, do_sample=True)
    with attach(llama) as model:
        got = model.generate(**padded, max_new_tokens=5, custom_generate=loop)
        assert torch.equal(got, model.generate(**padded, max_new_tokens=5, do_sample=True, seed=3))


# -- loops written for transformers, in decodekit ----------------------------------------------------


def plain_loop(
    model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any, **kwargs: Any
) -> Tensor:
    """Greedy, with everything that the page of custom generation methods shows."""
    mask = kwargs.pop("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask  # transformers leaves out one that hides nothing
    kwargs.pop("position_ids", None)
    pad = generation_config._pad_token_tensor
    going = torch.ones(input_ids.shape[0], dtype=torch.bool)
    while input_ids.shape[1] < stopping_criteria.max_length and bool(going.any()):
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(input_ids, attention_mask=mask, position_ids=places, use_cache=False).logits[:, -1]
        new = logits_processor(input_ids, logits.float()).argmax(-1).masked_fill(~going, pad)
        input_ids = torch.cat([input_ids, new[:, None]], 1)
        mask = torch.cat([mask, torch.ones_like(new)[:, None]], 1)
        going &= ~stopping_criteria(input_ids, None)
    return input_ids


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_loop_gives_what_it_gives_in_transformers(llama: Any, padded: Any, call: dict[str, Any]) -> None:
    call = {name: value for name, value in {"max_new_tokens": 9, **call}.items() if value is not None}
    ids = padded["inputs"][1:]
    want = llama.generate(ids, do_sample=False, **call, custom_generate=plain_loop)
    with attach(llama) as model:
        assert torch.equal(model.generate(ids, **call, custom_generate=plain_loop), want)
        own = model.generate(**padded, **call)
        assert torch.equal(model.generate(**padded, **call, custom_generate=plain_loop), own)


def test_transformers_own_loop_runs(llama: Any, padded: Any) -> None:
    loop = type(llama)._sample
    want = llama.generate(**padded, max_new_tokens=8, do_sample=False)
    with attach(llama) as model:
        assert torch.equal(model.generate(**padded, max_new_tokens=8, custom_generate=loop), want)


def test_parts_with_state_follow_the_loop(llama: Any, padded: Any) -> None:
    """Keys that only decodekit has, with state that advances by accepted tokens."""
    keys: dict[str, Any] = {
        "max_new_tokens": 12,
        "dry_multiplier": 3.0,
        "frequency_penalty": 1.0,
    }
    with attach(llama) as model:
        want = model.generate(**padded, **keys)
        assert torch.equal(model.generate(**padded, **keys, custom_generate=plain_loop), want)
        assert not torch.equal(model.generate(**padded, max_new_tokens=12), want)


def test_rows_may_trade_places(llama: Any) -> None:
    seen: list[Tensor] = []

    def swaps(model: Any, input_ids: Tensor, logits_processor: Any, **_: Any) -> Tensor:
        for step in range(4):
            scores = logits_processor(input_ids, torch.zeros(2, 83))
            seen.append(scores)
            input_ids = torch.cat([input_ids, torch.tensor([[40 + step], [60 + step]])], 1)
            if step == 1:
                input_ids = input_ids.flip(0)
        return input_ids

    with attach(llama) as model:
        model.generate([[5, 6], [7, 8]], frequency_penalty=1.0, max_new_tokens=4, custom_generate=swaps)
    assert [scores.nonzero()[:, 1].tolist() for scores in seen[2:]] == [[60, 61, 40, 41], [42, 60, 61, 40, 41, 62]]


def test_rows_that_cannot_be_followed(llama: Any) -> None:
    def forgets(model: Any, input_ids: Tensor, logits_processor: Any, **_: Any) -> Tensor:
        return logits_processor(input_ids[:, :-1], torch.zeros(1, 83))

    def invents(model: Any, input_ids: Tensor, stopping_criteria: Any, **_: Any) -> Tensor:
        return stopping_criteria(input_ids + 1, None)

    with attach(llama) as model:
        with pytest.raises(GenerationError, match="taken back"):
            model.generate([[5, 6]], custom_generate=forgets)
        with pytest.raises(GenerationError, match="was not there before"):
            model.generate([[5, 6]], custom_generate=invents)


def test_what_a_loop_names_it_gets(llama: Any, padded: Any) -> None:
    def asks(model: Any, input_ids: Tensor, *, mine: int, streamer: Any = None, **kwargs: Any) -> Any:
        return mine, streamer, tuple(input_ids.shape), sorted(kwargs)

    def narrow(
        model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any
    ) -> int:
        return generation_config.max_length

    ear = type("Ear", (), {"put": lambda self, value: None, "end": lambda self: None})()
    with attach(llama) as model:
        mine, streamer, shape, rest = model.generate(
            **padded, num_beams=3, num_return_sequences=2, mine=5, streamer=ear, custom_generate=asks
        )
        assert (mine, streamer, shape) == (5, ear, (6, 4))
        assert {"attention_mask", "logits_processor", "stopping_criteria", "generation_config", "use_cache"} <= {*rest}
        assert model.generate(padded["inputs"][1:], max_new_tokens=3, custom_generate=narrow) == 7
        with pytest.raises(InputError, match="takes no streamer"):
            model.generate(padded["inputs"][1:], streamer=ear, custom_generate=narrow)
        with pytest.raises(ConfigError, match="mine"):
            model.generate(padded["inputs"][1:], mine=5, custom_generate=narrow)


def test_a_module_of_ones_own(counter: Any) -> None:
    def loop(model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, **kwargs: Any) -> Tensor:
        assert isinstance(kwargs["generation_config"], decodekit.GenerationConfig)
        while not bool(stopping_criteria(input_ids).all()):
            new = logits_processor(input_ids, model(input_ids)[:, -1]).argmax(-1)
            input_ids = torch.cat([input_ids, new[:, None]], 1)
        return input_ids

    with attach(counter) as model:
        assert model.generate([[3]], max_new_tokens=3, custom_generate=loop).tolist() == [[3, 4, 5, 6]]
