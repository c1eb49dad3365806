"""What plugins may be able to do beside what their protocol asks: looked for once, when the pipeline is assembled.

Shapes as in `protocols`: B rows, T tokens so far, Q new tokens, V vocabulary.
"""

# A method of a protocol is its docstring.
# pyright: reportReturnType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from .context import BindContext
    from .prompt import Prompt
    from .protocols import ModelSpec
    from .settings import Settings
    from .shortlist import Shortlist


class Bindable(Protocol):
    """Options that become a runtime object for one call."""

    def bind(self, ctx: BindContext, /) -> Any | None:
        """Return the runtime for this call (`self` if stateless), or None: nothing to do, leave me out."""


class Accepts(Protocol):
    """State that advances only when tokens are accepted, never in `__call__`."""

    def accept(self, tokens: Tensor, rows: Tensor | None, /) -> None:
        """Take accepted tokens int64 [B] or [B, N]; `rows` int64 names the rows, None: all in order."""


class RollsBack(Protocol):
    """State that can take accepted tokens back (rejected drafts)."""

    def rollback(self, steps: int, /) -> None:
        """Undo the last `steps` calls of `accept`."""


class Reorders(Protocol):
    """Per-row state that follows beams and batch compaction."""

    def reorder(self, rows: Tensor, /) -> None:
        """State of row i becomes a copy of that of former row `rows[i]`, int64."""


class PerSlot(Protocol):
    """Different options for each request of a shared batch."""

    def open(self, slot: int, options: Any, /) -> None:
        """Request slot `slot` starts with these options."""

    def close(self, slot: int, /) -> None:
        """The slot is free again."""


class Masks(Protocol):
    """A constrainer that states allowed tokens as bits."""

    def fill(self, bits: Tensor, row: int, /) -> None:
        """Set bit v of `bits` int32 [ceil(V / 32)] for every token v the row may take next."""


class Encodes(Protocol):
    """A model adapter that reads more than the tokens to continue: an encoder's input, images, embeddings."""

    def arrange(
        self, inputs: Any, mask: Any, model_kwargs: dict[str, Any], /, *, settings: Settings, tokenizer: Any, past: int
    ) -> tuple[Prompt, dict[str, Any]]:
        """Return the rows to continue, and what `encode` gets, out of what the caller passed. Runs nothing, unless
        the rows begin with what the model hears or sees (the language of Whisper).

        `past` is the number of tokens that a passed cache holds. Raises `InputError` for what does not fit."""

    def adopt(self, cache: Any, ctx: BindContext, /) -> Any:
        """Return the cache to use for this one; an encoder-decoder model needs room for the encoder's part, too."""

    def encode(self, model_kwargs: dict[str, Any], /) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments of every forward pass, a row for each prompt, and fields of the output."""


class EditsPrompt(Protocol):
    """Options of a processor that change the prompt before anything is assembled."""

    def edit_prompt(self, prompt: Prompt, /, *, spec: ModelSpec, settings: Settings, tokenizer: Any) -> Prompt:
        """Return the rows to continue instead of `prompt`, as many of them and left-padded as before."""


class Edits(Protocol):
    """A processor that changes scores at a few places, and need not copy all others where nobody else wants them."""

    def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
        """Return what `__call__` would give: `scores` themselves, or a new tensor that nobody else holds.

        Write into `scores` only where `own`: then they belong to the chain. The class must claim ``pure``.
        """


class Shortlists(Protocol):
    """A processor that can work on the shortlist [B, K] instead of the whole vocabulary."""

    def shorten(self, input_ids: Tensor, shortlist: Shortlist, /) -> Shortlist:
        """Return what `__call__` would give, restricted to the shortlist; exactly the same kept set."""


class OpensShortlist(Protocol):
    """A truncation that can make the first shortlist out of dense scores."""

    def open_shortlist(self, input_ids: Tensor, scores: Tensor, /) -> Shortlist | None:
        """Return the shortlist of `__call__(input_ids, scores)`; None: not this time, use the dense form."""


class Limits(Protocol):
    """A criterion that knows a width which no row will pass."""

    def limit(self, prompt_width: int, /) -> int:
        """Return the greatest total width T, prompt included."""


class Explains(Protocol):
    """A criterion that can say more about why a row stopped."""

    def why(self, row: int, /) -> Any:
        """Return details of the stop of `row` (for a stop string: the string)."""


class StreamsRows(Protocol):
    """A streamer of several rows, which end at different times. Their prompts come by `put`, the rest by these."""

    def put_rows(self, tokens: Tensor, rows: Sequence[int], /) -> None:
        """Take new tokens int64 [N] on the CPU; token i continues row `rows[i]` of the output. Rows may be missing."""

    def end_row(self, row: int, /) -> None:
        """The row has got its last token; the others go on."""


class Fails(Protocol):
    """A streamer that wants to pass the error of a failing generation on to its consumer."""

    def fail(self, error: BaseException, /) -> None:
        """The generation ended with `error`; `end` will not be called."""
