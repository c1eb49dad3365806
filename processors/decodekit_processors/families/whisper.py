"""Whisper: timestamps in pairs and in order, and the probability that nobody speaks."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.fields import option
from decodekit.traits import Phase, Traits
from torch import Tensor

from decodekit_processors.checks import id_tuple, whole

_DETECT = "_detect_timestamp_from_logprob"


def _check_cap(instance: Any, attribute: Any, value: Any) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
        raise ValueError(f"max_initial_timestamp_index must be a whole number, 0 or more, got {value!r}")


@attrs.frozen
class TimestampTokens:
    """What the timestamp rules need of a generation configuration."""

    no_timestamps_token_id: int | None = None
    """The token before the first timestamp."""
    eos_token_id: int | tuple[int, ...] | None = attrs.field(default=None, converter=id_tuple)
    bos_token_id: int | None = None
    """Stands in where there is no end token."""
    max_initial_timestamp_index: int | None = attrs.field(default=None, validator=_check_cap)
    _detect_timestamp_from_logprob: bool | None = attrs.field(default=None, alias="_detect_timestamp_from_logprob")


_NAMES = tuple(attrs.fields_dict(TimestampTokens))


def _tokens(config: Any) -> Any:
    """`TimestampTokens` of a dict or of any object with these attributes; None stays None."""
    if config is None or isinstance(config, TimestampTokens):
        return config
    if isinstance(config, Mapping):
        return TimestampTokens(**{name: config.get(name) for name in _NAMES})
    return TimestampTokens(**{name: getattr(config, name, None) for name in _NAMES})


@attrs.frozen(slots=False)
class _Movable:
    """Options whose begin may be moved from outside between calls, as transformers' long-form Whisper does."""

    def set_begin_index(self, begin_index: int) -> None:
        """From now on generation begins at column `begin_index`. The options, and what equals them, stay."""
        object.__setattr__(self, "_begin", begin_index)

    def _from(self, begin_index: int | None) -> int | None:
        found: int | None = self.__dict__.get("_begin", begin_index)
        return found


@attrs.frozen(slots=False)
class WhisperTimeStampLogitsProcessor(_Movable):
    """Let timestamps come in pairs that never go back, and force one where it is likelier than any word.

    After one timestamp comes another or the end; after two comes text. The first token is a timestamp, not later than
    `max_initial_timestamp_index`. Where all timestamps together are likelier than the likeliest other token, only
    timestamps stay. Scores are floating [B, V]; timestamps are the tokens behind `no_timestamps_token_id`, up to V.
    Raises ValueError where that token or an end token is unknown, and for a direct call without `begin_index`.
    (Radford et al. 2022, Whisper, arXiv 2212.04356.)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.CONSTRAIN, after=("suppress_tokens",), pure=True)

    generate_config: Any = option(
        "Dict or configuration with no_timestamps_token_id, eos_token_id, max_initial_timestamp_index; what it leaves "
        "out is the model's.",
        default=None,
        converter=_tokens,
    )
    begin_index: int | None = option(
        "Column of the first generated token, padding included; unset: that of the running call.",
        default=None,
        check=whole(0),
    )
    _detect_timestamp_from_logprob: bool | None = attrs.field(
        default=None,
        alias="_detect_timestamp_from_logprob",
        validator=attrs.validators.optional(attrs.validators.instance_of(bool)),
        metadata={"doc": "Whether to force a timestamp where all of them together beat every other token."},
    )
    return_timestamps: bool = option(
        "Write times into the text: of Whisper models, whose text then begins without <|notimestamps|>.", default=True
    )

    def bind(self, ctx: BindContext, /) -> _Timestamps | None:
        """Return the form that carries each row's newest timestamp along; None where no timestamps are wanted.

        What `generate_config` does not say comes from the model's own configuration. Raises ValueError where
        no_timestamps_token_id or an end token is known to neither, or lies outside the vocabulary.
        """
        if not self.return_timestamps:
            return None
        begin = self._from(self.begin_index)
        return _Timestamps(self, _rules(self, ctx), ctx, ctx.prompt_width if begin is None else begin)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with what the rules forbid after `input_ids` [B, T] at -inf."""
        begin = self._from(self.begin_index)
        if begin is None:
            raise ValueError("begin_index is needed where the processor is called on its own: the prompt's width")
        rules = _rules(self, None)
        return rules(input_ids, scores, begin, rules.newest(input_ids[:, begin:], None), None)


