"""A model whose linear layers run packed weights: a twin of the caller's, made once and watched."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from decodekit.errors import PipelineError
from torch import Tensor, nn

from decodekit_plugins.kernels import library
from decodekit_plugins.twins.shadow import Twin

from .blocks import fused
from .choice import FORMS, PLAIN, Choice, fixed, measured
from .freed import FreedWeight
from .layers import Pack, linear, matrix, packed, turned, why_not
from .layouts import Plain
from .stack import stacked
from .streamed import HALVES, Halved, Streamed, half_of
from .trunks import decoder
from .watch import Watch, Weight

KERNEL = "kernel"
"""The form that runs kernels of our own; layers that are known run fused ones."""


@attrs.frozen
class Wish:
    """How a model shall be prepared."""

    dtype: torch.dtype | None = None
    """Type of the packed weights; None: each weight's own."""
    free: bool = False
    layout: str = "measured"
    halve: bool = False
    """Where a type of half the size holds all weights exactly, kernels of our own read that."""
    share: float = 1.0
    """Only layers are packed that take at most this share of their time, as the mean over numbers of rows."""


@attrs.frozen
class Fact:
    """What became of the linear layers of one kind, for people to read."""

    shape: tuple[int, ...]
    form: str
    rows: str


class Prepared:
    """The twin of a model, with packed layers for those that gain by it.

    `twin` is None where none does. Raises `PipelineError` where weights were freed in another type than is wanted.
    """

    def __init__(self, model: nn.Module, wish: Wish, kernels: Mapping[int, Plain] | None = None) -> None:
        self.wish = wish
        self._model = weakref.ref(model)
        self._kernels = dict(kernels or {})
        self._facts: list[Fact] = []
        self._frees: list[tuple[str, Fact]] = []
        self._packs: dict[int, Pack] = {}
        with torch.no_grad():
            users = _users(model)
            layers = {name: module for name, module in model.named_modules() if linear(module)}
            self._half = self._find_half(layers.values())
            chosen = self._choose(layers.values())
            homes: list[tuple[dict[str, Any], str]] = []
            for module in layers.values():
                self._pack(module, chosen, users, homes)
            self._tune()
            self._runs = {key: pack.kernel for key, pack in self._packs.items() if all(pack.picks)}
            self.twin = Twin(model, lambda module: self._swap(module, homes)) if self._packs else None
        self._packs, self._runs = {}, {}
        self._freed = [module._parameters for module in layers.values() if _is_freed(module)]
        self._watch = Watch([Weight.of(home, name, self._kernels.get(id(home[name]))) for home, name in homes])
        self._kernels = {}
        if wish.free:
            _trim()

    # -- making ------------------------------------------------------------------------------------

    def _find_half(self, layers: Iterable[nn.Module]) -> torch.dtype | None:
        """The type of half the size that holds all weights exactly; None where none does, or it is not wanted."""
        weights: list[Any] = [module._parameters["weight"] for module in layers if not why_not(module)]
        if not self.wish.halve or library.why_not() or any(weight.dtype is not torch.float32 for weight in weights):
            return None
        freed = {weight.kernel.dtype for weight in weights if isinstance(weight, FreedWeight)}
        whole = {id(weight): weight for weight in weights if not isinstance(weight, FreedWeight)}
        return half_of(whole.values(), [dtype for dtype in HALVES if freed <= {dtype}])

    def _choose(self, layers: Iterable[nn.Module]) -> dict[Any, Choice]:
        """The form for each shape and type."""
        alike: dict[Any, list[nn.Module]] = {}
        for module in layers:
            if not why_not(module) and not _is_freed(module):
                alike.setdefault(_kind(module), []).append(module)
        return {kind: self._form(kind[1], modules) for kind, modules in alike.items()}

    def _form(self, dtype: torch.dtype, modules: list[nn.Module]) -> Choice:
        wanted = self.wish.dtype or dtype
        if wanted is not dtype:
            found = fixed(FORMS["blocks" if self.wish.layout == "measured" else self.wish.layout], wanted)
            return found if found.form is not None else Choice(Plain)
        if self.wish.layout != "measured":
            return fixed(FORMS[self.wish.layout], dtype)
        found = measured([matrix(module) for module in modules], self.wish.free)
        return found if (found.whole if self.wish.free else found.share) <= self.wish.share else PLAIN

    def _tune(self) -> None:
        """Let kernels choose how they read the largest weight."""
        found = [pack.kernel.data for pack in self._packs.values() if isinstance(pack.kernel, Streamed)]
        if found:
            library.tune(max(found, key=Tensor.numel))

    def _pack(
        self, module: nn.Module, chosen: Mapping[Any, Choice], users: Mapping[int, list[nn.Module]],
        homes: list[tuple[dict[str, Any], str]],
    ) -> None:  # fmt: skip
        if reason := why_not(module):
            self._note(_shape(module), f"as it was: {reason}")
            return
        weight: Any = module._parameters["weight"]
        wanted = self.wish.dtype or weight.dtype
        if isinstance(weight, FreedWeight):
            if weight.kernel.dtype is not wanted and not (weight.kernel.exact and wanted is weight.dtype):
                raise PipelineError(
                    f"this model's weights were freed in {weight.kernel.dtype}, but {wanted} is wanted: prepare it as "
                    f"before, or call decodekit.release(model)"
                )
            kernel = weight.kernel
            self._packs[id(module)] = Pack(kernel, weight.dtype, Choice(None).picks, True)
            self._note(kernel.shape, _form_words(kernel), "all", "; original freed")
            return
        choice = chosen[_kind(module)]
        if choice.form is None:
            reason = self.wish.layout == KERNEL and library.why_not()
            self._note(_shape(module), f"as it was: {reason or 'that is as fast'}")
            return
        kernel = self._kernels.get(id(weight))
        if kernel is None or kernel.dtype is not (self._half or wanted):
            kernel = Halved(matrix(module), self._half) if self._half else choice.form(matrix(module).to(wanted))
        self._kernels[id(weight)] = kernel
        whole = kernel.is_part_of(weight)
        why = "" if not self.wish.free else "it is what runs" if whole else self._keeps(weight, module, kernel, users)
        if self.wish.free and not why:
            stand_in = FreedWeight(weight, kernel, turned(module))
            for user in users[id(weight)]:
                user._parameters["weight"] = stand_in
            if isinstance(kernel, Halved):
                kernel.source = None
        else:
            homes.append((module._parameters, "weight"))
        freed = self.wish.free and not why
        self._packs[id(module)] = Pack(kernel, weight.dtype, choice.picks, freed)
        words = f"; original kept: {why}" if why else "; original freed" if freed else ""
        self._note(kernel.shape, _form_words(kernel), _rows(choice.picks), words)

    def _keeps(
        self, weight: nn.Parameter, module: nn.Module, kernel: Plain, users: Mapping[int, list[nn.Module]]
    ) -> str:
        """Why a weight cannot be freed, or an empty string."""
        others = [user for user in users[id(weight)] if user is not module]
        alike = [user for user in others if linear(user) and not why_not(user) and turned(user) == turned(module)]
        embeddings = [user for user in others if isinstance(user, nn.Embedding)]
        if len(alike) + len(embeddings) < len(others):
            return "other modules use it"
        if any(user._parameters.get("weight") is not weight for user in others):
            return "other modules have it by another name"
        if embeddings and (turned(module) or any(user.max_norm is not None for user in embeddings)):
            return "an embedding uses it in another way"
        return "" if not embeddings or kernel.reads_rows(matrix(module)) else "no embedding can read this form"

    def _swap(self, module: nn.Module, homes: list[tuple[dict[str, Any], str]]) -> nn.Module | None:
        pack = self._packs.get(id(module))
        if pack is not None:
            return packed(module, pack)
        if self.wish.layout != KERNEL or (made := fused(module, self._runs)) is None:
            return stacked(module) or decoder(module) if self.wish.layout == KERNEL else None
        known = {(id(home), name) for home, name in homes}
        held = [(part._parameters, name) for part in module.modules() for name in part._parameters]
        homes += [
            (home, name)
            for home, name in held
            if isinstance(home[name], Tensor) and not isinstance(home[name], FreedWeight)
            and (id(home), name) not in known
        ]  # fmt: skip
        if (steps := getattr(made, "steps", None)) is not None:
            self._note((steps.layer.hidden, steps.layer.inner), f"whole {type(module).__name__}", "all")
        return made

    def _note(self, shape: Any, form: str, rows: str = "none", more: str = "") -> None:
        self._facts.append(Fact(tuple(shape), form + more, rows))

    # -- later -------------------------------------------------------------------------------------

    def renewed(self, model: nn.Module) -> Prepared:
        """This, or what must be made of the model now that it is another."""
        changed = self._watch.changed()
        gone = any(not isinstance(home.get("weight"), FreedWeight) for home in self._freed)
        if not changed and not gone and not (self.twin is not None and self.twin.stale()):
            return self
        bad = {id(weight.parameter) for weight in changed}
        kept = {id(w.parameter): w.kernel for w in self._watch.weights if w.kernel and id(w.parameter) not in bad}
        return Prepared(model, self.wish, kept)

    def through(self, adapter: Any) -> Any:
        """A copy of `adapter` that runs the twin; the same model where no layer gains by it."""
        made = copy.copy(adapter) if self.twin is None else self.twin.through(adapter)
        made.__dict__.update(prepared=self.report, unprepared=adapter)  # frozen adapters, too
        return made

    @property
    def frees(self) -> bool:
        """Whether any weight was freed."""
        return bool(self._freed)

    def release(self, model: nn.Module) -> None:
        """Give the model its weights back. Raises `PipelineError`, changing nothing, where they were rounded."""
        users = [(module, w) for module in model.modules() if (w := module._parameters.get("weight")) is not None]
        freed = {id(weight): weight for _, weight in users if isinstance(weight, FreedWeight)}
        made = {id_: weight.restored() for id_, weight in freed.items()}
        for module, weight in users:
            if id(weight) in made:
                module._parameters["weight"] = made[id(weight)]

    def report(self) -> list[dict[str, Any]]:
        """Linear layers by shape: how many, in which form, for which numbers of rows."""
        counts: dict[Fact, int] = {}
        for fact in self._facts:
            counts[fact] = counts.get(fact, 0) + 1
        return [
            {"layers": count, "shape": " x ".join(map(str, fact.shape)), "form": fact.form, "rows": fact.rows}
            for fact, count in counts.items()
        ]


