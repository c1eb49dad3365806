"""Token healing: the last token of a prompt may be the begin of a longer one."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import attrs
import torch
from decodekit.context import BindContext
from decodekit.errors import InputError
from decodekit.fields import option
from decodekit.prompt import Prompt, eos_ids, filler
from decodekit.protocols import ModelSpec
from decodekit.settings import Settings
from decodekit.text import Tokenizer, as_tokenizer
from decodekit.traits import Phase, Traits
from torch import Tensor


class Vocabulary:
    """The tokens of a tokenizer in the order of their bytes."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        read = tokenizer.token_bytes if tokenizer.token_bytes(0) is not None else _decoded(tokenizer)
        data = [read(token) or b"" for token in range(size)]
        self._ids = sorted(range(size), key=data.__getitem__)
        self._bytes = [data[token] for token in self._ids]
        self._data = data

    def extensions(self, token: int) -> list[int]:
        """Tokens whose text inside a text begins with that of `token`, itself included; none where it adds nothing."""
        piece = self._data[token] if 0 <= token < len(self._data) else b""
        if not piece:
            return []
        # The first bytes that no longer begin with the piece: its last byte that can grow, grown.
        stem = piece.rstrip(b"\xff")
        start = bisect_left(self._bytes, piece)
        end = bisect_left(self._bytes, stem[:-1] + bytes([stem[-1] + 1])) if stem else len(self._bytes)
        return self._ids[start:end]


def _decoded(tokenizer: Tokenizer) -> Any:
    """What a token adds inside a text, by decoding it behind itself."""

    def read(token: int) -> bytes:
        once, twice = (tokenizer.decode([token] * n, skip_special_tokens=False) for n in (1, 2))
        # Half a character says nothing about its bytes.
        return twice[len(once) :].encode() if twice.startswith(once) and "\ufffd" not in twice else b""

    return read


_known: WeakKeyDictionary[Any, dict[int, Vocabulary]] = WeakKeyDictionary()


def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """The sorted vocabulary of the first `size` ids, made once for a tokenizer and kept as long as that lives."""
    inner = getattr(tokenizer, "wrapped", tokenizer)
    for key in (inner, tokenizer):
        try:
            found = _known.setdefault(key, {})
        except TypeError:  # cannot be referred to weakly, or has no hash
            continue
        if size not in found:
            found[size] = Vocabulary(tokenizer, size)
        return found[size]
    return Vocabulary(tokenizer, size)


