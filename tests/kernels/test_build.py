"""C sources become a library: once for a machine, whole or not at all, out of nobody else's folder."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from decodekit_plugins.kernels import build as module
from decodekit_plugins.kernels import library
from decodekit_plugins.kernels.build import Unbuilt, build

NO_COMPILER = library.why_not()
pytestmark = pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER or "kernels can be built")
ANSWER = '#include "vectors.h"\nlong answer(void) { return LANES * 0 + %d; }\n'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "decodekit" / "kernels"


def source(folder: Path, number: int = 42) -> Path:
    file = folder / "answer.c"
    file.write_text(ANSWER % number)
    return file


def kept(home: Path) -> list[str]:
    return sorted(os.listdir(home))


def test_compiled_once(home: Path, tmp_path: Path) -> None:
    assert build(source(tmp_path)).answer() == 42
    (name,) = kept(home)
    assert name.startswith("answer-")
    made = (home / name).stat().st_mtime_ns
    assert build(source(tmp_path)).answer() == 42
    assert (home / name).stat().st_mtime_ns == made
    assert build(source(tmp_path, 43)).answer() == 43, "another source is another library"
    assert len(kept(home)) == 2
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_headers_count(home: Path, tmp_path: Path) -> None:
    (tmp_path / "number.h").write_text("#define NUMBER 1\n")
    file = tmp_path / "own.c"
    file.write_text('#include "number.h"\nlong number(void) { return NUMBER; }\n')
    assert build(file).number() == 1
    (tmp_path / "number.h").write_text("#define NUMBER 2\n")
    assert build(file).number() == 2


def test_no_library_out_of_a_folder_that_others_write_to(home: Path, tmp_path: Path) -> None:
    home.mkdir(parents=True)
    home.chmod(0o777)
    assert build(source(tmp_path)).answer() == 42
    assert kept(home) == []


def test_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert build(source(tmp_path)).answer() == 42


@pytest.mark.parametrize("left", [0, 4, 4096, 0.5])
def test_a_library_that_was_cut_off_is_made_again(home: Path, tmp_path: Path, left: float) -> None:
    """Loading it would end the process by a signal."""
    code = f"from decodekit_plugins.kernels.build import build; assert build({str(source(tmp_path))!r}).answer() == 42"
    run = [sys.executable, "-c", code]
    subprocess.run(run, check=True)
    (name,) = kept(home)
    size = (home / name).stat().st_size
    os.truncate(home / name, int(left if left >= 1 or left == 0 else left * size))
    subprocess.run(run, check=True)
    assert kept(home) == [name]
    assert (home / name).stat().st_size == size


def test_no_room_to_keep_it(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def full(old: str, new: Path) -> None:
        if Path(new).parent == home:
            raise OSError(28, "No space left on device")
        replace(old, new)

    monkeypatch.setattr(os, "replace", full)
    assert build(source(tmp_path)).answer() == 42
    assert kept(home) == []


def test_a_folder_that_nothing_runs_from(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = ctypes.CDLL

    def refuses(name: str) -> ctypes.CDLL:
        if name.startswith(str(home)):
            raise OSError("failed to map segment from shared object")
        return load(name)

    monkeypatch.setattr(ctypes, "CDLL", refuses)
    assert build(source(tmp_path)).answer() == 42


def test_nowhere_to_write(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", nowhere)
    with pytest.raises(Unbuilt, match="No usable temporary directory"):
        build(source(tmp_path))


def test_a_user_without_a_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert build(source(tmp_path)).answer() == 42


def test_what_the_compiler_says(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "wrong.c"
    file.write_text("long answer(void) { return nothing; }\n")
    with pytest.raises(Unbuilt, match=r"does not compile the kernels: .*nothing"):
        build(file)
    assert kept(home) == []


@pytest.mark.parametrize(
    ("compiler", "words"),
    [
        ("no-such-compiler", "'no-such-compiler' of the variable CC was not found"),
        ("false", "does not compile"),
        ("true", "there is nothing"),
        ("gcc '", "correct or unset it"),
    ],
)
def test_other_compilers(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, words: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    with pytest.raises(Unbuilt, match=words):
        build(source(tmp_path))


def test_a_compiler_that_does_not_end(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended with all that it started, and leaves nothing."""
    slow = tmp_path / "slow"
    slow.write_text(
        f"#!/bin/sh\ncase $1 in --version) exec gcc --version;; esac\nsleep 60 & echo $! > {tmp_path}/pid\nwait\n"
    )
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(module, "PATIENCE", 0.5)
    with pytest.raises(Unbuilt, match="cannot be run: .*timed out"):
        build(source(tmp_path))
    assert kept(home) == []
    number = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not Path(f"/proc/{number}").exists() or "(sleep) Z" in Path(f"/proc/{number}/stat").read_text():
            return
        time.sleep(0.02)
    raise AssertionError("it still runs")


def test_no_compiler(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(Unbuilt, match="install gcc"):
        build(source(tmp_path))


def test_one_openmp() -> None:
    """Kernels run on torch's threads: no second library of threads is loaded."""
    code = r"""
import re, torch
from decodekit_plugins.kernels.library import library
def loaded(): return sorted(set(re.findall(r"\S*/lib(?:gomp|iomp5|omp)[^/\s]*", open("/proc/self/maps").read())))
before = loaded()
library()
assert before == loaded() != [], (before, loaded())
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_processes_at_the_same_time(home: Path, tmp_path: Path) -> None:
    file = source(tmp_path)
    code = f"from decodekit_plugins.kernels.build import build; assert build({str(file)!r}).answer() == 42"
    started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert [name for name in kept(home) if name.endswith(".so")] == kept(home)
    assert len(kept(home)) == 1
