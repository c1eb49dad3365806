"""The file of a stored prompt: a safetensors file that is there whole or not at all.

Tensors: ``tokens`` int64 [B, T] and ``mask`` bool [B, T] of the prompt, and what the cache's `state` gave, under
``state.``. Its metadata hold, as JSON under `KEY`: the version of this format, the names that tell models and caches
apart, and a checksum of all tensors.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from decodekit import InputError
from torch import Tensor

KEY = "decodekit.prompt_cache"
VERSION = 1


def write(path: Path, facts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> None:
    """Write the file under another name, and move it into place once it is on the disk. Raises OSError.

    Of several writers the last one wins; nobody ever sees a part of a file.
    """
    from safetensors.torch import save_file

    plain = {name: tensor.detach().to("cpu").contiguous() for name, tensor in tensors.items()}
    told = {**facts, "version": VERSION, "checksum": _checksum(plain)}
    handle, draft = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    os.close(handle)
    try:
        save_file(plain, draft, metadata={KEY: json.dumps(told)})
        with open(draft, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


class Stored:
    """An open file: `facts` and the prompt are read, its keys and values when they are asked for."""

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self._file = path, file
        try:
            self.facts: dict[str, Any] = json.loads((file.metadata() or {})[KEY])
            self.version = self.facts.pop("version")
            self._sum = self.facts.pop("checksum")
        except (KeyError, ValueError, AttributeError):
            raise self.wrong("is no stored prompt; name another file") from None
        if self.version != VERSION:
            words = f"has version {self.version} of this format, and this is version {VERSION}"
            raise self.wrong(f"{words}; delete it, and it will be made anew")
        self.tokens: Tensor = file.get_tensor("tokens")
        self.mask: Tensor = file.get_tensor("mask")

    def wrong(self, words: str) -> InputError:
        """The error that names this file."""
        return InputError(f"prompt_cache: {self.path} {words}")

    def state(self) -> dict[str, Tensor]:
        """The state of the cache. Raises `InputError` where its numbers are not those that were written."""
        tensors = {name: self._file.get_tensor(name) for name in self._file.keys()}  # noqa: SIM118 - no dict
        if _checksum(tensors) != self._sum:
            raise self.wrong("is damaged: its checksum is another; delete it, and it will be made anew")
        return {name.removeprefix("state."): part for name, part in tensors.items() if name.startswith("state.")}


@contextlib.contextmanager
def read(path: Path) -> Iterator[Stored]:
    """Open a stored prompt. Raises `InputError` for half a file, and for any other."""
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(path, "pt")
    except SafetensorError as error:
        words = f"is damaged, or was not written to its end ({error}); delete it, and it will be made anew"
        raise InputError(f"prompt_cache: {path} {words}") from error
    with opened as file:
        yield Stored(path, file)


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 of names and bytes."""
    found = 0
    for name in sorted(tensors):
        part = tensors[name]
        found = zlib.crc32(f"{name} {part.dtype} {tuple(part.shape)}".encode(), found)
        if part.nbytes:
            found = zlib.crc32((ctypes.c_char * part.nbytes).from_address(part.data_ptr()), found)
    return found
