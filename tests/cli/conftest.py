"""Runs the command in processes of its own, with pinned threads."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest


class Command:
    """Calls ``python -m decodekit``; keywords are environment variables, `path` comes first on PYTHONPATH."""

    def __call__(self, *words: str, path: str = "", stdin: str = "", **environ: str) -> Any:
        return self.python("-m", "decodekit", *words, path=path, stdin=stdin, **environ)

    def python(self, *words: str, path: str = "", stdin: str = "", **environ: str) -> Any:
        line = [sys.executable, *words]
        env = self._environment(path, environ)
        return subprocess.run(line, capture_output=True, encoding="utf-8", env=env, timeout=120, input=stdin)

    def start(self, *words: str, path: str = "", **environ: str) -> Any:
        return subprocess.Popen(
            [sys.executable, "-m", "decodekit", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=self._environment(path, environ),
        )

    @staticmethod
    def _environment(path: str, environ: dict[str, str]) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("DECODEKIT_")}
        pinned = {"OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8", "HF_HUB_OFFLINE": "1"}
        # What these tests themselves import must be what they start.
        paths = os.pathsep.join(filter(None, [path, kept.get("PYTHONPATH", "")]))
        return {**kept, **pinned, **({"PYTHONPATH": paths} if paths else {}), **environ}


@pytest.fixture(scope="session")
def command() -> Command:
    return Command()


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls the command in this process: what needs torch is imported once."""
    import torch
    from decodekit_plugins.commands.main import main

    torch.set_num_threads(1)

    def call(*words: str, stdin: str = "") -> Any:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = main(words)
        done = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=done.out, stderr=done.err)

    return call