def _rules(options: WhisperTimeStampLogitsProcessor, ctx: BindContext | None) -> _Rules:
    said = options.generate_config or TimestampTokens()
    # Keys that nobody owns while the plugin of Whisper models is switched off.
    model: Mapping[str, Any] = {} if ctx is None else {**ctx.settings.unknown, **_owned(ctx)}
    spec = None if ctx is None else ctx.spec

    def first(*values: Any) -> Any:
        return next((value for value in values if value is not None), None)

    mark = first(said.no_timestamps_token_id, model.get("no_timestamps_token_id"))
    eos = first(said.eos_token_id, (spec.eos_token_ids or None) if spec else None, said.bos_token_id)
    eos = first(eos, spec.bos_token_id if spec else None)
    if mark is None:
        words = "the token before the first timestamp, as generation configurations of Whisper models say it"
        raise ValueError(f"no_timestamps_token_id is needed in generate_config: {words}")
    if eos is None:
        raise ValueError("eos_token_id is needed in generate_config: a text may end between two timestamps")
    if spec is not None and not 0 <= mark < spec.vocab_size:
        raise ValueError(f"no_timestamps_token_id {mark} is outside the vocabulary of {spec.vocab_size}")
    own = options._detect_timestamp_from_logprob
    detect = first(own, said._detect_timestamp_from_logprob, model.get(_DETECT), True)
    cap = first(said.max_initial_timestamp_index, model.get("max_initial_timestamp_index"))
    return _Rules(mark + 1, min(eos) if isinstance(eos, tuple) else eos, cap, bool(detect))


def _owned(ctx: BindContext) -> dict[str, Any]:
    names = ("no_timestamps_token_id", "max_initial_timestamp_index")
    return {name: ctx.settings.get(name) for name in names if ctx.settings.get(name) is not None}


@attrs.frozen
class _Rules:
    """The rules with every number settled."""

    stamp: int
    """The first timestamp token."""
    eos: int
    """Tokens below it are words."""
    cap: int | None
    detect: bool

    def newest(self, ids: Tensor, real: Tensor | None) -> Tensor:
        """int64 [B]: the last timestamp in `ids` [B, N]; `stamp` - 1 where there is none."""
        none = ids.new_full((ids.shape[0],), self.stamp - 1)
        if ids.shape[1] == 0:
            return none
        found = ids >= self.stamp if real is None else (ids >= self.stamp) & real
        place = (found * torch.arange(1, ids.shape[1] + 1, device=ids.device)).amax(-1)
        last = ids.gather(-1, (place - 1).clamp_min_(0)[:, None])[:, 0]
        return last.where(place > 0, none)

    def __call__(self, ids: Tensor, scores: Tensor, begin: int, newest: Tensor, real: Tensor | None) -> Tensor:
        """Scores [B, V] after `ids` [B, T]; `real` bool [B, T] where some of the columns from `begin` are padding."""
        out = scores.clone()
        text, stamps = out[:, : self.stamp], out[:, self.stamp :]
        new = ids.shape[1] - begin
        if new == 0:
            text.fill_(-torch.inf)
            if self.cap is not None:
                stamps[:, self.cap + 1 :] = -torch.inf
            return out
        text[:, -1] = -torch.inf
        low = newest + (1 - self.stamp)
        opened: Tensor | None = None
        if new > 0:
            last = ids[:, -1] >= self.stamp
            paired = ids[:, -2] >= self.stamp if new > 1 else torch.ones_like(last)
            if real is not None:
                last = last & real[:, -1]
                paired = paired | ~real[:, -2] if new > 1 else paired
            opened = last & ~paired
            # An opened pair may close at the same time; a closed one is followed by no timestamp at all.
            low = (low - opened.long()).masked_fill(last & paired, stamps.shape[1])
        low = low.to(out.device)[:, None]
        stamps.masked_fill_(torch.arange(stamps.shape[1], device=out.device) < low, -torch.inf)
        cut = max(min(self.eos, self.stamp - 1), 0)
        words, rest = text[:, :cut], text[:, cut:]
        closed = None if opened is None else opened.to(out.device)
        if self.detect:
            best = rest.amax(-1)
            if cut:
                top = words.amax(-1)
                best = torch.maximum(best, top if closed is None else top.masked_fill(closed, -torch.inf))
            # Of scores and of log-probabilities the same is true: the norm is on both sides.
            mass = (stamps.float() if stamps.dtype in (torch.float16, torch.bfloat16) else stamps).logsumexp(-1)
            sure = mass > best
            rest.masked_fill_(sure[:, None], -torch.inf)
            closed = sure if closed is None else closed | sure
        if closed is not None:
            words.masked_fill_(closed[:, None], -torch.inf)
        return out


