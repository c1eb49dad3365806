"""The preparer ``kernels``: the same answers as the model's own layers, for every shape that they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit import generate, load, plan, release
from decodekit.models import adapter_for
from decodekit.registry import registry
from decodekit_caches.dynamic import DynamicCache
from decodekit_plugins.kernels import library
from decodekit_plugins.models.native.module import NativeConfig, NativeLM
from decodekit_plugins.preparers.blocks import BlockForward, LayerForward
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

NO_COMPILER = library.why_not()
pytestmark = pytest.mark.skipif(bool(NO_COMPILER), reason=NO_COMPILER or "kernels can be built")
TIGHT = {torch.float32: 1e-5, torch.bfloat16: 6e-3, torch.float16: 8e-4}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True, "attention_output_bias": True, "mlp_bias": True},
    "head norms": {"qk_norm": True},
    "window": {"sliding_window": 5},
    "odd sizes": {"hidden_size": 37, "intermediate_size": 51, "head_dim": 6},
    "one key head": {"num_key_value_heads": 1},
    "wide heads": {"head_dim": 80},
}


def native(seed: int = 0, dtype: torch.dtype = torch.float32, **shape: Any) -> NativeLM:
    facts: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": 16,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NativeLM(NativeConfig(**{**facts, **shape}))
        for name, weight in model.named_parameters():
            nn.init.normal_(weight, 1.0 if "norm" in name else 0.0, 0.3)
    return model.to(dtype).eval().requires_grad_(False)


def prepared(model: Any, **options: Any) -> Any:
    return registry.load("preparers", "kernels")(**options).prepare(adapter_for(model))


def logits(adapter: Any, tokens: torch.Tensor, cache: Any = None, mask: torch.Tensor | None = None) -> torch.Tensor:
    width = tokens.shape[1]
    start = 0 if cache is None else cache.get_seq_length()
    positions = torch.arange(start, start + width).expand_as(tokens)
    with torch.no_grad():
        return adapter.forward(tokens, positions, cache, mask=mask, last=width).logits


def near(got: torch.Tensor, want: torch.Tensor, tight: float) -> None:
    assert got.dtype is want.dtype
    off = float((got.float() - want.float()).abs().max() / want.float().abs().max())
    assert off <= tight, off


# -- one product ---------------------------------------------------------------------------------------


@given(
    rows=st.integers(1, 150), count=st.integers(1, 70), width=st.integers(1, 70), dtype=st.sampled_from(list(TIGHT)),
    mixed=st.booleans(), with_bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_product(
    rows: int, count: int, width: int, dtype: torch.dtype, mixed: bool, with_bias: bool, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    kind = torch.float32 if mixed else dtype
    weight = torch.randn(count, width, generator=random).to(dtype)
    x, bias = torch.randn(rows, width, generator=random).to(kind), torch.randn(count, generator=random).to(kind)
    given_bias = bias if with_bias else None
    want = x.double() @ weight.double().t() + (bias.double() if with_bias else 0)
    got = library.linear(x, weight, given_bias)
    assert got.dtype is kind
    assert float((got.double() - want).abs().max()) <= TIGHT[kind] * max(1.0, float(want.abs().max()))
    if rows <= 8:
        alone = torch.cat([library.linear(row[None], weight, given_bias) for row in x])
        assert torch.equal(alone, got), "a row gives other bits in a batch"


@pytest.mark.parametrize("dtype", list(TIGHT), ids=str)
@pytest.mark.parametrize("mixed", [False, True], ids=["alike", "float32 in and out"])
@pytest.mark.parametrize("shape", [(97, 33, 800), (200, 130, 1601), (130, 300, 33), (1030, 64, 96)], ids=str)
def test_products_of_many_rows(shape: tuple[int, int, int], dtype: torch.dtype, mixed: bool) -> None:
    """Several panels, chunks and pieces; as near to the true sums as torch's own products in float32."""
    rows, count, width = shape
    random = torch.Generator().manual_seed(0)
    kind = torch.float32 if mixed else dtype
    weight = torch.randn(count, width, generator=random).to(dtype)
    x, bias = torch.randn(rows, width, generator=random).to(kind), torch.randn(count, generator=random).to(kind)
    want = x.double() @ weight.double().t() + bias.double()
    off = (library.linear(x, weight, bias).double() - want).abs().max()
    most = 5e-4 if kind is torch.float32 else float(want.abs().max()) * torch.finfo(kind).eps
    assert float(off) <= most


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_odd_numbers_stay_in_their_row(value: float) -> None:
    x, weight = torch.ones(200, 70), torch.full((40, 70), 1.001)
    x[7, 3] = value
    got = library.linear(x, weight, None)
    others = torch.arange(200) != 7
    assert torch.allclose(got[others], torch.full((199, 40), 70 * 1.001))
    if value == 3e38:  # its parts must not round to what is endless
        assert torch.allclose(got[7], torch.full((40,), 3e38 * 1.001))
    else:
        assert not got[7].isfinite().any()


