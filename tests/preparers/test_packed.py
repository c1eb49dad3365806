"""The packed preparer: which layers it takes, what it leaves, and what happens to the model around it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import PipelineError, generate, load, plan, release
from decodekit.models import adapter_for
from decodekit.registry import registry
from decodekit.testing import TinyLM
from torch import Tensor, nn

BLOCKS = {"layout": "blocks"}
FREED = {"layout": "blocks", "free": True}


class Odd(nn.Module):
    """Linear layers of shapes that fill no block, with and without bias, and a head that is the embedding."""

    def __init__(self, vocab: int = 101, width: int = 23) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embed = nn.Embedding(vocab, width)
            self.up = nn.Linear(width, 1)
            self.wide = nn.Linear(width, 67, bias=False)
            self.down = nn.Linear(67, width)
            self.lm_head = nn.Linear(width, vocab, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.lm_head(x + self.down(self.wide(x).tanh()) * self.up(x))


def packed(**options: Any) -> Any:
    return registry.load("preparers", "packed")(**options)


def ask(model: Any, rows: int = 2, **options: Any) -> Tensor:
    keys = {"preparers": {"packed": options}} if options else {}
    inputs = [[5, 9, 3 + row] for row in range(rows)]
    return torch.as_tensor(generate(model, inputs, max_new_tokens=8, eos_token_id=None, **keys))


def logits(adapter: Any, rows: int = 2) -> Tensor:
    tokens = torch.arange(3, 3 + 5 * rows).view(rows, 5) % 37
    with torch.no_grad():
        return adapter.forward(tokens, torch.arange(5).expand(rows, 5), None, last=5).logits


def facts(model: Any, **options: Any) -> list[dict[str, Any]]:
    return plan(model, [[5]], preparers={"packed": options}).describe()["prepared"]


@pytest.mark.parametrize(
    "options", [BLOCKS, {"layout": "columns"}, FREED, {"layout": "columns", "free": True}], ids=str
)
def test_odd_shapes_biases_and_a_tied_head(options: Any) -> None:
    want, whole = ask(Odd()), logits(adapter_for(Odd()))
    model = Odd()
    assert torch.equal(ask(model, **options), want)
    prepared = packed(**options).prepare(adapter_for(model))
    torch.testing.assert_close(logits(prepared), whole)
    assert sum(row["layers"] for row in prepared.prepared() if row["rows"] == "all") == 4


@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 0.03), ("float16", 0.004)])
@pytest.mark.parametrize("free", [False, True])
def test_other_types_differ_by_their_rounding(dtype: str, most: float, free: bool) -> None:
    want = logits(adapter_for(TinyLM().eval()))
    got = logits(packed(dtype=dtype, free=free).prepare(adapter_for(TinyLM().eval())))
    assert got.dtype == torch.float32
    off = float((got - want).abs().max() / want.abs().max())
    assert 0 < off < most


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_other_types_keep_theirs(dtype: torch.dtype) -> None:
    model = TinyLM().eval().to(dtype)
    want = logits(adapter_for(model))
    got = logits(packed(**BLOCKS).prepare(adapter_for(model)))
    assert got.dtype == dtype
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


# -- what is left as it is ---------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class LowRank(nn.Module):
    """A wrapper as adapters put around a layer, and as they merge it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.a, self.b = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        nn.init.normal_(self.b.weight)
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) if self.merged else self.base(x) + self.b(self.a(x))

    def merge(self) -> None:
        self.base.weight.data += self.b.weight.data @ self.a.weight.data
        self.merged = True


def hooked(model: Odd) -> None:
    model.wide.register_forward_hook(lambda module, args, out: out * 2)


def replaced_forward(model: Odd) -> None:
    model.wide.forward = lambda x: nn.functional.linear(x, model.wide.weight) * 2  # type: ignore[method-assign]


def own_class(model: Odd) -> None:
    twice = Doubled(23, 67, bias=False)
    twice.weight = model.wide.weight
    model.wide = twice


def normed(model: Odd) -> None:
    nn.utils.parametrizations.weight_norm(model.wide)


def wrapped(model: Odd) -> None:
    with torch.random.fork_rng(devices=[]):
        model.wide = LowRank(model.wide)  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "it has hooks"),
        (replaced_forward, "its forward pass was replaced"),
        (own_class, "it has a forward pass of its own"),
        (normed, "its weight is no plain parameter"),
        (wrapped, ""),
    ],
)
@pytest.mark.parametrize("options", [BLOCKS, FREED], ids=str)
def test_strange_layers(change: Callable[[Odd], None], reason: str, options: Any) -> None:
    """They act as they did, and explain says why they were left."""
    model = Odd()
    change(model)
    want = ask(model)
    assert torch.equal(ask(model, **options), want)
    left = [row["form"] for row in facts(model, **options) if row["form"].startswith("as it was")]
    assert left == ([f"as it was: {reason}"] if reason else [])