def _trim() -> None:
    """Let the C library return what was freed to the system, where it can: weights are many pieces of its heap."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _users(model: nn.Module) -> dict[int, list[nn.Module]]:
    """All modules that hold a parameter, by its id."""
    found: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(module)
    return found


def _is_freed(module: nn.Module) -> bool:
    return isinstance(module._parameters.get("weight"), FreedWeight)


def _kind(module: nn.Module) -> tuple[tuple[int, ...], torch.dtype]:
    weight: Tensor = module._parameters["weight"]  # type: ignore[assignment]
    return _shape(module), weight.dtype


def _shape(module: nn.Module) -> tuple[int, ...]:
    weight = module._parameters.get("weight")
    shape = () if weight is None else tuple(weight.shape)
    return shape[::-1] if turned(module) else shape


def _form_words(kernel: Plain) -> str:
    return f"{kernel.name} of {str(kernel.dtype).removeprefix('torch.')}{', exactly' if kernel.exact else ''}"


def _rows(picks: tuple[bool, ...]) -> str:
    """For which numbers of rows a kernel runs: by bit length, as in ``1, 4-15, from 64``."""
    if all(picks):
        return "all"
    words, last = [], len(picks) - 1
    lengths = [length for length in range(1, last + 1) if picks[length]]
    runs: list[list[int]] = []
    for length in lengths:
        if runs and runs[-1][-1] == length - 1:
            runs[-1].append(length)
        else:
            runs.append([length])
    for run in runs:
        low, high = 1 << (run[0] - 1), (1 << run[-1]) - 1
        words.append(f"from {low}" if run[-1] == last else str(low) if low == high else f"{low}-{high}")
    return ", ".join(words) or "none"
