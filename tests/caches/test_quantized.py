"""The quantized cache keeps its bound, its memory, and every block as it was packed first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit import ConfigError, InputError, generate
from decodekit.testing import CacheContract
from decodekit_caches.dynamic import DynamicCache
from decodekit_caches.quantized import Quantized, QuantizedCache
from decodekit_caches.quantized_blocks import AT_ONCE
from torch import Tensor

SMALL: dict[str, Any] = {"q_group_size": 8, "residual_length": 3}
AXES = [{"axis_key": key, "axis_value": value} for key in (-1, 0) for value in (-1, 0)]


def cache_of(**options: Any) -> QuantizedCache:
    return QuantizedCache(Quantized(**options))


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def feed(cache: Any, key: Tensor, value: Tensor, pieces: Any) -> tuple[Tensor, Tensor]:
    """Give one layer `key` and `value` in pieces of these lengths; what the last piece's attention gets, copied."""
    start, got = 0, (key, value)
    for count in pieces:
        more = (key[:, :, start : start + count], value[:, :, start : start + count])
        got = cache.update(*more, 0)
        start += count
    return got[0].clone(), got[1].clone()


def bound(numbers_: Tensor, bits: int, size: int, axis: int, dtype: torch.dtype) -> Tensor:
    """Half a step of each number's group, and the rounding of its dtype."""
    rows, heads, count, width = numbers_.shape
    exact = numbers_.double()
    if axis == -1:
        groups = exact.view(rows, heads, -1, size, width)
        reach = groups.amax(3, True) - groups.amin(3, True)
        reach = reach.expand_as(groups).reshape_as(exact)
    else:
        share = next(width // n for n in range(1, width + 1) if width % n == 0 and width // n <= size)
        groups = exact.view(rows, heads, count, -1, share)
        reach = (groups.amax(4, True) - groups.amin(4, True)).expand_as(groups).reshape_as(exact)
    eps = torch.finfo(dtype).eps
    return reach / (2**bits - 1) / 2 * (1 + 2 * eps) + exact.abs() * eps + 1e-6


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("axes", AXES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [4, 12, 80])
def test_every_number_is_within_half_a_step_of_its_group(
    bits: int, axes: dict[str, int], dtype: torch.dtype, width: int
) -> None:
    size = 16
    cache = cache_of(nbits=bits, q_group_size=size, residual_length=0, **axes)
    key, value = (numbers(2, 3, 6 * size + 1, width, seed=seed, dtype=dtype) for seed in (0, 1))
    key[..., 1] += 30  # channels of other size and place are what per-channel groups are for
    key[..., 2] *= 20
    given = key.clone(), value.clone()
    got = feed(cache, key, value, [2 * size, 3, 29, *[1] * 32, 1])
    assert torch.equal(key, given[0])
    assert torch.equal(value, given[1])
    for mine, true, axis in zip(got, (key, value), axes.values(), strict=True):
        assert mine.dtype == dtype
        kept = true[:, :, : 6 * size]
        off = (mine[:, :, : 6 * size].double() - kept.double()).abs()
        assert (off <= bound(kept, bits, size, axis, dtype)).all()
        assert off.max() > 0, "nothing was packed"


def test_constant_and_strange_numbers() -> None:
    """Groups without any spread come back exactly; NaN stays NaN instead of becoming some number."""
    cache = cache_of(**{**SMALL, "residual_length": 0})
    key = torch.full((1, 1, 8, 4), 2.5)
    value = key.clone()
    value[0, 0, 3, 2] = torch.nan
    cache.update(key, value, 0)
    keys, values = cache.update(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), 0)
    assert torch.equal(keys[:, :, :8], key)
    assert values[0, 0, 3].isnan().all()
    assert torch.equal(values[0, 0, 4:8], value[0, 0, 4:8])


def test_newest_tokens_are_exact_and_the_first_call_gives_back_what_it_got() -> None:
    cache = cache_of(nbits=2, q_group_size=8, residual_length=20)
    key, value = numbers(1, 2, 100, 4), numbers(1, 2, 100, 4, seed=1)
    first = cache.update(key[:, :, :60], value[:, :, :60], 0)
    assert torch.equal(first[0], key[:, :, :60])
    for at in range(60, 100):
        keys, values = cache.update(key[:, :, at : at + 1], value[:, :, at : at + 1], 0)
        assert torch.equal(keys[:, :, at - 20 :], key[:, :, at - 20 : at + 1])
        assert torch.equal(values[:, :, at - 20 :], value[:, :, at - 20 : at + 1])