@attrs.frozen
class TokenHealing:
    """Take the last token off each prompt, and let the first new token be one that begins with its text.

    A prompt that ends inside a word, or in a space, was cut into tokens in a way in which the model rarely saw the text
    that would follow. The new token says the end of the prompt again and goes on, so that the text reads as if the
    prompt had been cut anywhere. It counts as a new token; what is returned as new text begins behind the prompt.

    A prompt stays as it is where its last token is special, adds no text or has no longer token to become, and where it
    is the only token and there is no bos token to begin with. Scores are floating [B, V]. `edit_prompt` raises
    InputError without a tokenizer, or for a batch with a passed cache of which only some rows can be healed.
    (Lundberg 2023, "The art of prompt design: prompt boundaries and token healing".)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.CONSTRAIN, pure=True)

    token_healing: bool = option("Let the last token of a prompt grow into a longer one.", default=True)

    def edit_prompt(self, prompt: Prompt, *, spec: ModelSpec, settings: Settings, tokenizer: Any) -> Prompt:
        """Return the prompt without the last tokens that can be healed; which ones, its `dropped` says."""
        if not self.token_healing:
            return prompt
        if tokenizer is None:
            raise InputError("token_healing reads the text of tokens: pass tokenizer=... of the model to the call")
        wrapped = as_tokenizer(tokenizer)
        bos = settings.get("bos_token_id")
        known: Vocabulary | None = None
        last = prompt.tokens[:, -1].tolist()
        lengths = [prompt.tokens.shape[1]] * len(last) if prompt.mask is None else prompt.mask.sum(-1).tolist()
        if prompt.past:  # what counts then is how many columns are left to feed
            left = [prompt.tokens.shape[1] - (0 if prompt.fresh else prompt.past) - 1] * len(last)
        else:
            left = [length - 1 if length > 1 or bos is None else 1 for length in lengths]
        real = [True] * len(last) if prompt.mask is None else prompt.mask[:, -1].tolist()
        dropped = []
        for token, rest, here in zip(last, left, real, strict=True):
            heals = here and rest > 0 and token not in (bos, *eos_ids(settings)) and not wrapped.is_special(token)
            if heals:
                known = vocabulary(wrapped, spec.vocab_size) if known is None else known
                heals = len(_plain(known, wrapped, token)) > 1
            dropped.append(token if heals else -1)
        if all(token < 0 for token in dropped):
            return prompt
        if prompt.past and -1 in dropped:
            raise InputError(
                "token_healing can take the last token of some prompts only, and a passed cache fixes the places of "
                "their tokens; pass the prompts one by one, or no cache"
            )
        return _shortened(prompt, torch.tensor(dropped, device=prompt.tokens.device), lengths, bos, filler(settings))

    def bind(self, ctx: BindContext, /) -> _Healing | None:
        """Return the constraint of the first new token, or None where no prompt was shortened."""
        if ctx.dropped is None or not self.token_healing:
            return None
        tokenizer = as_tokenizer(ctx.tokenizer)
        known = vocabulary(tokenizer, ctx.spec.vocab_size)
        allowed = {token: _plain(known, tokenizer, token) for token in set(ctx.dropped.tolist()) if token >= 0}
        return _Healing(self, ctx, {token: torch.tensor(ids) for token, ids in allowed.items()})

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return `scores`: outside of a call there is no prompt to shorten."""
        return scores


def _plain(known: Vocabulary, tokenizer: Tokenizer, token: int) -> list[int]:
    return [longer for longer in known.extensions(token) if not tokenizer.is_special(longer)]


def _shortened(prompt: Prompt, dropped: Tensor, lengths: list[int], bos: int | None, fill: int) -> Prompt:
    """The rows without their `dropped` tokens [B], -1 for none; what is left stays at the right end."""
    if prompt.past:  # all rows drop theirs, and columns cannot move
        own: dict[str, Any] = attrs.asdict(prompt, recurse=False)
        cut = {name: own[name][:, :-1] for name in ("tokens", "mask", "positions") if own[name] is not None}
        return Prompt(**{**own, **cut, "dropped": dropped})
    tokens, width = prompt.tokens.clone(), prompt.tokens.shape[1]
    mask = torch.ones_like(tokens, dtype=torch.bool) if prompt.mask is None else prompt.mask.clone()
    heals = dropped >= 0
    single = heals & (torch.tensor(lengths, device=tokens.device) == 1)
    tokens[single, -1] = bos if bos is not None else fill
    moves = heals & ~single
    for rows, empty in ((tokens, fill), (mask, False)):
        moved = rows.roll(1, -1)
        moved[:, 0] = empty
        rows.copy_(moved.where(moves[:, None], rows))
    if width > 1 and not bool(mask[:, 0].any()):
        tokens, mask = tokens[:, 1:], mask[:, 1:]
    positions = (mask.long().cumsum(-1) - 1).clamp_min_(0)
    return Prompt(tokens, None if bool(mask.all()) else mask, positions, dropped=dropped)


class _Healing:
    """The constraint inside a run: it acts on the first new token only."""

    def __init__(self, options: TokenHealing, ctx: BindContext, allowed: dict[int, Tensor]) -> None:
        assert ctx.dropped is not None
        self._options, self._width = options, ctx.prompt_width
        self._rows = [(row, allowed[token]) for row, token in enumerate(ctx.dropped.tolist()) if token >= 0]

    def __repr__(self) -> str:
        return repr(self._options)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V]; before the first new token, those that do not begin with what was dropped at -inf."""
        if input_ids.shape[1] != self._width:
            return scores
        out = scores.clone()
        for row, ids in self._rows:
            ids = ids.to(scores.device)
            out[row] = -torch.inf
            out[row, ids] = scores[row, ids]
        return out
