"""A step that cannot be compiled: one warning and the model as it is; with `strict` an error that names what helps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from decodekit import CompileConfig, GenerationError, generate

KEYS: dict[str, Any] = {"max_new_tokens": 6, "pad_token_id": 0, "eos_token_id": None}


def broken(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no such instruction")


def test_one_warning_and_the_right_tokens(model: Any) -> None:
    want = generate(model, [[1, 2, 3]], **KEYS)
    config = CompileConfig(backend=broken)
    words = r"NativeLM cannot be compiled \(.*no such instruction.*\): set another"
    with pytest.warns(UserWarning, match=words) as told:
        assert torch.equal(generate(model, [[1, 2, 3]], compile_config=config, **KEYS), want)
    assert len([one for one in told if "cannot be compiled" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(generate(model, [[1, 2, 3]], compile_config=config, **KEYS), want)


def test_strict_refuses(model: Any) -> None:
    with pytest.raises(GenerationError, match="set another backend in compile_config.*or set strict=False"):
        generate(model, [[1, 2, 3]], compile_config=CompileConfig(backend=broken), strict=True, **KEYS)


def test_a_missing_compiler_is_named(model: Any) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def backend(graph: Any, inputs: Any) -> Any:
        raise InvalidCxxCompiler

    with pytest.raises(GenerationError, match=r"install a C\+\+ compiler \(g\+\+\)"):
        generate(model, [[1, 2, 3]], compile_config=CompileConfig(backend=backend), strict=True, **KEYS)


def test_graph_breaks_where_there_may_be_none(model: Any, counting: Any) -> None:
    handle = model.model.layers[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
    config = CompileConfig(backend=counting, fullgraph=True)
    with pytest.raises(GenerationError, match="set fullgraph=False in compile_config"):
        generate(model, [[1, 2, 3]], compile_config=config, strict=True, **KEYS)
    handle.remove()


def test_an_interruption_leaves_nothing_half_done(model: Any, counting: Any) -> None:
    """Ctrl-C while a graph is made: the next call makes it, and gives the right tokens."""
    state = {"interrupt": True}

    def backend(graph: Any, inputs: Any) -> Any:
        if state.pop("interrupt", False):
            raise KeyboardInterrupt
        return counting(graph, inputs)

    config = CompileConfig(backend=backend)
    with pytest.raises(KeyboardInterrupt):
        generate(model, [[1, 2, 3]], compile_config=config, **KEYS)
    got = generate(model, [[1, 2, 3]], compile_config=config, **KEYS)
    assert torch.equal(got, generate(model, [[1, 2, 3]], **KEYS))
    assert counting.graphs == 1
