"""The preparer `compiled` keeps the laws of preparers; the graphs run as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit.testing import PreparerContract
from decodekit_plugins.compiling.adapter import CompiledAdapter
from decodekit_plugins.compiling.config import CompileConfig
from decodekit_plugins.compiling.prepare import Compiled


class Traced(Compiled):
    def _prepare(self, adapter: Any) -> Any:
        made: Any = super()._prepare(adapter)
        return made if made is adapter else CompiledAdapter(adapter, CompileConfig(backend="eager"))


class TestCompiled(PreparerContract):
    @pytest.fixture(autouse=True)
    def _models(self, make: Callable[..., torch.nn.Module]) -> None:
        self._new = make

    def make(self) -> Any:
        return Traced()

    def model(self) -> torch.nn.Module:
        return self._new()
