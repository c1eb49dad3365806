"""The keys ``compile_config`` and ``disable_compile``: when the decoding step is compiled."""

from __future__ import annotations

from typing import Any

import attrs
from decodekit.errors import ConfigError, Problem
from decodekit.fields import option
from decodekit.hooks import hookimpl, hooks
from decodekit.options import Choices
from decodekit.pipeline import Pipeline, cache_offers
from decodekit.registry import registry
from decodekit.settings import CALLER, Settings

from .adapter import CompiledAdapter, compiled_in, inside
from .config import CompileConfig

ACCELERATORS = ("cuda", "xpu", "neuron", "tpu")
"""Devices on which a step over a static cache is compiled unasked."""
OWN_BACKENDS = ("neuron", "tpu")
"""Devices with a backend of their name."""


@attrs.frozen
class Compile:
    """Compile the decoding step: on accelerators over a static cache unless told not to, on a CPU where asked to."""

    compile_config: CompileConfig | None = option(
        "How torch.compile makes the decoding step, over a static cache; setting it also asks for that on a CPU.",
        default=None,
    )
    disable_compile: bool = option("Never compile unasked, and not for compile_config either.", default=False)

    @staticmethod
    @hookimpl
    def doubts(settings: Settings, samples: bool | None, strategy: str | None) -> list[Problem]:
        """A configuration of what is switched off has no effect."""
        said = settings.get("compile_config") is not None and settings.origin("compile_config") in CALLER
        words = "has no effect with disable_compile=True; take one of them out"
        return [Problem("compile_config", words)] if said and settings.get("disable_compile") else []

    @staticmethod
    @hookimpl(tryfirst=True)  # before anybody fills the cache, which may be changed here
    def pipeline_assembled(pipeline: Pipeline) -> None:
        """Wrap the adapter where the criteria are met. Raises `ConfigError` where a wish of the call cannot act."""
        _decide(pipeline)

    @staticmethod
    @hookimpl
    def report(pipeline: Pipeline) -> dict[str, Any] | None:
        """What is compiled, and how."""
        made = compiled_in(pipeline.adapter)
        if made is None:
            return None
        told = made.config.to_dict()
        told["backend"] = getattr(made.config.backend, "__name__", made.config.backend)
        return {"compiled step": {name: value for name, value in told.items() if value is not None}}


def usual(device: str) -> CompileConfig:
    """What stands where nobody configures it."""
    if device in OWN_BACKENDS:
        return CompileConfig(backend=device, dynamic=False, mode="default")
    return CompileConfig()


def _decide(pipeline: Pipeline) -> None:
    settings, prepared = pipeline.settings, compiled_in(pipeline.adapter)
    config: CompileConfig | None = settings.get("compile_config")
    off, device = bool(settings.get("disable_compile")), pipeline.context.spec.device.type
    anywhere = None if config is None else config._compile_all_devices
    asked = config is not None and settings.origin("compile_config") in CALLER and not off
    if prepared is not None:
        if off and settings.origin("disable_compile") in CALLER:
            words = "forbids what prepare='compiled' asks for; take one of them out"
            raise ConfigError([Problem("disable_compile", words)])
        _demand(pipeline, "prepare", switch=False)
    elif asked and (device in ACCELERATORS or anywhere is not False):
        _demand(pipeline, "compile_config", switch=True)
    else:
        able = device in ACCELERATORS or bool(anywhere)
        why = "disable_compile is set" if off else "" if able else f"unasked only on accelerators, not on {device}"
        why = why or ("" if "compile" in cache_offers(pipeline.cache) else "the cache offers no cache:compile")
        why = why or _hindrance(getattr(pipeline.adapter, "model", None))
        why = why or ("" if _callable(pipeline.adapter) else "the adapter does not say how its model is called")
        if why:
            if config is not None:
                pipeline.left_out["compile_config"] = why
            return
    model = getattr(pipeline.adapter, "model", None)
    if (asked or prepared is not None) and (why := _hindrance(model)):
        raise ConfigError([Problem("prepare" if prepared is not None else "compile_config", f"cannot act: {why}")])
    config = config or (prepared.config if prepared is not None else usual(device))
    if config.fullgraph and "flash" in str(getattr(getattr(model, "config", None), "_attn_implementation", "")):
        config = attrs.evolve(config, fullgraph=False)  # its kernels break graphs
    strict = settings.of(Choices).strict
    pipeline.adapter = inside(pipeline.adapter, lambda found: CompiledAdapter(_bare(found), config, strict))


def _bare(adapter: Any) -> Any:
    return adapter.inner if isinstance(adapter, CompiledAdapter) else adapter


def _callable(adapter: Any) -> bool:
    held = getattr(adapter, "__dict__", {})
    return "call" in held or ("inner" in held and _callable(adapter.inner))


def _demand(pipeline: Pipeline, key: str, switch: bool) -> None:
    """See to a cache that compiled code can use. Raises `ConfigError` where the call's own choice is none.

    switch: nobody chose this cache, so a static one may take its place.
    """
    if "compile" in cache_offers(pipeline.cache):
        return
    chosen = pipeline.cache_passed or pipeline.settings.get("cache_implementation") is not None
    if pipeline.cache is None:
        words = "needs a cache: leave use_cache=False out, and take a model that takes one"
    elif not chosen and switch and pipeline.cache_name != "model":
        ctx, adapter = pipeline.context, pipeline.adapter
        try:
            made = registry.load("caches", "static")().bind(ctx)
        except ValueError as error:
            raise ConfigError([Problem(key, f"needs a static cache, and {error}")]) from error
        adopt = getattr(adapter, "adopt", None)
        pipeline.cache = made if adopt is None else adopt(made, ctx)
        pipeline.cache_name = "static"
        return
    else:
        kind = type(pipeline.cache).__name__
        words = f"needs cache:compile, which {kind} does not offer; {hooks.call.would_do(capability='cache:compile')}"
    raise ConfigError([Problem(key, words)])


def _hindrance(model: Any) -> str:
    """What about a model keeps its step from being compiled; an empty string where nothing does."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is not None and not getattr(quantizer, "is_compileable", False):
        return "the quantization of the model cannot be compiled"
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if "disk" in places or ("cpu" in places and len(places) > 1):
        return "layers of the model are offloaded by its device map"
    return ""
