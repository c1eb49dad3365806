"""Whisper as the loop sees it: speech in, and a transcript that begins as the model was trained to begin it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from decodekit.errors import ConfigError, InputError, Problem
from decodekit.options import Outputs
from decodekit.prompt import Prompt, prepare
from decodekit.settings import CALLER, Settings
from torch import Tensor

from .seq2seq import EncoderDecoderAdapter
from .whisper_keys import Whisper

OWNER = "decodekit:whisper"
BEGINNINGS = ("language", "task", "prompt_ids")
"""Keys that say how a text begins."""


class WhisperAdapter(EncoderDecoderAdapter):
    """Adapter of `WhisperForConditionalGeneration`: log-mel features of up to one window (30 s) in, tokens out.

    A text begins with prompt_ids, the start token, language and task where the model knows several languages, and
    <|notimestamps|> where no timestamps are asked for; whoever passes decoder_input_ids says it all.
    """

    tells_languages = True

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        super().__init__(model, tokenizer)
        config, said = model.config, dict(self.defaults)
        if (forced := getattr(config, "forced_decoder_ids", None)) is not None:  # of older checkpoints
            said.setdefault("forced_decoder_ids", forced)
        if said.get("max_length") is not None:
            said["max_length"] = min(said["max_length"], config.max_target_positions)
        self.defaults = said

    # -- what is heard -------------------------------------------------------------------------------

    def arrange(
        self, inputs: Any, mask: Any, model_kwargs: dict[str, Any], /, *, settings: Settings, tokenizer: Any, past: int
    ) -> tuple[Prompt, dict[str, Any]]:
        """As of any model with an encoder. Features shorter than the window are filled up with zeros.

        Where the prompt depends on what is heard (a language to be found, silence to be told), the encoder and the
        decoder's first step run here; the encoder's output goes on to `encode`. Raises `InputError` for features of
        more than one window, and `ConfigError` for languages and tasks that the model does not have.
        """
        given = dict(model_kwargs)
        if isinstance(features := given.get(self._main), Tensor):
            given[self._main] = self._window(features)
        elif isinstance(inputs, Tensor) and inputs.is_floating_point():
            inputs = self._window(inputs)
        more: Any = {"settings": settings, "tokenizer": tokenizer, "past": past}
        return super().arrange(inputs, mask, given, **more)

    def _window(self, features: Tensor) -> Tensor:
        """Features [B, mels, frames] of exactly one window."""
        encoder, bins = self._encoder, self.model.config.num_mel_bins
        frames = self.model.config.max_source_positions * encoder.conv1.stride[0] * encoder.conv2.stride[0]
        if features.dim() != 3 or features.shape[1] != bins:
            words = f"features must be [B, {bins}, frames], got {tuple(features.shape)}"
            raise InputError(f"{words}: log-mel features as the model's feature extractor makes them")
        if not features.shape[2]:
            raise InputError("there is no audio: the features have no frames")
        if (long := features.shape[2]) > frames:
            raise InputError(
                f"the audio has {long} frames, of which this model hears {frames} at once ({frames / 100:g} s): cut it "
                "into pieces of at most that length, and transcribe them one by one"
            )
        return torch.nn.functional.pad(features, (0, frames - long))

    def _covers(self, given: Mapping[str, Any]) -> bool:
        """Frames are filled up to a window, of which a mask says nothing."""
        return False

    def _after(self, tokens: list[list[int]], given: dict[str, Any], settings: Settings) -> Tensor:
        """float32 [B, V]: logits after these tokens of the decoder. The encoder's output is kept in `given`."""
        out = settings.of(Outputs)
        with torch.no_grad():
            given["encoder_outputs"] = heard = self._encoded(given, out.output_attentions, out.output_hidden_states)
            ids = torch.tensor(tokens, device=self.spec.device)
            call = {"encoder_outputs": (heard.last_hidden_state,), "decoder_input_ids": ids, "use_cache": False}
            logits: Tensor = self.model(**call, return_dict=True).logits[:, -1].float()
        return logits

    # -- how it begins -------------------------------------------------------------------------------

    def _start(
        self, decoder: Any, mask: Any, rows: int, settings: Settings, past: int, given: dict[str, Any]
    ) -> Prompt:
        said = _said(settings)
        if decoder is not None or past:
            if decoder is not None and (told := [key for key in BEGINNINGS if settings.origin(key) in CALLER]):
                words = "says how the text begins, and so do decoder_input_ids: pass only one of them"
                raise ConfigError([Problem(told[0], words, OWNER)])
            prompt = super()._start(decoder, mask, rows, settings, past, given)
        else:
            prompt = self._beginning(said, rows, settings, given)
        self._fits(prompt, settings)
        self._silence(said, prompt, settings, given)
        return prompt

    def _beginning(self, said: Whisper, rows: int, settings: Settings, given: dict[str, Any]) -> Prompt:
        starts = self._starts(rows, settings)
        _known(said)
        forced = [] if said.language or said.task else [token for _, token in said.forced_decoder_ids or ()]
        languages = self._languages(said, forced, starts, settings, given)
        rest = [token for token in forced if token is not None]
        if said.language is None and languages[0] is not None:
            rest = [token for token in forced[1:] if token is not None]
        tasks = said.task_to_id or {}
        if said.task is not None:
            rest.append(tasks[said.task])
        elif languages[0] is not None and "transcribe" in tasks and not set(rest) & set(tasks.values()):
            rest.append(tasks["transcribe"])
        if (mark := said.no_timestamps_token_id) is not None:
            rest = [token for token in rest if token != mark]
            rest += [] if _timed(settings) else [mark]
        before, mark = list(said.prompt_ids or ()), said.prev_sot_token_id
        if before and mark is not None and before[0] != mark:
            words = f"begin with {before[0]}, not with <|startofprev|> ({mark}): put that in front of them"
            raise ConfigError([Problem("prompt_ids", words, OWNER)])
        begun = [
            [*before, start, *([] if language is None else [language]), *rest]
            for start, language in zip(starts, languages, strict=True)
        ]
        return prepare(begun, self, settings, attention_mask=None, tokenizer=None)

    def _languages(
        self, said: Whisper, forced: Sequence[int | None], starts: Sequence[int], settings: Settings,
        given: dict[str, Any],
    ) -> list[int | None]:  # fmt: skip
        """The language token of each row; None for all where the model has none, or `forced` begins with it."""
        rows, known = len(starts), said.lang_to_id or {}
        wanted = said.language if isinstance(said.language, tuple) else (said.language,) * rows
        if len(wanted) != rows:
            words = f"has {len(wanted)} values for {rows} prompts; give one, or one for each"
            raise ConfigError([Problem("language", words, OWNER)])
        found = [None if name is None else _language(name, known) for name in wanted]
        fixed = bool(forced) and forced[0] is not None
        if None not in found or not known or fixed or said.is_multilingual is False:
            return found
        ids = torch.tensor(sorted(known.values()), device=self.spec.device)
        likeliest = ids[self._after([[start] for start in starts], given, settings)[:, ids].argmax(-1)].tolist()
        return [own if token is None else token for token, own in zip(found, likeliest, strict=True)]

    def _fits(self, prompt: Prompt, settings: Settings) -> None:
        """Raise `InputError` where the text may grow beyond the model's positions: it cannot go on there."""
        most = self.model.config.max_target_positions
        width = prompt.tokens.shape[1] + (prompt.past if prompt.fresh else 0)
        if width >= most:
            raise InputError(f"the decoder's prompt has {width} tokens, which leaves no room in {most} positions")
        for key, room in (("max_new_tokens", most - width), ("max_length", most)):
            value = settings.get(key) if settings.origin(key) in CALLER else None
            largest = max(value) if isinstance(value, tuple) else value
            if largest is not None and largest > room:
                words = f"is {largest}, but behind a prompt of {width} tokens" if key == "max_new_tokens" else ""
                words = words or f"is {largest}, but with its prompt"
                problem = f"{words} a text of this model has room for {room}; lower it"
                raise ConfigError([Problem(key, problem, settings.values[key].owner)])

    def _silence(self, said: Whisper, prompt: Prompt, settings: Settings, given: dict[str, Any]) -> None:
        """Tell the processors that ask for it how likely silence is: what the model says at the start token."""
        asking = [at for at, active in settings.active.items() if hasattr(active.options, "heard")]
        if not asking:
            return
        mark, starts = said.no_timestamps_token_id, self._starts(len(prompt.tokens), settings)
        if mark is None or prompt.past:
            words = "needs no_timestamps_token_id in the model's generation_config, before which silence stands"
            words = "cannot be told once the text has begun: leave it out" if prompt.past else words
            raise ConfigError([Problem("no_speech_threshold", words)])
        begun = [
            row[: row.index(start) + 1] if start in row else row
            for row, start in zip(prompt.tokens.tolist(), starts, strict=True)
        ]
        silence = self._after(begun, given, settings).softmax(-1)[:, mark - 1]
        for at in asking:
            active = settings.active[at]
            settings.active[at] = attrs.evolve(active, options=active.options.heard(silence))


