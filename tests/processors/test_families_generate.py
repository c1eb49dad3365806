"""The processors of Bark, MusicGen and Dia inside the generate methods that transformers wrote for them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from decodekit import generate
from decodekit_processors.families.bark import AlternatingCodebooksLogitsProcessor, BarkEosPrioritizerLogitsProcessor
from decodekit_processors.families.dia import (
    DiaClassifierFreeGuidanceLogitsProcessor,
    DiaEOSChannelFilterLogitsProcessor,
    DiaEOSDelayPatternLogitsProcessor,
)
from decodekit_processors.families.musicgen import ClassifierFreeGuidanceLogitsProcessor
from torch import Tensor


def ids_of(rows: int, width: int, vocab: int = 11, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab, (rows, width), generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def instead(module: Any, *classes: type) -> Iterator[list[str]]:
    """Put our classes in the place of transformers' own; gives the names of those that were called."""
    called: list[str] = []

    def watched(cls: type) -> type:
        def call(self: Any, input_ids: Tensor, scores: Tensor, /) -> Tensor:
            called.append(cls.__name__)
            result: Tensor = cls.__call__(self, input_ids, scores)  # type: ignore[operator]
            return result

        return type(cls.__name__, (cls,), {"__call__": call, "__slots__": ()})

    with pytest.MonkeyPatch.context() as patch:
        for cls in classes:
            patch.setattr(module, cls.__name__, watched(cls))
        yield called


def seeded(make: Any, seed: int) -> Tensor:
    torch.manual_seed(seed)
    made: Tensor = make()
    return made


SMALL = {"num_layers": 1, "num_heads": 2, "hidden_size": 16, "initializer_range": 0.5}


def test_inside_barks_own_generate() -> None:
    module = pytest.importorskip("transformers.models.bark.modeling_bark")
    settings = pytest.importorskip("transformers.models.bark.generation_configuration_bark")
    from transformers.models.bark.configuration_bark import BarkCoarseConfig, BarkSemanticConfig

    torch.manual_seed(0)
    sizes = {"block_size": 64, "input_vocab_size": 130, "output_vocab_size": 60}
    semantic = module.BarkSemanticModel(BarkSemanticConfig(**sizes, **SMALL)).eval()
    sizes = {"block_size": 128, "input_vocab_size": 100, "output_vocab_size": 100}
    coarse = module.BarkCoarseModel(BarkCoarseConfig(**sizes, **SMALL)).eval()
    first = settings.BarkSemanticGenerationConfig(
        eos_token_id=50, max_new_tokens=12, text_encoding_offset=60, text_pad_token=100, semantic_infer_token=120,
        semantic_vocab_size=50, semantic_pad_token=50, max_input_semantic_length=8, min_eos_p=0.01, do_sample=True,
    )  # fmt: skip
    second = settings.BarkCoarseGenerationConfig(
        max_coarse_history=20, max_coarse_input_length=16, sliding_window_len=5, coarse_semantic_pad_token=90,
        coarse_infer_token=91, do_sample=True,
    )  # fmt: skip

    def run() -> Tensor:
        words = semantic.generate(ids_of(3, 8, 30, 1), semantic_generation_config=first)
        sounds = coarse.generate(words.clone(), first, second, codebook_size=20)
        return torch.cat([words, sounds], dim=1)

    ours = (BarkEosPrioritizerLogitsProcessor, AlternatingCodebooksLogitsProcessor)
    for seed in range(4):
        want = seeded(run, seed)
        with instead(module, *ours) as called:
            got = seeded(run, seed)
        assert torch.equal(got, want)
        assert set(called) == {cls.__name__ for cls in ours}


@pytest.mark.parametrize("sample", [False, True])
def test_inside_musicgens_own_generate(sample: bool) -> None:
    module = pytest.importorskip("transformers.models.musicgen.modeling_musicgen")
    from transformers import MusicgenDecoderConfig

    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "ffn_dim": 16, "num_attention_heads": 2, "hidden_size": 16, "num_codebooks": 4}
    special = {"vocab_size": 30, "pad_token_id": 30, "bos_token_id": 30, "initializer_factor": 0.5}
    model = module.MusicgenForCausalLM(MusicgenDecoderConfig(max_position_embeddings=32, **shape, **special)).eval()
    model.generation_config.pad_token_id = model.generation_config.decoder_start_token_id = 30
    states = torch.randn(4, 5, 16)
    states[2:] = 0  # the unconditional half

    def run() -> Tensor:
        made: Tensor = model.generate(
            torch.full((8, 1), 30), encoder_hidden_states=states, encoder_attention_mask=torch.ones(4, 5),
            guidance_scale=3.0, max_new_tokens=12, do_sample=sample, num_return_sequences=1, temperature=1.0,
        )  # fmt: skip
        return made

    for seed in range(3):
        want = seeded(run, seed)
        with instead(module, ClassifierFreeGuidanceLogitsProcessor) as called:
            got = seeded(run, seed)
        assert torch.equal(got, want)
        assert len(called) > 5


