"""Sequences of tokens made likelier or less likely, or forbidden; single tokens by id or by text."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import option
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import id_tuple
from .edits import Editing, mine
from .ngrams import shift, tails

Bias = dict[tuple[int, ...], float]
_WORDS = "must map token ids to numbers, as {(5, 6): 1.5} or [[[5, 6], 1.5]]"


def _as_bias(value: Any) -> Any:
    """Pairs of (ids, number), whichever way they were written; anything else is left for the check."""
    pairs = list(value.items()) if isinstance(value, Mapping) else value
    if not isinstance(pairs, (list, tuple)) or not all(isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs):
        return value
    return tuple((id_tuple(ids), bias) for ids, bias in pairs)


def _check_bias(instance: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, tuple) or not value:
        raise ValueError(f"{_WORDS}, and not be empty; got {value!r}")
    for ids, bias in value:
        _check_sequence(ids)
        if not isinstance(bias, (int, float)) or isinstance(bias, bool) or bias != bias:
            raise ValueError(f"{_WORDS}; got the bias {bias!r}")


def _check_sequence(ids: Any) -> None:
    if not isinstance(ids, tuple) or not ids:
        raise ValueError(f"must be lists of token ids, none of them empty; got {ids!r}")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ValueError(f"must be lists of token ids, 0 or more; got {token!r}")


class Biases(Editing):
    """Biases of sequences, in the form that a step needs: a vector for single tokens, a table for the others."""

    __slots__ = ("_by_length", "_ctx", "_options", "_single", "_vocab", "_widest")

    def __init__(self, options: Any, bias: Bias, vocab: int, ctx: BindContext | None, device: torch.device) -> None:
        for ids in bias:
            if max(ids) >= vocab:
                raise ValueError(f"token id {max(ids)} of {list(ids)} is outside the vocabulary of {vocab}")
        self._options, self._ctx, self._vocab = options, ctx, vocab
        single = {ids[0]: value for ids, value in bias.items() if len(ids) == 1}
        self._single: tuple[Tensor, Tensor] | None = None
        if single:
            numbers = torch.tensor(list(single.values()), dtype=torch.float64, device=device)
            self._single = torch.tensor(list(single), device=device), numbers
        # By length, so that a step looks up one suffix for each length and none for each sequence.
        self._by_length: dict[int, dict[tuple[int, ...], list[tuple[int, float]]]] = {}
        for ids, value in bias.items():
            if len(ids) > 1:
                table = self._by_length.setdefault(len(ids) - 1, {})
                table.setdefault(ids[:-1], []).append((ids[-1], value))
        self._widest = max(self._by_length, default=0)

    def __repr__(self) -> str:
        return repr(self._options)

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return scores [B, V] with the biases of single tokens, and of last tokens of sequences under way."""
        if self._single is not None:
            ids, numbers = self._single
            scores = mine(scores, own).index_add_(-1, ids, numbers.to(scores.dtype).expand(len(scores), -1))
        found = self._under_way(input_ids) if self._by_length else {}
        return shift(scores, list(found), list(found.values()), own or self._single is not None) if found else scores

    def _under_way(self, input_ids: Tensor) -> dict[int, float]:
        """The bias of each row * V + token that would complete a sequence; several of one token add up."""
        found: dict[int, float] = {}
        for row, tail in enumerate(tails(self._ctx, input_ids, self._widest)):
            for length, table in self._by_length.items():
                # A shorter tail is the key of nothing here.
                for token, value in table.get(tuple(tail[-length:]), ()):
                    place = row * self._vocab + token
                    found[place] = found.get(place, 0.0) + value
        return found


@functools.lru_cache(maxsize=32)
def _tables(options: Any, vocab: int, device: torch.device) -> Biases:
    """The tables of options called on their own, made once for each size of vocabulary."""
    return Biases(options, options.biases(), vocab, None, device)


@attrs.frozen
class SequenceBiasLogitsProcessor:
    """Add a bias to the last token of each sequence, where the tokens before it are those generated last.

    Sequences of one token are biased at every step; biases of sequences that end alike add up. Only real tokens
    count as the sequence's beginning, never padding. Scores are floating [B, V].
    Raises ValueError for ids outside the vocabulary.
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.BIAS, pure=True)

    sequence_bias: Any = option(
        "What is added to the last token of a sequence: {(5, 6): 1.5}, or [[[5, 6], 1.5]] in JSON.",
        converter=_as_bias,
        check=_check_bias,
    )

    def bind(self, ctx: BindContext, /) -> Biases:
        """Return the form that knows padding and the vocabulary."""
        return Biases(self, self.biases(), ctx.spec.vocab_size, ctx, ctx.spec.device)

    def biases(self) -> Bias:
        """The bias of each sequence."""
        return dict(self.sequence_bias)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return biased scores [B, V]; all of `input_ids` [B, T] counts."""
        return _tables(self, scores.shape[-1], scores.device)(input_ids, scores)


