"""What every opener of checkpoints checks. The files may come from the network: nothing in them is trusted or run."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from decodekit.errors import InputError

PICKLES = ("pytorch_model*.bin", "*.pth", "*.pt")


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`, with or without a byte order mark. Raises `InputError` where there is none."""
    try:
        data = json.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file} is not valid JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise InputError(f"{file} must hold a JSON object, not {type(data).__name__}; download it again")
    return data


def no_weights(folder: Path) -> InputError:
    """What to say of a folder without safetensors files."""
    pickled = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    return InputError(
        f"there are no .safetensors files in {folder}"
        + (f"; {pickled[0]} is a pickle, which may run code when it is opened, so it is not" if pickled else "")
        + "; save the model once more as safetensors (save_pretrained of transformers does)"
    )


def device_of(wanted: Any) -> torch.device:
    """The device asked for, tried out; the CPU where none is. Raises `InputError` for one that cannot be used."""
    try:
        place = torch.device("cpu" if wanted is None else wanted)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError, TypeError, ImportError, AttributeError) as error:
        # Backends that this build of torch lacks fail each in their own way.
        words = str(error).splitlines()[0]
        raise InputError(f"device {str(wanted)!r} cannot be used here ({words}); leave it out for the CPU") from error
    return place


def dtype_of(wanted: Any) -> torch.dtype | None:
    """The number type asked for; None: it depends on device and checkpoint. Raises `InputError` for what is none."""
    if wanted is None or (isinstance(wanted, str) and wanted == "auto"):
        return None
    found = getattr(torch, wanted, None) if isinstance(wanted, str) else wanted
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InputError(f"dtype {wanted!r} is not a floating-point type of torch; use float32, bfloat16 or float16")
    return found


def refuse_unknown(options: Mapping[str, Any], opener: Callable[..., Any], who: str) -> None:
    """Raise `InputError` naming the options of `opener` where there are any in `options`."""
    if options:
        found = inspect.signature(opener).parameters.values()
        known = [parameter.name for parameter in found if parameter.kind is parameter.KEYWORD_ONLY]
        raise InputError(f"{who} has no option {', '.join(options)}; there are: {', '.join(known)}")


def warn_of_strangers(tokenizer: Any, adapter: Any, ref: str) -> None:
    """Warn where the tokenizer has tokens that the model has no embedding for. Fewer are fine: tables are padded."""
    wrapped = getattr(tokenizer, "wrapped", tokenizer)
    count = wrapped.get_vocab_size() if hasattr(wrapped, "get_vocab_size") else len(wrapped)
    room = adapter.spec.num_embeddings or adapter.spec.vocab_size
    if count > room:
        warnings.warn(
            f"the tokenizer of {ref} has {count} tokens, its model embeddings for {room}: they may not belong "
            f"together, and a prompt with a token from {room} on is refused",
            stacklevel=4,
        )