def test_blocks_are_packed_once() -> None:
    """A token, once packed, comes back as the same numbers for ever: errors never add up."""
    cache = cache_of(nbits=2, **SMALL)
    key, value = numbers(2, 2, 200, 4), numbers(2, 2, 200, 4, seed=1)
    before = feed(cache, key, value, [40, 1])
    for at in range(41, 200):
        after = cache.update(key[:, :, at : at + 1], value[:, :, at : at + 1], 0)
        assert torch.equal(after[0][:, :, :32], before[0][:, :, :32])
        assert torch.equal(after[1][:, :, :32], before[1][:, :, :32])


def test_crop_leaves_packed_tokens_as_they_are() -> None:
    """Cut anywhere, again and again, and go on: what stays is what was handed out before."""
    random = torch.Generator().manual_seed(3)
    for case in range(40):
        cache = cache_of(nbits=4, **SMALL)
        feed(cache, numbers(1, 2, 60, 4, seed=case), numbers(1, 2, 60, 4, seed=case + 99), [50, 5, 5])
        for _ in range(6):
            layer = cache.layers[0]
            packed, held = layer.sealed, (layer.keys, layer.values)
            count = int(torch.randint(0, layer.length + 1, (1,), generator=random))
            cache.crop(count)
            assert cache.get_seq_length() == count
            more = numbers(1, 2, int(torch.randint(1, 30, (1,), generator=random)), 4, seed=count)
            got = [part.clone() for part in cache.update(more, more, 0)]
            for mine, before, after in zip(got, held, (layer.keys, layer.values), strict=True):
                same = min(count, packed)
                assert torch.equal(mine[:, :, :same], before[:, :, :same])
                assert count == 0 or (mine[:, :, :count] - before[:, :, :count]).abs().max() < 0.3
                assert torch.equal(mine[:, :, count:], more)
                assert torch.equal(after[:, :, :same], mine[:, :, :same])
                assert (after - mine).abs().max() < 0.3
        state = cache.state()
        again = cache_of(nbits=4, **SMALL)
        again.load(state)
        assert torch.equal(again.layers[0].keys, cache.layers[0].keys)


def test_memory_at_8k_tokens() -> None:
    """Everything that is kept counts: codes, scales, and the tokens in full precision."""
    for bits, most in ((4, 0.31), (2, 0.19)):
        for dtype, width in ((torch.bfloat16, 64), (torch.float16, 64), (torch.bfloat16, 48)):
            cache = QuantizedCache(Quantized(nbits=bits), 8192)
            key = torch.zeros(1, 2, 8000, width, dtype=dtype)
            cache.update(key, key, 0)
            for _ in range(192):
                cache.update(key[:, :, :1], key[:, :, :1], 0)
            assert cache.nbytes <= most * 2 * 2 * 8192 * width * 2
            assert cache.working_nbytes <= 1.02 * 2 * 2 * 8192 * width * 2 + 2 * AT_ONCE * 4, (
                "one layer is open at most"
            )


def test_one_layer_is_open_at_a_time() -> None:
    cache = cache_of(**SMALL)
    key = numbers(1, 2, 50, 4)
    for layer in range(6):
        cache.update(key, key, layer)
    pointers = {cache.update(key[:, :, :1], key[:, :, :1], layer)[0].data_ptr() for layer in range(6)}
    assert len(pointers) == 1


def test_gradients_flow_through_the_tokens_of_a_call() -> None:
    cache = cache_of(**SMALL)
    first = numbers(1, 2, 30, 4)
    cache.update(first, first, 0)
    cache.update(first, first, 1)
    new = numbers(1, 2, 2, 4).requires_grad_()
    one, two = cache.update(new, new, 0), cache.update(new, new, 1)
    sum((part**2).sum() for part in (*one, *two)).backward()
    torch.testing.assert_close(new.grad, 8 * new.detach())


def test_dtype_handed_out_can_be_chosen() -> None:
    cache = cache_of(compute_dtype="float16")
    key = numbers(1, 2, 5, 4)
    assert cache.update(key, key, 0)[0].dtype == torch.float16
    assert cache.update(key, key, 0)[0].dtype == torch.float16


