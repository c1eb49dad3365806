"""A cache that there is no memory for says how much it wanted, and what would do."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from decodekit import GenerationError, generate

HUGE = 10**12


@pytest.mark.parametrize(
    ("name", "options", "fix"),
    [
        ("dynamic", {"reserve": HUGE}, "lower cache_config's reserve"),
        ("static", {"max_cache_len": HUGE}, "lower max_cache_len"),
        ("offloaded", {"reserve": HUGE}, "lower cache_config's reserve"),
        ("offloaded_static", {"max_cache_len": HUGE}, "lower max_cache_len"),
    ],
)
@pytest.mark.filterwarnings("ignore:an offloaded cache saves nothing")
@pytest.mark.parametrize("model", ["llama", "native", "t5"])
def test_how_much_was_wanted(
    small: Callable[[str], Any], model: str, name: str, options: dict[str, int], fix: str
) -> None:
    # float32 keys and values of 2 heads (T5: 4) of 8 numbers, 2 rows
    slot = 2 * 2 * (4 if model == "t5" else 2) * 8 * 4
    size = f"{HUGE * slot / (1 << 40):.1f} TiB"
    words = (
        rf"no memory for a cache of {HUGE} tokens: {fix}, or feed fewer rows or tokens, or set "
        rf"cache_implementation='quantized' .* or 'disk'. Each layer wants {re.escape(size)} for 2 rows, {slot} bytes"
    )
    with pytest.raises(GenerationError, match=words):
        generate(small(model), [[5, 9], [3, 4]], cache_implementation=name, cache_config=options, max_new_tokens=3)
