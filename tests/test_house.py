"""House rules that no linter knows: how much core there may be, what it imports, what tracked files may name."""

from __future__ import annotations

import ast
import io
import subprocess
import tokenize
from pathlib import Path

import pytest

HERE = Path(__file__).parents[1]
ROOTS = ("core", "processors", "strategies", "caches", "schedulers", "plugins")
CORE = [path for path in sorted(HERE.glob("core/decodekit/**/*.py")) if "testing" not in path.parts]
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(path: Path) -> int:
    """Lines that hold code: no blank ones, no comments, no docstrings."""
    source = path.read_text(encoding="utf-8")
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


def test_core_stays_small() -> None:
    counts = {path.stem: code_lines(path) for path in CORE}
    assert sum(counts.values()) < 2500, f"move what is not core into a plugin: {counts}"


@pytest.mark.parametrize("root", [*ROOTS, "tests"])
def test_a_file_holds_one_idea(root: str) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (HERE / root).glob("**/*.py")}
    assert {str(path.relative_to(HERE)): n for path, n in lengths.items() if n > 400} == {}


def test_core_imports_no_plugin() -> None:
    for path in (HERE / "core").glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith("decodekit_")], f"{path}:{node.lineno}"


def test_tracked_files_name_no_folder_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=HERE, capture_output=True, timeout=60)
    if listed.returncode:
        pytest.skip("not a git checkout")
    words = [f"/{folder}/".encode() for folder in ("work", "root", "opt/dk")]
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = HERE / name
        if path.is_file() and path.stat().st_size < 1_000_000:
            found = [word.decode() for word in words if word in path.read_bytes()]
            assert found == [], f"{name} names {found}"
