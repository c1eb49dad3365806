"""What a text must contain, followed token by token: the constraints of constrained beam search."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Constraint:
    """Something that a text must contain. Subclass it for constraints of your own.

    An object follows one text: `update` takes its tokens one by one until `completed` is true, and never after that.
    """

    seqlen: int
    """Steps from nothing to complete, at most."""
    completed: bool = False

    def advance(self) -> int | list[int] | None:
        """The token or tokens that would be a step from here; None: it is complete."""
        raise NotImplementedError(f"{type(self).__name__} must define advance()")

    def does_advance(self, token_id: int) -> bool:
        """Whether this token would be a step."""
        raise NotImplementedError(f"{type(self).__name__} must define does_advance()")

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        """Take the next token. Returns whether it was a step, whether all is complete, and whether steps were lost."""
        raise NotImplementedError(f"{type(self).__name__} must define update()")

    def reset(self) -> None:
        """Forget all steps."""
        raise NotImplementedError(f"{type(self).__name__} must define reset()")

    def remaining(self) -> int:
        """Steps to go."""
        raise NotImplementedError(f"{type(self).__name__} must define remaining()")

    def copy(self, stateful: bool = False) -> Constraint:
        """A new object for the same; `stateful`: with the steps made so far."""
        raise NotImplementedError(f"{type(self).__name__} must define copy()")


class _Phrases(Constraint):
    """One of several phrases must appear. Where one breaks off, the end of the text may have begun another.

    The state is the longest end of the text that begins a phrase (Aho and Corasick 1975, "Efficient string matching").
    """

    def __init__(self, phrases: Sequence[Sequence[int]]) -> None:
        self._phrases = frozenset(map(tuple, phrases))
        self._next: dict[tuple[int, ...], list[int]] = {}
        for phrase in sorted(self._phrases):
            for i, token in enumerate(phrase):
                following = self._next.setdefault(phrase[:i], [])
                if token not in following:
                    following.append(token)
        self.seqlen = max(map(len, self._phrases))
        self._current: tuple[int, ...] = ()

    @property
    def phrases(self) -> list[tuple[int, ...]]:
        """Those of which one must appear."""
        return sorted(self._phrases)

    @property
    def idle(self) -> bool:
        """Whether a token that is no step leaves it as it is."""
        return not self._current

    def does_advance(self, token_id: int) -> bool:
        """Whether this token goes on with a phrase from where it is."""
        return not self.completed and token_id in self._next.get(self._current, ())

    def update(self, token_id: int) -> tuple[bool, bool, bool]:
        """Take the text's next token. Returns whether it was a step, whether all is complete, whether steps were lost.

        Raises ValueError for anything but a whole number.
        """
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ValueError(f"a token id is a whole number, not {token_id!r}")
        stepped = self.does_advance(token_id)
        whole = (*self._current, token_id)
        ends = [whole[i:] for i in range(len(whole) + 1)]
        self.completed = any(end in self._phrases for end in ends)
        self._current = next(end for end in ends if end in self._next or self.completed)
        return stepped, self.completed, not stepped and not self.completed

    def reset(self) -> None:
        """Forget all steps."""
        self._current, self.completed = (), False

    def remaining(self) -> int:
        """Steps to go, on the longest way."""
        return 0 if self.completed else self.seqlen - len(self._current)

    def copy(self, stateful: bool = False) -> Constraint:
        """A new object for the same phrases; `stateful`: with the steps made so far."""
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        if not stateful:
            new.reset()
        return new

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.token_ids!r})"  # type: ignore[attr-defined]


def _phrase(tokens: Any, name: str) -> list[int]:
    tokens = tokens.tolist() if hasattr(tokens, "tolist") else tokens
    good = isinstance(tokens, (list, tuple)) and len(tokens) > 0
    if not good or not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in tokens):
        raise ValueError(f"{name} must be a list of one or more token ids, 0 or greater, got {tokens!r}")
    return list(tokens)


class PhrasalConstraint(_Phrases):
    """These tokens must appear one after the other.

    token_ids: one or more ids. Raises ValueError for anything else.
    """

    def __init__(self, token_ids: Sequence[int]) -> None:
        self.token_ids = _phrase(token_ids, "token_ids")
        super().__init__([self.token_ids])

    @property
    def fulfilled_idx(self) -> int:
        """Place in the phrase of the last token that the text has got to; -1: none."""
        return len(self._current) - 1

    def advance(self) -> int | None:
        """The phrase's next token; None: it has appeared."""
        return None if self.completed else self.token_ids[len(self._current)]


class DisjunctiveConstraint(_Phrases):
    """One of these phrases must appear.

    nested_token_ids: one or more phrases. Raises ValueError for anything else.
    """

    def __init__(self, nested_token_ids: Sequence[Sequence[int]]) -> None:
        if not isinstance(nested_token_ids, (list, tuple)) or not nested_token_ids:
            raise ValueError(f"nested_token_ids must be a list of one or more phrases, got {nested_token_ids!r}")
        self.token_ids = [_phrase(phrase, "each phrase of nested_token_ids") for phrase in nested_token_ids]
        super().__init__(self.token_ids)

    @property
    def current_seq(self) -> list[int]:
        """How much of a phrase the text ends with."""
        return list(self._current)

    def advance(self) -> list[int] | None:
        """Every token that goes on with a phrase; None: one has appeared."""
        return None if self.completed else list(self._next[self._current])
