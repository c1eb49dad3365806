"""A function that calls decodekit may be compiled: the loop runs outside of its graphs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from decodekit import generate, load, plan, stream
from decodekit.testing import TinyLM
from torch import Tensor

KEYS: dict[str, Any] = {"max_new_tokens": 4, "do_sample": True, "seed": 3}


@pytest.fixture
def compiled() -> Any:
    yield lambda call: torch.compile(call, backend="eager")
    torch.compiler.reset()


def test_generate_stream_and_plan(compiled: Any) -> None:
    model = TinyLM()

    def whole(x: Tensor) -> tuple[Tensor, Any]:
        return x + 1, generate(model, [[1, 2, 3]], **KEYS)

    def steps(x: Tensor) -> tuple[Tensor, Any]:
        return x + 1, torch.stack([step.tokens for step in stream(model, [[1, 2, 3]], **KEYS)], 1)

    def planned(x: Tensor) -> tuple[Tensor, Any]:
        return x + 1, plan(model, [[1, 2, 3]], **KEYS).prompt.tokens

    for call in (whole, steps, planned):
        want, made = call(torch.ones(2)), compiled(call)
        for _ in range(2):
            got = made(torch.ones(2))
            assert torch.equal(got[0], want[0])
            assert torch.equal(got[1], want[1])


def test_text(compiled: Any) -> None:
    lm = load("bundled")

    def both(x: Tensor) -> tuple[Tensor, str, str]:
        return x + 1, lm.generate("She was", **KEYS), "".join(lm.stream("She was", **KEYS))

    assert compiled(both)(torch.ones(2))[1:] == both(torch.ones(2))[1:]


def test_a_compiled_model_inside(compiled: Any) -> None:
    model = TinyLM()
    fast = compiled(TinyLM())
    out = compiled(lambda x: (x + 1, generate(fast, [[1, 2, 3]], **KEYS)))(torch.ones(2))[1]
    assert torch.equal(out, generate(model, [[1, 2, 3]], **KEYS))


def test_the_compiler_is_not_imported_for_those_who_compile_nothing() -> None:
    code = """
import sys, decodekit
assert "torch" not in sys.modules
from decodekit.testing import TinyLM
decodekit.generate(TinyLM(), [[1]], max_new_tokens=2)
next(decodekit.stream(TinyLM(), [[1]], max_new_tokens=2))
assert "torch._dynamo" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