@pytest.mark.parametrize("change", [hooked, replaced_forward, own_class, normed, wrapped])
def test_layers_that_become_strange_later(change: Callable[[Odd], None]) -> None:
    model = Odd()
    ask(model, **BLOCKS)
    change(model)
    assert torch.equal(ask(model, **BLOCKS), ask(model))


def test_an_adapter_that_is_merged() -> None:
    model = Odd()
    wrapped(model)
    ask(model, **BLOCKS)
    model.wide.merge()  # type: ignore[operator]
    assert torch.equal(ask(model, **BLOCKS), ask(model))


def test_a_weight_that_others_read_is_not_freed() -> None:
    class Reads(Odd):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.Bilinear(1, 1, 1)
            self.other.weight_too = self.wide.weight

    model = Reads()
    assert torch.equal(ask(model, **FREED), ask(Odd()))
    assert any("original kept: other modules use it" in row["form"] for row in facts(model, **FREED))


def test_missing_ops_leave_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    from decodekit_plugins.preparers import prepared

    monkeypatch.setattr(prepared, "fixed", lambda form, dtype: prepared.PLAIN)
    model = Odd()
    assert torch.equal(ask(model, **BLOCKS), ask(model))
    assert {row["rows"] for row in facts(model, **BLOCKS)} == {"none"}


def test_gpt2_keeps_its_weights_the_other_way_round() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=71, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    model = transformers.GPT2LMHeadModel(config).eval()
    want, kept = ask(model), {name: value.clone() for name, value in model.state_dict().items()}
    assert torch.equal(ask(model, **BLOCKS), want)
    assert torch.equal(ask(model, **FREED), want)
    assert sum(row["layers"] for row in facts(model, **FREED) if "freed" in row["form"]) == 9
    twin = copy.deepcopy(model)
    assert all(torch.equal(value, kept[name]) for name, value in twin.state_dict().items())
    assert release(model)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert model.transformer.h[0].mlp.c_fc.weight.is_contiguous()


# -- freed models ------------------------------------------------------------------------------------


def test_a_freed_model_says_what_to_do() -> None:
    model = TinyLM().eval()
    ask(model, **FREED)
    with pytest.raises(PipelineError, match=r"freed.*prepare='packed'.*release\(model\)"):
        generate(model, [[5]], max_new_tokens=2)
    with pytest.raises(RuntimeError, match="freed"):
        model.load_state_dict(TinyLM().state_dict())
    with pytest.raises(PipelineError, match="freed"):
        model.double()
    assert model.lm_head.weight.shape == (37, 16)
    assert "FreedWeight" in repr(model.lm_head.weight)
    with pytest.raises(PipelineError, match="freed in torch.float32"):
        ask(model, dtype="bfloat16")


def test_a_freed_model_takes_new_weights() -> None:
    model, other = TinyLM().eval(), TinyLM(seed=3).eval()
    ask(model, **FREED)
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(ask(model, **FREED), ask(TinyLM(seed=3).eval()))
    assert any("freed" in row["form"] for row in facts(model, **FREED))


def test_rounded_weights_do_not_come_back() -> None:
    model = TinyLM().eval()
    ask(model, dtype="bfloat16", free=True)
    with pytest.raises(PipelineError, match=r"freed in bfloat16.*load the model again"):
        release(model)
    ask(model, dtype="bfloat16", free=True)


@pytest.mark.parametrize("options", [BLOCKS, FREED], ids=str)
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save"])
def test_copies_are_whole(options: Any, how: str) -> None:
    model, want = Odd(), ask(Odd())
    ask(model, **options)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model.state_dict(), file := io.BytesIO())
        file.seek(0)
        twin = Odd()
        twin.load_state_dict(torch.load(file))
    assert torch.equal(ask(twin), want)
    assert twin.lm_head.weight is twin.embed.weight
    assert torch.equal(ask(twin, **options), want)
    assert torch.equal(ask(model, **options), want)


def test_a_prepared_adapter_is_copied() -> None:
    adapter = packed(**FREED).prepare(adapter_for(Odd()))
    assert torch.equal(logits(copy.deepcopy(adapter)), logits(adapter))


# -- around the forward pass -------------------------------------------------------------------------


