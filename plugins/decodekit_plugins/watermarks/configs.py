"""What a watermark is made from: plain data that the writer and the detector of a text share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import attrs
from decodekit.converter import plain, structure
from decodekit.fields import at_least, between, one_of, option

C = TypeVar("C", bound="_Data")

LARGEST_TABLE = 2**24
"""Entries of the greatest sampling table: its indices are drawn as 24-bit numbers."""


class _Data:
    """The reference's ways to and from plain data."""

    @classmethod
    def from_dict(cls: type[C], config_dict: Mapping[str, Any], **kwargs: Any) -> C:
        """Build from plain data; `kwargs` override. Raises ValueError that names each field that does not fit."""
        made: C = structure({**config_dict, **kwargs}, cls)
        return made

    def to_dict(self) -> dict[str, Any]:
        """Every field as JSON-able data."""
        return dict(plain(self))

    def to_json_string(self) -> str:
        """JSON text: indent 2, one final newline."""
        return json.dumps(self.to_dict(), indent=2) + "\n"


@attrs.frozen
class WatermarkingConfig(_Data):
    """Adds `bias` to the scores of "green" tokens, which a hash of the text before them draws.

    (Kirchenbauer et al. 2023, "A Watermark for Large Language Models", arXiv 2306.04634.) Raises ValueError for values
    out of range.
    """

    greenlist_ratio: float = option("Share of the vocabulary that is green.", default=0.25, check=between(0, 1))
    bias: float = option("Added to the scores of green tokens.", default=2.0)
    hashing_key: int = option("Secret number that the hash begins with.", default=15485863)
    seeding_scheme: str = option(
        "What the hash reads: the tokens before (lefthash), or the token itself, too (selfhash).",
        default="lefthash",
        check=one_of("lefthash", "selfhash"),
    )
    context_width: int = option("Tokens that the hash reads.", default=1, check=at_least(1))


def _some(_: Any, field: Any, value: tuple[int, ...]) -> None:
    if not value:
        raise ValueError("keys must not be empty: give one for each layer of the tournament")


@attrs.frozen
class SynthIDTextWatermarkingConfig(_Data):
    """Draws tokens by a tournament in which a keyed hash of the last `ngram_len` tokens decides.

    (Dathathri et al. 2024, "Scalable watermarking for identifying large language model outputs", Nature 634,
    doi 10.1038/s41586-024-08025-4.) Raises ValueError for values out of range.
    """

    ngram_len: int = option("Tokens that the hash reads, the drawn one included.", check=at_least(2))
    keys: tuple[int, ...] = option("Secret keys, one for each layer of the tournament.", check=_some, converter=tuple)
    context_history_size: int = option(
        "Contexts remembered, so that one that comes again is not marked twice.", default=1024, check=at_least(1)
    )
    sampling_table_seed: int = option("Seed of the table that hashes are looked up in.", default=0)
    sampling_table_size: int = option("Entries of that table.", default=2**16, check=between(1, LARGEST_TABLE))
    skip_first_ngram_calls: bool = option("Leave tokens unmarked until there is a whole n-gram.", default=False)
    debug_mode: bool = option("Mark uniform scores instead of the model's, to test the mark itself.", default=False)
