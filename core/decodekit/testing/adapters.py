"""The conformance suite of model adapters: whatever the path, a token's logits are the same."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from decodekit.errors import PipelineError
from decodekit.protocols import Forward, ModelAdapter
from decodekit.registry import registry

from .support import context

ABILITIES = frozenset({"cache", "hidden", "early_exit", "early_logits", "positions", "mask", "last", "attentions"})


class AdapterContract:
    """Subclass it in a file that pytest collects, and name what to test::

        class TestMine(AdapterContract):
            def make(self):
                return MyAdapter(small_model())

    `make` gives an adapter of a small float32 model in eval mode, the same weights every time. `lengths` are those of
    the prompts in a padded batch. Tests of abilities that the adapter does not offer are skipped.
    """

    lengths: Sequence[int] = (2, 5, 9)
    tolerance = 1e-4

    def make(self) -> ModelAdapter:
        """Return an adapter. It is called many times."""
        raise NotImplementedError(f"{type(self).__name__} must define make()")

    # -- helpers -----------------------------------------------------------------------------------

    def cache(self, adapter: ModelAdapter) -> Any:
        """A fresh cache of the kind a run would use; None where the model takes none."""
        name = getattr(adapter, "default_cache", "model")
        if "cache" not in adapter.offers():
            return None
        if name == "model":
            return adapter.make_cache("model")
        made = registry.load("caches", name)()
        return made.bind(context()) if hasattr(made, "bind") else made

    def tokens(self, adapter: ModelAdapter, rows: int, width: int, seed: int = 0) -> Tensor:
        """Random ids int64 [rows, width] on the model's device."""
        random = torch.Generator().manual_seed(seed)
        known = min(adapter.spec.vocab_size, adapter.spec.num_embeddings or adapter.spec.vocab_size)
        return torch.randint(min(3, known - 1), known, (rows, width), generator=random).to(adapter.spec.device)

    def padded(self, adapter: ModelAdapter) -> tuple[Tensor, Tensor]:
        """Left-padded ids int64 [B, T] and their mask bool [B, T]."""
        width = max(self.lengths)
        tokens = self.tokens(adapter, len(self.lengths), width)
        pads = torch.tensor([width - n for n in self.lengths], device=tokens.device)
        mask = torch.arange(width, device=tokens.device) >= pads[:, None]
        return tokens.masked_fill(~mask, 0), mask

    def run(
        self,
        adapter: ModelAdapter,
        tokens: Tensor,
        mask: Tensor | None = None,
        cache: Any = None,
        past: int = 0,
        **more: Any,
    ) -> Forward:
        """One forward pass as the loop does it: positions count real tokens; `mask` covers cached tokens too."""
        if mask is None:
            positions = torch.arange(past, past + tokens.shape[1], device=tokens.device).expand_as(tokens)
        else:
            positions = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, past:]
        with torch.no_grad():
            return adapter.forward(tokens, positions, cache, mask=mask, **{"last": tokens.shape[1], **more})

    def near(self, got: Tensor, want: Tensor, what: str) -> None:
        """Equal within the tolerance."""
        assert got.shape == want.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(want.shape)}"
        off = float((got - want).abs().max())
        assert off <= self.tolerance * max(1.0, float(want.abs().max())), f"{what}: logits are off by {off:.3g}"

    def need(self, ability: str) -> ModelAdapter:
        """The adapter, or skip the test."""
        adapter = self.make()
        if ability not in adapter.offers():
            self._skip(f"{ability} is not offered")
        return adapter

    @staticmethod
    def _skip(why: str) -> NoReturn:
        import pytest

        pytest.skip(why)

    # -- what it says ------------------------------------------------------------------------------

    def test_offers_known_abilities(self) -> None:
        """Only names that somebody could ask for."""
        assert set(self.make().offers()) <= ABILITIES

    def test_spec_is_true(self) -> None:
        """Vocabulary, device and dtype are those of the logits."""
        adapter = self.make()
        logits = self.run(adapter, self.tokens(adapter, 1, 3)).logits
        assert logits.shape[-1] == adapter.spec.vocab_size
        assert logits.device == adapter.spec.device
        assert logits.dtype == adapter.spec.dtype

    # -- one pass ----------------------------------------------------------------------------------

    def test_last_positions(self) -> None:
        """`last` logits come back, the same ones as without the limit; asking for more gives all."""
        adapter = self.make()
        tokens = self.tokens(adapter, 2, 6)
        whole = self.run(adapter, tokens).logits
        assert whole.shape == (2, 6, adapter.spec.vocab_size)
        for last in (1, 2, 6):
            self.near(self.run(adapter, tokens, last=last).logits, whole[:, -last:], f"last={last}")

    def test_later_tokens_do_not_matter(self) -> None:
        """Causal: what follows a token does not change its logits."""
        adapter = self.make()
        tokens = self.tokens(adapter, 1, 8)
        other = torch.cat([tokens[:, :4], self.tokens(adapter, 1, 4, seed=5)], 1)
        self.near(self.run(adapter, other).logits[:, :4], self.run(adapter, tokens).logits[:, :4], "other later tokens")

    def test_positions_count(self) -> None:
        """Positions given are positions used."""
        adapter = self.need("positions")
        tokens = self.tokens(adapter, 1, 6)
        near = torch.arange(6, device=tokens.device)[None]
        with torch.no_grad():
            cache = self.cache(adapter)  # with a cache, so that nobody takes the gaps for packed sequences
            a = adapter.forward(tokens, near, cache, last=6).logits
            b = adapter.forward(tokens, near * 3, self.cache(adapter), last=6).logits
        assert not torch.allclose(a, b), "offers positions, but other positions give the same logits"

    def test_arguments_stay(self) -> None:
        """Tokens, positions and mask are not written to."""
        adapter = self.make()
        tokens, mask = self.padded(adapter)
        given = mask if "mask" in adapter.offers() else None
        before = tokens.clone(), mask.clone()
        self.run(adapter, tokens, given)
        assert torch.equal(tokens, before[0])
        assert torch.equal(mask, before[1])

    def test_repeats(self) -> None:
        """The same call gives the same logits, bit for bit."""
        adapter = self.make()
        tokens = self.tokens(adapter, 2, 5)
        assert torch.equal(self.run(adapter, tokens).logits, self.run(adapter, tokens).logits)

    def test_model_stays_as_it_was(self) -> None:
        """No weight, mode, hook, attribute or configuration of the model changes."""
        adapter = self.make()
        model = getattr(adapter, "model", None)
        if not isinstance(model, torch.nn.Module):
            self._skip("the adapter has no attribute model that is a torch.nn.Module")
        before = _portrait(model)
        tokens, mask = self.padded(adapter)
        self.run(adapter, tokens, mask if "mask" in adapter.offers() else None)
        cache = self.cache(adapter)
        cache = self.run(adapter, tokens, None, cache).cache
        if cache is not None:
            self.run(adapter, tokens[:, :1], None, cache, past=tokens.shape[1])
        after = _portrait(model)
        changed = [name for name in {*before, *after} if before.get(name) != after.get(name)]
        assert not changed, f"using the adapter changed the model: {', '.join(sorted(changed))}"

    # -- padding -----------------------------------------------------------------------------------

    def test_padded_equals_alone(self) -> None:
        """A row in a padded batch gets the logits it gets alone (or the adapter refuses the batch)."""
        adapter = self.make()
        tokens, mask = self.padded(adapter)
        try:
            batch = self.run(adapter, tokens, mask, last=1).logits
        except PipelineError:
            assert "mask" not in adapter.offers(), "offers mask, but refuses a padded batch"
            return
        for row, length in enumerate(self.lengths):
            alone = self.run(adapter, tokens[row : row + 1, -length:], last=1).logits
            self.near(batch[row], alone[0], f"prompt of {length} padded to {max(self.lengths)}")

    def test_pad_token_does_not_matter(self) -> None:
        """Other ids under the padding change nothing."""
        adapter = self.need("mask")
        tokens, mask = self.padded(adapter)
        want = self.run(adapter, tokens, mask, last=1).logits
        for pad in (1, 2, adapter.spec.vocab_size - 1):
            self.near(self.run(adapter, tokens.masked_fill(~mask, pad), mask, last=1).logits, want, f"pad token {pad}")

    # -- cache -------------------------------------------------------------------------------------

    def test_cached_equals_uncached(self) -> None:
        """Prefill in chunks, then single tokens: the logits of one pass over everything."""
        adapter = self.need("cache")
        tokens = self.tokens(adapter, 2, 14)
        whole = self.run(adapter, tokens).logits
        for sizes in ((14,), (9, 1, 1, 1, 1, 1), (4, 3, 1, 6)):
            cache, place = self.cache(adapter), 0
            for size in sizes:
                out = self.run(adapter, tokens[:, place : place + size], None, cache, past=place)
                self.near(out.logits, whole[:, place : place + size], f"chunks {sizes}, at {place}")
                cache, place = out.cache, place + size

    def test_padded_and_cached_equals_alone(self) -> None:
        """A padded batch continued from its cache, token by token, equals each row alone and uncached."""
        adapter = self.need("cache")
        if "mask" not in adapter.offers():
            self._skip("mask is not offered")
        tokens, mask = self.padded(adapter)
        more = self.tokens(adapter, len(self.lengths), 6, seed=3)
        cache = self.run(adapter, tokens, mask, self.cache(adapter), last=1).cache
        for step in range(more.shape[1]):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            out = self.run(adapter, more[:, step : step + 1], mask, cache, past=max(self.lengths) + step, last=1)
            cache = out.cache
            for row, length in enumerate(self.lengths):
                alone = torch.cat([tokens[row, -length:], more[row, : step + 1]])[None]
                want = self.run(adapter, alone, last=1).logits[0]
                self.near(out.logits[row], want, f"prompt of {length}, step {step}")

    # -- inside ------------------------------------------------------------------------------------

    def test_hidden_states(self) -> None:
        """Layers asked for come back as [B, Q, H], cached or not, and asking does not change the logits."""
        adapter = self.need("hidden")
        layers = adapter.spec.num_layers
        assert layers is not None, "offers hidden, but the spec does not say how many layers there are"
        tokens = self.tokens(adapter, 2, 5)
        plain = self.run(adapter, tokens)
        for wanted in ((0,), (layers,), tuple(range(layers + 1))):
            out = self.run(adapter, tokens, hidden=wanted)
            assert tuple(sorted(out.hidden)) == wanted
            assert all(tap.shape[:2] == (2, 5) for tap in out.hidden.values())
            self.near(out.logits, plain.logits, f"hidden={wanted}")
        assert not plain.hidden, "hidden states came back that nobody asked for"

    def test_early_logits(self) -> None:
        """The head gives the model's own logits for the last layer's states, and logits for those of every layer."""
        adapter: Any = self.need("early_logits")
        layers = adapter.spec.num_layers
        assert layers is not None, "offers early_logits, but the spec does not say how many layers there are"
        out = self.run(adapter, self.tokens(adapter, 2, 5), hidden=range(layers + 1))
        with torch.no_grad():
            last = adapter.normed(out.hidden[layers]) if hasattr(adapter, "normed") else out.hidden[layers]
            self.near(adapter.early_logits(last), out.logits, "the head on the last layer's states")
            for layer in range(layers):
                assert adapter.early_logits(out.hidden[layer]).shape == out.logits.shape


def _portrait(model: torch.nn.Module) -> dict[str, Any]:
    """Everything about a model that using it must not change."""
    found: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        found[f"weight {name}"] = (tensor.data_ptr(), tensor._version)
    for name, module in model.named_modules():
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        found[f"module {name}"] = (module.training, hooks, sorted(vars(module)))
    for name in ("config", "generation_config"):
        source = getattr(model, name, None)
        found[name] = repr(copy.deepcopy(vars(source))) if hasattr(source, "__dict__") else repr(source)
    return found