def test_other_rows_and_strange_states_are_refused() -> None:
    cache = cache_of(**SMALL)
    key = numbers(1, 2, 30, 4)
    cache.update(key, key, 0)
    with pytest.raises(InputError, match="1 rows but 3 were fed; repeat its rows with batch_repeat_interleave"):
        cache.update(key.expand(3, -1, -1, -1), key.expand(3, -1, -1, -1), 0)
    with pytest.raises(InputError, match="nbits 4 instead of 2"):
        cache_of(nbits=2, **SMALL).load(cache.state())
    with pytest.raises(InputError, match="no state of a quantized cache"):
        cache.load({"keys.0": key, "values.0": key})
    part = {name: tensor for name, tensor in cache.state().items() if name != "0.keys.scale"}
    with pytest.raises(InputError, match="lacks scale"):
        cache.load(part)
    cache.crop(0)
    cache.update(key.expand(3, -1, -1, -1), key.expand(3, -1, -1, -1), 0)
    assert cache.batch_size == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nbits": 3}, "one of 2, 4, 8 with backend 'torch'; 3 is for backend 'hqq'"),
        ({"nbits": 8, "backend": "quanto"}, "one of 2, 4 with backend 'quanto'; 8 is for backend 'torch' and 'hqq'"),
        ({"nbits": 16}, "one of 1, 2, 3, 4, 8"),
        ({"axis_key": 1}, "axis_key must be one of -1, 0 with backend 'torch'"),
        ({"axis_value": -1, "backend": "hqq"}, "axis_value must be one of 0, 1 with backend 'hqq'"),
        ({"backend": "fp8"}, "one of 'torch', 'quanto', 'hqq'"),
        ({"device": "nowhere"}, "device"),
        ({"q_group_size": 12}, "multiple of 8"),
        ({"residual_length": -1}, "at least 0"),
        ({"compute_dtype": "int8"}, "one of None, 'float32'"),
        ({"bits": 4}, "did you mean nbits"),
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any], words: str) -> None:
    from decodekit import load

    with pytest.raises(ConfigError, match=words):
        generate(load("bundled"), [[5]], cache_implementation="quantized", cache_config=options)


class TestSmallBlocks(CacheContract):
    """The contract over caches whose blocks fill and are cut at once, in every form."""

    tolerance = 0.02

    @pytest.fixture(autouse=True, params=AXES, ids=str)
    def _choose(self, request: pytest.FixtureRequest) -> None:
        self.axes = request.param

    def make(self) -> Any:
        return Quantized(nbits=8, **SMALL, **self.axes)


