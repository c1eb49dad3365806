"""What the forward pass costs, prepared and not: transformers, decodekit, CTranslate2, and the memory's limit.

Random Llamas of 15M and 135M parameters in one process, interleaved round by round, threads pinned, greedy. Reported
are medians: new tokens of all rows per second, and milliseconds until the first token behind a long prompt. The limit
is the bytes of the weights over the read bandwidth, which is measured by summing a large tensor: no float32 decoder
that reads every weight once for each token is faster with one row. "Numbers of bfloat16" are float32 weights as they
come of most checkpoints, which are stored in half the bytes; random ones need all of theirs. CTranslate2 takes part
where it is installed, in a process of its own.

Example: python benchmarks/forward.py --sizes 135M --batch 1 8 --rounds 5 --json
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from overhead import SHAPE, machine, native, random_llama, turns

SIZES: dict[str, dict[str, int]] = {
    "15M": SHAPE,
    "135M": {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3,
    },
}  # fmt: skip
Loop = Callable[[torch.Tensor, int], Any]


def llama(size: str) -> Any:
    """A random Llama of transformers, float32, embeddings tied."""
    return random_llama(**SIZES[size]).requires_grad_(False)


def ctranslate2(size: str, threads: int) -> Loop | None:
    """The same weights in CTranslate2; None where it is not installed.

    It runs in a process of its own: beside the OpenMP that it brings along, torch's takes nearly twice as long.
    """
    if importlib.util.find_spec("ctranslate2") is None:
        return None
    os.environ["KMP_BLOCKTIME"] = "0"  # so that its threads do not spin while the others run
    here, there = multiprocessing.get_context("spawn").Pipe()
    worker = multiprocessing.get_context("spawn").Process(target=_serve, args=(size, threads, there), daemon=True)
    worker.start()

    def loop(ids: torch.Tensor, new: int) -> Any:
        here.send((ids.tolist(), new))
        if not here.poll(300):
            raise TimeoutError("CTranslate2 has not answered for 300 s")
        return here.recv()

    return loop


def _serve(size: str, threads: int, pipe: Any) -> None:
    import ctranslate2 as ct2
    from ctranslate2.converters.transformers import _MODEL_LOADERS

    torch.set_num_threads(1)
    model = llama(size)
    spec = _MODEL_LOADERS["LlamaConfig"].get_model_spec(model)
    words = [f"t{token}" for token in range(model.config.vocab_size)]
    spec.register_vocabulary(words)
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = words[1], words[2], words[0]
    spec.config.layer_norm_epsilon = model.config.rms_norm_eps
    spec.validate()
    spec.optimize(quantization="float32")
    with tempfile.TemporaryDirectory() as folder:
        spec.save(folder)
        made = ct2.Generator(folder, device="cpu", compute_type="float32", intra_threads=threads)
    while True:
        rows, new = pipe.recv()
        prompts = [[words[token] for token in row] for row in rows]
        more = {"sampling_topk": 1, "include_prompt_in_result": False, "max_batch_size": len(prompts)}
        made.generate_batch(prompts, max_length=new, min_length=new, **more)
        pipe.send(None)


def loops(size: str, threads: int, preparer: str) -> dict[str, Loop]:
    """What is compared, by name. Each prepared model is an object of its own."""
    import decodekit

    theirs, ours = llama(size), native(llama(size)).requires_grad_(False)
    stored = native(llama(size).bfloat16().float()).requires_grad_(False)

    def ask(model: Any, **keys: Any) -> Loop:
        def loop(ids: torch.Tensor, new: int) -> Any:
            mask = torch.ones_like(ids)
            return decodekit.generate(model, ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **keys)

        return loop

    def reference(ids: torch.Tensor, new: int) -> Any:
        return theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)

    rounded = {"preparers": {preparer: {"dtype": "bfloat16"}}}
    found: dict[str, Loop | None] = {
        "transformers": reference,
        "decodekit, transformers model": ask(theirs),
        "decodekit, native": ask(ours),
        "prepared transformers model": ask(theirs, prepare=preparer),
        "prepared native": ask(ours, prepare=preparer),
        "prepared native, numbers of bfloat16": ask(stored, prepare=preparer),
        "bfloat16 transformers model": ask(theirs, **rounded),
        "bfloat16 native": ask(ours, **rounded),
        "CTranslate2": ctranslate2(size, threads),
    }
    return {name: loop for name, loop in found.items() if loop is not None}


def bandwidth() -> float:
    """Bytes per second that reading memory gives: the median over sums of half a gigabyte."""
    data, took = torch.ones(1 << 27), []
    for _ in range(7):
        start = time.perf_counter()
        data.sum()
        took.append(time.perf_counter() - start)
    return data.numel() * 4 / statistics.median(took)


def medians(found: dict[str, Loop], ids: torch.Tensor, new: int, rounds: int) -> dict[str, float]:
    """Seconds of each loop, interleaved; the first round warms up, and prepares."""
    took: dict[str, list[float]] = {name: [] for name in found}
    for round_ in range(rounds + 1):
        for name in turns(found, round_):
            start = time.perf_counter()
            found[name](ids, new)
            if round_:
                took[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in took.items()}


def measure(size: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """For each batch size tokens per second, and the milliseconds of reading a long prompt; the limit among them."""
    found = loops(size, args.threads, args.prepare)
    if args.only:
        found = {name: loop for name, loop in found.items() if any(word in name for word in args.only)}
    random = torch.Generator().manual_seed(1)
    rows: dict[str, dict[str, float]] = {name: {} for name in found}
    for batch in args.batch:
        ids = torch.randint(3, SIZES[size]["vocab_size"], (batch, args.prompt), generator=random)
        for name, seconds in medians(found, ids, args.tokens, args.rounds).items():
            rows[name][f"batch {batch}"] = batch * args.tokens / seconds
    if args.prefill:
        ids = torch.randint(3, SIZES[size]["vocab_size"], (1, args.prefill), generator=random)
        for name, seconds in medians(found, ids, 1, args.rounds).items():
            rows[name]["prefill ms"] = seconds * 1e3
    weights = sum(p.numel() for p in llama(size).parameters()) * 4
    speed = bandwidth()
    rows["limit of float32"] = {f"batch {batch}": batch * speed / weights for batch in args.batch}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--prefill", type=int, default=512, help="tokens of the long prompt; 0: leave it out")
    parser.add_argument(
        "--prepare", choices=["kernels", "packed"], default="kernels", help="the preparer (%(default)s)"
    )
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only loops whose name holds one of these words")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {}
    for size in args.sizes:
        found[size] = measure(size, args)
    if args.json:
        print(json.dumps({"machine": machine(args.threads), "rounds": args.rounds, "sizes": found}, indent=2))
        return
    print(machine(args.threads))
    print(f"{args.tokens} new tokens after {args.prompt}, tokens of all rows per second, "
          f"and ms for a prompt of {args.prefill}; medians of {args.rounds} rounds\n")  # fmt: skip
    for size, rows in found.items():
        columns = [f"batch {batch}" for batch in args.batch] + (["prefill ms"] if args.prefill else [])
        print(f"{size:32}" + "".join(f"{column:>12}" for column in columns))
        for name, row in rows.items():
            print(f"{name:32}" + "".join(f"{row[c]:12.1f}" if c in row else f"{'':12}" for c in columns))
        print()


if __name__ == "__main__":
    main()
