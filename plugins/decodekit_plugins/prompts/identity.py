"""What tells one model from another, as far as the keys and values of a prompt depend on it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import attrs
from decodekit.protocols import ModelAdapter

SAMPLES = 256
"""Numbers of each weight that are looked at, spread over all of it."""
IDLE = frozenset(
    {
        "transformers_version", "torch_dtype", "dtype", "architectures", "name_or_path", "use_cache", "return_dict",
        "output_attentions", "output_hidden_states", "id2label", "label2id", "problem_type", "task_specific_params",
        "bos_token_id", "eos_token_id", "pad_token_id", "chunk_size_feed_forward",
    }
)  # fmt: skip
"""Entries of a model's configuration that change no key and no value."""


def identity(adapter: ModelAdapter) -> dict[str, str]:
    """Named facts of a model: its class, a digest of its configuration, and one of its weights.

    The weights' digest is of `SAMPLES` numbers of each, with names, shapes and dtypes: it tells training apart, and
    every quantization, but not the change of single numbers. A model without weights to look at has none.
    """
    model: Any = getattr(adapter, "model", adapter)
    found = {"model": f"{type(model).__module__}.{type(model).__qualname__}", "dtype": str(adapter.spec.dtype)}
    if (config := getattr(model, "config", None)) is not None:
        found["configuration"] = _digest(json.dumps(_plain(config), sort_keys=True, default=str).encode())
    if callable(getattr(model, "state_dict", None)):
        found["weights"] = _weights(model)
    return found


def _plain(config: Any) -> Any:
    if attrs.has(type(config)):
        return attrs.asdict(config)
    told = config.to_dict() if hasattr(config, "to_dict") else dict(getattr(config, "__dict__", {}))
    return {name: value for name, value in told.items() if name not in IDLE and not name.startswith("_")}


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def _weights(model: Any) -> str:
    import torch

    parts = []
    for name, weight in sorted(model.state_dict().items()):
        if not isinstance(weight, torch.Tensor):
            continue
        flat = weight.detach().reshape(-1)
        some = flat[:: max(flat.numel() // SAMPLES, 1)][:SAMPLES].to("cpu").contiguous()
        told = bytes(some.view(torch.uint8).tolist()) if some.numel() else b""
        parts.append(f"{name} {tuple(weight.shape)} {weight.dtype} ".encode() + told)
    return _digest(b"\n".join(parts))
