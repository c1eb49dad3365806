"""decodekit: text from any autoregressive PyTorch model, by a pipeline of plugins.

Importing this imports neither torch nor any plugin; the names below arrive on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import generate, plan, stream
    from .config import GenerationConfig, GenerationMode
    from .context import BindContext
    from .errors import (
        Cancelled,
        ConfigError,
        DecodekitError,
        GenerationError,
        InputError,
        MissingExtra,
        PipelineError,
        PluginBroken,
        PluginClash,
        PluginError,
        PluginNotFound,
    )
    from .fields import at_least, between, greater_than, one_of, option
    from .hooks import hookimpl
    from .lm import LM, load
    from .mixin import GenerationMixin
    from .outputs import GenerateDecoderOnlyOutput
    from .run import Run, Step
    from .shortlist import Shortlist
    from .traits import Phase, Traits

__all__ = [
    "LM", "BindContext", "Cancelled", "ConfigError", "DecodekitError", "GenerateDecoderOnlyOutput", "GenerationConfig",
    "GenerationError", "GenerationMixin", "GenerationMode", "InputError", "MissingExtra", "Phase", "PipelineError",
    "PluginBroken", "PluginClash", "PluginError", "PluginNotFound", "Run", "Shortlist", "Step", "Traits", "__version__",
    "at_least", "between", "generate", "greater_than", "hookimpl", "load", "one_of", "option", "plan", "stream",
]  # fmt: skip

_NAMES = {
    "api": "generate plan stream", "config": "GenerationConfig GenerationMode", "context": "BindContext",
    "fields": "at_least between greater_than one_of option", "hooks": "hookimpl", "lm": "LM load",
    "mixin": "GenerationMixin", "outputs": "GenerateDecoderOnlyOutput", "run": "Run Step", "shortlist": "Shortlist",
    "traits": "Phase Traits",
}  # fmt: skip
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'decodekit' has no attribute {name!r}")
    return getattr(import_module(f".{_WHERE.get(name, 'errors')}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
