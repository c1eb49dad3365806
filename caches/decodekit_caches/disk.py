"""A key/value cache in files: for prompts whose keys and values are larger than memory.

The files are mapped into memory, so the system writes what has not been used for long to disk and reads it back when
attention comes to it. Every layer is read once for each new token: this is for what does not fit otherwise.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import tempfile
from typing import TYPE_CHECKING, ClassVar

import attrs
import torch
from decodekit import InputError, PipelineError, at_least, option
from torch import Tensor

from .buffers import Layer
from .dynamic import expected
from .layered import PROVIDES, LayeredCache

if TYPE_CHECKING:
    from decodekit import BindContext

PREFIX = "decodekit-cache-"


@attrs.frozen
class Disk:
    """Keep every token in files that are mapped into memory, for prompts larger than that."""

    provides: ClassVar[frozenset[str]] = PROVIDES
    folder: str | None = option(
        "Folder for the files; unset: the system's for temporary ones. One that lies in memory itself saves nothing.",
        default=None,
    )
    reserve: int | None = option(
        "Slots to make room for at once; unset: up to the run's greatest length, where it is known.",
        default=None,
        check=at_least(1),
    )

    def bind(self, ctx: BindContext, /) -> DiskCache:
        """Return an empty cache for one call. Raises ValueError where the folder is none."""
        if self.folder is not None and not os.path.isdir(self.folder):
            raise ValueError(f"folder {self.folder!r} does not exist; make it, or name another")
        return DiskCache(self.folder, expected(ctx) if self.reserve is None else self.reserve)


class DiskLayer(Layer):
    """Buffers in files, on the CPU whatever the model's device: elsewhere attention gets a copy of all of them."""

    __slots__ = ("folder",)

    def __init__(self, folder: str | None, reserve: int = 0) -> None:
        super().__init__(reserve)
        self.folder = folder

    def fresh(self) -> DiskLayer:
        """An empty layer in the same folder."""
        return DiskLayer(self.folder, self.reserve)

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write [B, H, Q, D] behind what is there and return all of it on the device of what was given."""
        keys, values = super().append(key, value)
        return keys.to(key.device), values.to(value.device)

    def _room(self, like: Tensor, capacity: int, rows: int) -> Tensor:
        shape = (rows, like.shape[1], capacity, like.shape[3])
        return mapped(shape, like.dtype, self.folder)


def mapped(shape: tuple[int, ...], dtype: torch.dtype, folder: str | None) -> Tensor:
    """A tensor whose memory is a file of its own, which is gone with it.

    Raises `InputError` for a folder that cannot be written to, `PipelineError` where there is no room.
    """
    count = 1
    for number in shape:
        count *= number
    size = count * dtype.itemsize
    try:
        descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    except OSError as error:
        raise InputError(f"no file can be made in {folder or tempfile.gettempdir()}: {error}; set folder") from error
    try:
        try:
            _take(descriptor, size)
        finally:
            os.close(descriptor)
        with torch.inference_mode(False):
            found = torch.from_file(name, shared=True, size=count, dtype=dtype).view(shape)
    except OSError as error:
        where = os.path.dirname(name)
        raise PipelineError(
            f"{where} has no room for {size / 2**20:.0f} MiB of keys and values: {error}; set another folder"
        ) from error
    finally:
        # A mapped file needs no name: without one, nothing is left over however the process ends.
        try:
            os.unlink(name)
        except OSError:  # a system that keeps names in use
            atexit.register(_remove, name)
    return found


def _take(descriptor: int, size: int) -> None:
    """Make the file as large as it gets now: a full disk must not show as a crash when the memory is written to."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except (AttributeError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.truncate(descriptor, size)  # a system, or a kind of disk, that cannot promise it


def _remove(name: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(name)


class DiskCache(LayeredCache):
    """Keys and values of all tokens, in files in `folder`. `reserve`: slots to make room for at once."""

    def __init__(self, folder: str | None = None, reserve: int | None = None) -> None:
        super().__init__()
        self._folder, self._reserve = folder, reserve or 0

    def make_layer(self, index: int) -> Layer:
        """An empty layer, without a file until something is written."""
        return DiskLayer(self._folder, self._reserve)
