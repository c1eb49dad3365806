"""Processes that share a sharded model: each runs it as often as the others, and none is left waiting."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")

SCRIPT = '''
import json, sys, datetime
import torch, torch.distributed as dist
torch.set_num_threads(1)
rank, store, way = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=40))
import decodekit
from decodekit.testing import TinyLM

class Sharded(TinyLM):
    """Gathers from the other process in every pass, as FSDP does: alone it would wait for ever."""
    passes = 0
    def forward(self, *args, **keys):
        type(self).passes += 1
        dist.all_reduce(torch.ones(1))
        return super().forward(*args, **keys)

torch.manual_seed(0)
model = Sharded().eval()
long = 9 if rank else 3
keys = {"max_new_tokens": long, "eos_token_id": None, "pad_token_id": 0, "synced_gpus": True}
keys.update({"greedy": {}, "no cache": {"use_cache": False}, "beams": {"num_beams": 2},
             "error": {}, "cancelled": {}, "guided": {"guidance_scale": 1.5}}[way])
said = None
if way == "error" and not rank:
    def broken(ids, scores):
        if ids.shape[1] > 3:
            raise ValueError("broken on purpose")
        return scores
    keys["logits_processor"] = [broken]
try:
    if way == "cancelled" and not rank:
        steps = decodekit.stream(model, [[5, 9]], **keys)
        next(steps)
        steps.close()
        out = None
    else:
        out = decodekit.generate(model, [[5, 9]], **keys).tolist()
except ValueError as error:
    out, said = None, str(error)
print(json.dumps({"out": out, "passes": Sharded.passes, "said": said}))
dist.barrier()
dist.destroy_process_group()
'''


def both(tmp_path: Path, way: str) -> list[dict[str, Any]]:
    """What two processes give, the first with 3 new tokens, the other with 9."""
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script)]
    made = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), way],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=120) for process in made]
    finally:
        for process in made:
            process.kill()
    for (_, errors), process in zip(said, made, strict=True):
        assert process.returncode == 0, errors
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def alone(keys: dict[str, Any]) -> list[list[int]]:
    import torch
    from decodekit import generate
    from decodekit.testing import TinyLM

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = TinyLM().eval()
    found: list[list[int]] = generate(model, [[5, 9]], eos_token_id=None, pad_token_id=0, **keys).tolist()
    return found


@pytest.mark.parametrize(
    ("way", "keys"),
    [
        ("greedy", {}),
        ("no cache", {"use_cache": False}),
        ("beams", {"num_beams": 2}),
        ("guided", {"guidance_scale": 1.5}),
    ],
)
def test_the_first_to_finish_goes_on_with_the_others(way: str, keys: dict[str, Any], tmp_path: Path) -> None:
    short, long = both(tmp_path, way)
    assert short["passes"] == long["passes"] >= 9
    assert short["out"] == alone({"max_new_tokens": 3, **keys})
    assert long["out"] == alone({"max_new_tokens": 9, **keys})


@pytest.mark.parametrize("way", ["error", "cancelled"])
def test_nobody_waits_for_a_process_that_gave_up(way: str, tmp_path: Path) -> None:
    gave_up, other = both(tmp_path, way)
    assert gave_up["passes"] == other["passes"] >= 9
    assert other["out"] == alone({"max_new_tokens": 9})
    assert gave_up["out"] is None
    assert way == "cancelled" or "broken on purpose" in gave_up["said"]


def test_one_process_needs_nobody() -> None:
    """Without a group the key changes nothing."""
    assert alone({"max_new_tokens": 3, "synced_gpus": True}) == alone({"max_new_tokens": 3})
