"""When the step is compiled, and what becomes of wishes that cannot act."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from decodekit import CompileConfig, ConfigError, GenerationConfig, PipelineError, generate, plan
from decodekit.registry import registry
from decodekit_plugins.compiling.adapter import CompiledAdapter, compiled_in
from decodekit_plugins.compiling.criteria import Compile

KEYS: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}


def compiled(model: Any, **keys: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return plan(model, [[1, 2, 3]], **{**KEYS, **keys})


def test_on_a_cpu_only_where_asked_for(model: Any) -> None:
    assert compiled_in(compiled(model).adapter) is None
    assert compiled_in(compiled(model, cache_implementation="static").adapter) is None
    assert compiled_in(compiled(model, disable_compile=True, cache_implementation="static").adapter) is None
    for keys in ({"compile_config": CompileConfig(backend="eager")}, {"prepare": "compiled"}):
        pipeline = compiled(model, **keys)
        assert isinstance(pipeline.adapter, CompiledAdapter)
        assert pipeline.cache_name == "static"
        assert pipeline.describe()["compiled step"]["backend"] in ("eager", "inductor")


def test_both_together_are_one(model: Any, counting: Any) -> None:
    pipeline = compiled(model, prepare="compiled", compile_config=CompileConfig(backend=counting))
    assert pipeline.adapter.config.backend is counting
    assert not isinstance(pipeline.adapter.inner, CompiledAdapter)


def test_the_hidden_switch(model: Any) -> None:
    """As in the reference, False keeps a CPU out, whoever asks; True takes it in, whoever says so."""
    config = CompileConfig(backend="eager")
    config._compile_all_devices = False
    pipeline = compiled(model, compile_config=config)
    assert compiled_in(pipeline.adapter) is None
    assert "only on accelerators" in pipeline.left_out["compile_config"]


def test_what_a_models_file_says_is_no_wish_of_the_call(model: Any) -> None:
    """Without an accelerator it has no effect, as in the reference, and nobody is bothered with it."""
    model.generation_defaults = {"compile_config": {"backend": "eager"}}
    assert compiled_in(compiled(model).adapter) is None
    assert compiled_in(compiled(model, cache_implementation="static").adapter) is None
    assert compiled_in(compiled(model, generation_config=GenerationConfig(compile_config={})).adapter) is not None


def test_on_an_accelerator_unasked_over_a_static_cache(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is only said to be one: the criteria look at nothing else of it."""
    from decodekit_plugins.models.native.adapter import NativeAdapter

    monkeypatch.setattr("decodekit_plugins.compiling.criteria.ACCELERATORS", ("cpu",))
    assert NativeAdapter(model).spec.device.type == "cpu"
    assert compiled_in(compiled(model).adapter) is None, "over a dynamic cache never unasked"
    made = compiled_in(compiled(model, cache_implementation="static").adapter)
    assert made is not None
    assert made.config == CompileConfig()
    assert compiled_in(compiled(model, cache_implementation="static", disable_compile=True).adapter) is None
    model.hf_device_map = {"a": "cuda:0", "b": "cpu"}
    assert compiled_in(compiled(model, cache_implementation="static").adapter) is None
    with pytest.raises(ConfigError, match="compile_config: cannot act: layers of the model are offloaded"):
        compiled(model, cache_implementation="static", compile_config=CompileConfig())
    del model.hf_device_map
    model.hf_quantizer = object()
    with pytest.raises(ConfigError, match="prepare: cannot act: the quantization"):
        compiled(model, prepare="compiled")


@pytest.mark.parametrize("name", ["dynamic", "hybrid", "offloaded", "offloaded_static", "quantized", "disk"])
def test_other_caches_are_refused_with_what_would_do(model: Any, name: str) -> None:
    words = r"needs cache:compile, which \w+ does not offer; these do: static \(set cache_implementation\)"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an offloaded cache saves nothing here
        with pytest.raises(ConfigError, match=f"compile_config: {words}"):
            plan(model, [[1]], compile_config=CompileConfig(), cache_implementation=name, **KEYS)
        with pytest.raises(ConfigError, match=f"prepare: {words}"):
            plan(model, [[1]], prepare="compiled", cache_implementation=name, **KEYS)


def test_no_cache_is_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="compile_config: needs a cache: leave use_cache=False out"):
        compiled(model, compile_config=CompileConfig(), use_cache=False)


def test_a_passed_cache_is_never_exchanged(model: Any) -> None:
    held = generate(model, [[1, 2]], return_dict_in_generate=True, **KEYS).cache
    with pytest.raises(ConfigError, match="compile_config: needs cache:compile, which DynamicCache does not offer"):
        plan(model, [[1] * 9], compile_config=CompileConfig(), cache=held, **KEYS)


def test_contradictions(model: Any) -> None:
    with pytest.raises(ConfigError, match="disable_compile: forbids what prepare='compiled' asks for"):
        compiled(model, prepare="compiled", disable_compile=True)
    with pytest.warns(UserWarning, match="compile_config: has no effect with disable_compile=True"):
        pipeline = plan(model, [[1]], compile_config=CompileConfig(), disable_compile=True, **KEYS)
    assert compiled_in(pipeline.adapter) is None


def test_a_model_that_gives_no_hand_in_its_call() -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(20, 20)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.embed(input_ids)

    with pytest.raises((PipelineError, ConfigError), match="leave"):
        compiled(Own(), prepare="compiled")
    with pytest.raises((PipelineError, ConfigError), match="leave use_cache=False out"):
        compiled(Own(), compile_config=CompileConfig())


def test_wrappers_of_others_stay_around(make: Callable[..., Any], counting: Any, register: Any) -> None:
    """A third party's preparer, whose adapter holds another, and compile_config act together."""

    class Noting:
        def __init__(self, inner: Any) -> None:
            self.inner, self.passes = inner, passes

        def __getattr__(self, name: str) -> Any:
            if name == "inner":
                raise AttributeError(name)
            return getattr(self.inner, name)

        def forward(self, *args: Any, **more: Any) -> Any:
            self.passes.append(1)
            return self.inner.forward(*args, **more)

    class Notes:
        def prepare(self, adapter: Any) -> Any:
            return Noting(adapter)

    passes: list[int] = []
    register("preparers", "notes", Notes)
    model = make()
    want = generate(model, [[1, 2, 3]], **KEYS)
    got = generate(model, [[1, 2, 3]], prepare="notes", compile_config=CompileConfig(backend=counting), **KEYS)
    assert torch.equal(got, want)
    assert len(passes) == KEYS["max_new_tokens"]
    assert counting.graphs == 1


def test_released(model: Any, counting: Any) -> None:
    """Graphs are dropped, and made again when they are wanted again."""
    preparer = registry.load("preparers", "compiled")()
    assert preparer.release(model) is False
    keys = {**KEYS, "compile_config": CompileConfig(backend=counting)}
    generate(model, [[1, 2, 3]], **keys)
    assert preparer.release(model) is True
    generate(model, [[1, 2, 3]], **keys)
    assert counting.graphs == 2


def test_the_owner_of_the_keys_is_plain_data() -> None:
    assert attrs.fields_dict(Compile).keys() == {"compile_config", "disable_compile"}
