"""Settings in vain are told once, with the fix; what comes from the model's own file is not the caller's doing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from decodekit import ConfigError, GenerationConfig, GenerationError, InputError, generate, load, plan
from decodekit.testing import TinyLM


def said(model: Any, *config: Any, **keys: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plan(model, [[1, 2], [3, 4]], *config, **keys)
    assert all(warning.filename == __file__ for warning in caught), "at the caller's line"
    return [str(warning.message) for warning in caught]


CASES: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"strategy": "greedy", "temperature": 0.5},
        ["temperature: 0.5 has no effect with strategy='greedy': leave it out"],
    ),
    ({"strategy": "greedy", "top_p": 0.5, "seed": 1}, ["top_p: 0.5 has no effect", "seed: 1 has no effect with strat"]),
    ({"top_p": 0.5}, ["top_p: 0.5 has no effect without do_sample=True"]),
    ({"seed": 7}, ["seed: 7 has no effect without do_sample=True: nothing is drawn"]),
    (
        {"use_cache": False, "cache_implementation": "dynamic"},
        ["cache_implementation: 'dynamic' has no effect with use"],
    ),
    ({"max_cache_len": 9}, ["max_cache_len: 9 has no effect with a cache that grows: set cache_impl"]),
    ({"max_cache_len": 9, "cache_implementation": "static"}, []),
    ({"use_cache": False, "cache_config": {"reserve": 9}}, ["cache_config: {'reserve': 9} has no effect"]),
    ({"min_new_tokens": 9, "max_new_tokens": 5}, ["min_new_tokens: 9 cannot be reached: max_new_tokens is 5; raise"]),
    ({"min_new_tokens": 30, "eos_token_id": 3}, ["30 cannot be reached: max_new_tokens is 20 (library)"]),
    (
        {"min_length": 9, "max_length": 5, "max_new_tokens": 9, "eos_token_id": 3},
        ["max_length: 5 has no effect beside max_new_tokens=9: leave one of the two out"],
    ),
    ({"min_length": 9, "max_length": 5}, ["min_length: 9 cannot be reached: max_length is 5"]),
    (
        {"min_new_tokens": 3, "max_new_tokens": [5, 2]},
        ["min_new_tokens: 3 cannot be reached: max_new_tokens is (5, 2)"],
    ),
    ({"min_new_tokens": 3}, ["min_new_tokens: 3 has no effect without an end token, which is all it forbids: set eos"]),
    ({"min_length": 3, "max_length": 9, "eos_token_id": -1}, ["min_length: 3 has no effect without an end token"]),
    ({"length_penalty": 2.0}, ["length_penalty: 2.0 has no effect with strategy 'greedy', which other keys ask for"]),
    (
        {"penalty_alpha": 0.5, "top_k": 4, "do_sample": True},
        ["penalty_alpha: 0.5 has no effect with strategy 'sample'"],
    ),
    ({"num_beams": 2, "dola_layers": "high"}, ["dola_layers: 'high' has no effect with strategy 'beam'"]),
    ({"num_beams": 2, "dola_layers": "low"}, ["dola_layers: 'low' has no effect with strategy 'beam'"]),
    ({"num_beams": 2, "penalty_alpha": 0.6}, ["penalty_alpha: 0.6 has no effect with strategy 'beam'"]),
    ({"dry_base": 2.0}, ["dry_base: 2.0 has no effect without dry_multiplier: set that, too"]),
    ({"dry_base": 1.75}, []),
    ({"dry_base": 2.0, "dry_multiplier": 0.5}, []),
    (
        {"negative_prompt_attention_mask": [[1], [1]]},
        ["negative_prompt_attention_mask: ((1,), (1,)) has no effect without negative_prompt_ids"],
    ),
    ({"decoder_start_token_id": 3}, ["decoder_start_token_id: 3 has no effect: this model has no encoder"]),
    ({"num_beams": 2, "diversity_penalty": 0.5}, ["diversity_penalty: 0.5 has no effect with strategy 'beam', which"]),
    ({"num_beams": 1, "length_penalty": 1.0, "early_stopping": False}, []),
    ({"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5, "length_penalty": 2.0}, []),
    ({"force_words_ids": [[3]], "num_beams": 3, "early_stopping": True}, []),
]


@pytest.mark.parametrize(("keys", "words"), CASES)
def test_each_is_told_once_whether_in_the_call_or_in_an_object(keys: dict[str, Any], words: list[str]) -> None:
    for heard in (said(TinyLM(), **keys), said(TinyLM(), GenerationConfig(**keys))):
        assert len(heard) == len(words)
        assert all(part in whole for part, whole in zip(words, heard, strict=True)), heard


@pytest.mark.parametrize(("keys", "words"), CASES)
def test_nothing_is_said_about_the_models_own_file(parrot: Any, keys: dict[str, Any], words: list[str]) -> None:
    assert said(parrot(**keys)) == []


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"do_sample": True, "top_p": 0.5, "seed": 1},
        {"strategy": "sample", "top_p": 0.5, "seed": 1},
        {"min_new_tokens": 5, "max_new_tokens": 5, "eos_token_id": 3},
        {"min_new_tokens": 0},
        {"use_cache": True, "cache_implementation": "dynamic"},
        {"use_cache": False},
    ],
)
def test_nothing_is_said_where_all_is_well(keys: dict[str, Any]) -> None:
    assert said(TinyLM(), **keys) == []


def test_validate_says_the_same() -> None:
    with pytest.raises(ConfigError, match="min_new_tokens: 9 cannot be reached"):
        GenerationConfig(min_new_tokens=9, max_new_tokens=5).validate(strict=True)
    GenerationConfig(strategy="sample", top_p=0.5).validate(strict=True)


def test_a_third_party_may_doubt_too(register: Any) -> None:
    from decodekit.errors import Problem
    from decodekit.hooks import hookimpl

    class Sceptic:
        @hookimpl
        def doubts(self, settings: Any, samples: Any) -> Any:
            return [Problem("mood", f"samples: {samples}")]

    register("hooks", "sceptic", Sceptic())
    assert said(TinyLM(), do_sample=True) == ["mood: samples: True"]
    assert said(TinyLM()) == ["mood: samples: False"]


# -- special tokens and caches -----------------------------------------------------------------------


def test_a_pad_token_outside_the_vocabulary_is_refused(parrot: Any) -> None:
    for keys in ({"pad_token_id": 37}, {"pad_token_id": 99, "eos_token_id": 3}):
        with pytest.raises(ConfigError, match=r"pad_token_id: is \d\d, outside the model's vocabulary of 37; set"):
            plan(TinyLM(), [[1]], **keys)
    assert generate(TinyLM(), [[1]], pad_token_id=-1, max_new_tokens=2).shape == (1, 3)
    assert generate(TinyLM(), [[1]], pad_token_id=36, max_new_tokens=2).shape == (1, 3)
    # Files of real models name pad tokens that their embeddings lack; nobody needs it for one row.
    model = parrot(pad_token_id=10**6)
    assert generate(model, [[1]], max_new_tokens=2).shape == (1, 3)
    with pytest.raises(ConfigError, match="pad_token_id"):
        generate(model, [[1], [2]], max_new_tokens=2)


def failing(at: int) -> Any:
    def fails(input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] == at:
            raise ValueError("now")
        return scores

    return fails


def test_a_failed_call_leaves_a_passed_cache_as_it_was() -> None:
    lm = load("bundled")
    whole = generate(lm, [[5, 6, 7]], max_new_tokens=6, do_sample=False)
    cache = plan(lm, [[5]]).cache
    generate(lm, whole[:, :4], cache=cache, max_new_tokens=1, do_sample=False)
    for _ in range(2):
        with pytest.raises(ValueError, match="now"):
            generate(lm, whole[:, :5], cache=cache, max_new_tokens=4, do_sample=False, logits_processor=[failing(7)])
        assert cache.get_seq_length() == 4
    assert generate(lm, whole[:, :5], cache=cache, max_new_tokens=4, do_sample=False).equal(whole)


def test_where_it_cannot_be_cropped_that_is_said() -> None:
    class Stubborn:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            if name in ("offers", "crop") or name.startswith("__"):
                raise AttributeError(name)
            return getattr(self.inner, name)

    lm = load("bundled")
    cache = Stubborn(plan(lm, [[5]]).cache)
    keys = {"max_new_tokens": 4, "do_sample": False, "logits_processor": [failing(4)]}
    with (
        pytest.warns(
            UserWarning, match="this call failed, and the cache passed to it has grown by 4 tokens: begin again"
        ),
        pytest.raises(GenerationError, match="now"),
    ):
        generate(lm, [[5, 6]], cache=cache, **keys)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InputError, match="99999"):  # nothing had run
            generate(lm, [[5, 6, 7, 99999]], cache=cache, **keys)


def test_what_a_strategy_reads_is_not_in_vain_however_it_was_chosen() -> None:
    from decodekit_strategies.contrastive import ContrastiveSearch

    lm = load("bundled")
    for keys in ({"strategy": "contrastive"}, {"strategy": ContrastiveSearch()}, {"penalty_alpha": 0.6}):
        assert said(lm.model, do_sample=False, top_k=4, **keys) == []
