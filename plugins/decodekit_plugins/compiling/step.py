"""One compiled call for each model and configuration, kept as long as the model."""

from __future__ import annotations

import itertools
import json
import types
from collections.abc import Callable
from typing import Any

import torch
from decodekit.errors import ConfigError, GenerationError, Problem, warn

from decodekit_plugins.twins.table import Table

from .config import CompileConfig

_numbers = itertools.count()


def _call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


class Step:
    """A model's call as ``torch.compile`` made it. The model is an argument: nothing here keeps it alive.

    Raises `ConfigError` for a backend, mode or options that torch does not have.
    """

    def __init__(self, config: CompileConfig) -> None:
        self.error: BaseException | None = None
        """Why it cannot be compiled, once that is known."""
        self.told = False
        # A code object of its own: torch keeps graphs, and counts them against a limit, by code object, and by its name
        # remembers which sizes vary. What one model made must not reach another, and goes when this goes.
        code = _call.__code__.replace(co_name=f"decoding_step_{next(_numbers)}")
        own = types.FunctionType(code, _call.__globals__)
        try:
            self.run: Callable[..., Any] = torch.compile(own, **config.arguments())
        except Exception as error:  # each backend checks its options in its own way
            raise ConfigError([Problem("compile_config", _words(error, config))]) from error


_steps: Table[Step] = Table()


def _words(error: Exception, config: CompileConfig) -> str:
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    if type(error).__name__ != "InvalidBackend":
        return said
    return f"there is no backend {config.backend!r}: take one of {', '.join(torch.compiler.list_backends())}"


def step_of(model: Any, config: CompileConfig) -> Step:
    """The step of a model and configuration, made once."""
    key = json.dumps(config.to_dict(), sort_keys=True, default=lambda value: f"{value!r} {id(value)}")
    return _steps.get(model, key, lambda made: made or Step(config))


def forget(model: Any) -> bool:
    """Drop every graph of a model. Returns whether there was any."""
    return bool(_steps.pop(model))


class Caller:
    """Stands for the model in an adapter: runs the compiled step, and the model itself where that cannot be made.

    strict: raise `GenerationError` in that case; else one warning for each model and configuration.
    """

    def __init__(self, model: Any, config: CompileConfig, strict: bool = False) -> None:
        self.model, self.strict = model, strict
        self.step = step_of(model, config)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for these arguments."""
        step = self.step
        if step.error is None:
            from torch._dynamo.exc import TorchDynamoException

            try:
                return step.run(self.model, args, kwargs)
            except TorchDynamoException as error:
                step.error = error
        if self.strict:
            raise GenerationError(f"{_failed(step.error, self.model)}, or set strict=False to run without") from (
                step.error
            )
        if not step.told:
            step.told = True
            warn(f"{_failed(step.error, self.model)}; it runs as it is")
        return self.model(*args, **kwargs)


def _failed(error: BaseException | None, model: Any) -> str:
    """What went wrong and what mends it."""
    words = " ".join(line for line in map(str.strip, str(error).splitlines()[:3]) if line)
    causes, cause = {type(error).__name__}, error
    while cause is not None:
        causes.add(type(cause).__name__)
        cause = getattr(cause, "inner_exception", None) or cause.__cause__ or cause.__context__
    if causes & {"InvalidCxxCompiler", "CppCompileError"}:
        fix = "install a C++ compiler (g++), or name one by the environment variable CXX"
    elif "Unsupported" in causes:
        fix = "set fullgraph=False in compile_config"
    elif causes & {"TritonMissing", "GPUTooOldForTriton"}:
        fix = "install triton"
    else:
        fix = "set another backend in compile_config"
    return f"the decoding step of {type(model).__name__} cannot be compiled ({words}): {fix}, or disable_compile=True"
