"""What generation costs beyond the model itself: a bare forward loop, transformers' `generate`, and decodekit.

All three run on the same random Llama object in one process, interleaved round by round, threads pinned. Reported are
medians in ms per token, the overhead over the bare loop, and the prelude: time from the call to the first forward pass.

Example: python benchmarks/overhead.py --rounds 15 --tokens 64 --json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from typing import Any

import torch

SHAPE = {
    "vocab_size": 32000, "hidden_size": 288, "intermediate_size": 768, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 6,
}  # fmt: skip
"""Of the 15M-parameter Llama."""
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.1}


def machine(threads: int) -> str:
    """One line that says where the figures come from."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as info:
            name = next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    versions = ", ".join(f"{package} {version(package)}" for package in ("torch", "transformers"))
    return f"{name}, {threads} threads, {versions}, Python {platform.python_version()}"


def turns(names: Iterable[str], round_: int) -> list[str]:
    """The names in the order of a round: each comes first in its turn, so that none always follows the same one."""
    order = list(names)
    first = round_ % len(order)
    return order[first:] + order[:first]


def random_llama(family: str = "Llama", positions: int = 2048, **more: Any) -> Any:
    """The 15M-parameter Llama of the benchmarks: hidden 288, 6 layers, 6 heads, vocabulary 32,000.

    family: another one of transformers with the same layout. more: other values of its configuration.
    """
    import transformers

    torch.manual_seed(0)
    shape: dict[str, Any] = {**SHAPE, "max_position_embeddings": positions, "tie_word_embeddings": True}
    shape |= {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**{**shape, **more})
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def native(theirs: Any) -> Any:
    """The same weights in decodekit's own class."""
    from decodekit_plugins.models.native.module import NativeConfig, NativeLM

    model = NativeLM(NativeConfig.from_hf(theirs.config.to_dict()))
    model.load_state_dict(theirs.state_dict())
    return model.eval()


def bare(model: Any, ids: torch.Tensor, tokens: int) -> None:
    """The least a cached loop can do: forward, argmax, again."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        step = ids
        for _ in range(tokens):
            logits = model(input_ids=step, cache=cache, use_cache=True, logits_to_keep=1).logits
            step = logits[:, -1].argmax(-1, keepdim=True)


class FirstForward:
    """Measures the time from `start` to the first forward pass of a model."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.start = self.seen = 0.0
        model.register_forward_pre_hook(self._hook)

    def _hook(self, *_: Any) -> None:
        if not self.seen:
            self.seen = time.perf_counter()

    def time(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Return (seconds in all, seconds before the first forward pass)."""
        self.seen = 0.0
        self.start = time.perf_counter()
        call()
        return time.perf_counter() - self.start, self.seen - self.start


def measure(rounds: int, tokens: int, prompt: int, batch: int) -> dict[str, dict[str, float]]:
    """Interleave all loops for `rounds` rounds; medians in ms."""
    import decodekit

    model = random_llama()
    watch = FirstForward(model)
    ids = torch.randint(3, 32000, (batch, prompt), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    length = {"max_new_tokens": tokens, "min_new_tokens": None}
    sampled: dict[str, Any] = {**SAMPLING, "max_new_tokens": tokens}
    loops: dict[str, Callable[[], Any]] = {
        "bare loop": lambda: bare(model, ids, tokens),
        "decodekit greedy": lambda: decodekit.generate(model, ids, attention_mask=mask, **length),
        "transformers greedy": lambda: model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False),
        "decodekit sampling": lambda: decodekit.generate(model, ids, attention_mask=mask, seed=1, **sampled),
        "transformers sampling": lambda: model.generate(ids, attention_mask=mask, **sampled),
    }
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for round_ in range(rounds + 1):
        for name in turns(loops, round_):
            seconds = watch.time(loops[name])
            if round_:  # the first round warms up
                took[name].append(seconds)
    base = statistics.median(total for total, _ in took["bare loop"])
    result = {}
    for name, pairs in took.items():
        # The overhead is the median of round-by-round ratios: slow drifts of the machine cancel out.
        ratios = [total / reference for (total, _), (reference, _) in zip(pairs, took["bare loop"], strict=True)]
        result[name] = {
            "ms_per_token": statistics.median(total for total, _ in pairs) / tokens * 1e3,
            "over_bare_percent": (statistics.median(ratios) - 1) * 100,
            "prelude_ms": statistics.median(first for _, first in pairs) * 1e3,
        }
    assert base > 0
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = measure(args.rounds, args.tokens, args.prompt, args.batch)
    if args.json:
        print(json.dumps({"machine": machine(args.threads), "rounds": args.rounds, "rows": rows}, indent=2))
        return
    print(machine(args.threads))
    print(f"random Llama of 15M parameters, batch {args.batch}, {args.tokens} tokens after {args.prompt}, "
          f"medians of {args.rounds} interleaved runs\n")  # fmt: skip
    print(f"{'':24}{'ms/token':>10}{'over bare':>12}{'prelude ms':>12}")
    for name, row in rows.items():
        print(f"{name:24}{row['ms_per_token']:10.2f}{row['over_bare_percent']:11.1f}%{row['prelude_ms']:12.2f}")


if __name__ == "__main__":
    main()
