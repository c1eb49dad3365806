"""Config keys that belong to the core: which parts to use and what to return. Torch-free."""

from __future__ import annotations

from typing import Any

import attrs

from .fields import at_least, option


@attrs.frozen
class Choices:
    """Which parts the pipeline is made of."""

    strategy: str | None = option("Decoding strategy by plugin name; unset: chosen from the other keys.", default=None)
    do_sample: bool | None = option("Draw from the distribution instead of taking the likeliest token.", default=None)
    selector: str | None = option("Selector plugin that picks tokens; unset: the strategy's own.", default=None)
    use_cache: bool = option("Keep keys and values of earlier tokens.", default=True)
    cache_implementation: str | None = option("Cache by plugin name; unset: the model's own.", default=None)
    cache_config: dict[str, Any] | None = option("Options of the chosen cache.", default=None)
    prepare: str | None = option("Preparer plugin that makes the model faster first.", default=None)
    processor_order: tuple[str, ...] | None = option(
        "Names of processors in the order they shall run; overrides the phases among those named.", default=None
    )
    num_return_sequences: int = option("Sequences returned for each prompt.", default=1, check=at_least(1))
    seed: int | tuple[int, ...] | None = option(
        "Seed of the draws; unset: drawn from torch's global generator.", default=None, per_row=True
    )
    prefill_chunk_size: int | None = option(
        "Prompt tokens that the model reads at once, into a cache; unset: all.", default=None, check=at_least(1)
    )
    synced_gpus: bool | None = option(
        "Run the model as often in every process, as FSDP and ZeRO stage 3 need; unset: where the model is such a one.",
        default=None,
    )
    strict: bool = option("Refuse parts that cannot promise to be right here, instead of warning.", default=False)


@attrs.frozen
class Outputs:
    """What `generate` returns."""

    return_dict_in_generate: bool = option("Return an output object instead of the token tensor.", default=False)
    output_scores: bool = option("Record processed scores of every step.", default=False)
    output_logits: bool = option("Record raw logits of every step.", default=False)
    output_attentions: bool = option("Record attention weights of every step.", default=False)
    output_hidden_states: bool = option("Record hidden states of every step.", default=False)


@attrs.frozen
class Tokens:
    """Special tokens that every part may need."""

    bos_token_id: int | None = option("Begins an empty prompt.", default=None, check=at_least(0))
    pad_token_id: int | None = option("Fills finished rows; unset: the first eos token.", default=None)
    decoder_start_token_id: int | tuple[int, ...] | None = option(
        "Begins the text of an encoder-decoder model; unset: bos_token_id.",
        default=None,
        check=at_least(0),
        per_row=True,
    )


CORE_OPTIONS: tuple[type, ...] = (Choices, Outputs, Tokens)

REFERENCE = "compression_ratio_threshold condition_on_prev_tokens logprob_threshold"
"""Keys of the reference that no plugin owns yet: no mistake to ask for them, but nothing would answer."""

ARGUMENTS = "assistant_model assistant_tokenizer generator return_segments return_token_timestamps"
"""Arguments of the reference's call that are no keys, and that nothing here answers to."""

MADE = "position_ids labels logits_to_keep num_logits_to_keep cache_position return_dict"
"""Arguments of a model's forward pass that no caller need make."""

LIBRARY: dict[str, Any] = {"max_new_tokens": 20, "top_k": 50}
"""What applies when nobody says anything, as in the reference. Each stands in only for an owner of which
no other source sets any key."""
