"""Classifier-free guidance: away from what the model says without the prompt."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any, ClassVar

import attrs
import torch
from decodekit.context import BindContext
from decodekit.errors import ConfigError, InputError, Problem
from decodekit.fields import between, option
from decodekit.models import adapter_for
from decodekit.options import Choices
from decodekit.pipeline import cache_offers
from decodekit.protocols import ModelAdapter
from decodekit.registry import registry
from decodekit.traits import Phase, Traits
from torch import Tensor

from .checks import of_rows

_KEPT = 256
"""Calls of `accept` that can be taken back."""

Rows = tuple[tuple[int, ...], ...]


def _rows(value: Any) -> Any:
    """Token ids of one prompt or of several (list or tensor, [N] or [B, N]) as a tuple of tuples."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return value
    value = [item.tolist() if hasattr(item, "tolist") else item for item in value]
    if value and not any(isinstance(item, (list, tuple)) for item in value):
        value = [value]
    return tuple(tuple(item) if isinstance(item, (list, tuple)) else item for item in value)


def _check_rows(instance: Any, attribute: Any, value: Any) -> None:
    """Raise ValueError unless None, or rows of whole numbers, none of them empty."""
    if value is None:
        return
    fine = isinstance(value, tuple) and all(isinstance(row, tuple) and row for row in value) and len(value) > 0
    if not fine or not all(isinstance(item, int) for row in value for item in row):
        raise ValueError(f"must be token ids [N] or [B, N], at least one in each row, got {value!r:.80}")


