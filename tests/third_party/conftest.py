"""Installs the distributions of tests/plugins with pip, each into its own folder, and runs scripts that see them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import attrs
import pytest

SOURCES = Path(__file__).parents[1] / "plugins"


@attrs.frozen
class Result:
    """What a subprocess did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The last line of its output."""
        assert self.code == 0, self.err
        return json.loads(self.out.strip().splitlines()[-1])

    @property
    def json_document(self) -> Any:
        """The whole output, which must be one JSON document."""
        assert self.code == 0, self.err
        return json.loads(self.out)


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Distribution name -> folder that holds only that distribution."""
    pytest.importorskip("hatchling", reason="the plugins are built with the hatchling of this environment")
    root = tmp_path_factory.mktemp("installed")

    def install(source: Path) -> tuple[str, Path]:
        target = root / source.name
        flags = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--target", str(target)]
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *flags, str(source)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return source.name, target

    with ThreadPoolExecutor(2) as pool:
        return dict(pool.map(install, sorted(p for p in SOURCES.iterdir() if (p / "pyproject.toml").exists())))


def _run(arguments: list[str], folders: list[Path], env: dict[str, str]) -> Result:
    path = os.pathsep.join(map(str, folders))
    full = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "default", **env}
    done = subprocess.run(
        [sys.executable, "-P", *arguments] if sys.version_info >= (3, 11) else [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=full,
        check=False,
        cwd=folders[0] if folders else None,
    )
    return Result(done.returncode, done.stdout, done.stderr)


Runner = Callable[..., Result]


@pytest.fixture(scope="session")
def python(installed: dict[str, Path]) -> Runner:
    """Run a script with the named distributions installed, and any further folders before them on the path."""

    def run(code: str, *names: str, before: list[Path] | None = None, **env: str) -> Result:
        return _run(["-c", textwrap.dedent(code)], [*(before or []), *(installed[name] for name in names)], env)

    return run


@pytest.fixture(scope="session")
def command(installed: dict[str, Path]) -> Runner:
    """Run ``decodekit`` with the named distributions installed."""

    def run(words: list[str], *names: str, before: list[Path] | None = None, **env: str) -> Result:
        return _run(["-m", "decodekit", *words], [*(before or []), *(installed[name] for name in names)], env)

    return run


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Path]:
    """Write a distribution by hand: metadata folder and module, as an installer would leave them."""

    def write(
        name: str,
        entries: str,
        module: str = "",
        *,
        version: str = "1.0",
        folder: str = "fakes",
        suffix: str = "dist-info",
        metadata: str | None = None,
    ) -> Path:
        root = tmp_path / folder
        stem = name.replace("-", "_")
        info = root / f"{stem}-{version}.{suffix}"
        info.mkdir(parents=True, exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n" if metadata is None else metadata
        (info / ("METADATA" if suffix == "dist-info" else "PKG-INFO")).write_text(text)
        (info / "entry_points.txt").write_text(textwrap.dedent(entries))
        if module:
            (root / f"{stem}.py").write_text(textwrap.dedent(module))
        return root

    return write
