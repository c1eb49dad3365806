"""Keeps the processes that share a sharded model in step: each runs the model as often as the others.

With FSDP and ZeRO stage 3 every forward pass gathers weights from all processes, so a process whose texts have ended
must go on running the model until the last one is done, or all wait for ever.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from decodekit.hooks import hookimpl
from decodekit.pipeline import Pipeline, cache_offers
from decodekit.protocols import Forward, ModelAdapter


class Synced:
    """The preparer behind ``synced_gpus=True``. Every process of the default group must generate, each its own."""

    def prepare(self, adapter: ModelAdapter, /) -> ModelAdapter:
        """The same model, whose passes all processes begin together."""
        return SyncedAdapter(adapter)


class Sharded:
    """The preparer where `synced_gpus` is not set: acts where the model is sharded by FSDP or ZeRO stage 3."""

    def prepare(self, adapter: ModelAdapter, /) -> ModelAdapter:
        """The adapter itself where each process has all weights."""
        return SyncedAdapter(adapter) if _is_sharded(getattr(adapter, "model", None)) else adapter


class SyncedAdapter:
    """An adapter that asks all processes before each pass. Everything else is the inner adapter's."""

    def __init__(self, inner: ModelAdapter) -> None:
        self.inner = inner
        self._last: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not there yet while a copy is made
            raise AttributeError(name)
        return getattr(self.inner, name)

    def forward(self, *args: Any, **kwargs: Any) -> Forward:
        """As the inner adapter's, once every process is ready for a pass."""
        self._meet(True)
        self._last = args, kwargs
        return self.inner.forward(*args, **kwargs)

    @torch.no_grad()
    def drain(self) -> None:
        """Run the model along with the others until nobody needs a pass any more. What comes out is thrown away."""
        while self._meet(False):
            if self._last is None:
                raise RuntimeError("synced_gpus: this process ended before its first pass, the others go on without it")
            (tokens, positions, cache), keys = self._last[0], self._last[1]
            before = None if cache is None else int(cache.get_seq_length())
            self.inner.forward(tokens, positions, cache, **keys)
            if before is not None and "crop" in cache_offers(cache):
                cache.crop(before)

    def _meet(self, going: bool) -> bool:
        """Whether any process wants to run the model now."""
        wanted = torch.tensor([int(going)], device=self.inner.spec.device)
        dist.all_reduce(wanted)
        return bool(wanted.item())


@hookimpl
def run_wrapped(pipeline: Pipeline) -> contextlib.AbstractContextManager[Any] | None:
    """However the run ends, the others are not left waiting."""
    return _drained(pipeline.adapter) if isinstance(pipeline.adapter, SyncedAdapter) else None


@contextlib.contextmanager
def _drained(adapter: SyncedAdapter) -> Iterator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise  # the process goes away, and the group with it
    except BaseException:
        adapter.drain()
        raise
    adapter.drain()


def _is_sharded(model: Any) -> bool:
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = tuple(getattr(fsdp, name) for name in ("FullyShardedDataParallel", "FSDPModule") if hasattr(fsdp, name))
    if kinds and any(isinstance(module, kinds) for module in modules):
        return True
    return any(hasattr(parameter, "ds_id") for module in modules for parameter in module.parameters(recurse=False))