def _as_words(value: Any) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    return tuple(map(id_tuple, value)) if isinstance(value, (list, tuple)) else value


def _check_words(instance: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, tuple) or not value:
        raise ValueError(f"must be a list of lists of token ids, and not be empty; got {value!r}")
    for ids in value:
        _check_sequence(ids)


@attrs.frozen
class NoBadWordsLogitsProcessor:
    """Forbid sequences of tokens: the last token of each gets -inf where the tokens before it were generated last.

    A word that is nothing but an end token is left out: texts must be able to end. Scores are floating [B, V].
    Raises ValueError for ids outside the vocabulary.
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.PENALTY, after=("encoder_no_repeat_ngram_size",), pure=True)

    bad_words_ids: tuple[tuple[int, ...], ...] = option(
        "Sequences of token ids that are never completed, such as [[5, 6], [9]].",
        converter=_as_words,
        check=_check_words,
    )
    eos_token_id: int | tuple[int, ...] | None = option(
        "Tokens that end a text and are never forbidden here; unset: the model's.", default=None, converter=id_tuple
    )

    def biases(self, ends: Any = None) -> Bias:
        """-inf for each word but those that are an end token: of `eos_token_id`, or of `ends` where that is unset."""
        ends = ends if self.eos_token_id is None else self.eos_token_id
        ends = (ends,) if isinstance(ends, int) else ends or ()
        return {ids: -math.inf for ids in self.bad_words_ids if not (len(ids) == 1 and ids[0] in ends)}

    def bind(self, ctx: BindContext, /) -> Biases | None:
        """Return the form that knows padding and the vocabulary, or None where every word is an end token."""
        bias = self.biases(ctx.spec.eos_token_ids)
        return Biases(self, bias, ctx.spec.vocab_size, ctx, ctx.spec.device) if bias else None

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with -inf at tokens that would complete a word of `input_ids` [B, T]."""
        return _tables(self, scores.shape[-1], scores.device)(input_ids, scores)


def _check_texts(instance: Any, attribute: Any, value: Any) -> None:
    if not isinstance(value, tuple) or not value:
        raise ValueError(f'must map token ids or texts to numbers, as {{" the": -2.0, 5: 1.0}}; got {value!r}')
    for token, bias in value:
        good = token if isinstance(token, str) else type(token) is int and token >= 0
        if not good:
            raise ValueError(f"must map token ids or texts to numbers; got the token {token!r}")
        if not isinstance(bias, (int, float)) or isinstance(bias, bool) or bias != bias:
            raise ValueError(f"must map token ids or texts to numbers; got the bias {bias!r}")


@attrs.frozen
class LogitBiasLogitsProcessor:
    """Add a bias to single tokens, named by id or by text: {" the": -2.0, 5: 1.0}.

    A text must be one token of the tokenizer, its spaces included. In JSON ids are strings of digits, which mean ids.
    -inf forbids a token. Scores are floating [B, V]. Raises ValueError for a text that is not one token, and for ids
    outside the vocabulary. (OpenAI API reference, "logit_bias".)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.BIAS, after=("sequence_bias",), reads_history=False, pure=True)

    logit_bias: Any = option(
        "What is added to the scores of single tokens, by id or by text.",
        converter=lambda value: (
            tuple(
                (int(k) if isinstance(k, str) and k.isdecimal() else k, v)
                for k, v in (value.items() if isinstance(value, Mapping) else value)
            )
            if isinstance(value, (Mapping, list, tuple))
            else value
        ),
        check=_check_texts,
    )

    def bind(self, ctx: BindContext, /) -> Biases:
        """Return the form that knows the ids of texts. Raises ValueError without a tokenizer where there are texts."""
        return Biases(self, self.biases(ctx.tokenizer), ctx.spec.vocab_size, ctx, ctx.spec.device)

    def biases(self, tokenizer: Any = None) -> Bias:
        """The bias of each token; an id and a text that name the same one add up."""
        bias: Bias = {}
        for token, value in self.logit_bias:
            ids = (token,) if isinstance(token, int) else self._ids(token, tokenizer)
            bias[ids] = bias.get(ids, 0.0) + value
        return bias

    @staticmethod
    def _ids(text: str, tokenizer: Any) -> tuple[int, ...]:
        if tokenizer is None:
            raise ValueError(f"logit_bias names the text {text!r}: pass tokenizer=..., or the token's id")
        # With text before it, so that tokenizers which begin texts with a space or a special token do not show here.
        before, both = (list(tokenizer.encode(part)) for part in ("a", "a" + text))
        ids = both[len(before) :] if both[: len(before)] == before else list(tokenizer.encode(text))
        shown = [tokenizer.decode([token]) for token in ids]
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens ({shown}); name one token, or use sequence_bias")
        return (ids[0],)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return biased scores [B, V]. Raises ValueError where texts are named: ids of texts need a tokenizer."""
        return _tables(self, scores.shape[-1], scores.device)(input_ids, scores)
