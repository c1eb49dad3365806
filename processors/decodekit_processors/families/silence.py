"""Whisper: a prompt in which nobody speaks gets an empty transcript."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import between, option
from decodekit.traits import Phase, Traits
from torch import Tensor

from decodekit_processors.forced import forced


@attrs.frozen(slots=False)
class WhisperSilence:
    """End the text at once where silence is likelier than `no_speech_threshold`.

    The model says how likely that is at the start of the transcript, whichever tokens follow there; its adapter passes
    it on by `heard` before the run. Scores are floating [B, V]; for such a prompt the first are 0 at the end tokens and
    -inf elsewhere, all others pass untouched. (Radford et al. 2022, arXiv 2212.04356.)
    """

    # Behind whatever forbids an end at the beginning.
    traits: ClassVar[Traits] = Traits(
        phase=Phase.CONSTRAIN,
        after=(
            "suppress_tokens", "begin_suppress_tokens", "min_length", "min_new_tokens", "prefix_allowed_tokens_fn",
            "forced_bos_token_id", "whisper_timestamps",
        ),
        reads_history=False,
        pure=True,
    )  # fmt: skip

    no_speech_threshold: float = option(
        "Probability of silence above which a Whisper model's transcript stays empty.", check=between(0, 1)
    )

    def heard(self, silence: Tensor, /) -> WhisperSilence:
        """These options for a call whose prompts are silent with these probabilities, float [prompts]."""
        copy = attrs.evolve(self)
        object.__setattr__(copy, "_silence", silence)
        return copy

    def bind(self, ctx: BindContext, /) -> _Silence | None:
        """Return the form that knows which rows are silent; None where none is.

        Raises ValueError where the model's adapter says nothing of silence, and without an end token.
        """
        silence = self.__dict__.get("_silence")
        if silence is None:
            raise ValueError(f"is for Whisper models, and {type(ctx.model).__name__} hears no silence: leave it out")
        silent = (silence > self.no_speech_threshold).to(ctx.tokens.device)[list(ctx.slots)]
        if not bool(silent.any()):
            return None
        if not ctx.spec.eos_token_ids:
            raise ValueError("ends silent texts, and there is no end token: set eos_token_id")
        return _Silence(self, ctx, silent)


class _Silence:
    """The rule inside a run."""

    def __init__(self, options: WhisperSilence, ctx: BindContext, silent: Tensor) -> None:
        self._options, self._ctx, self._silent = options, ctx, silent[:, None]

    def __repr__(self) -> str:
        return repr(self._options)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] that allow silent rows nothing but their end, before the first new token."""
        if input_ids.shape[1] != self._ctx.prompt_width:
            return scores
        ended: Any = forced(scores, self._ctx.spec.eos_token_ids)
        return torch.where(self._silent.to(scores.device), ended, scores)
