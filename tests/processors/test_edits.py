"""A chain copies the scores once: what is its own is written to, what is not stays as it is."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import attrs
import pytest
import torch
from decodekit import GenerationError, generate
from decodekit.chain import Chain, Part
from decodekit.testing import context, score_cases
from decodekit.traits import Traits, traits_of
from decodekit_processors.decay import ExponentialDecayLengthPenalty
from decodekit_processors.dry import DRYLogitsProcessor
from decodekit_processors.forced import ForcedBOSTokenLogitsProcessor
from decodekit_processors.lengths import MinLengthLogitsProcessor
from decodekit_processors.ngrams import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor
from decodekit_processors.normalize import InfNanRemoveLogitsProcessor
from decodekit_processors.penalties import RepetitionPenaltyLogitsProcessor
from decodekit_processors.repeats import FrequencyPenaltyLogitsProcessor, PresencePenaltyLogitsProcessor
from decodekit_processors.scale import TemperatureLogitsWarper
from decodekit_processors.suppress import SuppressTokensAtBeginLogitsProcessor, SuppressTokensLogitsProcessor
from decodekit_processors.words import NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor
from torch import Tensor

VOCAB, ROWS = 37, 3
TOKENS = torch.tensor([[5, 6, 7, 5, 6], [5, 5, 5, 5, 5], [9, 8, 9, 8, 9]])

OPTIONS = [
    RepetitionPenaltyLogitsProcessor(1.3),
    FrequencyPenaltyLogitsProcessor(0.5),
    PresencePenaltyLogitsProcessor(0.5),
    DRYLogitsProcessor(dry_multiplier=0.8, dry_allowed_length=1),
    NoRepeatNGramLogitsProcessor(2),
    NoRepeatNGramLogitsProcessor((1, 2, 0)),
    EncoderNoRepeatNGramLogitsProcessor((2, 1, 0)),
    SequenceBiasLogitsProcessor({(3,): 1.5, (6, 7): -2.0, (5, 5): 0.5}),
    NoBadWordsLogitsProcessor([[4], [9, 8]]),
    MinLengthLogitsProcessor((9, 9, 0)),
    SuppressTokensLogitsProcessor([10, 11]),
    SuppressTokensAtBeginLogitsProcessor([12], 5),
    ForcedBOSTokenLogitsProcessor(5),
    ExponentialDecayLengthPenalty((0, 1.5), (2, 3), 3),
    InfNanRemoveLogitsProcessor(),
    TemperatureLogitsWarper(0.7),
    TemperatureLogitsWarper((0.7, 1.0, 1.3)),
]


@attrs.frozen
class Fixed:
    """Honestly pure, and yet what it returns is kept: the chain must not write there."""

    traits: ClassVar[Traits] = Traits(pure=True)
    kept: Tensor = attrs.field(factory=lambda: torch.linspace(-3, 3, VOCAB).repeat(ROWS, 1), eq=False)

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        return self.kept


def parts(items: list[Any]) -> list[Part]:
    ctx = context(TOKENS, vocab_size=VOCAB, eos=(2,))
    bound = [(item, item.bind(ctx) if hasattr(item, "bind") else item) for item in items]
    return [Part(type(item).__name__, "test", runtime, traits_of(item), "") for item, runtime in bound if runtime]


@pytest.mark.parametrize("seed", range(20))
def test_a_chain_gives_what_its_parts_give_one_after_the_other(seed: int) -> None:
    draw = random.Random(seed)
    chosen = draw.sample([*OPTIONS, Fixed(), lambda ids, scores: scores.mul_(0.5)], 6)
    found = parts(chosen)
    for name, scores in score_cases(ROWS, VOCAB, seed).items():
        want, before = scores, scores.clone()
        for part in found:
            want = part.runtime(TOKENS, want.clone()).clone()
        for _ in range(2):
            assert torch.equal(Chain(found)(TOKENS, scores), want), name
            assert torch.equal(scores, before), name
    for item in chosen:  # nobody wrote there
        assert not isinstance(item, Fixed) or torch.equal(item.kept, Fixed().kept)


def test_scores_are_copied_once() -> None:
    """What each part is told: the first makes the copy, a part that may keep what it returns ends the ownership."""
    seen: list[bool] = []

    @attrs.frozen
    class Told:
        traits: ClassVar[Traits] = Traits(pure=True)
        acts: bool = True

        def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
            raise AssertionError("a chain edits")

        def edit(self, input_ids: Tensor, scores: Tensor, own: bool, /) -> Tensor:
            seen.append(own)
            return scores if not self.acts else scores.add_(1) if own else scores + 1

    through = attrs.make_class("Through", [])
    through.traits = Traits(pure=True)
    through.__call__ = lambda self, input_ids, scores: scores
    items = [Told(False), Told(), Told(), through(), Told(), Fixed(), Told(), Told()]
    scores = torch.zeros(ROWS, VOCAB)
    Chain(parts(items))(TOKENS, scores)
    assert seen == [False, False, True, True, False, True]
    assert torch.equal(scores, torch.zeros(ROWS, VOCAB))


def test_an_edit_counts_only_where_purity_is_claimed() -> None:
    class Says:
        def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
            return scores + 1

        def edit(self, *_: Any) -> Tensor:
            raise AssertionError("it claims nothing")

    assert torch.equal(Chain(parts([Says()]))(TOKENS, torch.zeros(ROWS, VOCAB)), torch.ones(ROWS, VOCAB))


def test_what_a_run_records_is_not_written_to(model: Any) -> None:
    keys: dict[str, Any] = {
        "repetition_penalty": 1.3, "suppress_tokens": [3, 4], "bad_words_ids": [[5], [6, 7]], "max_new_tokens": 4,
        "return_dict_in_generate": True, "output_logits": True, "output_scores": True, "eos_token_id": None,
    }  # fmt: skip
    got = generate(model, [[5, 6, 7]], **keys)
    for step, (logits, scores) in enumerate(zip(got.logits, got.scores, strict=True)):
        assert logits.isfinite().all()
        assert scores[0, [3, 4, 5]].isneginf().all()
        plain = model(got.sequences[:, : 3 + step]).logits[:, -1]
        torch.testing.assert_close(logits, plain)


def test_who_empties_a_row_is_found_out_from_scores_that_nobody_changed(model: Any) -> None:
    keys: dict[str, Any] = {"repetition_penalty": 1.3, "bad_words_ids": [[0]], "suppress_tokens": [*range(1, 420)]}
    with pytest.raises(GenerationError, match="'suppress_tokens' .* leaves no token to choose"):
        generate(model, [[5, 6]], eos_token_id=None, max_new_tokens=2, **keys)
