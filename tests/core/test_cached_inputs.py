"""A passed cache without a mask: inputs are the whole sequence, and must go on behind what is cached."""

from __future__ import annotations

from typing import Any

import pytest
from decodekit import InputError, generate, load, plan


@pytest.fixture
def lm() -> Any:
    return load("bundled")


def test_only_what_the_cache_lacks_is_run(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False}
    whole = generate(lm, [[5, 6, 7, 8]], **keys)
    cache, fed = plan(lm, [[5]]).cache, []
    generate(lm, [[5, 6, 7]], cache=cache, max_new_tokens=1, do_sample=False)
    assert cache.get_seq_length() == 3
    forward = lm.adapter.forward

    def watch(tokens: Any, *args: Any, **more: Any) -> Any:
        fed.append(tokens.tolist())
        return forward(tokens, *args, **more)

    monkeypatch.setattr(lm.adapter, "forward", watch)
    assert generate(lm, [[5, 6, 7, 8]], cache=cache, **keys).equal(whole)
    assert fed[0] == [[8]]


@pytest.mark.parametrize("width", [1, 3, 4])
def test_a_width_not_above_the_cached_length_is_refused(lm: Any, width: int) -> None:
    cache = plan(lm, [[5]]).cache
    generate(lm, [[5, 6, 7, 8]], cache=cache, max_new_tokens=1, do_sample=False)
    with pytest.raises(InputError, match=f"the cache holds 4 tokens and inputs are {width}; pass the whole sequence"):
        generate(lm, [[5, 6, 7, 8][:width]], cache=cache, max_new_tokens=2)
