"""What beam search costs beyond the model itself: a bare forward loop of as many rows, transformers, and decodekit.

All run on the same random Llama of 15M parameters in one process, interleaved round by round, threads pinned. The bare
loop does no search at all: it feeds every row's likeliest token. Reported are medians in ms per step.

Example: python benchmarks/beam.py --beams 4 8 --rounds 15 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from overhead import bare, machine, random_llama, turns


def measure(rounds: int, tokens: int, prompt: int, beams: int) -> dict[str, dict[str, float]]:
    """Interleave the loops for `rounds` rounds; medians."""
    import decodekit

    model = random_llama()
    ids = torch.randint(3, 32000, (1, prompt), generator=torch.Generator().manual_seed(1))
    mask, rows = torch.ones_like(ids), ids.repeat(beams, 1)
    keys: dict[str, Any] = {"num_beams": beams, "max_new_tokens": tokens, "do_sample": False}
    loops: dict[str, Callable[[], Any]] = {
        "bare loop": lambda: bare(model, rows, tokens),
        "decodekit": lambda: decodekit.generate(
            model, ids, attention_mask=mask, cache_implementation="dynamic", **keys
        ),
        "decodekit, model's cache": lambda: decodekit.generate(
            model, ids, attention_mask=mask, cache_implementation="model", **keys
        ),
        "transformers": lambda: model.generate(ids, attention_mask=mask, **keys),
    }
    took: dict[str, list[float]] = {name: [] for name in loops}
    for round_ in range(rounds + 1):
        for name in turns(loops, round_):
            start = time.perf_counter()
            loops[name]()
            if round_:  # the first round warms up
                took[name].append(time.perf_counter() - start)
    return {
        name: {
            "ms_per_step": statistics.median(seconds) / tokens * 1e3,
            "over_bare_percent": (statistics.median(a / b for a, b in zip(seconds, took["bare loop"], strict=True)) - 1)
            * 100,
        }
        for name, seconds in took.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beams", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {beams: measure(args.rounds, args.tokens, args.prompt, beams) for beams in args.beams}
    if args.json:
        print(json.dumps({"machine": machine(args.threads), "rounds": args.rounds, "beams": found}, indent=2))
        return
    print(machine(args.threads))
    print(
        f"random Llama of 15M parameters, {args.tokens} tokens after {args.prompt}, medians of {args.rounds} rounds\n"
    )
    print(f"{'':32}{'ms/step':>10}{'over bare':>12}")
    for beams, rows in found.items():
        for name, row in rows.items():
            print(f"{f'{beams} beams: {name}':32}{row['ms_per_step']:10.2f}{row['over_bare_percent']:11.1f}%")


if __name__ == "__main__":
    main()
