"""What torch.compile makes of a token: eager, over a static cache, and compiled by inductor.

`generate` makes tokens greedily on the 15M-parameter Llama of overhead.py, as decodekit's `native` model and as
transformers' own class, beside transformers' `generate` as it is and with its static cache compiled. Calls take turns
round by round, threads pinned. Reported are medians in ms per token (prompt included), the median of the round-by-round
ratios to the first line, the seconds that the first call took beyond a later one, and the number of graphs torch made.
The results are compared: every line gives the same tokens.

Example: python benchmarks/compiled.py --rounds 11 --tokens 64 --batches 1 4
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from overhead import machine, native, random_llama, turns


def lines(theirs: Any, tokens: int) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """What is timed, by name."""
    import transformers
    from decodekit import CompileConfig, generate

    keys: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    fast = transformers.CompileConfig()
    fast._compile_all_devices = True
    made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "transformers": lambda ids: theirs.generate(ids, **keys),
        "transformers, static, compiled": lambda ids: theirs.generate(
            ids, cache_implementation="static", compile_config=fast, **keys
        ),
    }
    for name, model in (("native", native(theirs)), ("Llama of transformers", theirs)):
        more = {
            "": {},
            ", static": {"cache_implementation": "static"},
            ", compiled": {"compile_config": CompileConfig()},
        }
        for words, wish in more.items():
            made[f"decodekit, {name}{words}"] = lambda ids, model=model, wish=wish: generate(  # type: ignore[misc]
                model, ids, **keys, **wish
            )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    from torch._dynamo.utils import counters

    print(machine(args.threads))
    theirs = random_llama()
    for rows in args.batches:
        ids = torch.randint(3, 32000, (rows, args.prompt), generator=torch.Generator().manual_seed(1))
        first: dict[str, float] = {}
        graphs: dict[str, int] = {}
        took: dict[str, list[float]] = {}
        results = {}
        calls = lines(theirs, args.tokens)
        for name, call in calls.items():
            counters.clear()
            start = time.perf_counter()
            results[name] = call(ids)
            first[name], graphs[name], took[name] = time.perf_counter() - start, counters["stats"]["unique_graphs"], []
        want = next(iter(results.values()))
        same = all(torch.equal(result, want) for result in results.values())
        for round_ in range(args.rounds):
            for name in turns(calls, round_):
                start = time.perf_counter()
                calls[name](ids)
                took[name].append(time.perf_counter() - start)
        base = took["transformers"]
        print(f"\nbatch {rows}, {args.tokens} tokens after {args.prompt}; same tokens: {same}")
        print(f"{'':42}{'ms/token':>10}{'share':>8}{'first, s':>10}{'graphs':>8}")
        for name in calls:
            ms = statistics.median(took[name]) / args.tokens * 1e3
            share = statistics.median(mine / other for mine, other in zip(took[name], base, strict=True))
            late = first[name] - statistics.median(took[name])
            print(f"{name:42}{ms:10.2f}{share:8.2f}{late:10.1f}{graphs[name]:8}")


if __name__ == "__main__":
    main()