@pytest.mark.parametrize("options", [BLOCKS, FREED], ids=str)
def test_autocast(options: Any) -> None:
    model = TinyLM().eval()
    with torch.autocast("cpu", torch.bfloat16):
        want = logits(adapter_for(TinyLM().eval()))
        got = logits(packed(**options).prepare(adapter_for(model)))
    assert got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05 * float(want.abs().max()))


def test_gradients_flow_through_the_twin() -> None:
    model = Odd()
    adapter = packed(**BLOCKS).prepare(adapter_for(model))
    tokens = torch.tensor([[5, 6]])
    adapter.forward(tokens, torch.arange(2)[None], None, last=2).logits.sum().backward()
    assert model.wide.weight.grad is not None


def test_threads_prepare_once() -> None:
    model, made = Odd(), []
    want = ask(Odd())

    def run() -> None:
        made.append(ask(model, **BLOCKS))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    assert all(torch.equal(got, want) for got in made)
    twins = {id(packed(**BLOCKS).prepare(adapter_for(model)).model) for _ in range(3)}
    assert len(twins) == 1


@pytest.mark.parametrize("options", [BLOCKS, FREED], ids=str)
def test_what_was_made_goes_with_the_model(options: Any) -> None:
    model = Odd()
    twin = weakref.ref(packed(**options).prepare(adapter_for(model)).model)
    assert twin() is not None
    del model
    gc.collect()
    assert twin() is None


def test_modes_and_modules_changed_later_are_seen() -> None:
    model = nn.Sequential(nn.Embedding(41, 16), nn.Dropout(0.5), nn.Linear(16, 41)).eval()
    model.vocab_size = 41  # type: ignore[assignment]
    adapter = adapter_for(model)
    packed(**BLOCKS).prepare(adapter)
    model[1] = nn.Identity()
    assert isinstance(packed(**BLOCKS).prepare(adapter).model[1], nn.Identity)
    model.train()
    assert packed(**BLOCKS).prepare(adapter).model.training


def test_compiled_models_are_left_alone() -> None:
    model = torch.compile(Odd(), backend="eager")
    assert torch.equal(ask(model, **BLOCKS), ask(Odd()))


# -- load --------------------------------------------------------------------------------------------


def test_load_prepares_and_says_so() -> None:
    lm = load(Odd())
    settings = plan(lm, [[5]]).describe()["settings"]
    assert (settings["prepare"]["value"], settings["prepare"]["origin"]) == ("auto", "model")
    assert "prepare" not in plan(lm, [[5]], prepare=None).describe()["settings"]
    assert "prepare" not in plan(load(Odd(), prepare=None), [[5]]).describe()["settings"]
    assert "prepare" not in plan(Odd(), [[5]]).describe()["settings"]
    assert torch.equal(ask(lm), ask(Odd()))
    assert torch.equal(ask(load(Odd(), prepare="packed"), **FREED), ask(Odd()))


def test_auto_packs_what_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    from decodekit_plugins.preparers import auto, prepared
    from decodekit_plugins.preparers.choice import Choice
    from decodekit_plugins.preparers.layouts import Blocked

    shares = iter([0.5, 0.97])
    monkeypatch.setattr(prepared, "measured", lambda weights, only: Choice(Blocked, share=next(shares)))
    model = nn.Sequential(nn.Embedding(41, 16), nn.Linear(16, 20), nn.Linear(20, 41))
    model.vocab_size = 41  # type: ignore[assignment]
    rows = plan(load(model), [[5]]).describe()["prepared"]
    assert [row["form"].partition(":")[0] for row in rows] == ["blocks of float32", "as it was"]
    release(model)
    monkeypatch.setattr(auto, "_free", lambda: 100.0)
    assert "prepared" not in plan(load(model), [[5]]).describe()


def test_auto_goes_on_with_a_freed_model() -> None:
    model = Odd()
    want = ask(Odd())
    ask(model, **FREED)
    assert torch.equal(ask(load(model)), want)
    assert release(load(model))
    assert torch.equal(ask(model), want)
    assert not release(model)


def test_fused_layers_are_saved_by_their_parts() -> None:
    from decodekit_plugins.models.native.module import NativeConfig, NativeLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = NativeLM(NativeConfig(71, 32, 48, 2, 4, 2, 8)).eval()
    want, kept = ask(model), {name: value.clone() for name, value in model.state_dict().items()}
    assert torch.equal(ask(model, **FREED), want)
    torch.save(model.state_dict(), file := io.BytesIO())
    file.seek(0)
    assert all(torch.equal(value, kept[name]) for name, value in torch.load(file).items())
    assert release(model)
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
