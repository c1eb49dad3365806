"""Opens Llama-layout checkpoints (a folder or a Hub id) without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from decodekit.config import CONFIG_NAME, GenerationConfig
from decodekit.errors import InputError
from decodekit.registry import registry
from safetensors import SafetensorError
from safetensors.torch import load_file

from .adapter import NativeAdapter
from .module import SUPPORTED, NativeConfig, NativeLM

FILES = ("*.json", "*.safetensors", "*.jinja")
"""What is fetched from the Hub; nothing that would have to be unpickled."""


class Native:
    """The ``native`` models plugin."""

    def adapt(self, model: Any, /) -> NativeAdapter | None:
        """Wrap a `NativeLM`."""
        return NativeAdapter(model) if isinstance(model, NativeLM) else None

    def opens(self, ref: str, /) -> bool:
        """Whether `ref` is a folder with a config.json of a supported layout and safetensors weights."""
        folder = Path(ref)
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            return False
        try:
            NativeConfig.from_hf(_config(folder))
        except ValueError:
            return False
        return not (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file()

    def open(
        self,
        ref: str,
        /,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> NativeAdapter:
        """Load config.json, safetensors weights and, where there is one, tokenizer.json.

        dtype: of the weights in memory; unset: float32 on a CPU, the checkpoint's own elsewhere.
        Raises `InputError` for a missing, half-written or unsupported checkpoint.
        """
        folder = Path(ref)
        if not folder.is_dir():
            folder = Path(_fetch(ref, revision, token))
        config = NativeConfig.from_hf(_config(folder))
        place = torch.device(device or "cpu")
        weights = _weights(folder, place)
        wanted = _dtype(dtype, place, weights)
        model = build(config, weights, wanted, folder)
        defaults = _defaults(folder)
        tokenizer = None
        if (folder / "tokenizer.json").is_file():
            tokenizer = registry.load("tokenizers", "huggingface")().open(folder)
        return NativeAdapter(model, tokenizer, defaults)


def build(config: NativeConfig, weights: Mapping[str, torch.Tensor], dtype: torch.dtype, source: Path) -> NativeLM:
    """Make the module and fill it. Raises `InputError` that names missing, unexpected or misshapen weights."""
    with torch.device("meta"):
        model = NativeLM(config)
    known = model.state_dict()
    for name, tensor in weights.items():
        if name in known and tensor.shape != known[name].shape:
            raise InputError(
                f"{source}: weight {name} is {tuple(tensor.shape)}, but config.json asks for {tuple(known[name].shape)}"
            )
    kept = {n: t.to(dtype) for n, t in weights.items() if not n.endswith("rotary_emb.inv_freq")}
    missing, unexpected = model.load_state_dict(kept, strict=False, assign=True)
    if config.tie_word_embeddings:
        missing = [name for name in missing if name != "lm_head.weight"]
    if missing or unexpected:
        words = [
            f"lacks {', '.join(missing[:4])}" if missing else "",
            f"has unknown {', '.join(unexpected[:4])}" if unexpected else "",
        ]
        raise InputError(
            f"the weights in {source} do not fit its config.json: it {' and '.join(w for w in words if w)}"
        )
    return model.eval().requires_grad_(False)


def _config(folder: Path) -> dict[str, Any]:
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"there is no config.json in {folder}; native opens folders of {', '.join(SUPPORTED)}"
        ) from error
    except ValueError as error:
        raise InputError(f"{folder / 'config.json'} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise InputError(f"{folder / 'config.json'} must hold a JSON object")
    return data


def _weights(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        wanted = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        # The names come from a file that may come from the network: they must stay inside the folder.
        if any(Path(name).name != name for name in wanted):
            raise InputError(f"{index} names files outside its folder")
        lost = [name for name in wanted if not (folder / name).is_file()]
        if lost:
            raise InputError(f"{folder} lacks {', '.join(lost[:4])}, which its index names; download it again")
        files = [folder / name for name in wanted]
    if not files:
        raise InputError(
            f"there are no .safetensors files in {folder}; other formats are not read, since they may run code"
        )
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            weights.update(load_file(file, device=str(device)))
        except (SafetensorError, OSError) as error:
            raise InputError(f"{file} cannot be read ({error}); it may be half-written: download it again") from error
    return weights


def _dtype(wanted: str | torch.dtype | None, device: torch.device, weights: Mapping[str, torch.Tensor]) -> torch.dtype:
    if isinstance(wanted, torch.dtype):
        return wanted
    if wanted is None or wanted == "auto":
        return torch.float32 if device.type == "cpu" else next(iter(weights.values())).dtype
    found = getattr(torch, wanted, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InputError(f"dtype {wanted!r} is not a floating-point type of torch; use float32, bfloat16 or float16")
    return found


def _defaults(folder: Path) -> dict[str, Any]:
    """Generation defaults of a checkpoint: its own file, or the special tokens in config.json."""
    if (folder / CONFIG_NAME).is_file():
        config = GenerationConfig.from_pretrained(folder)
    else:
        config = GenerationConfig.from_model_config(_config(folder))
    return {**config.unknown_keys, **config.set_keys}


def _fetch(ref: str, revision: str | None, token: str | bool | None) -> str:
    from huggingface_hub import snapshot_download

    if ref.count("/") > 1 or ref.startswith((".", "/", "~")):
        raise InputError(f"there is no folder {ref}")
    found: str = snapshot_download(ref, revision=revision, token=token, allow_patterns=list(FILES))
    return found