def test_what_is_no_number_stays_none() -> None:
    weight = torch.eye(3)
    for value in (float("nan"), float("inf")):
        for dtype in TIGHT:
            got = library.linear(
                torch.tensor([[value, 1.0, 2.0]], dtype=dtype), weight[:, :1].repeat(1, 3).to(dtype), None
            )
            assert not got[0, 0].isfinite()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_no_bit(threads: int) -> None:
    x, weight = torch.randn(5, 33), torch.randn(130, 33)
    want, before = library.linear(x, weight, None), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert torch.equal(library.linear(x, weight, None), want)
    finally:
        torch.set_num_threads(before)


# -- whole layers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(TIGHT), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_native_layers(shape: str, dtype: torch.dtype) -> None:
    """A prompt of many tokens, steps of one and of several, with padding and without."""
    model = native(dtype=dtype, **SHAPES[shape])
    adapter = prepared(model)
    assert all(isinstance(layer, BlockForward) for layer in adapter.model.model.layers)
    random = torch.Generator().manual_seed(1)
    for rows, masked in ((1, False), (3, False), (3, True)):
        caches = [DynamicCache() for _ in range(2)]
        seen = 0
        for width in (40, 1, 4, 1):
            tokens = torch.randint(3, 97, (rows, width), generator=random)
            seen += width
            mask = torch.ones(rows, seen, dtype=torch.bool) if masked else None
            if mask is not None:
                mask[1, :7] = False
            got, want = (logits(a, tokens, c, mask) for a, c in zip((adapter, adapter_for(model)), caches, strict=True))
            near(got[:, -1], want[:, -1], 3 * TIGHT[dtype] if dtype is torch.float32 else 40 * TIGHT[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounds_less_than_torch(dtype: torch.dtype) -> None:
    """Sums are kept in float32, so a model in half precision is no further from float32 than torch's own layers."""
    model = native(dtype=dtype)
    exact = native()
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    tokens = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(2))
    want = logits(adapter_for(exact), tokens)
    ours, stock = (
        float((logits(a, tokens).float() - want).abs().mean()) for a in (prepared(model), adapter_for(model))
    )
    assert ours <= 1.2 * stock + 1e-6


def llama(kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**shape, **more})
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForCausalLM")(config).to(dtype).eval()


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Mistral", {"sliding_window": 6}),
        ("Qwen2", {}),
        ("Qwen3", {}),
    ],
)
@pytest.mark.parametrize("cache", ["dynamic", "static", "quantized", "model"])
def test_layers_of_transformers(kind: str, more: dict[str, Any], cache: str) -> None:
    model = llama(kind, **more)
    adapter = prepared(model)
    assert all(isinstance(layer, LayerForward) for layer in adapter.model.model.layers)
    keys: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    keys |= {"return_dict_in_generate": True, "cache_implementation": cache}
    for prompts in ([[5, 9, 3], [7]], [[5] * 30 + [7]]):
        want, got = generate(model, prompts, **keys), generate(model, prompts, prepare="kernels", **keys)
        assert torch.equal(got.sequences, want.sequences)
        for one, other in zip(got.logits, want.logits, strict=True):
            assert float((one - other).abs().max()) < 1e-4


def test_other_layers_are_left() -> None:
    """What differs from Llama's forward pass is not taken for it; its linear layers run kernels all the same."""
    model = llama("Llama", hidden_act="gelu")
    adapter = prepared(model)
    assert not any(isinstance(module, LayerForward) for module in adapter.model.modules())
    near(logits(adapter, torch.tensor([[5, 9]])), logits(adapter_for(model), torch.tensor([[5, 9]])), 1e-5)
    model = native()
    heard: list[int] = []
    model.model.layers[1].mlp.register_forward_hook(lambda *_: heard.append(1))
    adapter = prepared(model)
    assert [isinstance(layer, BlockForward) for layer in adapter.model.model.layers] == [True, False, True]
    logits(adapter, torch.tensor([[5, 9]]))
    assert heard == [1]


def test_hidden_states_and_attention_weights_of_transformers() -> None:
    model = llama("Llama")
    keys: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    keys["output_hidden_states"] = True
    want, got = generate(model, [[5, 9]], **keys), generate(model, [[5, 9]], prepare="kernels", **keys)
    for step, other in zip(got.hidden_states, want.hidden_states, strict=True):
        for one, two in zip(step, other, strict=True):
            assert torch.allclose(one, two, atol=1e-5)
    again = generate(model, [[5, 9]], prepare="kernels", **keys)  # the hooks that were installed are there now
    assert torch.equal(again.hidden_states[0][1], got.hidden_states[0][1])
    eager = llama("Llama", attn_implementation="eager")
    keys = {**keys, "output_attentions": True}
    want, got = generate(eager, [[5, 9]], **keys), generate(eager, [[5, 9]], prepare="kernels", **keys)
    assert len(got.attentions) == 3
    assert torch.allclose(got.attentions[0][1], want.attentions[0][1], atol=1e-5)