def _said(settings: Settings) -> Whisper:
    return next((a.options for a in settings.kind("models") if isinstance(a.options, Whisper)), Whisper())


def _timed(settings: Settings) -> bool:
    """Whether timestamps are asked for."""
    return any(getattr(active.options, "return_timestamps", False) for active in settings.kind("processors"))


def _known(said: Whisper) -> None:
    """Raise `ConfigError` for a language or task that this model cannot have."""
    wrong = []
    for key, table in (("language", "lang_to_id"), ("task", "task_to_id")):
        if getattr(said, key) is None:
            continue
        if said.is_multilingual is False:
            words = "is for multilingual models, and this one knows English only: leave it out"
        elif not getattr(said, table):
            words = f"needs {table}, which the model's generation_config lacks"
        elif key == "task" and said.task not in getattr(said, table):
            words = f"is {said.task!r}; this model knows {', '.join(sorted(getattr(said, table)))}"
        else:
            continue
        wrong.append(Problem(key, words, OWNER))
    if wrong:
        raise ConfigError(wrong)


def _language(name: str, known: dict[str, int]) -> int:
    """The token of a language by token, code or name. Raises `ConfigError` where the model does not have it."""
    from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE

    code = TO_LANGUAGE_CODE.get(name.lower(), name.lower())
    token = known.get(code, known.get(f"<|{code}|>"))
    if token is None:
        have = ", ".join(sorted(own.strip("<|>") for own in known))
        raise ConfigError([Problem("language", f"{name!r} is none of this model's; it has: {have}", OWNER)])
    return token
