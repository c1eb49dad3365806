"""Keys whose values have fields of their own: the watermark's, those of continuous batching; and those of drafts."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import attrs
import pytest
from decodekit import (
    ConfigError,
    ContinuousBatchingConfig,
    GenerationConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
    generate,
    plan,
)
from decodekit.settings import resolve

MARKS = [
    WatermarkingConfig(),
    WatermarkingConfig(greenlist_ratio=0.5, bias=-1.0, hashing_key=7, seeding_scheme="selfhash", context_width=3),
    SynthIDTextWatermarkingConfig(ngram_len=5, keys=[654, 400, 836]),
    SynthIDTextWatermarkingConfig(2, (1,), 8, 3, 2**24, True, True),
]
BATCHES = [
    ContinuousBatchingConfig(),
    ContinuousBatchingConfig(page_size=16, use_cuda_graph=(True, False), max_memory_percent=0.5, seed=0),
    ContinuousBatchingConfig(use_cuda_graph=True, cpu_offload_space=None, cpu_group_timeout=None, scheduler_type="x"),
    ContinuousBatchingConfig(varlen_compile_config={"dynamic": True, "options": {"a": [1]}}),
]
DRAFTS = {
    "num_assistant_tokens": 5,
    "num_assistant_tokens_schedule": "constant",
    "max_matching_ngram_size": 2,
    "assistant_lookbehind": 10,
    "target_lookbehind": 10,
    "assistant_ensemble_weight": 0.5,
    "is_assistant": True,
}
ASKING = {"prompt_lookup_num_tokens": 3, "assistant_early_exit": 2, "use_mtp": True, "speculation_type": "dflash"}


def final(config: GenerationConfig, key: str) -> Any:
    return resolve([("config", config.set_keys)]).get(key)


@pytest.mark.parametrize(
    ("key", "value"),
    [*(("watermarking_config", mark) for mark in MARKS), *(("continuous_batching_config", one) for one in BATCHES)],
)
def test_an_object_and_its_fields_are_the_same_and_survive_the_file(tmp_path: Path, key: str, value: Any) -> None:
    config = GenerationConfig(**{key: value})
    config.save_pretrained(tmp_path)
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert final(loaded, key) == final(config, key) == value
    assert type(final(loaded, key)) is type(value)
    assert loaded == config == GenerationConfig(**{key: value.to_dict()})
    assert json.loads((tmp_path / "generation_config.json").read_text())[key] == value.to_dict()


@pytest.mark.parametrize("name", ["WatermarkingConfig", "SynthIDTextWatermarkingConfig"])
def test_objects_of_the_reference_are_understood(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    given = {} if name == "WatermarkingConfig" else {"ngram_len": 4, "keys": [1, 2]}
    theirs = getattr(transformers, name)(**given)
    config = GenerationConfig(watermarking_config=theirs)
    config.save_pretrained(tmp_path)
    ours = final(config, "watermarking_config")
    assert type(ours).__name__ == name
    assert ours.to_dict() == theirs.to_dict()
    loaded = GenerationConfig.from_pretrained(tmp_path)
    assert final(loaded, "watermarking_config") == ours
    assert loaded == config


def test_the_defaults_are_those_of_the_reference() -> None:
    theirs = pytest.importorskip("transformers.generation.configuration_utils")
    assert WatermarkingConfig().to_dict() == theirs.WatermarkingConfig().to_dict()
    one, other = (
        cls(ngram_len=3, keys=[1]) for cls in (SynthIDTextWatermarkingConfig, theirs.SynthIDTextWatermarkingConfig)
    )
    assert one.to_dict() == other.to_dict()
    fields = attrs.asdict(ContinuousBatchingConfig())
    usual = vars(theirs.ContinuousBatchingConfig())
    assert fields == usual
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = GenerationConfig(continuous_batching_config=theirs.ContinuousBatchingConfig(page_size=8).__dict__)
        assert final(made, "continuous_batching_config") == ContinuousBatchingConfig(page_size=8)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("watermarking_config", {"greenlist_ratio": 2.0}, "greenlist_ratio: must be in [0, 1], got 2.0"),
        (
            "watermarking_config",
            {"greenlist_rato": 0.5},
            "greenlist_rato: unknown option; did you mean",
        ),
        ("watermarking_config", {"seeding_scheme": "right"}, "seeding_scheme: must be one of 'lefthash', 'selfhash'"),
        ("watermarking_config", {"context_width": 0}, "context_width: must be at least 1"),
        ("watermarking_config", {"keys": [1]}, "ngram_len: is required"),
        ("watermarking_config", {"ngram_len": 3, "keys": []}, "keys must not be empty"),
        ("watermarking_config", {"ngram_len": 3, "keys": [1.5]}, "keys: expected a whole number, got 1.5"),
        ("watermarking_config", {"ngram_len": 3, "keys": [1], "sampling_table_size": 2**24 + 1}, "sampling_table_size"),
        ("watermarking_config", "lefthash", "expected WatermarkingConfig or SynthIDTextWatermarkingConfig"),
        ("continuous_batching_config", {"page_size": 1}, "page_size: must be at least 4, got 1"),
        ("continuous_batching_config", {"page_sizes": 16}, "page_sizes: unknown option; did you mean page_size"),
        ("continuous_batching_config", {"use_cuda_graph": [True]}, "use_cuda_graph: expected True or False or"),
        ("num_assistant_tokens_schedule", "sometimes", "must be one of"),
        ("assistant_ensemble_weight", 1.0, "must be in (0, 1)"),
        ("num_assistant_tokens", 0, "must be at least 1"),
    ],
)
def test_what_is_wrong_is_named_by_field(key: str, value: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        GenerationConfig(**{key: value}).validate()
    assert str(caught.value).startswith(f"{key}: ")
    assert words in str(caught.value)


def test_faults_of_several_fields_are_told_at_once() -> None:
    with pytest.raises(ConfigError, match=r"bias: expected a number.*context_width: must be at least 1"):
        GenerationConfig(watermarking_config={"bias": "much", "context_width": 0}).validate()
    with pytest.raises(ValueError, match="bias: expected a number"):
        WatermarkingConfig.from_dict({"bias": "much"})
    assert WatermarkingConfig.from_dict({"bias": 3.0}, context_width=2) == WatermarkingConfig(bias=3.0, context_width=2)


@pytest.mark.parametrize("mark", [MARKS[0], MARKS[2].to_dict()])
def test_no_text_passes_for_marked(parrot: Any, mark: Any) -> None:
    with pytest.raises(ConfigError, match=r"watermarking_config: .* set watermarking_config=None"):
        generate(parrot(), [[1, 2]], watermarking_config=mark, max_new_tokens=2)
    stored = mark if isinstance(mark, dict) else mark.to_dict()
    with pytest.raises(ConfigError, match="watermarking_config"):
        generate(parrot(watermarking_config=stored), [[1, 2]], max_new_tokens=2)
    plan(parrot(watermarking_config=stored), [[1, 2]], watermarking_config=None, max_new_tokens=2)


@pytest.mark.parametrize("key", ASKING)
def test_drafts_are_refused_to_callers_and_left_out_of_models_files(parrot: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}.*leave {key} out"):
        plan(parrot(), [[1]], **{key: ASKING[key]})
    with pytest.raises(ConfigError, match=f"leave {key} out"):
        plan(parrot(), [[1]], GenerationConfig(**{key: ASKING[key]}))
    with pytest.warns(UserWarning, match=f"the model's {key} has no effect"):
        plan(parrot(**{key: ASKING[key]}), [[1]])
    GenerationConfig(**{key: ASKING[key]}).validate()


@pytest.mark.parametrize("key", DRAFTS)
def test_how_drafts_are_made_has_no_effect_without_any(parrot: Any, key: str) -> None:
    with pytest.warns(UserWarning, match=f"{key}: has no effect"):
        plan(parrot(), [[1]], **{key: DRAFTS[key]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(parrot(**{key: DRAFTS[key]}), [[1]])  # a draft model's own file
        plan(parrot(), [[1]], use_mtp=False)


def test_batching_waits_for_a_run_that_does_it(parrot: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        GenerationConfig(continuous_batching_config={"page_size": 16}).validate(strict=True)
    with pytest.warns(UserWarning, match="continuous_batching_config: has no effect"):
        plan(parrot(), [[1]], continuous_batching_config={"page_size": 16})


def test_old_names_become_the_new_ones() -> None:
    with pytest.warns(UserWarning, match="block_size is an old name: set page_size=32"):
        assert ContinuousBatchingConfig(block_size=32) == ContinuousBatchingConfig(page_size=32)
    with pytest.warns(UserWarning, match="set default_compile_level=3"):
        assert ContinuousBatchingConfig(use_default_compile_configs=True).default_compile_level == 3
    with pytest.warns(UserWarning, match="max_cached_graphs has no effect"):
        ContinuousBatchingConfig(max_cached_graphs=4)
