"""Allowed tokens as packed bits: what grammars and schemas hand over, and one fast way to apply it."""

from __future__ import annotations

import functools
import sys
from typing import Any, ClassVar

import torch
from decodekit.abilities import Masks
from decodekit.context import BindContext
from decodekit.shortlist import Shortlist
from decodekit.traits import Phase, Traits
from torch import Tensor

from .rowwise import resorted


def words(vocab_size: int) -> int:
    """How many int32 words hold one bit for each token."""
    return -(-vocab_size // 32)


@functools.lru_cache(maxsize=8)
def _eights(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[256, 8]: what each byte of a mask says of eight tokens, the lowest bit first: inf where it is set, else -inf."""
    bits = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return torch.where(bits.bool(), torch.inf, -torch.inf).to(dtype)


def pack(allowed: Tensor) -> Tensor:
    """Pack bool [..., V] into int32 [..., ceil(V / 32)]: token v is bit v % 32 of word v // 32."""
    vocab = allowed.shape[-1]
    padded = torch.nn.functional.pad(allowed.to(torch.int64), (0, words(vocab) * 32 - vocab))
    places = torch.arange(32, device=allowed.device)
    packed = (padded.view(*padded.shape[:-1], -1, 32) << places).sum(-1)
    # Bit 31 is the sign of an int32.
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def unpack(bits: Tensor, vocab_size: int) -> Tensor:
    """The inverse of `pack`: bool [..., vocab_size]."""
    return limits(bits, vocab_size, torch.float32) > 0


def limits(bits: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """[..., vocab_size] of a floating dtype: inf where the token's bit in int32 `bits` [..., ceil(V / 32)] is set, else
    -inf. Raises ValueError where the words do not fit the vocabulary."""
    if bits.dtype != torch.int32 or bits.shape[-1] != words(vocab_size):
        need = f"int32 [..., {words(vocab_size)}] for a vocabulary of {vocab_size}"
        raise ValueError(f"a bitmask must be {need}, got {bits.dtype} {tuple(bits.shape)}")
    given = bits.contiguous().view(torch.uint8)
    if sys.byteorder == "big":
        given = given.view(*given.shape[:-1], -1, 4).flip(-1).flatten(-2)
    spread = _eights(bits.device, dtype).index_select(0, given.reshape(-1).int())
    return spread.view(*bits.shape[:-1], -1)[..., :vocab_size]


def apply(scores: Tensor, bits: Tensor) -> Tensor:
    """Scores [B, V] with -inf where the bit in int32 `bits` [B, ceil(V / 32)] is not set, as a new tensor. NaN stays.

    The lower of the score and a limit: filling by a bool mask, which jumps at every token, takes five times as long.
    """
    return torch.minimum(scores, limits(bits, scores.shape[-1], scores.dtype))


def shorten(shortlist: Shortlist, bits: Tensor) -> Shortlist:
    """The shortlist without tokens whose bit is not set, descending again: K words are looked at, not V."""
    if bits.shape[-1] != words(shortlist.vocab_size):
        need = f"{words(shortlist.vocab_size)} words for a vocabulary of {shortlist.vocab_size}"
        raise ValueError(f"a bitmask must have {need}, got {bits.shape[-1]}")
    word = bits.gather(-1, shortlist.ids >> 5)
    off = ((word >> (shortlist.ids & 31).to(torch.int32)) & 1) == 0
    return resorted(shortlist, off)


class BitmaskConstraint:
    """A processor whose rule is stated as bits, by an object with ``fill(bits, row)`` (`decodekit.protocols.Masks`).

    Return it from the `bind` of your options class, and write only the rule::

        @attrs.frozen
        class OnlyDigits:
            traits: ClassVar = BitmaskConstraint.traits
            digits: tuple[int, ...] = option("Tokens that are digits.")

            def bind(self, ctx):
                return BitmaskConstraint(DigitRule(self.digits), ctx)

    `fill` gets an int32 view [ceil(V / 32)], all zero, and sets bit v % 32 of word v // 32 for every token v that the
    row may take next; bits beyond the vocabulary are ignored. `accept`, `rollback` and `reorder` of the rule, where it
    has them, are called as those of any processor. A row that may take no token becomes -inf throughout; if the run
    needs a token from it, it stops with an error that names the processor, row and step.

    bits: int32 [rows, ceil(V / 32)], as filled last; the buffer is used again at every step.
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.CONSTRAIN, pure=True)

    def __init__(self, rule: Masks, ctx: BindContext) -> None:
        self.rule = rule
        self.bits = torch.zeros((ctx.rows, words(ctx.spec.vocab_size)), dtype=torch.int32, device=ctx.tokens.device)
        # Offered only where the rule has it: a run asks what its parts can do.
        for name in ("accept", "rollback", "reorder"):
            ability: Any = getattr(rule, name, None)
            if ability is not None:
                setattr(self, name, ability)

    def __repr__(self) -> str:
        return f"BitmaskConstraint({self.rule!r})"

    def filled(self) -> Tensor:
        """Ask the rule about every row: int32 [rows, ceil(V / 32)]."""
        self.bits.zero_()
        for row, bits in enumerate(self.bits):
            self.rule.fill(bits, row)
        return self.bits

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with -inf at tokens that the rule does not allow."""
        return apply(scores, self.filled())

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return the shortlist without tokens that the rule does not allow."""
        return shorten(shortlist, self.filled())
