"""The contract between core and plugins. Shapes: B rows, T tokens so far, Q new tokens, V vocabulary.

Everything is structural: a class need not inherit from these. Optional abilities are looked for once,
when the pipeline is assembled, never in the loop.
"""

# A method of a protocol is its docstring.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, device, dtype

    from .context import BindContext
    from .run import Run, Step
    from .shortlist import Shortlist


# -- the plugin kinds ------------------------------------------------------------------------------


class LogitsProcessor(Protocol):
    """Reshapes the scores of the next token."""

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        """Return new scores [B, V], floating; `input_ids` is int64 [B, T]. Write to neither argument."""


class StoppingCriterion(Protocol):
    """Says which rows are done."""

    def __call__(self, input_ids: Tensor, scores: Any, /) -> Tensor | bool:
        """Return bool [B], true where the row ends with its newest token.

        `input_ids` is int64 [B, T], prompt included; `scores` is the tuple of recorded score tensors,
        or None when `output_scores` is off. A plain ``False`` says cheaply that no row is done.
        """


class Streamer(Protocol):
    """Receives tokens as they are made."""

    def put(self, value: Tensor, /) -> None:
        """Take the prompt [B, T] once, then the new tokens [B] of every step, int64 on the CPU.

        Rows that ended before hold the pad token.
        """

    def end(self) -> None:
        """The generation is over; deliver whatever was held back."""


