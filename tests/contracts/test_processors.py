"""Every installed processor keeps the laws and its own claims."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from decodekit.models import adapter_for
from decodekit.testing import ProcessorContract, TinyLM, installed


def few(prompt: int, ids: Any) -> list[int]:
    """Some tokens that depend on the row's own ones."""
    return [int(ids[-1]), 5, 7 * len(ids) % 37]


# Options with which each plugin has something to do, by name; several where their forms differ.
EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "temperature": [
        {"temperature": 0.7},
        {"temperature": 3},
        {"temperature": 0.9, "dynatemp_range": 0.5},
        {"dynatemp_range": 2, "dynatemp_exponent": 0.7},
    ],
    "top_n_sigma": [{"top_n_sigma": 1.5}, {"top_n_sigma": 0.2, "min_tokens_to_keep": 3, "filter_value": -1e4}],
    "top_h": [{"top_h": 0.4}, {"top_h": 0.7, "filter_value": -1e4}],
    "typical_p": [
        {"mass": 0.8},
        {"mass": 0.2, "min_tokens_to_keep": 3},
        {"mass": 0.999},
        {"mass": 0.5, "filter_value": -1e4},
    ],
    "epsilon_cutoff": [
        {"epsilon": 0.02},
        {"epsilon": 0.9, "min_tokens_to_keep": 3},
        {"epsilon": 0.1, "filter_value": -1e4},
    ],
    "eta_cutoff": [
        {"epsilon": 0.02},
        {"epsilon": 0.9, "min_tokens_to_keep": 3},
        {"epsilon": 0.1, "filter_value": -1e4},
    ],
    # Below 1 it draws: processors/test_shape_xtc.py.
    "xtc": [{"xtc_probability": 1.0}, {"xtc_probability": 1.0, "xtc_threshold": 0.02}],
    "mirostat": [{"mirostat_tau": 1.0}, {"mirostat_tau": 0.3, "mirostat_eta": 1}],
    "top_k": [{"top_k": 5}, {"top_k": 1}, {"top_k": 2, "min_tokens_to_keep": 4}, {"top_k": 5, "filter_value": -1e4}],
    "top_p": [
        {"top_p": 0.8},
        {"top_p": 0.0},
        {"top_p": 0.3, "min_tokens_to_keep": 3},
        {"top_p": 0.8, "filter_value": -1e4},
    ],
    "min_p": [
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"min_p": 0.9, "min_tokens_to_keep": 3},
        {"min_p": 0.1, "filter_value": -1e4},
    ],
    "repetition_penalty": [
        {"penalty": 1.3},
        {"penalty": 0.5},
        {"penalty": 2, "prompt_ignore_length": (0, 1, 2, 3)},
    ],
    "encoder_repetition_penalty": [{"penalty": 1.3}, {"penalty": 0.5, "encoder_input_ids": [[3, 4, 5]]}],
    "frequency_penalty": [{"frequency_penalty": 0.7}, {"frequency_penalty": -2}],
    "presence_penalty": [{"presence_penalty": 0.7}, {"presence_penalty": -2}],
    "dry": [{"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_sequence_breakers": (5,)}],
    "no_repeat_ngram_size": [{"ngram_size": 1}, {"ngram_size": 2}],
    "encoder_no_repeat_ngram_size": [
        {"encoder_ngram_size": 1},
        {"encoder_ngram_size": 2, "encoder_input_ids": [[token for pair in range(3, 37) for token in (pair, 9)]]},
    ],
    "sequence_bias": [{"sequence_bias": (((5,), 2.0), ((36,), -1.5), ((7, 3), 4.0))}],
    "bad_words_ids": [{"bad_words_ids": ((5,), (2,), (9, 4))}],
    "logit_bias": [{"logit_bias": ((5, 2.0), (36, -100.0))}],
    "min_length": [{"min_length": 8}, {"min_length": 50}, {"min_length": 50, "eos_token_id": (3, 4)}],
    "min_new_tokens": [{"min_new_tokens": 4}, {"min_new_tokens": 50, "eos_token_id": 5}],
    "suppress_tokens": [{"suppress_tokens": (3, 4, 36, 99, -1)}],
    "begin_suppress_tokens": [{"begin_suppress_tokens": (3, 4, 36, 99), "begin_index": 9}],
    "forced_bos_token_id": [],  # it acts behind prompts of one token: processors/test_constrain_rows.py
    "forced_eos_token_id": [{"eos_token_id": 5, "max_length": 10}, {"eos_token_id": (5, 6), "max_length": 10}],
    "exponential_decay_length_penalty": [
        {"exponential_decay_length_penalty": (1, 1.5)},
        {"exponential_decay_length_penalty": (0, 0.5), "eos_token_id": (3, 4)},
    ],
    "remove_invalid_values": [{}],
    "renormalize_logits": [{}],
    "prefix_allowed_tokens_fn": [{"prefix_allowed_tokens_fn": few}],
    "guidance_scale": [
        {"guidance_scale": 1.5},
        {"guidance_scale": 0.0, "unconditional_ids": ((4, 5, 6),), "use_cache": False},
        {"guidance_scale": 3.0, "unconditional_ids": ((4, 5, 6),), "unconditional_attention_mask": ((0, 1, 1),)},
    ],
    "token_healing": [],  # it acts where a prompt was shortened: processors/test_healing.py
    "whisper_timestamps": [
        {"generate_config": {"no_timestamps_token_id": 20, "eos_token_id": 15, "max_initial_timestamp_index": 3}},
        {"generate_config": {"no_timestamps_token_id": 30, "eos_token_id": 15}, "begin_index": 0},
    ],
    "whisper_no_speech": [],  # it changes no scores: processors/test_families_whisper.py
    "whisper_silence": [],  # it acts on what a speech model's adapter heard: seq2seq/test_whisper.py
    "bark_eos": [{"min_eos_p": 0.01}, {"eos_token_id": (3, 4), "min_eos_p": 0.05}],
    "alternating_codebooks": [{"semantic_vocab_size": 10, "codebook_size": 12}],
    "batched_guidance": [],  # two rows of scores for each row of tokens: processors/test_families_guidance.py
    "dia_guidance": [],
    "dia_eos_filter": [{"num_channels": 1, "eos_token_id": 30}],
    "dia_delay": [{"delay_pattern": (0,), "eos_token_id": 6}],
}

CASES = installed("processors", EXAMPLES)
PER_ROW = "prompt_ignore_length"
"""An option with a number for each row fits one batch size only."""


def test_there_are_processors_to_test() -> None:
    assert {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_length", "min_new_tokens"} <= {
        case.plugin.name for case in CASES if case.own
    }


@functools.cache
def model(vocab_size: int) -> Any:
    return adapter_for(TinyLM(vocab_size).double())  # so that batches of other sizes round to the same


class TestEveryProcessor(ProcessorContract):
    @pytest.fixture(autouse=True, params=CASES, ids=str)
    def _choose(self, request: pytest.FixtureRequest) -> None:
        self.case = request.param
        if PER_ROW in self.case.options and request.node.originalname in (
            "test_claim_rowwise",
            "test_padding_is_never_history",
        ):
            pytest.skip("rows are taken out of the batch, and the option has one number for each")

    def make(self) -> Any:
        return self.case.make()

    def context(self, tokens: Any, mask: Any, **more: Any) -> Any:
        asks = self.case.plugin.name == "guidance_scale"
        return super().context(tokens, mask, **({"model": model(self.vocab_size), **more} if asks else more))