@attrs.frozen(slots=False)
class UnbatchedClassifierFreeGuidanceLogitsProcessor:
    """Mix in what the model says without the prompt, or after a negative one: u + guidance_scale * (c - u).

    c are the log-probabilities of the scores, u those of a second forward pass over the negative prompt (unset: the
    last token of the prompt) and the new tokens, which has a cache of its own. Above 1 the text keeps closer to the
    prompt; 1 changes nothing; `guidance_scale` may be one number for each prompt. Tokens with an infinite score on
    either side keep their c. Scores are floating [B, V]. Negative prompts of different length are padded on either
    side, as `unconditional_attention_mask` says, or not at all (lists of different length); one serves every prompt.

    Called on its own it remembers: the first call begins a text, later ones with longer `input_ids` go on with it.
    Raises ValueError where there is no model, or for negative prompts that fit neither the batch nor their mask.
    (Sanchez et al. 2023, "Stay on topic with classifier-free guidance", arXiv 2306.17806.)
    """

    traits: ClassVar[Traits] = Traits(phase=Phase.GUIDE, pure=False)

    guidance_scale: float | tuple[float, ...] = option(
        "How far to go from the unconditional distribution towards the prompt's and beyond; 1 changes nothing.",
        default=1.0,
        check=between(-torch.inf, torch.inf, low_open=True, high_open=True),
        per_row=True,
    )
    model: Any = attrs.field(
        default=None, eq=False, repr=False, metadata={"doc": "Model to ask; unset: that of the running call."}
    )
    unconditional_ids: Any = option(
        "Negative prompt: token ids, one row for each prompt or one for all; unset: the prompt's last token.",
        default=None,
        converter=_rows,
        check=_check_rows,
    )
    unconditional_attention_mask: Any = option(
        "1 at tokens of the negative prompt, 0 at padding.", default=None, converter=_rows, check=_check_rows
    )
    use_cache: bool = option("Keep keys and values of the unconditional text.", default=True)

    def bind(self, ctx: BindContext, /) -> _Guidance | None:
        """Return the form with a text of its own, or None at 1. Raises ValueError where no model is known,
        and ConfigError for one with an encoder, which has read the prompt."""
        scale = self.guidance_scale
        if all(each == 1 for each in (scale if isinstance(scale, tuple) else (scale,))):
            return None
        model = ctx.model if self.model is None else adapter_for(self.model)
        if model is None:
            raise ValueError("guidance needs a model: pass model=... where the processor is made")
        if hasattr(model, "encode"):
            words = "is for models without an encoder: what the text would be without its prompt is not asked here"
            raise ConfigError([Problem("guidance_scale", words, "decodekit:guidance_scale")])
        negative = None if self.unconditional_ids is None else self._negative(ctx.slots, ctx.tokens.device)
        able = self.use_cache and ctx.settings.of(Choices).use_cache
        start = ctx.length - ctx.prompt_width
        return _Guidance(self, model, ctx.per_row(scale), negative, ctx.prompt_width, start, able, ctx)

    def _negative(self, slots: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
        """Negative prompt of each row, left-padded: int64 [rows, N], and bool [rows, N] of its real tokens."""
        given: Rows = self.unconditional_ids
        marks: Rows | None = self.unconditional_attention_mask
        prompts = max(slots) + 1
        if len(given) not in (1, prompts):
            raise ValueError(
                f"has {len(given)} negative prompts for {prompts} prompt{'s'[: prompts != 1]}; give one, or one each"
            )
        if marks is not None and [len(row) for row in marks] != [len(row) for row in given]:
            raise ValueError("negative_prompt_attention_mask must have the shape of negative_prompt_ids")
        kept = [[t for i, t in enumerate(row) if marks is None or marks[n][i]] for n, row in enumerate(given)]
        if not all(kept):
            raise ValueError("negative_prompt_attention_mask hides a whole row: each needs at least one real token")
        width = max(map(len, kept))
        own = [kept[slot if len(kept) > 1 else 0] for slot in slots]
        tokens = torch.tensor([[0] * (width - len(row)) + row for row in own], device=device)
        real = torch.tensor([[False] * (width - len(row)) + [True] * len(row) for row in own], device=device)
        return tokens, real

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return guided log-probabilities. Raises ValueError without `model`."""
        if self.guidance_scale == 1:
            return scores.log_softmax(-1)
        session: _Guidance | None = self.__dict__.get("_session")
        if session is None or not session.goes_on(input_ids):
            session = self._begin(input_ids, scores)
            object.__setattr__(self, "_session", session)
        session.catch_up(input_ids)
        with torch.no_grad():
            return session(input_ids, scores)

    def _begin(self, input_ids: Tensor, scores: Tensor) -> _Guidance:
        """The text that begins with these rows, outside of any run."""
        if self.model is None:
            raise ValueError("model is needed where the processor is called on its own")
        rows, mixed = range(input_ids.shape[0]), of_rows(self.guidance_scale, scores)
        negative = None if self.unconditional_ids is None else self._negative(rows, input_ids.device)
        return _Guidance(self, adapter_for(self.model), mixed, negative, input_ids.shape[-1], 0, self.use_cache)


class _Guidance:
    """The unconditional text of every row, and the cache of what the model has seen of it.

    It consists of the negative prompt and the new tokens in `input_ids`. Only tokens that were accepted are relied
    upon: what was fed beyond them, in drafts, is taken out of the cache before the next forward pass.
    """

    def __init__(
        self,
        options: UnbatchedClassifierFreeGuidanceLogitsProcessor,
        model: ModelAdapter,
        scale: Any,
        negative: tuple[Tensor, Tensor] | None,
        prompt_width: int,
        accepted: int,
        use_cache: bool,
        ctx: BindContext | None = None,
    ) -> None:
        self._options = options
        self._model = model
        self._scale = scale
        self._negative = negative
        self._pads = None if negative is None else _padding(negative[1])
        self._prompt_width = prompt_width
        self._accepted = accepted
        self._said: Tensor | None = None
        self._ctx = ctx
        self._caches = use_cache and "cache" in model.offers()
        self._cache: Any = None
        self._seen = 0
        """Tokens of the unconditional text in the cache, negative prompt included."""
        self._logits: Tensor | None = None
        self._back: deque[int] = deque(maxlen=_KEPT)

    def __repr__(self) -> str:
        return repr(self._options)

    # -- state ---------------------------------------------------------------------------------------

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        """The new tokens stay; they are read from `input_ids` when they are needed."""
        self._trim()  # a draft that was asked about may not be what is accepted
        count = 1 if tokens.dim() == 1 else tokens.shape[1]
        self._back.append(count)
        self._accepted += count

    def rollback(self, steps: int, /) -> None:
        """Undo the last `steps` calls of `accept`. Raises ValueError beyond what is kept."""
        if steps > len(self._back):
            raise ValueError(f"only the last {len(self._back)} steps are kept, cannot take back {steps}")
        self._accepted -= sum(self._back.pop() for _ in range(steps))
        self._trim()

    def reorder(self, rows: Tensor, /) -> None:
        """Row i goes on as former row `rows[i]`."""
        if self._negative is not None:
            self._negative = self._negative[0][rows], self._negative[1][rows]
        if self._pads is not None:
            self._pads = self._pads[rows]
        if isinstance(self._scale, Tensor):
            self._scale = self._scale[rows]
        self._logits = None if self._logits is None else self._logits[rows]
        if self._seen and "reorder" in cache_offers(self._cache):
            self._cache.reorder_cache(rows)
        elif self._seen:
            self._forget()

    def goes_on(self, input_ids: Tensor) -> bool:
        """Whether `input_ids` [B, T], given from outside of any run, begin with the prompt of this text."""
        said, width = self._said, self._prompt_width
        return said is None or torch.equal(said[:, :width], input_ids[:, :width])

    def catch_up(self, input_ids: Tensor) -> None:
        """Take over `input_ids` [B, T] from outside of any run; what the model has seen of other tokens is dropped."""
        said = self._said
        self._said = input_ids.clone()
        self._accepted = input_ids.shape[1] - self._prompt_width
        both = 0 if said is None else min(said.shape[1], input_ids.shape[1])
        if said is not None and not torch.equal(said[:, :both], input_ids[:, :both]):
            self._forget()

    def _trim(self) -> None:
        """Take what was not accepted out of the cache."""
        if self._negative is not None:
            self._keep(self._negative[0].shape[1] + self._accepted)

    def _keep(self, length: int) -> None:
        """Leave at most the first `length` tokens of the unconditional text in the cache."""
        if self._seen <= length:
            return
        self._logits = None
        if length > 0 and "crop" in cache_offers(self._cache):
            try:
                self._cache.crop(length - self._seen)
                self._seen = length
                return
            except InputError:  # a layer with a window has forgotten what it would need
                pass
        self._forget()

    def _forget(self) -> None:
        """Begin the unconditional text anew."""
        self._cache, self._seen, self._logits = None, 0, None

    # -- the forward pass ------------------------------------------------------------------------------

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return guided log-probabilities [B, V] in the dtype of `scores`."""
        given = scores.log_softmax(-1)
        free = self._unconditional(input_ids).to(scores.dtype).log_softmax(-1)
        scale = self._scale.to(scores.dtype) if isinstance(self._scale, Tensor) else self._scale
        mixed = scale * (given - free) + free
        # Where one side is infinite the difference says nothing: the prompt's own word stands.
        mixed = torch.where(given.isinf() | free.isinf(), given, mixed)
        return mixed if not isinstance(scale, Tensor) else torch.where(scale == 1, scores, mixed)

    def _unconditional(self, input_ids: Tensor) -> Tensor:
        """Logits [B, V] after the unconditional text that belongs to `input_ids` [B, T]."""
        if self._negative is None:
            first = input_ids[:, self._prompt_width - 1 : self._prompt_width].clone()
            self._negative = first, torch.ones_like(first, dtype=torch.bool)
        tokens, real = self._negative
        new = input_ids[:, self._prompt_width :]
        width = tokens.shape[1] + new.shape[1]
        if self._logits is not None and self._seen == width and new.shape[1] <= self._accepted:
            return self._logits
        self._trim()
        self._keep(width - 1)
        if self._caches and self._cache is None:
            self._cache = self._new_cache()
        seen = self._seen
        fed = new[:, seen - tokens.shape[1] :] if seen >= tokens.shape[1] else torch.cat([tokens, new], 1)[:, seen:]
        places = torch.arange(seen, width, device=fed.device).expand(fed.shape)
        mask: Tensor | None = None
        if self._pads is not None:
            places = (places - self._pads).clamp_min_(0)
            mask = torch.cat([real, real.new_ones(new.shape)], 1)
        result = self._model.forward(fed, places, self._cache, mask=mask, last=1)
        self._cache = result.cache if self._cache is not None else None
        self._seen = width if self._cache is not None else 0
        self._logits = result.logits[:, -1].float()
        return self._logits

    def _new_cache(self) -> Any:
        """A cache as the model likes it; None where it takes none."""
        name = getattr(self._model, "default_cache", "model")
        if name == "model" or self._ctx is None:
            return self._model.make_cache("model")
        made = registry.load("caches", name)()
        ctx = copy.copy(self._ctx)
        ctx.spec, ctx.model = self._model.spec, self._model  # of another model's layers the run's say nothing
        return made.bind(ctx) if hasattr(made, "bind") else made


def _padding(real: Tensor) -> Tensor | None:
    """int64 [B, 1], the padding in front of each row; None where there is none."""
    pads = real.shape[1] - real.sum(-1, keepdim=True)
    return pads if bool(pads.any()) else None
