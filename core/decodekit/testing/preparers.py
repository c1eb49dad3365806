"""The conformance suite of preparers: the same answers, faster or not, and nothing of the caller's changed."""

from __future__ import annotations

import copy
from typing import Any, NoReturn

import torch
from torch import Tensor

from decodekit.api import generate
from decodekit.models import adapter_for
from decodekit.protocols import ModelAdapter, Preparer

from .adapters import _portrait
from .models import TinyLM


class PreparerContract:
    """Subclass it in a file that pytest collects, and name what to test::

        class TestMine(PreparerContract):
            def make(self):
                return MyPreparer(option=3)

    `model` gives a small model that the preparer is for, in eval mode, the same weights every time. `frees`: whether
    the preparer as made takes the model's own weights away, so that the model object cannot be compared to itself.
    """

    tolerance = 1e-4
    frees = False
    width = 7

    def make(self) -> Any:
        """Return a preparer. It is called many times."""
        raise NotImplementedError(f"{type(self).__name__} must define make()")

    def model(self) -> torch.nn.Module:
        """Return a model object; decodekit's plugins find its adapter."""
        return TinyLM().eval()

    # -- helpers -----------------------------------------------------------------------------------

    def prepared(self, model: torch.nn.Module, preparer: Preparer | None = None) -> ModelAdapter:
        """The model as the preparer makes it."""
        return (preparer or self.make()).prepare(adapter_for(model))

    def logits(self, adapter: Any, rows: int = 2, seed: int = 0) -> Tensor:
        """Logits [rows, width, V] of random tokens."""
        random = torch.Generator().manual_seed(seed)
        tokens = torch.randint(3, adapter.spec.vocab_size, (rows, self.width), generator=random).to(adapter.spec.device)
        positions = torch.arange(self.width, device=tokens.device).expand_as(tokens)
        with torch.no_grad():
            logits: Tensor = adapter.forward(tokens, positions, None, last=self.width).logits
        return logits

    def near(self, got: Tensor, want: Tensor, what: str) -> None:
        """Equal within the tolerance."""
        off = float((got - want).abs().max())
        assert off <= self.tolerance * max(1.0, float(want.abs().max())), f"{what}: logits are off by {off:.3g}"

    def tokens(self, adapter: Any) -> Tensor:
        """Greedy tokens of a padded batch."""
        return torch.as_tensor(generate(adapter, [[5, 9, 3], [7]], max_new_tokens=6, eos_token_id=None, pad_token_id=0))

    def changes(self, model: torch.nn.Module) -> list[Any]:
        """Ways of changing all weights of a model, each a function without arguments."""

        def scaled() -> None:
            with torch.no_grad():
                for weight in model.parameters():
                    weight.mul_(1.25)

        def behind() -> None:
            for weight in model.parameters():
                weight.data.mul_(0.75)

        def loaded() -> None:
            model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})

        def replaced() -> None:
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}, assign=True)

        return [scaled, behind, loaded, replaced]

    @staticmethod
    def _skip(why: str) -> NoReturn:
        import pytest

        pytest.skip(why)

    # -- what it says ------------------------------------------------------------------------------

    def test_facts_are_facts(self) -> None:
        """What it says of devices, types, frozen weights and memory is of the right kind."""
        made = self.make()
        for name in ("devices", "dtypes"):
            names: Any = getattr(made, name, frozenset())
            assert isinstance(names, frozenset), f"{name} is no frozenset"
            assert all(isinstance(item, str) for item in names), f"{name} holds other things than names"
        assert isinstance(getattr(made, "frozen", True), bool)
        assert float(getattr(made, "memory", 0.0)) >= 0

    # -- answers -----------------------------------------------------------------------------------

    def test_same_answers(self) -> None:
        """Logits for one and several rows, and greedy tokens, are those of the model as it was."""
        plain = adapter_for(self.model())
        adapter = self.prepared(self.model())
        for rows in (1, 3, 9):
            self.near(self.logits(adapter, rows), self.logits(plain, rows), f"{rows} rows")
        assert torch.equal(self.tokens(adapter), self.tokens(plain))

    def test_same_adapter_to_the_loop(self) -> None:
        """What is known of the model and what it can do stay as they were."""
        plain, adapter = adapter_for(self.model()), self.prepared(self.model())
        assert adapter.spec == plain.spec
        assert adapter.offers() >= plain.offers()
        assert dict(adapter.defaults) == dict(plain.defaults)

    def test_again_and_on_top(self) -> None:
        """Prepared twice, or prepared what was prepared: still the same answers."""
        model, preparer = self.model(), self.make()
        want = self.logits(adapter_for(self.model()))
        first = self.prepared(model, preparer)
        self.near(self.logits(self.prepared(model, preparer)), want, "prepared twice")
        self.near(self.logits(preparer.prepare(first)), want, "prepared on top")
        self.near(self.logits(first), want, "the first one afterwards")

    def test_two_models(self) -> None:
        """Models do not get into each other's way."""
        preparer, one, other = self.make(), self.model(), self.model()
        with torch.no_grad():
            for weight in other.parameters():
                weight.mul_(1.1)
        want = self.logits(adapter_for(copy.deepcopy(other)))
        first, second = self.prepared(one, preparer), self.prepared(other, preparer)
        self.near(self.logits(second), want, "the second model")
        self.near(self.logits(first), self.logits(adapter_for(self.model())), "the first model")

    # -- the caller's model ------------------------------------------------------------------------

    def test_model_stays_as_it_was(self) -> None:
        """No weight, mode, hook or attribute of the model object changes, and it gives the same logits, bit for bit."""
        if self.frees:
            self._skip("frees the model's weights")
        model = self.model()
        before, want = _portrait(model), self.logits(adapter_for(model))
        self.logits(self.prepared(model))
        after = _portrait(model)
        assert not [name for name in {*before, *after} if before.get(name) != after.get(name)]
        assert torch.equal(self.logits(adapter_for(model)), want)

    def test_changed_weights_are_noticed(self) -> None:
        """Written to, behind torch's back too, loaded or replaced: the next call knows the new weights."""
        if getattr(self.make(), "frozen", True):
            self._skip("says that weights must stay as they are")
        if self.frees:
            self._skip("frees the model's weights")
        model, preparer = self.model(), self.make()
        self.logits(self.prepared(model, preparer))
        for change in self.changes(model):
            change()
            want = self.logits(adapter_for(model))
            self.near(self.logits(self.prepared(model, preparer)), want, f"weights {change.__name__}")

    def test_release(self) -> None:
        """Undone, the model gives its own logits, bit for bit, and there is nothing left to undo."""
        model, preparer = self.model(), self.make()
        if not hasattr(preparer, "release"):
            self._skip("cannot be undone")
        want = self.logits(adapter_for(self.model()))
        self.logits(self.prepared(model, preparer))
        preparer.release(model)
        assert torch.equal(self.logits(adapter_for(model)), want)
        assert not preparer.release(model)
        self.near(self.logits(self.prepared(model, preparer)), want, "prepared anew")