@pytest.mark.parametrize("sample", [False, True])
def test_inside_dias_own_generate(sample: bool) -> None:
    transformers = pytest.importorskip("transformers")
    module = pytest.importorskip("transformers.models.dia.generation_dia")
    from transformers.models.dia.configuration_dia import DiaConfig, DiaDecoderConfig, DiaEncoderConfig

    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    shape |= {"head_dim": 8, "intermediate_size": 16}
    cross = {f"cross_{name}": n for name, n in shape.items() if "head" in name} | {"cross_hidden_size": 16}
    special = {"vocab_size": 12, "num_channels": 3, "eos_token_id": 9, "pad_token_id": 10, "bos_token_id": 11}
    encoder = DiaEncoderConfig(max_position_embeddings=20, vocab_size=20, **shape)
    decoder = DiaDecoderConfig(max_position_embeddings=40, **shape, **cross, **special)
    model = transformers.DiaForConditionalGeneration(
        DiaConfig(
            encoder_config=encoder.to_dict(),
            decoder_config=decoder.to_dict(),
            delay_pattern=[0, 2, 3],
            initializer_range=0.8,
        )
    ).eval()
    ours = (
        DiaClassifierFreeGuidanceLogitsProcessor,
        DiaEOSChannelFilterLogitsProcessor,
        DiaEOSDelayPatternLogitsProcessor,
    )
    ends = set()
    for seed in range(8):

        def run(seed: int = seed) -> Tensor:
            text = ids_of(2, 7, 20, seed)
            made: Tensor = model.generate(text, guidance_scale=3.0, top_k=5, do_sample=sample, max_new_tokens=20)
            return made

        want = seeded(run, seed)
        with instead(module, *ours) as called:
            got = seeded(run, seed)
        assert torch.equal(got, want)
        assert set(called) == {cls.__name__ for cls in ours}
        ends |= {int(row.argmax()) for row in (want[:, :, 0] == 9).int()}
    assert len(ends) > 1, "no text ended before the longest width, so the delays were not tested"


# -- inside decodekit's own loop ---------------------------------------------------------------------


class Bigrams(torch.nn.Module):
    """Logits that depend on the last token alone."""

    def __init__(self, vocab: int, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = torch.nn.Embedding(vocab, vocab)

    def forward(self, input_ids: Tensor) -> Tensor:
        table: Tensor = self.table(input_ids)
        return table * 3


def made(vocab: int, prompts: list[list[int]], **keys: Any) -> list[list[int]]:
    found: Any = generate(Bigrams(vocab), prompts, return_dict_in_generate=True, pad_token_id=0, **keys)
    new = found.sequences[:, found.prompt_width :].tolist()
    return [row[:length] for row, length in zip(new, found.lengths, strict=True)]


@pytest.mark.parametrize("sample", [False, True])
def test_timestamps_chosen_by_section(sample: bool) -> None:
    tokens = {"no_timestamps_token_id": 40, "max_initial_timestamp_index": 3}
    for rows in ([[1, 2], [45]], [[3]]):
        section = {"whisper_timestamps": {"generate_config": tokens}}
        for row in made(60, rows, processors=section, eos_token_id=39, do_sample=sample, seed=1, max_new_tokens=25):
            stamps = [token for token in row if token > 40]
            assert 41 <= row[0] <= 44
            assert stamps == sorted(stamps)
            assert 40 not in row
            runs = [len(list(group)) for is_stamp, group in itertools.groupby(row, lambda t: t > 40) if is_stamp]
            assert all(length == 2 for length in runs[1:-1])


def test_codebooks_and_ends_chosen_by_section() -> None:
    turns = {"alternating_codebooks": {"semantic_vocab_size": 5, "codebook_size": 10}}
    for row in made(25, [[1, 2], [3]], processors=turns, do_sample=True, seed=2, max_new_tokens=9, eos_token_id=None):
        assert all(5 <= token < 15 for token in row[::2])
        assert all(15 <= token < 25 for token in row[1::2])
    lengths = []
    for least in (0.9, 1e-6):
        end = {"bark_eos": {"min_eos_p": least}}
        lengths.append([len(row) for row in made(25, [[1], [2]], processors=end, eos_token_id=7, max_new_tokens=9)])
    assert lengths[1] == [1, 1] != lengths[0]
    own = made(25, [[1], [2]], logits_processor=[BarkEosPrioritizerLogitsProcessor(7, 1e-6)], eos_token_id=7)
    assert [len(row) for row in own] == [1, 1]


def test_dias_delays_chosen_by_section() -> None:
    """Three neighbouring rows are a text; the rows that ended are filled with the pad token."""
    section = {"dia_eos_filter": {"num_channels": 3, "eos_token_id": 9}}
    section["dia_delay"] = {"delay_pattern": [0, 2, 3], "eos_token_id": 9}  # type: ignore[dict-item]
    for seed in range(4):
        rows = made(
            12, [[seed], [2], [3], [4], [5], [6]], processors=section, eos_token_id=9, do_sample=True, seed=seed,
            max_new_tokens=14,
        )  # fmt: skip
        for text in (rows[:3], rows[3:]):
            first = len(text[0])
            assert [len(row) - first for row in text] == [0, 2, 3]
            assert all(row[-1] == 9 and 9 not in row[:-1] for row in text)
            assert first <= 14 - 3


@pytest.mark.parametrize("name", ["batched_guidance", "dia_guidance"])
def test_batched_guidance_needs_a_model_that_doubles_its_batch(name: str) -> None:
    with pytest.raises(ValueError, match="two rows for each of the 1 rows.*use guidance_scale"):
        made(12, [[1]], processors={name: {"guidance_scale": 2.0}})
