"""Opens whatever transformers can load: folders, GGUF files, Hub ids."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from decodekit.errors import InputError, MissingExtra, PipelineError

from .adapter import TransformersAdapter

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
)  # fmt: skip


class Transformers:
    """The ``transformers`` models plugin."""

    fallback = True
    """Others that can open the same checkpoint go first."""

    def adapt(self, model: Any, /) -> TransformersAdapter | None:
        """Wrap a decoder-only model object. Raises `PipelineError` for kinds of model that cannot be generated with."""
        return TransformersAdapter(model) if hasattr(model, "config") and hasattr(model, "forward") else None

    def opens(self, ref: str, /) -> bool:
        """Whether `ref` is a folder with a config.json of transformers, a GGUF file or its folder, or like a Hub id."""
        path = Path(ref)
        if not path.exists():
            return HUB_ID.fullmatch(ref) is not None
        if path.is_file():
            return path.suffix == ".gguf"
        return _describes(path) or len(list(path.glob("*.gguf"))) > 0

    def open(
        self,
        ref: str,
        /,
        *,
        dtype: Any = None,
        device: Any = None,
        revision: str | None = None,
        token: str | bool | None = None,
        trust_remote_code: bool = False,
        attn_implementation: str | None = None,
        device_map: Any = None,
        local_files_only: bool = False,
    ) -> TransformersAdapter:
        """Load model and tokenizer by transformers' Auto classes.

        dtype: of the weights; unset: float32 on a CPU, the checkpoint's own elsewhere.
        trust_remote_code: run model code that comes with the checkpoint; off unless asked for.
        Raises `MissingExtra` without transformers (for GGUF, also gguf and accelerate) installed, `InputError` when
        the checkpoint cannot be loaded, `PipelineError` for encoder-decoder models.
        """
        if find_spec("transformers") is None:
            raise MissingExtra("transformers", "transformers", f"opening {ref!r}")
        from transformers import AutoConfig, AutoModelForCausalLM

        source, gguf = _source(ref)
        common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": local_files_only}
        if revision is not None:
            common["revision"] = revision
        if token is not None:
            common["token"] = token
        if gguf is not None:
            for package in ("gguf", "accelerate"):
                if find_spec(package) is None:
                    raise MissingExtra(package, "transformers", f"reading {gguf}")
            common["gguf_file"] = gguf
        on_cpu = device_map is None and (device is None or str(device).startswith("cpu"))
        weights: dict[str, Any] = {"dtype": dtype if dtype is not None else "float32" if on_cpu else "auto"}
        if attn_implementation is not None:
            weights["attn_implementation"] = attn_implementation
        if device_map is not None:
            weights["device_map"] = device_map
        try:
            if gguf is None:
                config = AutoConfig.from_pretrained(source, **common)
                if getattr(config, "is_encoder_decoder", False):
                    raise PipelineError(
                        f"{ref} is an encoder-decoder model ({config.model_type}); decodekit 0.1 generates with "
                        f"decoder-only models, 0.2 will with these"
                    )
                weights["config"] = config
            model = AutoModelForCausalLM.from_pretrained(source, **common, **weights)
        except PipelineError:
            raise
        except (OSError, ValueError, KeyError) as error:
            raise InputError(f"transformers cannot load {ref!r}: {error}") from error
        model = model.eval()
        if device is not None and device_map is None:
            model = model.to(device)
        return TransformersAdapter(model, _tokenizer(source, common))


def _tokenizer(source: str, common: dict[str, Any]) -> Any:
    """The checkpoint's tokenizer, or None where it has none."""
    from transformers import AutoTokenizer

    folder = Path(source)
    if folder.is_dir() and "gguf_file" not in common and not any((folder / n).is_file() for n in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(source, **common)
    except OSError as error:
        if folder.is_dir():
            raise InputError(f"the tokenizer in {source} cannot be loaded: {error}") from error
        return None
    except ValueError as error:
        raise InputError(f"the tokenizer of {source} cannot be loaded: {error}") from error


def _describes(folder: Path) -> bool:
    """Whether the folder's config.json names a model."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(data, dict) and any(key in data for key in ("model_type", "architectures", "auto_map"))


def _source(ref: str) -> tuple[str, str | None]:
    """What to load from, and the GGUF file in it, if that is what holds the weights."""
    path = Path(ref)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(f"{ref} is neither a folder nor a GGUF file")
        return str(path.parent), path.name
    if not path.is_dir() or _describes(path):
        return ref, None
    files = sorted(file.name for file in path.glob("*.gguf"))
    if len(files) > 1:
        raise InputError(f"{ref} holds several GGUF files; name one: {', '.join(str(path / name) for name in files)}")
    if not files:
        raise InputError(f"there is neither a config.json nor a GGUF file in {ref}")
    return ref, files[0]
