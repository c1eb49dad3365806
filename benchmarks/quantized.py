"""What a token costs with quantized caches: decodekit's beside transformers' with the backends that are installed.

"attention alone": one token is given to every layer of a cache that holds 512, 2,048 or 8,192 tokens, and torch's
attention runs over what the cache hands out, with nothing else in between. transformers packs everything anew each time
its residual of 128 tokens is full, so each figure is the mean over 128 steps. "in a model": a whole step of the random
Llama of 15M parameters, transformers' own. "prepared": the same weights in decodekit's class, with the preparer
``kernels``; decodekit's caches only. Both sides run in one process, in turns; reported are medians over the rounds.
Bytes are those kept per token and layer, keys and values, with scales and the tokens in full precision; packed and
plain tokens of transformers' are counted the same way.

Example: python benchmarks/quantized.py --rounds 3 --lengths 512 2048 8192 --dtype bfloat16 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from decodekit import plan
from decodekit_caches.dynamic import DynamicCache
from decodekit_caches.quantized import Quantized, QuantizedCache
from overhead import machine, native, random_llama, turns

STEPS = 128


def makers(config: Any, longest: int) -> dict[str, Callable[[], Any]]:
    """Name -> a fresh cache; what is not installed is left out with a note."""
    found: dict[str, Callable[[], Any]] = {"decodekit dynamic": lambda: DynamicCache(longest)}
    for bits in (8, 4, 2):
        found[f"decodekit {bits} bits"] = lambda bits=bits: QuantizedCache(Quantized(nbits=bits), longest)
    from transformers import QuantizedCache as Theirs

    backends: dict[str, tuple[tuple[int, ...], dict[str, int]]] = {
        "quanto": ((4, 2), {}),
        "hqq": ((8, 4, 2), {"axis_key": 1, "axis_value": 1}),
    }
    for backend, (widths, axes) in backends.items():
        try:
            Theirs(backend, config, **axes)
        except ImportError as error:
            print(f"left out: {error}")
            continue
        for bits in widths:
            found[f"transformers {backend} {bits} bits"] = lambda backend=backend, bits=bits, axes=axes: Theirs(
                backend, config, nbits=bits, **axes
            )
    return found


def tensors(value: Any, seen: set[int]) -> int:
    """Bytes of all tensors inside, each storage once."""
    if isinstance(value, torch.Tensor):
        if hasattr(value, "__tensor_flatten__"):
            return sum(tensors(getattr(value, name), seen) for name in value.__tensor_flatten__()[0])
        storage = value.untyped_storage()
        fresh = storage.data_ptr() not in seen
        seen.add(storage.data_ptr())
        return storage.nbytes() if fresh else 0
    if isinstance(value, dict):
        return sum(tensors(item, seen) for item in value.values())
    return sum(tensors(item, seen) for item in value) if isinstance(value, (list, tuple)) else 0


def kept(cache: Any) -> int:
    """Bytes that a cache keeps, working memory aside."""
    if isinstance(cache, QuantizedCache):
        return cache.nbytes
    held = [list(getattr(layer, "__dict__", {}).values()) or [layer.keys, layer.values] for layer in cache.layers]
    return tensors(held, set())


def alone(
    make: Callable[[], Any], length: int, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> tuple[float, float]:
    """(ms per token of all layers, bytes per token and layer) after `length` tokens."""
    layers, rows, heads, width = shape
    cache = make()
    prompt, new = (torch.randn(rows, heads, count, width).to(dtype) for count in (length - STEPS, 1))
    for layer in range(layers):
        cache.update(prompt, prompt.clone(), layer)
    cache.update(new, new, layers - 1)
    attend = torch.nn.functional.scaled_dot_product_attention
    start = time.perf_counter()
    for _ in range(STEPS):
        for layer in range(layers):
            attend(new, *cache.update(new, new, layer))
    took = (time.perf_counter() - start) / STEPS * 1e3
    return took, kept(cache) / length / layers / rows


def inside(model: Any, make: Callable[[], Any], length: int) -> tuple[float, float]:
    """(ms per token, bytes per token and layer) of whole steps of a model."""
    cache = make()
    model(input_ids=torch.randint(3, 32000, (1, length - STEPS)), cache=cache, use_cache=True, logits_to_keep=1)
    token = torch.tensor([[5]])
    model(input_ids=token, cache=cache, use_cache=True)
    start = time.perf_counter()
    for _ in range(STEPS):
        model(input_ids=token, cache=cache, use_cache=True)
    return (time.perf_counter() - start) / STEPS * 1e3, kept(cache) / length / len(cache.layers)


def prepared(adapter: Any, make: Callable[[], Any], length: int) -> tuple[float, float]:
    """The same of a prepared model's adapter."""
    cache, places = make(), torch.arange(length + 1).unsqueeze(0)
    adapter.forward(torch.randint(3, 32000, (1, length - STEPS)), places[:, : length - STEPS], cache)
    token = torch.tensor([[5]])
    start = 0.0
    for step in range(STEPS + 1):
        at = length - STEPS + step
        adapter.forward(token, places[:, at : at + 1], cache)
        start = start or time.perf_counter()  # the first one warms up
    return (time.perf_counter() - start) / STEPS * 1e3, kept(cache) / length / len(cache.layers)


def measure(args: Any) -> list[dict[str, Any]]:
    """One entry for each cache, length and way of running it."""
    dtype = getattr(torch, args.dtype)
    model = random_llama(positions=max(2048, *args.lengths) + STEPS).to(dtype)
    twin = native(model).to(dtype).requires_grad_(False)
    adapter = plan(twin, [[5, 6]], prepare="kernels").adapter
    shape = (args.layers, args.batch, args.heads, args.width)
    rows = []
    for length in args.lengths:
        found = makers(model.config, length + 64)
        ways: dict[str, Callable[[Any], tuple[float, float]]] = {
            "attention alone": lambda make, length=length: alone(make, length, shape, dtype)
        }
        if not args.alone:
            ways["in a model"] = lambda make, length=length: inside(model, make, length)
            ways["prepared"] = lambda make, length=length: prepared(adapter, make, length)
        for way, run in ways.items():
            names = [name for name in found if way != "prepared" or name.startswith("decodekit")]
            took: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
            for round_ in range(args.rounds):
                for name in turns(names, round_):
                    took[name].append(run(found[name]))
            for name, pairs in took.items():
                ms, bytes_ = (statistics.median(pair[i] for pair in pairs) for i in (0, 1))
                rows.append({"way": way, "tokens": length, "cache": name, "ms": ms, "bytes": bytes_})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--layers", type=int, default=6, help="of the attention alone")
    parser.add_argument("--heads", type=int, default=3)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--alone", action="store_true", help="leave the model out")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with torch.no_grad():
        rows = measure(args)
    if args.json:
        print(json.dumps({"machine": machine(args.threads), "rows": rows}, indent=2))
        return
    print(
        f"{machine(args.threads)}\n{args.dtype}, {args.layers} layers of [{args.batch}, {args.heads}, T, {args.width}]"
    )
    for row in rows:
        print(f"{row['way']:16}{row['tokens']:6} {row['cache']:28}{row['ms']:9.3f} ms{row['bytes']:9.0f} bytes")


if __name__ == "__main__":
    main()
