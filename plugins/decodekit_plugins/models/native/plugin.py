"""Opens Llama-layout checkpoints (a folder or a Hub id) without transformers."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from decodekit.config import CONFIG_NAME, GenerationConfig
from decodekit.errors import InputError
from decodekit.registry import registry

from decodekit_plugins.models.checkpoint import (
    PICKLES,
    device_of,
    dtype_of,
    read_object,
    refuse_unknown,
    warn_of_strangers,
)

from .adapter import OFFERS, NativeAdapter
from .config import SUPPORTED, NativeConfig, Unsupported
from .files import read_weights
from .fused import Fused
from .module import NativeLM

FILES = ("*.json", "*.safetensors", "*.jinja")
"""What is fetched from the Hub; nothing that would have to be unpickled."""
NOT_FILES = ("*/*", "consolidated*")
"""What is left there: other forms of the same weights."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Native:
    """The ``native`` models plugin."""

    provides = frozenset(f"model:{name}" for name in OFFERS)
    """What adapters can offer."""

    def adapt(self, model: Any, /) -> NativeAdapter | None:
        """Wrap a `NativeLM`."""
        return NativeAdapter(model) if isinstance(model, NativeLM) else None

    def opens(self, ref: str, /) -> bool:
        """Whether `ref` is a folder with a config.json of a supported layout and weights.

        Broken files count, and weights that would have to be unpickled: `open` says what is wrong with them. A Hub
        id is left to transformers where that is installed: what is behind it is known only when it is fetched.
        """
        folder = Path(ref)
        if not folder.is_dir():
            return not folder.exists() and HUB_ID.fullmatch(ref) is not None and find_spec("transformers") is None
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            return self._pickled(folder)
        try:
            _shape(folder)
        except Unsupported:
            return False
        except InputError:
            return True
        return not (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file()

    def _pickled(self, folder: Path) -> bool:
        if not any(file for pattern in PICKLES for file in folder.glob(pattern)):
            return False
        try:
            return read_object(folder / "config.json").get("model_type") in SUPPORTED
        except InputError:
            return False

    def open(
        self,
        ref: str,
        /,
        *,
        dtype: str | torch.dtype | None = None,
        device: str | torch.device | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        **unknown: Any,
    ) -> NativeAdapter:
        """Load config.json, safetensors weights and, where there is one, tokenizer.json.

        dtype: of the weights in memory; unset: float32 on a CPU, the checkpoint's own elsewhere.
        Module and adapter know the checkpoint's tokenizer and generation defaults. Float32 weights on a CPU stay
        mapped to their file, but for those that are fused: write no other weights into it while they are in use, rename
        new files into place.
        Raises `InputError` for a missing, half-written or unsupported checkpoint, and for options it does not have.
        """
        refuse_unknown(unknown, self.open, "native")
        place, wanted = device_of(device), dtype_of(dtype)
        folder = Path(ref)
        if not folder.is_dir():
            folder = Path(_fetch(ref, revision, token))
        try:
            config = _shape(folder)
        except Unsupported as error:
            raise InputError(f"{folder / 'config.json'}: {error}") from error
        defaults = _defaults(folder)
        tokenizer = _tokenizer(folder)
        weights = read_weights(folder, place)
        if wanted is None:
            embedding = weights.get("model.embed_tokens.weight")
            wanted = torch.float32 if place.type == "cpu" or embedding is None else embedding.dtype
        model = build(config, weights, wanted, folder)
        model.tokenizer, model.generation_defaults = tokenizer, defaults
        adapter = NativeAdapter(model)
        if tokenizer is not None:
            warn_of_strangers(tokenizer, adapter, ref)
        return adapter


def build(config: NativeConfig, weights: dict[str, torch.Tensor], dtype: torch.dtype, source: Path) -> NativeLM:
    """Make the module and fill it with `weights`, some of which are taken out of the mapping.

    Raises `InputError` that names missing, unexpected or misshapen weights.
    """
    fix = "download the checkpoint again"
    last = f"model.layers.{config.num_hidden_layers - 1}.input_layernorm.weight"
    # Before the module is made: config.json may say that there are a million layers.
    if last not in weights:
        raise InputError(
            f"the weights in {source} lack {last}, "
            f"but its config.json asks for {config.num_hidden_layers} layers; {fix}"
        )
    with torch.device("meta"):
        model = NativeLM(config)
    known = model.state_dict()
    for name, tensor in weights.items():
        if name in known and tensor.shape != known[name].shape:
            raise InputError(
                f"{source}: weight {name} is {tuple(tensor.shape)}, "
                f"but its config.json asks for {tuple(known[name].shape)}; {fix}"
            )
        if name in known and not tensor.is_floating_point():
            raise InputError(f"{source}: weight {name} is {tensor.dtype}; quantized weights are not read here")
    for prefix, module in model.named_modules():
        if isinstance(module, Fused):  # layer by layer: what was read is let go as soon as it is converted
            module.join(weights, f"{prefix}.", dtype)
    kept = {n: t.to(dtype) for n, t in weights.items() if not n.endswith("rotary_emb.inv_freq")}
    missing, unexpected = model.load_state_dict(kept, strict=False, assign=True)
    if config.tie_word_embeddings:
        missing = [name for name in missing if name != "lm_head.weight"]
    words = [f"lack {_few(missing)}"] if missing else []
    words += [f"have unknown {_few(unexpected)}"] if unexpected else []
    if words:
        # No such advice for missing ones: transformers would fill them with random numbers.
        fix += ", or open it with adapter='transformers', which leaves them out" if not missing else ""
        raise InputError(f"the weights in {source} do not fit its config.json: they {' and '.join(words)}; {fix}")
    return model.eval().requires_grad_(False)


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _shape(folder: Path) -> NativeConfig:
    """Read config.json. Raises `Unsupported` for another kind of model, `InputError` for a broken file."""
    file = folder / "config.json"
    if not file.is_file():
        raise InputError(f"there is no config.json in {folder}; native opens folders of {', '.join(SUPPORTED)}")
    data = read_object(file)
    try:
        return NativeConfig.from_hf(data)
    except Unsupported:
        raise
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{file}: {error}; correct it, or download it again") from error


def _defaults(folder: Path) -> dict[str, Any]:
    """Generation defaults of a checkpoint: its own file, or the special tokens in config.json."""
    if not (folder / CONFIG_NAME).is_file():
        config = GenerationConfig.from_model_config(read_object(folder / "config.json"))
    else:
        try:
            config = GenerationConfig.from_pretrained(folder)
        except InputError as error:
            raise InputError(f"{error}; repair or delete the file: config.json then says where texts end") from error
    return {**config.unknown_keys, **config.set_keys}


def _tokenizer(folder: Path) -> Any:
    if not (folder / "tokenizer.json").is_file():
        return None
    return registry.load("tokenizers", "huggingface")().open(folder)


def _fetch(ref: str, revision: str | None, token: str | bool | None) -> str:
    from huggingface_hub import snapshot_download

    if Path(ref).exists():
        raise InputError(f"{ref} is a file: give the folder of a checkpoint")
    if HUB_ID.fullmatch(ref) is None:
        raise InputError(f"there is no folder {ref}; on the Hub, models are called owner/name")
    wanted: dict[str, Any] = {"allow_patterns": list(FILES), "ignore_patterns": list(NOT_FILES)}
    try:
        found: str = snapshot_download(ref, revision=revision, token=token, **wanted)
    except Exception as error:  # the Hub's errors share no base class
        raise InputError(f"{ref} is no folder here, and cannot be fetched from the Hub: {error}") from error
    return found