class _Timestamps:
    """The rules inside a run."""

    def __init__(self, options: WhisperTimeStampLogitsProcessor, rules: _Rules, ctx: BindContext, begin: int) -> None:
        self._options, self._rules, self._ctx, self._begin = options, rules, ctx, begin
        # Padding can only lie in the prompt.
        self._padded = ctx.mask is not None and begin < ctx.prompt_width
        self._newest: Tensor | None = None

    def __repr__(self) -> str:
        return repr(self._options)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return scores [B, V] with what the rules forbid at -inf."""
        real = self._ctx.history_mask(input_ids.shape[1]) if self._padded else None
        if self._newest is None:
            tail = None if real is None else real[:, self._begin :]
            self._newest = self._rules.newest(input_ids[:, self._begin :], tail)
        return self._rules(input_ids, scores, self._begin, self._newest, real)

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        """Remember the newest timestamp of the rows."""
        if self._newest is None:
            return
        for column in tokens.unbind(1) if tokens.dim() == 2 else (tokens,):
            old = self._newest if rows is None else self._newest[rows]
            new = column.where(column >= self._rules.stamp, old)
            self._newest = new if rows is None else self._newest.index_copy(0, rows, new)

    def rollback(self, steps: int, /) -> None:
        """Forget; the next call looks at the tokens that are left."""
        self._newest = None

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on with the newest timestamp of former row `rows[i]`."""
        if self._newest is not None:
            self._newest = self._newest[rows]


