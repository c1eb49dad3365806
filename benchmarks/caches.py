"""What a token costs with each key/value cache: time and memory, beside transformers' own.

The 15M-parameter Llama of overhead.py (and a Mistral of the same shape with a window of 512, for the caches with
windows) reads a context in pieces of 512 and then makes tokens one by one in a bare loop of forward passes: only the
caches differ. Caches take turns round by round, threads pinned; reported are medians in ms per token and the median of
the round-by-round ratios to transformers' cache of that kind. Bytes per token are those of all buffers at the end over
the tokens seen. Peak growth is that of the process's resident memory from before the context to the last token, each
cache in a process of its own (Linux only).

Example: python benchmarks/caches.py --rounds 15 --contexts 512 2048 8192
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from overhead import machine, random_llama, turns

PIECE = 512
"""Tokens of the context read at once."""
WINDOW = 512
LLAMA = ("dynamic", "static", "offloaded", "offloaded_static", "disk", "quantized")
MISTRAL = ("hybrid", "sliding_window", "dynamic")
OTHERS = {"static": "transformers static", "offloaded_static": "transformers static"}
"""Which of transformers' caches each is compared with; the dynamic one where none is named."""


def models(dtype: str = "float32") -> dict[str, tuple[Any, tuple[str, ...]]]:
    """The models and the caches tried with each."""
    kind = getattr(torch, dtype)
    return {
        "Llama": (random_llama(positions=16384).to(kind), LLAMA),
        f"Mistral, window {WINDOW}": (random_llama("Mistral", 16384, sliding_window=WINDOW).to(kind), MISTRAL),
    }


def prompt(context: int) -> torch.Tensor:
    """Random tokens [1, context]."""
    return torch.randint(3, 32000, (1, context), generator=torch.Generator().manual_seed(1))


def make(model: Any, name: str, context: int, new: int) -> Any:
    """An empty cache for a run that makes `new` tokens after `context`."""
    from decodekit import plan
    from transformers import DynamicCache, StaticCache

    if name == "transformers dynamic":
        return DynamicCache(config=model.config)
    if name == "transformers static":
        return StaticCache(config=model.config, max_cache_len=context + new)
    return plan(model, prompt(context), cache_implementation=name, max_new_tokens=new).cache


def read(model: Any, cache: Any, context: int, piece: int = PIECE) -> torch.Tensor:
    """Feed the context; returns the next token [1, 1]."""
    for part in prompt(context).split(piece, 1):
        logits = model(input_ids=part, cache=cache, use_cache=True, logits_to_keep=1).logits
    return logits[:, -1].argmax(-1, keepdim=True)


def go_on(model: Any, cache: Any, step: torch.Tensor, tokens: int) -> torch.Tensor:
    """Make tokens one by one; returns the next [1, 1]."""
    for _ in range(tokens):
        logits = model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1).logits
        step = logits[:, -1].argmax(-1, keepdim=True)
    return step


def held(cache: Any) -> int:
    """Bytes of all buffers of a cache."""
    if hasattr(cache, "nbytes"):
        return int(cache.nbytes)
    found: dict[int, int] = {}
    for layer in cache.layers:
        for tensor in (layer.keys, layer.values):
            storage = tensor.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


@torch.no_grad()
def times(model: Any, names: list[str], context: int, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """Medians by cache."""
    new = (rounds + 1) * tokens
    caches = {name: make(model, name, context, new) for name in names}
    steps = {name: read(model, cache, context) for name, cache in caches.items()}
    took: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + 1):
        for name in turns(names, round_):
            start = time.perf_counter()
            steps[name] = go_on(model, caches[name], steps[name], tokens)
            if round_:  # the first round warms up
                took[name].append(time.perf_counter() - start)
    rows = {}
    for name in names:
        other = took[OTHERS.get(name, "transformers dynamic") if "transformers" not in name else name]
        rows[name] = {
            "ms": statistics.median(took[name]) / tokens * 1e3,
            "ratio": statistics.median(mine / theirs for mine, theirs in zip(took[name], other, strict=True)),
            "bytes": held(caches[name]) / (context + new),
        }
    return rows


def peak(which: str, name: str, context: int, tokens: int, *more: str) -> float:
    """MiB by which a process grows that uses this cache alone."""
    call = [sys.executable, str(Path(__file__)), "--peak", which, name, str(context), str(tokens), *more]
    return float(subprocess.run(call, check=True, capture_output=True, text=True).stdout.split()[-1])


@torch.no_grad()
def grow(which: str, name: str, context: int, tokens: int, piece: int, dtype: str) -> float:
    """MiB by which this process grows at most."""
    model, _ = models(dtype)[which]
    warm = make(model, name, 2 * PIECE, 2 * PIECE)
    go_on(model, warm, read(model, warm, 2 * PIECE), 4)  # code and workspaces are in memory
    del warm
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = status("VmRSS")
    cache = make(model, name, context, tokens)
    go_on(model, cache, read(model, cache, context, piece), tokens)
    return (status("VmHWM") - before) / 1024


def status(key: str) -> int:
    """A figure of this process in KiB."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if key in line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of each round")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--piece", type=int, default=PIECE, help="tokens of the context read at once, for the peaks")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--no-peaks", action="store_true", help="leave out the memory of processes")
    parser.add_argument("--peak", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.peak:
        print(grow(args.peak[0], args.peak[1], *map(int, args.peak[2:]), args.piece, args.dtype))
        return
    print(machine(args.threads))
    rest = ("--piece", str(args.piece), "--dtype", args.dtype, "--threads", str(args.threads))
    for which, (model, own) in models(args.dtype).items():
        for context in args.contexts:
            names = ["transformers dynamic", *(["transformers static"] if "static" in own else []), *own]
            rows = times(model, names, context, args.rounds, args.tokens)
            print(f"\n{which}, {args.rounds * args.tokens} tokens after {context}")
            print(f"{'':24}{'ms/token':>10}{'ratio':>8}{'bytes/token':>14}{'peak MiB':>10}")
            for name, row in rows.items():
                most = "" if args.no_peaks else f"{peak(which, name, context, args.tokens * args.rounds, *rest):10.0f}"
                print(f"{name:24}{row['ms']:10.2f}{row['ratio']:8.2f}{row['bytes']:14.0f}{most}")


if __name__ == "__main__":
    main()
