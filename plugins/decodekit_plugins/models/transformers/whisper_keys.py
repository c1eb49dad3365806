"""The keys of Whisper models, and the plugin that answers to them."""

from __future__ import annotations

from typing import Any

import attrs
from decodekit.fields import at_least, option

from .plugin import Transformers


def _each_a_step(instance: Any, attribute: Any, value: Any) -> None:
    """Raise ValueError unless the steps of forced tokens are 1, 2, 3 and so on."""
    steps = [step for step, _ in value or ()]
    if steps != list(range(1, len(steps) + 1)):
        raise ValueError(f"must give a token for each step from 1 on, got steps {steps}")


@attrs.frozen
class Whisper(Transformers):
    """What a Whisper model's text begins with, and which tokens say so.

    The same keys as transformers' `WhisperForConditionalGeneration.generate` and generation_config.json have. (Radford
    et al. 2022, arXiv 2212.04356.)
    """

    language: str | tuple[str | None, ...] | None = option(
        "Language that is spoken, of Whisper models: a code (en), name (english) or token (<|en|>); unset, or None for "
        "one of several prompts: the likeliest, found in one pass of the decoder.",
        default=None,
        per_row=True,
    )
    task: str | None = option(
        "What a multilingual Whisper model writes: transcribe, or translate into English; unset: transcribe.",
        default=None,
    )
    is_multilingual: bool | None = option(
        "Whether a Whisper model knows several languages; unset: where it names them.", default=None
    )
    prompt_ids: tuple[int, ...] | None = option(
        "Tokens before the start of a Whisper transcript, the token <|startofprev|> first: what was said before, names "
        "and their spelling.",
        default=None,
    )
    lang_to_id: dict[str, int] | None = option("Whisper's language tokens (<|en|>) and their ids.", default=None)
    task_to_id: dict[str, int] | None = option("Whisper's tasks and the ids of their tokens.", default=None)
    no_timestamps_token_id: int | None = option(
        "Whisper's token <|notimestamps|>; those behind it are times.", default=None, check=at_least(0)
    )
    forced_decoder_ids: tuple[tuple[int, int | None], ...] | None = option(
        "Pairs of step and token that a Whisper model's text begins with, steps from 1 on; None in place of a language "
        "that is to be found. Where language or task is set they do not count.",
        default=None,
        check=_each_a_step,
    )
    max_initial_timestamp_index: int | None = option(
        "Greatest first time of a Whisper transcript, in steps of 0.02 s.", default=None, check=at_least(0)
    )
    prev_sot_token_id: int | None = option(
        "Whisper's token <|startofprev|>, with which prompt_ids begin.", default=None, check=at_least(0)
    )

    fallback = True
    provides = frozenset()
    """Nothing that a model of another kind could choose it for."""

    def adapt(self, model: Any, /) -> Any:
        """Wrap a Whisper model with its head."""
        from .whisper import WhisperAdapter

        return WhisperAdapter(model)

    def opens(self, ref: str, /) -> bool:
        """Never by itself: the plugin of all transformers models opens these, too."""
        return False

    def serves(self, adapter: Any, /) -> bool:
        """Whether these keys act with this adapter: Whisper's, or what a preparer wrapped around it."""
        return bool(getattr(adapter, "tells_languages", False))
