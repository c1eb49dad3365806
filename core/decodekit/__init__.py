"""decodekit: text from any autoregressive PyTorch model, by a pipeline of plugins.

Importing this imports neither torch nor any plugin; the names below arrive on first use. Their types are in the stub
beside this file.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "api": "generate plan stream",
    "config": "GenerationConfig GenerationMode",
    "context": "BindContext",
    "errors": "Cancelled ConfigError DecodekitError GenerationError InputError MissingExtra PipelineError PluginBroken "
    "PluginClash PluginError PluginNotFound",
    # Plugins of this kind stand here as names, so that every way in needs one import.
    "frontends": "ContinuousBatchingConfig GenerationMixin LM SynthIDTextWatermarkingConfig WatermarkingConfig "
    "as_custom_generate attach compute_transition_scores load",
    "fields": "at_least between greater_than one_of option",
    "hooks": "hookimpl",
    "outputs": "GenerateBeamDecoderOnlyOutput GenerateBeamEncoderDecoderOutput GenerateDecoderOnlyOutput "
    "GenerateEncoderDecoderOutput",
    "run": "Run Step",
    "shortlist": "Shortlist",
    "traits": "Phase Traits",
}
_WHERE = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *_WHERE]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'decodekit' has no attribute {name!r}")
    if _WHERE[name] == "frontends":
        return import_module(".registry", __name__).registry.load("frontends", name)
    return getattr(import_module(f".{_WHERE[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
