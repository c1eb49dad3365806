"""Opens whatever transformers can load: folders, GGUF files, Hub ids."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from decodekit.errors import DecodekitError, InputError, MissingExtra
from decodekit.models import adapter_for

from decodekit_plugins.models.checkpoint import (
    device_of,
    dtype_of,
    no_weights,
    read_object,
    refuse_unknown,
    warn_of_strangers,
)

from .adapter import TransformersAdapter
from .pictures import adapter_of
from .seq2seq import EncoderDecoderAdapter

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
)  # fmt: skip


class Transformers:
    """The ``transformers`` models plugin."""

    provides = frozenset(
        f"model:{name}" for name in ("cache", "mask", "positions", "last", "hidden", "attentions", "early_logits")
    )
    """What adapters can offer; the model at hand may lack some of it."""
    fallback = True
    """Others that can open the same checkpoint go first."""

    def adapt(self, model: Any, /) -> TransformersAdapter | EncoderDecoderAdapter | None:
        """Wrap a model object. Raises `PipelineError` for kinds of model that cannot be generated with."""
        if not (hasattr(model, "config") and hasattr(model, "forward")):
            return None
        encodes = getattr(model.config, "is_encoder_decoder", False)
        return EncoderDecoderAdapter(model) if encodes else adapter_of(model)

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
        **unknown: Any,
    ) -> Any:
        """Load model and tokenizer by transformers' Auto classes.

        dtype: of the weights; unset: float32 on a CPU, the checkpoint's own elsewhere.
        trust_remote_code: run model code that comes with the checkpoint; off unless asked for. Weights are read from
        safetensors or GGUF files, never unpickled.
        Raises `MissingExtra` without transformers (for GGUF, also gguf and accelerate) installed, `InputError` when
        the checkpoint is broken or lacks weights, `PipelineError` for models that make no text.
        """
        refuse_unknown(unknown, self.open, "transformers")
        if find_spec("transformers") is None:
            raise MissingExtra("transformers", "transformers", f"opening {ref!r}")
        import transformers

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
        place = None if device is None else device_of(device)
        on_cpu = device_map is None and (place is None or place.type == "cpu")
        weights: dict[str, Any] = {"dtype": dtype_of(dtype) or ("float32" if on_cpu and dtype is None else "auto")}
        if gguf is None:
            weights["use_safetensors"] = True
        if attn_implementation is not None:
            weights["attn_implementation"] = attn_implementation
        if device_map is not None:
            weights["device_map"] = device_map
        try:
            auto = transformers.AutoModelForCausalLM
            if gguf is None:
                weights["config"] = config = transformers.AutoConfig.from_pretrained(source, **common)
                auto = _auto_class(transformers, config)
            # Mismatched weights are let through here, since only then they are named; they are refused below.
            loaded: Any = auto.from_pretrained(
                source, **common, **weights, output_loading_info=True, ignore_mismatched_sizes=True
            )
            model, report = loaded
        except _PASS:
            raise
        except Exception as error:  # files from anywhere break transformers, safetensors, torch, gguf in any way
            raise InputError(f"transformers cannot load {ref!r}: {_cause(error)}") from error
        _complete(report, ref)
        model = model.eval()
        if place is not None and device_map is None:
            model = model.to(place)
        adapter: Any = adapter_for(model)  # of the plugin that knows most of its class
        adapter.tokenizer = _tokenizer(source, common)
        if adapter.tokenizer is not None:
            warn_of_strangers(adapter.tokenizer, adapter, ref)
        return adapter


_PASS = (DecodekitError, ImportError, MemoryError, torch.OutOfMemoryError)
"""Errors that say nothing about the checkpoint."""


AUTO_CLASSES = (
    "AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForImageTextToText",
)  # fmt: skip
"""What text comes from; encoder-decoder models are looked for from the second on."""


def _auto_class(transformers: Any, config: Any) -> Any:
    """The auto class that knows this configuration; the first where none does, as with code of the checkpoint's."""
    names = AUTO_CLASSES[1:] if getattr(config, "is_encoder_decoder", False) else AUTO_CLASSES
    found = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    return next((auto for auto in found if type(config) in auto._model_mapping), found[0])


def _cause(error: Exception) -> str:
    """The error in words; with its type where the words alone would not do."""
    return str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"


def _complete(report: dict[str, Any], ref: str) -> None:
    """Refuse a model with weights that the checkpoint did not give: transformers has filled them with random numbers.

    Tied ones and those that their class can do without are not in the report.
    """
    wrong = [("lacks", sorted(report["missing_keys"]))]
    wrong.append(("has in another shape", sorted(name for name, *_ in report["mismatched_keys"])))
    words = [
        f"{verb} {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        for verb, names in wrong
        if names
    ]
    if words:
        raise InputError(
            f"{ref} {' and '.join(words)}, which its config.json asks for; download it again, or correct config.json"
        )


def _tokenizer(source: str, common: dict[str, Any]) -> Any:
    """The checkpoint's tokenizer, or None where it has none."""
    from transformers import AutoTokenizer

    folder = Path(source)
    if folder.is_dir() and "gguf_file" not in common and not any((folder / n).is_file() for n in TOKENIZER_FILES):
        return None
    if (folder / "tokenizer_config.json").is_file():
        read_object(folder / "tokenizer_config.json")  # transformers would not say which file is broken
    try:
        return AutoTokenizer.from_pretrained(source, **common)
    except _PASS:
        raise
    except Exception as error:
        if isinstance(error, OSError) and not folder.is_dir():
            return None  # there is none on the Hub
        raise InputError(f"the tokenizer in {source} cannot be loaded: {_cause(error)}; download it again") from error


def _describes(folder: Path) -> bool:
    """Whether the folder's config.json names a model."""
    try:
        data = read_object(folder / "config.json")
    except InputError:
        return False
    return any(key in data for key in ("model_type", "architectures", "auto_map"))


def _source(ref: str) -> tuple[str, str | None]:
    """What to load from, and the GGUF file in it, if that is what holds the weights."""
    path = Path(ref)
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError(f"{ref} is neither a folder nor a GGUF file")
        return str(path.parent), path.name
    if not path.is_dir():
        if HUB_ID.fullmatch(ref) is None:
            raise InputError(f"there is no folder {ref}; on the Hub, models are called owner/name")
        return ref, None
    if _describes(path):
        if not any(path.glob("*.safetensors")):
            raise no_weights(path)
        return ref, None
    files = sorted(file.name for file in path.glob("*.gguf"))
    if len(files) > 1:
        raise InputError(f"{ref} holds several GGUF files; name one: {', '.join(str(path / name) for name in files)}")
    if not files:
        if (path / "config.json").is_file():
            read_object(path / "config.json")  # says what is wrong with it
            raise InputError(f"{path / 'config.json'} names no model: it has neither model_type nor architectures")
        raise InputError(f"there is neither a config.json nor a GGUF file in {ref}")
    return ref, files[0]
