"""What `generate` returns: attrs classes that also read like the reference's (attribute, key, tuple order)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
from torch import Tensor

ORDER = (
    "sequences", "sequences_scores", "scores", "logits", "beam_indices", "encoder_attentions", "encoder_hidden_states",
    "decoder_attentions", "cross_attentions", "decoder_hidden_states", "attentions", "hidden_states", "cache",
)  # fmt: skip
"""The reference's order of the fields it has; ours come behind them."""

OLDER = {"past_key_values": "cache"}
"""Names that the reference still answers to."""


@attrs.define(slots=False)
class GenerateDecoderOnlyOutput:
    """Result of a decoder-only model.

    Indexing by name or place, iteration over names and `to_tuple` skip fields that are None, as the reference does.
    """

    sequences: Tensor
    """int64 [rows, T]: prompt and new tokens; rows that ended early are filled with the pad token."""
    scores: tuple[Tensor, ...] | None = None
    """One [rows, V] float tensor a step: processed scores (``output_scores``)."""
    logits: tuple[Tensor, ...] | None = None
    """One [rows, V] float tensor a step: raw logits (``output_logits``)."""
    attentions: tuple[Any, ...] | None = None
    """A tuple per step of one tensor per layer (``output_attentions``)."""
    hidden_states: tuple[Any, ...] | None = None
    """A tuple per step of one [rows, Q, H] tensor per layer, embeddings first (``output_hidden_states``)."""
    cache: Any = None
    """The cache after the last step."""
    stop_reasons: tuple[str, ...] = ()
    """For each row, the name of the criterion that ended it (eos, max_length, stop_strings, max_time, ...)."""
    stop_details: tuple[Any, ...] = ()
    """For each row what the criterion says about it: for a stop string, the string."""
    lengths: tuple[int, ...] = ()
    """For each row the number of new tokens, the one that ended it included."""
    prompt_width: int = 0
    """Columns of `sequences` that belong to the prompt."""

    def keys(self) -> list[str]:
        """Names of the fields that are not None, in the reference's order."""
        names = [f.name for f in attrs.fields(type(self)) if getattr(self, f.name) is not None]
        return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def items(self) -> list[tuple[str, Any]]:
        """(name, value) of the fields that are not None."""
        return [(name, getattr(self, name)) for name in self.keys()]

    def to_tuple(self) -> tuple[Any, ...]:
        """The values that are not None, in order."""
        return tuple(value for _, value in self.items())

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __contains__(self, name: object) -> bool:
        return (OLDER.get(name, name) if isinstance(name, str) else name) in self.keys()

    def __getitem__(self, key: str | int | slice) -> Any:
        return dict(self.items())[OLDER.get(key, key)] if isinstance(key, str) else self.to_tuple()[key]

    @property
    def past_key_values(self) -> Any:
        """The reference's older name of `cache`."""
        return self.cache


@attrs.define(slots=False)
class GenerateEncoderDecoderOutput(GenerateDecoderOnlyOutput):
    """Result of an encoder-decoder model; `attentions` and `hidden_states` are empty: they say whose they are."""

    encoder_attentions: tuple[Any, ...] | None = None
    """One tensor per layer of the encoder, a row for each row of the decoder."""
    encoder_hidden_states: tuple[Any, ...] | None = None
    """One [rows, S, H] tensor per layer of the encoder."""
    decoder_attentions: tuple[Any, ...] | None = None
    """A tuple per step of one tensor per layer of the decoder."""
    cross_attentions: tuple[Any, ...] | None = None
    """A tuple per step of one tensor per layer: what the decoder attends to in the encoder."""
    decoder_hidden_states: tuple[Any, ...] | None = None
    """A tuple per step of one [rows, Q, H] tensor per layer of the decoder."""


@attrs.define(slots=False)
class GenerateBeamDecoderOnlyOutput(GenerateDecoderOnlyOutput):
    """Result of a beam search; rows are the returned sequences, recorded tensors hold all rows of the beams."""

    sequences_scores: Tensor | None = None
    """float [rows]: summed log-probability of the new tokens over length ** length_penalty."""
    beam_indices: Tensor | None = None
    """int32 [rows, new tokens]: the row of `scores` that each token was chosen by; -1 behind a sequence's end."""


@attrs.define(slots=False)
class GenerateBeamEncoderDecoderOutput(GenerateBeamDecoderOnlyOutput, GenerateEncoderDecoderOutput):
    """Result of a beam search with an encoder-decoder model."""