# -- weights that change -------------------------------------------------------------------------------


def test_norms_and_biases_are_watched_too() -> None:
    model = native(attention_bias=True)
    tokens = torch.tensor([[5, 9, 3]])
    logits(prepared(model), tokens)
    block = model.model.layers[0]
    block.input_layernorm.weight = nn.Parameter(torch.full((64,), 0.5), requires_grad=False)
    near(logits(prepared(model), tokens), logits(adapter_for(model), tokens), 1e-5)
    block.self_attn.qkv_proj.bias = nn.Parameter(torch.ones(160), requires_grad=False)
    near(logits(prepared(model), tokens), logits(adapter_for(model), tokens), 1e-5)
    model.model.norm.weight = nn.Parameter(torch.full((64,), 0.25), requires_grad=False)
    near(logits(prepared(model), tokens), logits(adapter_for(model), tokens), 1e-5)


def test_nothing_is_copied() -> None:
    model = native()
    adapter = prepared(model)
    layer = adapter.model.model.layers[0]
    assert layer.steps.facts.o.weight.data_ptr() == model.model.layers[0].self_attn.o_proj.weight.data_ptr()
    rows = plan(model, [[5]], prepare="kernels").describe()["prepared"]
    assert {"layers": 3, "shape": "64 x 112", "form": "whole Block", "rows": "all"} in rows
    freed = plan(model, [[5]], preparers={"kernels": {"free": True}}).describe()["prepared"]
    assert all("it is what runs" in row["form"] for row in freed if row["form"].startswith("kernel"))


@pytest.mark.parametrize("free", [False, True])
def test_another_type(free: bool) -> None:
    model, tokens = native(), torch.tensor([[5, 9, 3, 8], [4, 4, 1, 7]])
    want = logits(adapter_for(native()), tokens)
    adapter = prepared(model, dtype="bfloat16", free=free)
    got = logits(adapter, tokens)
    near(got, want, 0.1)
    assert float((got - want).abs().max()) > 0
    if free:
        with pytest.raises(Exception, match="freed"):
            model(tokens, torch.arange(4).expand(2, 4))
    else:
        assert release(model)
        assert torch.equal(logits(adapter_for(model), tokens), want)


# -- where kernels cannot run --------------------------------------------------------------------------


def test_gradients_autocast_and_compiling_run_the_layers_themselves() -> None:
    model = native().requires_grad_(True)
    adapter = prepared(model)
    tokens, positions = torch.tensor([[5, 9, 3]]), torch.arange(3)[None]
    adapter.forward(tokens, positions, None, last=3).logits.sum().backward()
    assert float(model.model.layers[0].mlp.down_proj.weight.grad.abs().sum()) > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        near(logits(adapter, tokens).float(), logits(adapter_for(model), tokens).float(), 1e-6)
    compiled = torch.compile(adapter.model, backend="eager", fullgraph=True)
    with torch.no_grad():
        out = compiled(tokens, positions).logits
    near(out, logits(adapter_for(model), tokens), 1e-5)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model stays as it is, `explain` says why, and `auto` packs instead."""
    error = library.Unbuilt("a C compiler was not found: install gcc")
    from decodekit_plugins.preparers import layouts

    monkeypatch.setattr(library, "_loaded", lambda: error)
    layouts.usable.cache_clear()
    try:
        model = native()
        rows = plan(model, [[5]], prepare="kernels").describe()["prepared"]
        assert {row["form"] for row in rows} == {"as it was: a C compiler was not found: install gcc"}
        assert torch.equal(
            generate(model, [[5]], max_new_tokens=2, prepare="kernels"), generate(model, [[5]], max_new_tokens=2)
        )
        with pytest.raises(library.Unbuilt, match="install gcc"):
            library.linear(torch.ones(1, 2), torch.ones(2, 2), None)
    finally:
        layouts.usable.cache_clear()


def test_auto_runs_kernels() -> None:
    model = native(hidden_size=256, intermediate_size=300)
    rows = plan(load(model), [[5]]).describe()["prepared"]
    assert [row["layers"] for row in rows if row["form"] == "whole Block"] == [3]
    assert "prepared" not in plan(load(native()), [[5]]).describe() or not [
        row for row in plan(load(native()), [[5]]).describe()["prepared"] if row["form"].startswith("kernel")
    ]
