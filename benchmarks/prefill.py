"""What a long prompt takes in memory and time: read at once, and in chunks (`prefill_chunk_size`).

The 15M-parameter Llama of overhead.py reads a prompt of 8,192 tokens and makes one. Each line is a process of its own:
the growth of its resident memory from before the call to its peak (Linux only), and the median time of the call.

Example: python benchmarks/prefill.py --tokens 8192 --chunks 0 2048 512 128
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from overhead import machine, native, random_llama

from caches import status


def measure(kind: str, tokens: int, chunk: int, threads: int) -> str:
    """MiB of growth and seconds of a call, as text."""
    from decodekit import generate

    torch.set_num_threads(threads)
    model = random_llama(positions=2 * tokens)
    model = native(model) if kind == "native" else model
    ids = torch.randint(3, 32000, (1, tokens), generator=torch.Generator().manual_seed(1))
    more = {"prefill_chunk_size": chunk} if chunk else {}
    generate(model, ids[:, :256], max_new_tokens=1, pad_token_id=0)  # code and workspaces are in memory
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before, took = status("VmRSS"), []
    peak = 0
    for _ in range(3):
        start = time.perf_counter()
        generate(model, ids, max_new_tokens=1, pad_token_id=0, **more)
        took.append(time.perf_counter() - start)
        peak = peak or status("VmHWM")  # of the first call: later ones find what it left
    return f"{(peak - before) / 1024:.0f} {statistics.median(took):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 2048, 512, 128], help="0: at once")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(measure(args.one[0], args.tokens, int(args.one[1]), args.threads))
        return
    print(f"{machine(args.threads)}; a prompt of {args.tokens} tokens")
    print(f"{'':32}{'growth, MiB':>14}{'seconds':>10}")
    for kind in ("native", "transformers"):
        for chunk in args.chunks:
            call = [sys.executable, __file__, "--one", kind, str(chunk), "--tokens", str(args.tokens)]
            call += ["--threads", str(args.threads)]
            found = subprocess.run(call, check=True, capture_output=True, text=True).stdout.split()
            name = f"{kind}, {f'chunks of {chunk}' if chunk else 'at once'}"
            print(f"{name:32}{found[-2]:>14}{found[-1]:>10}", flush=True)


if __name__ == "__main__":
    main()
