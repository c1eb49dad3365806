"""What conformance suites share: a context without a model, scores worth testing, and a way to run a suite by hand."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from decodekit.context import BindContext
from decodekit.options import CORE_OPTIONS
from decodekit.protocols import ModelSpec
from decodekit.settings import Settings, Value


def context(
    tokens: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    rows: int = 1,
    prompt_width: int | None = None,
    vocab_size: int = 37,
    eos: Sequence[int] = (2,),
    pad: int | None = 0,
    bos: int | None = 1,
    num_embeddings: int | None = None,
    max_length: int | None = None,
    capacity: int = 64,
    samples: bool = True,
    seeds: Sequence[int] | None = None,
    tokenizer: Any = None,
    model: Any = None,
    device: str = "cpu",
    **keys: Any,
) -> BindContext:
    """A `BindContext` as the loop would make it, for a model that does not exist.

    tokens: int64 [B, T] so far; `rows` rows of one token where it is None. mask: bool [B, T], False at padding.
    prompt_width: how many of the T columns are the prompt; all where it is None. Further keywords become settings.
    """
    if tokens is None:
        tokens = torch.full((rows, 1), min(3, vocab_size - 1))
    rows, width = tokens.shape
    prompt = width if prompt_width is None else prompt_width
    capacity = max(capacity, width)
    buffer = torch.zeros((rows, capacity), dtype=torch.long, device=device)
    buffer[:, :width] = tokens
    room: Tensor | None = None
    if mask is not None:
        room = torch.ones((rows, capacity), dtype=torch.bool, device=device)
        room[:, :width] = mask
    where = torch.device(device)
    spec = ModelSpec(
        vocab_size, where, torch.float32, tuple(eos), pad, bos, num_embeddings=num_embeddings or vocab_size
    )
    values = {key: Value(key, value, "call", "test") for key, value in keys.items()}
    settings = Settings(values, {}, {cls: cls() for cls in CORE_OPTIONS}, {})
    ctx = BindContext(
        spec=spec,
        settings=settings,
        tokens=buffer,
        mask=room,
        prompt_width=prompt,
        model=model,
        tokenizer=tokenizer,
        samples=samples,
        seeds=seeds,
    )
    ctx.length = width
    ctx.max_length = max_length
    return ctx


class Letters:
    """A tokenizer of one letter a token, for plugins that read text: token t is the letter t mod 26."""

    def encode(self, text: str, /, **options: Any) -> list[int]:
        """Token ids below 26."""
        return [(ord(char) - ord("a")) % 26 for char in text]

    def decode(self, ids: Sequence[int], /, **options: Any) -> str:
        """One letter for each token."""
        return "".join(chr(ord("a") + int(token) % 26) for token in ids)


def score_cases(rows: int, vocab_size: int, seed: int = 0) -> dict[str, Tensor]:
    """Scores float32 [rows, vocab_size] of the kinds that break processors, by name. None holds NaN."""
    random = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return torch.randn(rows, vocab_size, generator=random) * scale

    at = torch.arange(rows)
    holes = normal(3).masked_fill(torch.rand(rows, vocab_size, generator=random) < 0.8, -torch.inf)
    holes[at, at % vocab_size] = 0.5
    one = torch.full((rows, vocab_size), -torch.inf)
    one[at, (at * 5 + 1) % vocab_size] = -2.0
    return {
        "random": normal(3),
        "flat": normal(0.01),
        "peaked": normal(20),
        "negative": normal(1) - 50,
        "tied": (normal(2) * 2).round() / 2,
        "all equal": torch.zeros(rows, vocab_size),
        "mostly -inf": holes,
        "one token": one,
    }


def results(suite: Any) -> dict[str, str]:
    """Run every test of a conformance suite by hand: test name -> ``ok``, ``skipped`` or the failure's text.

    For checking a plugin outside of pytest, and for checking the suites themselves.
    """
    verdict: dict[str, str] = {}
    for name, test in inspect.getmembers(suite, inspect.ismethod):
        if not name.startswith("test_"):
            continue
        try:
            test()
            verdict[name] = "ok"
        except Exception as error:
            verdict[name] = f"{type(error).__name__}: {error}"
        except BaseException as error:
            # pytest's outcomes are no Exceptions, and pytest may not be installed.
            if type(error).__name__ != "Skipped":
                raise
            verdict[name] = "skipped"
    return verdict