def test_reordering_a_tail_moves_what_is_packed_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `reorder_cache` does, for any common beginning, inside a block or at its end."""
    for common in (0, 1, 7, 8, 9, 16, 30, 31, 40):
        start = numbers(1, 2, common, 4).expand(3, -1, -1, -1)
        key = torch.cat([start, numbers(3, 2, 41 - common, 4, seed=1)], 2)
        both = [cache_of(nbits=4, **SMALL) for _ in range(2)]
        for cache in both:
            # Packed alone, so that a common beginning is one: a block that it ends in has groups of its own.
            for at in range(41):
                cache.update(key[:, :, at : at + 1], key[:, :, at : at + 1], 0)
        rows = torch.tensor([2, 2, 0])
        both[0].reorder_cache(rows)
        both[1].reorder_tail(rows, common)
        off = (both[0].layers[0].keys - both[1].layers[0].keys).abs().max()
        assert off <= (0 if common % 8 == 0 else 0.5), common
        assert torch.equal(both[0].layers[0].keys[:, :, common:], both[1].layers[0].keys[:, :, common:])


def test_it_agrees_with_the_dynamic_cache_while_nothing_is_packed() -> None:
    one, other = cache_of(), DynamicCache()
    key = numbers(2, 2, 191, 4)
    got = [feed(cache, key, key, [100, 30, *[1] * 61]) for cache in (one, other)]
    assert torch.equal(got[0][0], got[1][0])


# -- whole models ---------------------------------------------------------------------------------

PROMPTS = [[5, 9, 33, 60, 8, 17, 42, 29, 11, 50, 12, 7], [23, 4, 61, 13, 37], [9, 9, 30]]
WHOLE = ("llama", "mistral", "gemma3", "native", "t5", "gpt2")
CLOSE = 0.12
"""Bound of the logits with 8 bits, in standard deviations: models with a window see windows of what is packed."""


def ask(model: Any, inputs: Any, **keys: Any) -> Any:
    keys = {"max_new_tokens": 14, "eos_token_id": None, "pad_token_id": 0, "do_sample": False, **keys}
    return generate(model, inputs, output_logits=True, return_dict_in_generate=True, **keys)


def quantized(**more: Any) -> dict[str, Any]:
    return {"cache_implementation": "quantized", "cache_config": {"nbits": 8, **SMALL, **more}}


def near(got: Any, want: Any, rows: int) -> None:
    """Logits of each row are near, step by step, for as long as the tokens are the same."""
    same = torch.ones(rows, dtype=torch.bool)
    new = got.sequences[:, -len(got.logits) :], want.sequences[:, -len(want.logits) :]
    for step, (mine, true) in enumerate(zip(got.logits, want.logits, strict=True)):
        off = ((mine - true).abs().amax(-1) / true.std())[same]
        assert (off < CLOSE).all(), f"step {step}: {off.tolist()}"
        same &= new[0][:, step] == new[1][:, step]
    assert same.sum() * 2 >= rows


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("way", [{}, {"prefill_chunk_size": 4}], ids=["at once", "in chunks"])
def test_models_keep_the_bound(small: Any, name: str, way: dict[str, int]) -> None:
    """Padded rows; models with windows, too: those are masked, nothing is forgotten."""
    inputs = [PROMPTS[0]] * 2 if name == "gpt2" else PROMPTS
    way = {} if name == "t5" else way  # its prompt is the encoder's
    near(ask(small(name), inputs, **quantized(), **way), ask(small(name), inputs, use_cache=False), len(inputs))


@pytest.mark.parametrize("name", WHOLE)
def test_beams_keep_the_bound(small: Any, name: str) -> None:
    """The score of what was found is that of the same tokens without a cache."""
    got = ask(small(name), [PROMPTS[0]], num_beams=3, num_return_sequences=3, **quantized())
    want = ask(small(name), [PROMPTS[0]], num_beams=3, num_return_sequences=3, use_cache=False)
    assert torch.equal(got.sequences[0], want.sequences[0])
    torch.testing.assert_close(got.sequences_scores, want.sequences_scores, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", [name for name in WHOLE if name != "t5"])
def test_a_passed_cache_goes_on_within_the_bound(small: Any, name: str) -> None:
    first = ask(small(name), [PROMPTS[0]], **quantized())
    again = ask(small(name), first.sequences, cache=first.cache)
    near(again, ask(small(name), first.sequences, use_cache=False), 1)
    first.cache.crop(16)
    again = ask(small(name), first.sequences[:, :18], cache=first.cache)
    near(again, ask(small(name), first.sequences[:, :18], use_cache=False), 1)


def test_a_window_that_forgets_is_for_other_caches(small: Any) -> None:
    """Layers with a window see it through the mask: the tokens before it change nothing."""
    got = ask(small("mistral"), [PROMPTS[0]], **quantized())
    assert got.cache.get_seq_length() == len(PROMPTS[0]) + 13
    assert not any(got.cache.is_sliding)


def test_numbers_at_the_end_of_half_precision() -> None:
    """The reach of a group is twice the greatest number, and still no infinity comes out."""
    top = torch.finfo(torch.float16).max
    for bits in (2, 4, 8):
        cache = cache_of(nbits=bits, **{**SMALL, "residual_length": 0})
        key = torch.full((1, 1, 16, 8), top, dtype=torch.float16)
        key[:, :, ::2] = -top
        key[:, :, 3] = 0
        cache.update(key, key, 0)
        for found in cache.update(key[:, :, :1], key[:, :, :1], 0):
            assert found.clone().isfinite().all()
            assert (found[:, :, :16].float() - key.float()).abs().max() <= top / (2**bits - 1) * 1.01


def test_names_of_the_reference_are_taken() -> None:
    """Every option of transformers' configuration, with torch's own objects for dtype and device."""
    told = Quantized(
        backend="torch", nbits=4, axis_key=0, axis_value=0, q_group_size=64, residual_length=128,
        compute_dtype=torch.float16, device=torch.device("cpu"),
    )  # fmt: skip
    assert (told.compute_dtype, told.device) == ("float16", "cpu")
    from decodekit import load

    config = {name: getattr(told, name) for name in ("backend", "nbits", "axis_key", "axis_value", "q_group_size")}
    config |= {"residual_length": 0, "compute_dtype": torch.float32, "device": "cpu"}
    out: Any = generate(
        load("bundled"), [[5, 6]], max_new_tokens=3, cache_implementation="quantized", cache_config=config
    )
    assert out.shape[1] <= 5
