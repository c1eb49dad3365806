"""The builder ``c``: C sources to a library of this machine's own instructions, compiled once and kept."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from decodekit.errors import PipelineError

HEADERS = Path(__file__).with_name("c")
"""Folder of ``vectors.h``, which every source may include."""
FLAGS = (
    "-O3",
    "-std=gnu11",
    "-fPIC",
    "-shared",
    "-fopenmp",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
)
NATIVE = (("-march=native",), ("-mcpu=native",))
"""Flags for this very processor, in the words of different machines: the first that the compiler takes, or none."""
PATIENCE = 120
"""Seconds for a compiler to finish."""
_lock = threading.Lock()


class Unbuilt(PipelineError):
    """There is no compiler, or it failed; the message says what would help."""


def build(*sources: str | Path) -> ctypes.CDLL:
    """Compile C sources into one library, or find it where an earlier process left it, and load it.

    Parallel regions run on torch's own threads: pass `torch.get_num_threads()` to ``num_threads``. Libraries are kept
    in ``$XDG_CACHE_HOME/decodekit`` (``~/.cache/decodekit``), by sources, compiler, processor and torch, or for this
    process only where that folder is somebody else's. Raises `Unbuilt`.
    """
    files = [Path(source) for source in sources]
    runtime, compiler = _runtime(), _compiler()
    try:
        with _lock:
            return _loaded(files, compiler, runtime)
    except OSError as error:
        raise Unbuilt(f"kernels in C cannot be compiled or kept here: {error}") from error


def _loaded(files: Sequence[Path], compiler: Sequence[str], runtime: str) -> ctypes.CDLL:
    stem = f"{files[0].stem}-{_fingerprint(files, compiler, runtime)}"
    folder = _folder()
    found = _whole(folder, stem)
    if found is None:
        made = _compile(compiler, files, runtime)
        try:
            found = _keep(made, folder, stem)
        except OSError:  # no room, perhaps
            found = _keep(made, _own_folder(), stem)
    try:
        return ctypes.CDLL(str(found))
    except OSError:  # nothing runs from that folder, perhaps
        other = _keep(found.read_bytes(), _own_folder(), stem)
    try:
        return ctypes.CDLL(str(other))
    except OSError as error:
        raise Unbuilt(f"kernels in C cannot be loaded from {found.parent} or {other.parent}: {error}") from error


def _keep(made: bytes, folder: Path, stem: str) -> Path:
    """Write a library in one step: a process that is killed, or another one at the same, leaves no half file."""
    target = folder / f"{stem}-{_digest(made)}.so"
    handle, name = tempfile.mkstemp(prefix=f".{stem}", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(made)
        os.chmod(name, 0o700)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
    return target


def _whole(folder: Path, stem: str) -> Path | None:
    """The library that was kept, if it is all there: reading what is cut off would end the process."""
    for file in sorted(folder.glob(f"{stem}-*.so")):
        if file.stem.rpartition("-")[2] == _digest(file.read_bytes()):
            return file
        file.unlink(missing_ok=True)
    return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _runtime() -> str:
    """The OpenMP library that torch runs on: a second one would make threads that get in the way of torch's."""
    if not sys.platform.startswith("linux"):
        raise Unbuilt(f"kernels in C are built on Linux only so far, not on {sys.platform}")
    if torch.backends.openmp.is_available():
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            for line in file:
                place = line.rstrip("\n").partition("/")[2]
                if place.rpartition("/")[2].startswith(("libgomp", "libiomp5")):
                    return f"/{place}"
    raise Unbuilt("this build of torch does not run on GNU's or Intel's OpenMP, which kernels in C share with it")


def _compiler() -> list[str]:
    """$CC, or gcc, or cc."""
    try:
        named = shlex.split(os.environ.get("CC", ""))
    except ValueError as error:
        raise Unbuilt(f"the variable CC cannot be read ({error}): correct or unset it") from error
    found = named or next(([name] for name in ("gcc", "cc") if shutil.which(name)), None)
    if found is None or shutil.which(found[0]) is None:
        what = f"the compiler {named[0]!r} of the variable CC" if named else "a C compiler"
        raise Unbuilt(f"{what} was not found: install gcc")
    return found


def _fingerprint(files: Sequence[Path], compiler: Sequence[str], runtime: str) -> str:
    """What must be the same for a library to be used again."""
    digest = hashlib.sha256()
    for file in [*files, *sorted({*HEADERS.glob("*.h"), *(h for f in files for h in f.parent.glob("*.h"))})]:
        digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    words = [*FLAGS, *compiler, _run([*compiler, "--version"]).stdout, runtime, torch.__version__, _processor()]
    digest.update("\0".join(words).encode())
    return digest.hexdigest()[:20]


def _processor() -> str:
    """Model and instructions of this processor: home folders are shared by machines that differ."""
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        lines = file.read().partition("\n\n")[0].splitlines()
    told = ("model", "cpu family", "stepping", "flags", "Features", "CPU implementer", "CPU part", "CPU variant", "isa")
    return "\n".join([platform.machine(), *(line for line in lines if line.startswith(told))])


def _folder() -> Path:
    """Where libraries are kept: a folder that nobody else can put one into."""
    base = os.environ.get("XDG_CACHE_HOME") or ""
    try:
        folder = Path(base if os.path.isabs(base) else Path.home() / ".cache") / "decodekit" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.stat()
        if (
            facts.st_uid == os.getuid()
            and not facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            and os.access(folder, os.W_OK)
        ):
            return folder
    except (OSError, RuntimeError):
        pass
    return _own_folder()


_owned: list[tempfile.TemporaryDirectory[str]] = []


def _own_folder() -> Path:
    if not _owned:
        _owned.append(tempfile.TemporaryDirectory(prefix="decodekit-"))
    return Path(_owned[0].name)


def _compile(compiler: Sequence[str], files: Sequence[Path], runtime: str) -> bytes:
    """The library."""
    with tempfile.TemporaryDirectory(prefix="decodekit-") as folder:
        tried = ([*compiler, *flags, "-E", "-x", "c", os.devnull] for flags in NATIVE)
        native = next((flags for flags, words in zip(NATIVE, tried, strict=True) if not _run(words).returncode), ())
        objects = [f"{folder}/{number}.o" for number in range(len(files))]
        own = [*compiler, *FLAGS, *native, f"-I{HEADERS}", "-c"]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda file, made: _told([*own, str(file), "-o", made]), files, objects))
        # The OpenMP library by its path, since the compiler would link its own.
        _told([*compiler, *FLAGS, "-shared", "-nostartfiles", *objects, runtime, "-lm", "-o", f"{folder}/kernels.so"])
        made = Path(folder, "kernels.so")
        if not made.exists():
            raise Unbuilt(f"{compiler[0]} says that it compiled the kernels, but there is nothing: is it a C compiler?")
        return made.read_bytes()


def _told(command: Sequence[str]) -> None:
    """Run a compiler. Raises `Unbuilt` with the first error it tells."""
    done = _run(command)
    if done.returncode:
        words = done.stderr.strip().splitlines()
        told = next((line for line in words if "error" in line), words[0] if words else f"status {done.returncode}")
        raise Unbuilt(f"{command[0]} does not compile the kernels: {told}")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """What a command says. Raises `Unbuilt` where it cannot be run, or does not end; what it started ends with it."""
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        with subprocess.Popen(command, text=True, errors="replace", start_new_session=True, **pipes) as process:
            try:
                out, told = process.communicate(timeout=PATIENCE)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unbuilt(f"{command[0]} cannot be run: {error}") from error
    return subprocess.CompletedProcess(list(command), process.returncode, out, told)
