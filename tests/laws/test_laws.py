"""Laws 1, 4 and 6 over whole calls; 3 and 7 have their tests beside text and configuration."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import attrs
import pytest
import torch
from decodekit import ConfigError, GenerationConfig, generate, plan
from decodekit.keys import keys
from decodekit.registry import registry
from decodekit_plugins.models.native.module import NativeConfig, NativeLM
from hypothesis import given, settings
from hypothesis import strategies as st

VOCAB = 41
few = settings(max_examples=30)


@pytest.fixture(scope="module")
def model() -> NativeLM:
    torch.manual_seed(0)
    config = NativeConfig(VOCAB, 32, 48, 2, 4, 2, 8, qk_norm=True, max_position_embeddings=256)
    lm = NativeLM(config).eval().requires_grad_(False)
    with torch.no_grad():  # sharp enough that rounding never decides
        for weight in lm.parameters():
            weight.mul_(3.0 if weight.dim() > 1 else 1.0)
    return lm


PROMPTS = st.lists(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=9), min_size=1, max_size=4)
CONFIGS = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 12)},
    optional={
        "do_sample": st.just(True),
        "temperature": st.floats(0.3, 2.0),
        "top_k": st.integers(0, VOCAB + 5),
        "top_p": st.floats(0.05, 1.0),
        "min_p": st.floats(0.0, 0.9),
        "repetition_penalty": st.floats(0.6, 2.0),
        "min_new_tokens": st.integers(0, 8),
        "min_length": st.integers(0, 15),
        "eos_token_id": st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
        "use_cache": st.booleans(),
    },
)


def run(model: Any, prompts: Any, config: dict[str, Any], **more: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # keys that greedy does not need are named; see law 6
        return generate(model, prompts, return_dict_in_generate=True, **config, **more)


def new_tokens(output: Any, row: int) -> list[int]:
    return output.sequences[row, output.prompt_width :][: output.lengths[row]].tolist()


@few
@given(prompts=PROMPTS, config=CONFIGS, pad=st.integers(0, VOCAB - 1), data=st.data())
def test_law_1_a_row_does_not_depend_on_its_neighbours_padding_or_the_pad_token(
    model: NativeLM, prompts: list[list[int]], config: dict[str, Any], pad: int, data: Any
) -> None:
    seeds = data.draw(st.lists(st.integers(0, 2**62), min_size=len(prompts), max_size=len(prompts)))
    together = run(model, prompts, config, pad_token_id=pad, seed=seeds)
    for row, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        alone = run(model, [prompt], config, seed=[seed])
        assert new_tokens(together, row) == new_tokens(alone, 0)
        assert together.stop_reasons[row] == alone.stop_reasons[0]


@few
@given(prompts=PROMPTS, config=CONFIGS, extra=st.integers(1, 6))
def test_law_1_more_padding_changes_nothing(
    model: NativeLM, prompts: list[list[int]], config: dict[str, Any], extra: int
) -> None:
    width = max(map(len, prompts)) + extra
    tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    config = {k: v for k, v in config.items() if k not in ("min_length",)}
    tight = run(model, prompts, config, seed=5)
    loose = run(model, tokens, config, seed=5, attention_mask=mask)
    right = run(
        model,
        torch.tensor([p + [0] * (width - len(p)) for p in prompts]),
        config,
        seed=5,
        attention_mask=torch.tensor([[1] * len(p) + [0] * (width - len(p)) for p in prompts]),
    )
    for row in range(len(prompts)):
        assert new_tokens(tight, row) == new_tokens(loose, row) == new_tokens(right, row)


@few
@given(prompts=PROMPTS, config=CONFIGS, seed=st.integers(0, 2**62))
def test_law_4_again_gives_the_same_and_nothing_passed_is_modified(
    model: NativeLM, prompts: list[list[int]], config: dict[str, Any], seed: int
) -> None:
    passed = GenerationConfig(**config)
    frozen = copy.deepcopy((prompts, passed.to_dict()))
    weights = [weight.clone() for weight in model.parameters()]
    first = run(model, prompts, {}, generation_config=passed, seed=seed)
    second = run(model, prompts, {}, generation_config=passed, seed=seed)
    assert torch.equal(first.sequences, second.sequences)
    assert first.stop_reasons == second.stop_reasons
    assert (prompts, passed.to_dict()) == frozen
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_law_4_tensors_and_masks_are_only_read(model: NativeLM) -> None:
    tokens, mask = torch.tensor([[0, 0, 5, 6], [1, 2, 3, 4]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    kept = tokens.clone(), mask.clone()
    generate(model, tokens, attention_mask=mask, max_new_tokens=4)
    assert torch.equal(tokens, kept[0])
    assert torch.equal(mask, kept[1])


@few
@given(config=CONFIGS, seed=st.integers(0, 2**62), rows=st.integers(1, 4))
def test_law_5_a_seeded_call_leaves_the_global_generator_alone(
    model: NativeLM, config: dict[str, Any], seed: int, rows: int
) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    run(model, [[3, 4]] * rows, config, seed=seed)
    assert torch.equal(before, torch.get_rng_state())


def test_law_5_without_a_seed_the_global_generator_decides(model: NativeLM) -> None:
    def draw() -> torch.Tensor:
        torch.manual_seed(7)
        return generate(model, [[3, 4]], do_sample=True, temperature=2.0, max_new_tokens=12)

    first = draw()
    assert torch.equal(first, draw())
    assert not torch.equal(first, generate(model, [[3, 4]], do_sample=True, temperature=2.0, max_new_tokens=12))


def test_law_5_sequences_of_one_prompt_differ_and_repeat(model: NativeLM) -> None:
    keys_ = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 10, "top_k": 0}
    several = generate(model, [[3, 4], [5]], num_return_sequences=3, seed=[8, 9], **keys_)
    assert len({tuple(row) for row in several.tolist()}) == 6
    alone = generate(model, [[5]], num_return_sequences=3, seed=[9], **keys_)
    assert torch.equal(several[3:, -10:], alone[:, -10:])
    assert torch.equal(generate(model, [[3, 4]], seed=8, **keys_)[0], several[0])


# -- law 6 ------------------------------------------------------------------------------------------

ACTING = {
    "temperature": 0.7,
    "top_k": 3,
    "top_p": 0.5,
    "min_p": 0.2,
    "repetition_penalty": 1.4,
    "min_new_tokens": 3,
    "min_length": 9,
    "max_length": 9,
    "max_new_tokens": 5,
    "max_time": 100.0,
    "eos_token_id": [7],
    "stop_strings": ["x"],
    "token_healing": True,
    "assistant_confidence_threshold": 0.4,
    "bad_words_ids": [[5], [6, 8]],
    "begin_suppress_tokens": [5],
    "dry_allowed_length": 1,
    "dry_base": 2.0,
    "dry_multiplier": 0.5,
    "dry_penalty_last_n": 30,
    "dry_sequence_breakers": [5],
    "dynatemp_exponent": 2.0,
    "dynatemp_range": 0.5,
    "encoder_no_repeat_ngram_size": 2,
    "encoder_repetition_penalty": 1.4,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "exponential_decay_length_penalty": (2, 1.5),
    "forced_bos_token_id": 5,
    "forced_eos_token_id": 7,
    "frequency_penalty": 0.5,
    "guidance_scale": 1.5,
    "logit_bias": {5: 1.0},
    "mirostat_eta": 0.2,
    "mirostat_tau": 3.0,
    "negative_prompt_attention_mask": [[1, 1]],
    "negative_prompt_ids": [[5, 6]],
    "no_repeat_ngram_size": 2,
    "prefix_allowed_tokens_fn": lambda prompt, ids: [5, 6, 7],
    "presence_penalty": 0.5,
    "remove_invalid_values": True,
    "renormalize_logits": True,
    "sequence_bias": {(5, 6): 1.0},
    "suppress_tokens": [5],
    "top_h": 0.5,
    "top_n_sigma": 1.0,
    "typical_p": 0.5,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
}
"""A value of every key of an installed processor or criterion that has something to do."""
OF_WHISPER: dict[str, Any] = {"return_timestamps": True, "no_speech_threshold": 0.5}
"""Keys that no other model can answer to: tests/seq2seq/test_whisper.py has the models that do."""
WITH: dict[str, dict[str, Any]] = {
    **{key: {"dry_multiplier": 0.5} for key in ACTING if key.startswith("dry_")},
    "dynatemp_exponent": {"dynatemp_range": 0.5},
    "mirostat_eta": {"mirostat_tau": 3.0},
    "negative_prompt_attention_mask": {"guidance_scale": 1.5, "negative_prompt_ids": [[5, 6]]},
    "negative_prompt_ids": {"guidance_scale": 1.5},
    "xtc_threshold": {"xtc_probability": 0.5},
}
"""What some need beside them to act."""


class _Letters:
    """One letter a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(char) % VOCAB for char in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


