"""Reads the files of a checkpoint. They may come from the network: nothing in them is trusted or run."""

from __future__ import annotations

from pathlib import Path

import torch
from decodekit.errors import InputError
from safetensors import SafetensorError
from safetensors.torch import load_file

from decodekit_plugins.models.checkpoint import no_weights, read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_weights(folder: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """All weights in a folder by name. Raises `InputError` for files that are missing or half-written.

    On a CPU, weights whose type is not changed stay mapped: they cost no memory until they are read, but whoever
    overwrites the file in place under a running process ends it (SIGBUS). Replace files by renaming.
    """
    weights: dict[str, torch.Tensor] = {}
    for file in _files(folder):
        try:
            found = load_file(file, device=str(device))
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{file} cannot be read ({error}); it may be half-written: download it again") from error
        if twice := weights.keys() & found.keys():
            raise InputError(
                f"{file} holds {min(twice)}, which another file in its folder holds, too: keep one of them, as {SINGLE}"
            )
        weights.update(found)
    return weights


def _files(folder: Path) -> list[Path]:
    """The one file, or those that the index names, or whatever there is."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder, folder / INDEX)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise no_weights(folder)
    return files


def _shards(folder: Path, index: Path) -> list[Path]:
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise InputError(f"{index} must have a weight_map from weights to file names; download it again")
    names = sorted(set(places.values()))
    outside = [name for name in names if name in ("", ".", "..") or Path(name).name != name or "\\" in name]
    if outside:
        raise InputError(f"{index} names files outside its folder, such as {outside[0]!r}; do not use this checkpoint")
    if odd := [name for name in names if not name.endswith(".safetensors")]:
        raise InputError(f"{index} names {odd[0]}, which is no safetensors file; other formats are not read")
    lost = [name for name in names if not (folder / name).is_file()]
    if lost:
        raise InputError(f"{folder} lacks {', '.join(lost[:4])}, which its index names; download it again")
    return [folder / name for name in names]
