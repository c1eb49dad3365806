"""What only the cache in files promises: where the files are, and that none is left."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import decodekit_caches.disk as disk
import pytest
import torch
from decodekit import ConfigError, InputError, PipelineError, generate
from decodekit.testing import TinyLM
from decodekit_caches.disk import DiskCache, mapped

KEYS: dict[str, Any] = {"cache_implementation": "disk", "max_new_tokens": 8, "eos_token_id": None}

LINUX = sys.platform == "linux"


def files_of(tensor: torch.Tensor) -> list[str]:
    """The mappings of this process that hold a tensor's memory."""
    address = tensor.untyped_storage().data_ptr()
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split(maxsplit=1)[0].split("-"))
        if low <= address < high:
            found.append(line.split(maxsplit=5)[5] if len(line.split(maxsplit=5)) > 5 else "")
    return found


@pytest.mark.skipif(not LINUX, reason="only Linux shows what is mapped")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_keys_and_values_lie_in_files(tmp_path: Path, dtype: torch.dtype) -> None:
    cache = DiskCache(str(tmp_path))
    new = torch.randn(2, 2, 3, 4).to(dtype)
    for _ in range(40):
        keys, values = cache.update(new, new + 1, 0)
    assert torch.equal(keys, new.repeat(1, 1, 40, 1))
    assert torch.equal(values, (new + 1).repeat(1, 1, 40, 1))
    assert all(str(tmp_path) in name for name in files_of(keys))
    assert files_of(keys)


def test_no_file_is_left(tmp_path: Path) -> None:
    model = TinyLM().eval()
    out = generate(model, [[5, 9]], cache_config={"folder": str(tmp_path)}, return_dict_in_generate=True, **KEYS)
    assert torch.equal(out.sequences, generate(model, [[5, 9]], use_cache=False, max_new_tokens=8, eos_token_id=None))
    del out
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_left_by_a_call_that_fails(tmp_path: Path) -> None:
    def fails(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 4:
            raise RuntimeError("no more")
        return scores

    with pytest.raises(Exception, match="no more"):
        generate(TinyLM().eval(), [[5, 9]], cache_config={"folder": str(tmp_path)}, logits_processor=[fails], **KEYS)
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.name != "posix", reason="other systems keep the names of files in use, until the process ends")
def test_no_file_is_left_by_a_process_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, torch\n"
        "from decodekit_caches.disk import DiskCache\n"
        "cache, new = DiskCache(sys.argv[1]), torch.ones(1, 1, 1, 2)\n"
        "cache.update(new, new, 0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist; make it, or name another"):
        generate(TinyLM().eval(), [[5]], cache_config={"folder": str(tmp_path / "none")}, **KEYS)
    with pytest.raises(InputError, match=r"no file can be made in .*none.*; set folder"):
        mapped((1, 1, 1, 1), torch.float32, str(tmp_path / "none"))


def test_a_full_disk_is_an_error_and_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "_take", full)
    with pytest.raises(PipelineError, match=r"has no room for 1 MiB of keys and values.*set another folder"):
        mapped((1, 1, 2**18, 1), torch.float32, str(tmp_path))
    assert list(tmp_path.iterdir()) == []
