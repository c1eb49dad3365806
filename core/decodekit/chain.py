"""Puts processors in order and fuses them into one call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs
from torch import Tensor

from .errors import GenerationError, PipelineError, suggest
from .shortlist import Shortlist
from .traits import Traits

Scores = Tensor | Shortlist


@attrs.frozen
class Part:
    """One processor of a pipeline: the runtime object and where it came from."""

    name: str
    owner: str
    """``distribution:name`` of the plugin, or ``caller`` for objects passed in."""
    runtime: Any
    traits: Traits
    why: str
    """Which key asked for it, and from which source."""


def order(parts: Sequence[Part], override: Sequence[str] | None = None) -> list[Part]:
    """Sort by phase, then before/after inside the phase; ties keep the given order.

    `override` lists names: those parts trade places among themselves to follow it.
    Raises `PipelineError` for a cycle or an unknown name.
    """
    result: list[Part] = []
    for phase in sorted({part.traits.phase for part in parts}):
        result += _inside([part for part in parts if part.traits.phase is phase])
    if override:
        names = [part.name for part in result]
        for name in override:
            if name not in names:
                hint = suggest(name, names) or f"active: {', '.join(names) or 'none'}"
                raise PipelineError(f"processor_order names {name!r}, which is not active; {hint}")
        places = iter(sorted((p for p in result if p.name in override), key=lambda p: list(override).index(p.name)))
        result = [next(places) if part.name in override else part for part in result]
    return result


def _inside(parts: list[Part]) -> list[Part]:
    """Stable topological order by name."""
    if len(parts) < 2:
        return parts
    places = range(len(parts))

    def goes_first(j: int, i: int) -> bool:
        return j != i and (parts[j].name in parts[i].traits.after or parts[i].name in parts[j].traits.before)

    before = [{j for j in places if goes_first(j, i)} for i in places]
    done: list[int] = []
    while len(done) < len(parts):
        ready = next((i for i in places if i not in done and before[i] <= set(done)), None)
        if ready is None:
            circle = ", ".join(parts[i].name for i in places if i not in done)
            raise PipelineError(f"these processors each want to run before the other: {circle}; set processor_order")
        done.append(ready)
    return [parts[i] for i in done]


class Chain:
    """The ordered processors as one function of (input_ids, scores)."""

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = tuple(parts)
        self._steps = tuple((self._guard(p), p.traits.pure and getattr(p.runtime, "edit", None)) for p in self.parts)
        opener = next((i for i, p in enumerate(self.parts) if hasattr(p.runtime, "open_shortlist")), len(self.parts))
        self._head = self._steps[:opener]
        self._open = self.parts[opener].runtime.open_shortlist if opener < len(self.parts) else None
        self._tail = self._steps[opener:]
        able = itertools.takewhile(lambda part: hasattr(part.runtime, "shorten"), self.parts[opener + 1 :])
        self._short: tuple[Callable[[Tensor, Shortlist], Shortlist], ...] = tuple(p.runtime.shorten for p in able)
        self._after = self._steps[opener + 1 + len(self._short) :]

    @staticmethod
    def _guard(part: Part) -> Callable[[Tensor, Tensor], Tensor]:
        call: Callable[[Tensor, Tensor], Tensor] = part.runtime
        if part.traits.pure:
            return call

        def guarded(input_ids: Tensor, scores: Tensor) -> Tensor:
            # The object may write into what it gets: the run and other parts must not see that.
            result = call(input_ids.clone(), scores.clone())
            if not isinstance(result, Tensor) or result.shape != scores.shape or not result.is_floating_point():
                got = f"{tuple(result.shape)} {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
                wanted = f"must return floating scores of shape {tuple(scores.shape)}"
                raise GenerationError(f"logits processor {part.name!r} ({part.owner}) {wanted}, got {got}")
            return result

        return guarded

    def __len__(self) -> int:
        return len(self.parts)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Scores:
        """Processed scores, [B, V] or a shortlist of them."""
        scores = self._through(self._head, input_ids, scores)
        if self._open is None:
            return scores
        short: Shortlist | None = self._open(input_ids, scores)
        if short is None:
            return self._through(self._tail, input_ids, scores)
        for shorten in self._short:
            short = shorten(input_ids, short)
        return self._through(self._after, input_ids, short.dense(), True) if self._after else short

    def dense(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Processed scores [B, V] without any shortlist."""
        return self._through(self._steps, input_ids, scores)

    @staticmethod
    def _through(steps: Iterable[Any], input_ids: Tensor, scores: Tensor, own: bool = False) -> Tensor:
        """Scores after (call, edit or nothing) `steps`. `own`: nobody else holds them, as is so of what an edit made
        new; what a call returns may be kept by whoever made it."""
        for call, edit in steps:
            given, scores = scores, edit(input_ids, scores, own) if edit else call(input_ids, scores)
            own = own if scores is given else bool(edit)
        return scores
