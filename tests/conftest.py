"""One thread, no settings from outside, reproducible examples, and one copy of the package."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

# Before anybody imports torch: oversubscribed cores slow small models several times.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# A developer's own switches must not decide what the tests see.
for _name in [name for name in os.environ if name.startswith("DECODEKIT_")]:
    del os.environ[_name]

# A shell's background jobs ignore Ctrl-C, and so would every process that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis_settings.register_profile(
    "decodekit",
    deadline=None,
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
hypothesis_settings.load_profile("decodekit")


def _twins() -> list[str]:
    """Modules of a second copy of the package, found through the repository root instead of its install."""
    return [name for name in sys.modules if name == "core" or name.startswith("core.")]


def pytest_collection_finish(session: pytest.Session) -> None:
    if _twins():
        raise pytest.UsageError(f"{_twins()[0]} was imported: run plain `pytest`, not `python -m pytest`")


@pytest.fixture(autouse=True)
def _one_copy() -> Iterator[None]:
    yield
    assert not _twins(), "this test imported the package as `core...`"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture
def register() -> Iterator[Callable[..., Any]]:
    """Add plugins for one test: ``register(kind, name, target, key=field, ...)``."""
    from decodekit.registry import registry

    added: list[Any] = []

    def add(kind: str, name: str, target: Any, **keys: str) -> Any:
        added.append(registry.register(kind, name, target, keys=keys))
        return added[-1]

    yield add
    for plugin in added:
        registry.unregister(plugin)


@pytest.fixture(scope="session")
def toy() -> Any:
    """The module of tests/plugins/decodekit-toy, imported but not installed."""
    import importlib.util

    path = Path(__file__).parent / "plugins" / "decodekit-toy" / "decodekit_toy.py"
    spec = importlib.util.spec_from_file_location("decodekit_toy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["decodekit_toy"] = module  # attrs resolves annotations through it
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def parrot(toy: Any) -> Callable[..., Any]:
    """A model that likes to count, with generation defaults of its own: ``parrot(top_k=3)``."""
    return lambda **defaults: toy.ParrotAdapter(toy.Parrot(), defaults)