class Cache(Protocol):
    """Keys and values of earlier tokens: what a model's attention calls, plus what the loop needs."""

    def update(self, key: Tensor, value: Tensor, layer_idx: int, /, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append [B, H, Q, D] for one layer and return all that attention must see, [B, H, K, D].

        Extra arguments (transformers models pass their own keyword dict) are accepted and not written to.
        """

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens seen so far by a layer, evicted ones included."""

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return (K, offset): the key length `update` will return for Q more tokens, and the slot of its first."""

    def offers(self) -> frozenset[str]:
        """Abilities of this instance: some of crop, reorder, reorder_tail, fork, select, store, compile, paged."""


class Croppable(Protocol):
    """A cache that can forget its newest tokens (offers ``crop``)."""

    def crop(self, length: int, /) -> None:
        """Keep the first `length` tokens; a negative number drops that many; 0 keeps nothing."""


class Reorderable(Protocol):
    """A cache whose rows can change places (offers ``reorder``)."""

    def reorder_cache(self, rows: Tensor, /) -> None:
        """Make row i a copy of former row `rows[i]`, int64 [new B]."""


class TailReorderable(Reorderable, Protocol):
    """A reorderable cache that can save copies where rows have a beginning in common (offers ``reorder_tail``)."""

    def reorder_tail(self, rows: Tensor, start: int, /) -> None:
        """`reorder_cache`, told that all tokens before `start` are the same in the rows that trade places."""


class Forkable(Protocol):
    """A cache that can be copied, sharing nothing that either copy will write (offers ``fork``)."""

    def fork(self) -> Cache:
        """Return an independent copy."""


class Storable(Protocol):
    """A cache that can be written to disk and read back (offers ``store``)."""

    def state(self) -> Mapping[str, Tensor]:
        """Return everything needed to rebuild the cache, as named tensors."""

    def load(self, state: Mapping[str, Tensor], /) -> None:
        """Take over what `state` returned, replacing the content."""


@attrs.frozen
class ModelSpec:
    """Facts about a model that plugins may know."""

    vocab_size: int
    """Width V of the logits."""
    device: device
    dtype: dtype
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    max_positions: int | None = None
    num_embeddings: int | None = None
    """Rows of the input embedding, where they differ from `vocab_size`."""
    is_encoder_decoder: bool = False
    layer_windows: tuple[int | None, ...] | None = None
    """Newest tokens each layer attends to, its own included (None: all); None where nothing is known."""


@attrs.frozen
class Forward:
    """What one forward pass gives."""

    logits: Tensor
    """[B, last, V] in the model's dtype, for the last positions fed."""
    hidden: Mapping[int, Tensor] = attrs.field(factory=dict)
    """Requested hidden states by layer (0: embeddings), [B, Q, H]."""
    cache: Any = None
    """The cache to use next: the one passed in, or the one the model made."""
    extra: Mapping[str, Any] = attrs.field(factory=dict)
    """Other outputs of the model that were asked for (attentions)."""


class ModelAdapter(Protocol):
    """A model, as the loop sees it."""

    spec: ModelSpec
    defaults: Mapping[str, Any]
    """The model's own generation defaults, as flat config keys (lowest precedence but the library's)."""
    tokenizer: Any
    """The tokenizer that belongs to the model, or None."""

    def offers(self) -> frozenset[str]:
        """Abilities: some of cache, hidden, early_exit, early_logits, positions, mask, last, attentions.

        With early_logits it has a method ``early_logits(hidden)``: what the head, without the final norm, makes of
        hidden states [..., H] of any layer, [..., V]; and an attribute ``tied_embeddings`` where the head is the
        embedding. Where the last hidden state comes before the final norm, a method ``normed(hidden)`` applies it.
        """

    def make_cache(self, name: str, /, **options: Any) -> Any:
        """Return a cache the model makes itself (`name` "model"), or None where it makes none."""

    def forward(
        self, tokens: Tensor, positions: Tensor, cache: Any, /, *, mask: Tensor | None = None, last: int = 1,
        hidden: Sequence[int] = (), **model_kwargs: Any,
    ) -> Forward:  # fmt: skip
        """Run the model on `tokens` int64 [B, Q] at `positions` int64 [B, Q].

        `mask` is bool [B, K] over all slots, cached and new (True: a real token), or None for no padding.
        `cache` None means: no cache, `tokens` is the whole sequence. Logits of the `last` positions come back.
        """


class ModelPlugin(Protocol):
    """Entry of the ``models`` kind: makes adapters and opens checkpoints. Import nothing heavy at import."""

    def adapt(self, model: Any, /) -> ModelAdapter | None:
        """Return an adapter for a model object, or None when it is not of this kind."""

    def opens(self, ref: str, /) -> bool:
        """Whether `open` can load this name, folder or Hub id."""

    def open(self, ref: str, /, **options: Any) -> ModelAdapter:
        """Load it; the adapter's `tokenizer` is set where the checkpoint has one."""


class Strategy(Protocol):
    """A decoding loop. It reads like the algorithm; bookkeeping belongs to `Run`."""

    needs: ClassVar[frozenset[str]]
    """Capabilities of model and cache it cannot do without, such as ``cache:reorder``."""
    samples: ClassVar[bool]
    """Whether it draws from the distribution, so that temperature and truncation matter.

    Where it acts on keys of other plugins, a ClassVar ``reads`` names them, so that nobody doubts they have an effect.
    """

    def decode(self, run: Run, /) -> Iterator[Step]:
        """Yield one `Step` per forward pass until `run.finished`."""


class Selector(Protocol):
    """Picks the next token of every row from processed scores."""

    def __call__(self, scores: Tensor | Shortlist, ctx: BindContext, /) -> Tensor:
        """Return int64 [B]. Random numbers come from `ctx.uniform()` only, so that they follow the request."""


@attrs.frozen
class Candidates:
    """Drafted tokens to verify in one forward pass."""

    tokens: Tensor
    """int64 [B, N]; -1 where a row has fewer."""
    logits: Tensor | None = None
    """[B, N, V] scores each draft token was drawn from; None: they are certain (one-hot)."""
    parents: Tensor | None = None
    """int64 [N], the draft each one follows (-1: the last accepted token); None: a chain."""


class CandidateGenerator(Protocol):
    """Proposes tokens for speculative decoding."""

    def propose(self, input_ids: Tensor, limit: int, /) -> Candidates | None:
        """Draft at most `limit` tokens after `input_ids` [B, T]; None: no idea this round."""

    def observe(self, accepted: Tensor, scores: Tensor | None, /) -> None:
        """Learn how many drafts of each row were accepted, int64 [B]."""


@attrs.frozen
class Detection:
    """The verdict of a watermark detector on one text."""

    score: float
    p_value: float
    tokens_scored: int
    details: Mapping[str, Any] = attrs.field(factory=dict)


class Watermarker(Protocol):
    """Marks generated text and finds the mark again."""

    def bind(self, ctx: BindContext, /) -> LogitsProcessor:
        """Return the processor that marks, run in phase WATERMARK."""

    def detect(self, token_ids: Tensor, /) -> Detection:
        """Judge int64 [T] token ids."""


class Scheduler(Protocol):
    """Orders the requests of continuous batching."""

    def add_waiting_request(self, state: Any, /) -> None:
        """Queue a request."""

    def schedule_batch(self, token_budget: int, cache_budget: int, /) -> Sequence[Any] | None:
        """Return the requests of the next forward pass within both budgets, in tokens; None: nothing fits."""

    def finish_request(self, request_id: str, /) -> None:
        """Forget a finished request and free what it held."""

    def set_request_cancellation(self, request_id: str, /) -> None:
        """Mark a request to be dropped before the next batch."""

    def clear_cancelled_requests(self) -> None:
        """Drop all marked requests."""

    def has_pending_requests(self) -> bool:
        """Whether anything waits or runs."""


class Preparer(Protocol):
    """Turns an adapter into a faster one that gives the same answers: the key ``prepare`` names it.

    The entry point names its options class; an object of it prepares. ClassVars may say what it needs and takes:
    ``devices`` and ``dtypes`` (frozensets of names such as ``cpu`` and ``float32``, empty: any) of the models that it
    makes faster; ``frozen``: whether the weights must stay as they are (False: it notices changes at the next call);
    ``memory``: bytes that it takes at most for each byte of weights.

    Where what it made can be undone it has ``release(model) -> bool``: forget what was made of a model object (or
    adapter), give back what was taken of it, and say whether there was anything; `decodekit.release` calls it.
    """

    def prepare(self, adapter: ModelAdapter, /) -> ModelAdapter:
        """Return the faster adapter, or `adapter` itself where this preparer does nothing for it.

        Called for every run, so what costs must be made once for a model and found again; it must be found stale when
        the model's weights or modules are others. Neither the adapter nor the model object may be changed, unless an
        option asks for that. A method ``prepared()`` of the adapter returned gives rows (dicts) that
        ``decodekit explain`` shows.
        """


class Hub(Protocol):
    """Where files of configurations are kept for others."""

    def fetch(self, repo_id: str, name: str, /, **options: Any) -> Path:
        """Return a local copy of the file `name`. Raises an OSError where there is none."""

    def push(self, file: Path, /, **options: Any) -> None:
        """Upload a file; the names of its keyword arguments are the options that callers may give."""
