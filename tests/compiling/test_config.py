"""`CompileConfig`: the reference's fields, defaults and dict; files and back, which the reference lacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decodekit import CompileConfig, ConfigError, GenerationConfig, generate

transformers = pytest.importorskip("transformers")


def test_fields_and_defaults_are_the_references() -> None:
    theirs = transformers.CompileConfig()
    assert CompileConfig().to_dict() == theirs.to_dict()
    assert CompileConfig()._compile_all_devices is theirs._compile_all_devices is None
    mine = CompileConfig(fullgraph=True, dynamic=True, backend="eager", mode="default", options=None)
    assert mine.to_dict() == transformers.CompileConfig(True, True, "eager", "default", None).to_dict()


def test_to_dict_is_a_copy_without_the_hidden_switch() -> None:
    config = CompileConfig(options={"a": {"b": 1}})
    config._compile_all_devices = True
    config.to_dict()["options"]["a"]["b"] = 2
    assert config.options == {"a": {"b": 1}}
    assert set(config.to_dict()) == {"fullgraph", "dynamic", "backend", "mode", "options"}


@pytest.mark.parametrize("value", [CompileConfig(dynamic=True, mode="default"), {"dynamic": True, "mode": "default"}])
def test_round_trip_of_files(tmp_path: Path, value: Any) -> None:
    """Nested as a dict in generation_config.json; the reference drops it when saving and refuses the dict when used."""
    config = GenerationConfig(compile_config=value, disable_compile=False)
    config.save_pretrained(tmp_path)
    told = json.loads((tmp_path / "generation_config.json").read_text())
    assert told["compile_config"]["dynamic"] is True
    assert told["compile_config"]["mode"] == "default"
    again = GenerationConfig.from_pretrained(tmp_path)
    again.save_pretrained(tmp_path / "more")
    assert json.loads((tmp_path / "more" / "generation_config.json").read_text()) == told


def test_a_function_cannot_be_written() -> None:
    with pytest.raises(ConfigError, match="compile_config.*cannot be written as JSON"):
        GenerationConfig(compile_config=CompileConfig(backend=print)).to_json_string()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"mod": "default"}, "mod"),
        ({"backend": 3}, "backend"),
        ({"dynamic": "yes"}, "dynamic"),
        ({"mode": "max-autotune", "options": {"freezing": True}}, "exclude each other"),
        ("inductor", "compile_config"),
        ({"backend": "induktor"}, "there is no backend 'induktor': take one of .*inductor"),
        ({"mode": "fastest"}, "mode"),
        ({"options": {"no_such_option": 1}, "mode": None}, "no_such_option"),
    ],
)
def test_wrong_values_are_named_before_anything_runs(model: Any, value: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        generate(model, [[1, 2, 3]], max_new_tokens=2, compile_config=value)


def test_options_need_no_mode_beside_them() -> None:
    """In the reference options always clash with the default mode."""
    assert "mode" not in CompileConfig(options={"freezing": True}).arguments()
    assert CompileConfig().arguments()["mode"] == "reduce-overhead"
    assert "mode" not in CompileConfig(backend=print).arguments(), "no backend but inductor takes the usual mode"
    torch.compile(lambda x: x, **CompileConfig(options={"freezing": True}).arguments())


def test_a_configuration_of_transformers_is_taken(model: Any, counting: Any) -> None:
    theirs = transformers.CompileConfig(backend=lambda *graph: counting(*graph), mode="default")
    generate(model, [[1, 2, 3]], max_new_tokens=4, compile_config=theirs)
    assert counting.graphs == 1