@attrs.frozen(slots=False)
class WhisperNoSpeechDetection(_Movable):
    """Record how likely it is that nobody speaks; scores pass untouched.

    The probability of `no_speech_token` is read where the transcript starts, `begin_index` tokens before the first
    generated one: from the scores where that is the last token of the prompt, else from a pass of the model over the
    prompt. It runs first of all, since it must see the model's own scores. (Radford et al. 2022, arXiv 2212.04356.)

    Inside a run the model is that of the call; on its own, and for encoder-decoder models, give it with `set_model`
    and `set_inputs`. The last call's answer is `no_speech_prob`.
    """

    # What it finds goes out and never comes back in: no call depends on another.
    traits: ClassVar[Traits] = Traits(phase=Phase.GUIDE, reads_history=False, keeps_argmax=True, pure=True)

    no_speech_token: int = option("The token that stands for silence.", check=whole(0))
    begin_index: int | None = option(
        "Tokens of the prompt from the start of the transcript on; unset: all of the prompt.",
        default=None,
        check=whole(1),
    )
    scores_is_logprobs: bool = option("Whether scores come as log-probabilities.", default=False)

    @property
    def no_speech_prob(self) -> Any:
        """Probability of silence, float32 [prompts], of the last call; [0.0] before any."""
        return self.__dict__.get("_found", [0.0])

    def set_model(self, model: Any) -> None:
        """The model to ask where the transcript starts before the last token of the prompt."""
        object.__setattr__(self, "_model", model)

    def set_inputs(self, inputs: Mapping[str, Any]) -> None:
        """What to ask it: the arguments of its `prepare_inputs_for_generation`, `inputs` being the features."""
        model = self.__dict__["_model"]
        ready = {**model.prepare_inputs_for_generation(**inputs), **inputs}
        ready["input_features"] = ready.pop("inputs")
        if "input_ids" not in inspect.signature(model.forward).parameters:
            ready.pop("input_ids", None)
        object.__setattr__(self, "_inputs", ready)

    def bind(self, ctx: BindContext, /) -> _NoSpeech:
        """Return the form that knows prompt and model.

        Raises ValueError where `no_speech_token` lies outside the vocabulary, or the transcript starts before the last
        token of the prompt and there is no model that can be asked.
        """
        if self.no_speech_token >= ctx.spec.vocab_size:
            vocab = ctx.spec.vocab_size
            raise ValueError(f"no_speech_token {self.no_speech_token} is outside the vocabulary of {vocab}")
        back = ctx.prompt_lengths if self.begin_index is None else ctx.prompt_lengths.clamp(max=self.begin_index)
        asks = bool((back > 1).any()) and "_inputs" not in self.__dict__
        if asks and (ctx.model is None or ctx.spec.is_encoder_decoder):
            raise ValueError("the transcript starts inside the prompt: give set_model and set_inputs before the call")
        return _NoSpeech(self, ctx, back, asks)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return `scores`, the same object; where `input_ids` [B, T] end at the begin, read the probability."""
        begin = self._from(self.begin_index)
        if begin is None:
            raise ValueError("begin_index is needed where the processor is called on its own: the prompt's width")
        if input_ids.shape[1] == begin:
            start = self.begin_index or begin
            if start > 1:
                self._keep(self._ask()[:, begin - start], False)
            else:
                self._keep(scores, self.scores_is_logprobs)
        return scores

    def _ask(self) -> Tensor:
        if "_inputs" not in self.__dict__:
            raise ValueError("the transcript starts inside the prompt: give set_model and set_inputs before the call")
        with torch.no_grad():
            logits: Tensor = self.__dict__["_model"](**self.__dict__["_inputs"]).logits
        return logits

    def _keep(self, scores: Tensor, logprobs: bool) -> None:
        probs = scores.float().exp() if logprobs else scores.float().softmax(-1)
        object.__setattr__(self, "_found", probs[:, self.no_speech_token])


class _NoSpeech:
    """The detection inside a run."""

    def __init__(self, options: WhisperNoSpeechDetection, ctx: BindContext, back: Tensor, asks: bool) -> None:
        self._options, self._ctx, self._back, self._asks = options, ctx, back, asks
        # Several rows may belong to one prompt; each prompt has one answer.
        self._firsts = [ctx.slots.index(slot) for slot in dict.fromkeys(ctx.slots)]

    def __repr__(self) -> str:
        return repr(self._options)

    @property
    def no_speech_prob(self) -> Any:
        """Probability of silence, float32 [prompts]."""
        return self._options.no_speech_prob

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return `scores`; before the first new token, read the probability."""
        width = self._ctx.prompt_width
        if input_ids.shape[1] != width:
            return scores
        if bool((self._back == 1).all()):
            self._options._keep(scores[self._firsts], self._options.scores_is_logprobs)
            return scores
        logits = self._forward(input_ids) if self._asks else self._options._ask()
        logits = logits[self._firsts] if len(logits) > len(self._firsts) else logits
        start = (width - self._back)[self._firsts].to(logits.device)
        self._options._keep(logits[torch.arange(len(start), device=start.device), start], False)
        return scores

    def _forward(self, input_ids: Tensor) -> Tensor:
        """Logits [B, T, V] of the prompt, in a pass of its own."""
        mask = self._ctx.history_mask(input_ids.shape[1])
        if mask is None:
            positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        else:
            positions = (mask.long().cumsum(-1) - 1).clamp_min_(0)
        model: Any = self._ctx.model
        logits: Tensor = model.forward(input_ids, positions, None, mask=mask, last=input_ids.shape[1]).logits
        return logits