def _owned() -> list[str]:
    return [
        key.name for key in keys.all() if key.kind in ("processors", "criteria") and key.distribution == "decodekit"
    ]


def test_every_key_has_an_acting_value() -> None:
    assert set(_owned()) == {*ACTING, *OF_WHISPER}


@pytest.mark.parametrize("key", OF_WHISPER)
def test_law_6_a_key_of_other_models_is_refused_by_name(model: NativeLM, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        plan(model, [[3, 4]], eos_token_id=[7], **{key: OF_WHISPER[key]})


@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize("key", sorted(ACTING))
def test_law_6_what_was_asked_for_is_in_the_pipeline_or_named(model: NativeLM, key: str, sample: bool) -> None:
    found = keys.find(key)
    assert found is not None
    asked = {"do_sample": sample, "eos_token_id": [7], **WITH.get(key, {}), key: ACTING[key]}
    if key == "forced_bos_token_id":
        asked["inputs"] = [[3]]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = plan(model, asked.pop("inputs", [[3, 4]]), tokenizer=_Letters(), **asked)
    parts = {part.name: part for part in (*pipeline.chain.parts, *pipeline.criteria)}
    if found.plugin.name in parts:
        assert f"{key}={pipeline.settings.get(key)!r} (call)" in parts[found.plugin.name].why
    else:
        assert found.plugin.name in pipeline.left_out
        words = [str(warning.message) for warning in caught]
        assert any("no effect" in said and any(name in said for name in (key, *WITH.get(key, {}))) for said in words)
        assert not sample or key == "assistant_confidence_threshold"


def test_law_6_unknown_names_are_refused_wherever_they_come_from(model: NativeLM) -> None:
    for call in (
        lambda: generate(model, [[3]], top_kk=5),
        lambda: generate(model, [[3]], {"top_kk": 5}),
        lambda: GenerationConfig(top_kk=5),
        lambda: generate(model, [[3]], processors={"top_kk": {}}),
    ):
        with pytest.raises(ConfigError, match="did you mean top_k"):
            call()


def test_law_6_a_pipeline_names_every_plugin_it_uses(model: NativeLM) -> None:
    described = plan(model, [[3]], do_sample=True, top_p=0.9, eos_token_id=1).describe()
    names = [row["name"] for row in described["processors"]]
    assert names == ["top_k", "top_p"]
    assert [row["name"] for row in described["criteria"]] == ["eos", "max_length"]
    assert described["strategy"] == "sample"
    assert registry.find("strategies", described["strategy"]).qualified == "decodekit:sample"
    assert described["settings"]["top_k"] == {"value": 50, "origin": "library", "owner": "decodekit:top_k"}
    assert attrs.has(type(plan(model, [[3]]).settings))
