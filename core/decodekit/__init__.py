"""decodekit: text from any autoregressive PyTorch model, by a pipeline of plugins.

Importing this imports neither torch nor any plugin; the names below arrive on first use. Their types are in the stub
beside this file.
"""

from __future__ import annotations

from importlib import import_module, util
from typing import Any

__version__ = "0.1.0"

_NAMES = {
    "api": "generate plan stream",
    "config": "GenerationConfig GenerationMode",
    "context": "BindContext",
    "errors": "Cancelled ConfigError DecodekitError GenerationError InputError MissingExtra PipelineError PluginBroken "
    "PluginClash PluginError PluginNotFound",
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
    if name in _WHERE:
        return getattr(import_module(f".{_WHERE[name]}", __name__), name)
    # Plugins of kind ``frontends`` stand here as names, so that every way in needs one import. No one is looked for
    # where a module is imported that nobody has imported before.
    registry = import_module(".registry", __name__).registry
    if name[0] == "_" or util.find_spec(f"{__name__}.{name}") or name not in registry.names("frontends"):
        raise AttributeError(f"module 'decodekit' has no attribute {name!r}")
    return registry.load("frontends", name)


def __dir__() -> list[str]:
    return sorted({*__all__, *import_module(".registry", __name__).registry.names("frontends")})
