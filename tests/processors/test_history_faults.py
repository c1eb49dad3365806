"""Faults known from other implementations, by number, for every processor that looks at history or names tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import decodekit
import pytest
import torch
from decodekit.testing import Letters, context
from decodekit_processors.dry import BREAKERS, DRYLogitsProcessor
from decodekit_processors.ngrams import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor
from decodekit_processors.penalties import RepetitionPenaltyLogitsProcessor
from decodekit_processors.repeats import (
    EncoderRepetitionPenaltyLogitsProcessor,
    FrequencyPenaltyLogitsProcessor,
    PresencePenaltyLogitsProcessor,
)
from decodekit_processors.words import (
    LogitBiasLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
)
from torch import Tensor

VOCAB = 10


def changed(runtime: Any, ids: Tensor, row: int = 0) -> list[int]:
    """Tokens of a row whose scores a runtime changes."""
    scores = torch.full((len(ids), VOCAB), 2.0)
    result = runtime(ids, scores)
    assert (scores == 2).all(), "wrote into the scores"
    return (result[row] != scores[row]).nonzero()[:, 0].tolist()  # type: ignore[no-any-return]


# -- B02: padding is never history ---------------------------------------------------------------------

DRY: Callable[..., Any] = lambda: DRYLogitsProcessor(1.0, dry_allowed_length=1, dry_sequence_breakers=())  # noqa: E731
# What each changes behind the real tokens 7 9 7, as prompt; and behind 7 9 with 7 generated.
HISTORY: dict[str, tuple[Any, list[int], list[int]]] = {
    "repetition": (RepetitionPenaltyLogitsProcessor(1.3), [7, 9], [7, 9]),
    "encoder repetition": (EncoderRepetitionPenaltyLogitsProcessor(1.3), [7, 9], [7, 9]),
    "frequency": (FrequencyPenaltyLogitsProcessor(1.0), [], [7]),
    "presence": (PresencePenaltyLogitsProcessor(1.0), [], [7]),
    "no repeat 1": (NoRepeatNGramLogitsProcessor(1), [7, 9], [7, 9]),
    "no repeat 2": (NoRepeatNGramLogitsProcessor(2), [9], [9]),
    "encoder no repeat 1": (EncoderNoRepeatNGramLogitsProcessor(1), [7, 9], [7, 9]),
    "encoder no repeat 2": (EncoderNoRepeatNGramLogitsProcessor(2), [9], [9]),
    "dry": (DRY(), [9], [9]),
    "bad words": (NoBadWordsLogitsProcessor([[9, 7, 5], [0, 7, 4], [4, 7, 3], [0, 7, 9, 7, 6]]), [5], [5]),
    "sequence bias": (SequenceBiasLogitsProcessor({(9, 7, 5): 1.0, (0, 7, 9, 7, 6): 1.0, (4, 7): 1.0}), [5], [5]),
}


@pytest.mark.parametrize("eos", [(2,), (0,)], ids=["pad is its own", "pad is eos"])
@pytest.mark.parametrize("pad", [0, 4, 7, 9])
@pytest.mark.parametrize("name", HISTORY)
def test_b02_padding_is_no_history(name: str, pad: int, eos: tuple[int, ...]) -> None:
    """Before the tokens, and between them, where a caller's mask has holes."""
    options, of_prompt, of_made = HISTORY[name]
    for mask in ([0, 0, 1, 1, 1], [1, 0, 1, 0, 1], [1, 1, 0, 0, 1], [0, 1, 0, 1, 1]):
        real = torch.tensor([[bool(x) for x in mask], [True] * 5])
        ids = torch.tensor([[pad] * 5, [4, 5, 3, 8, 1]])
        ids[0, real[0]] = torch.tensor([7, 9, 7])
        assert changed(options.bind(context(ids, real, vocab_size=VOCAB, eos=eos, pad=pad)), ids) == of_prompt
        if real[0, 3]:
            ctx = context(ids, real, vocab_size=VOCAB, eos=eos, pad=pad, prompt_width=4)
            assert changed(options.bind(ctx), ids) == of_made


@pytest.mark.parametrize("name", HISTORY)
def test_b02_real_tokens_with_the_pad_id_are_history(name: str) -> None:
    options, _, of_made = HISTORY[name]
    ids, mask = torch.tensor([[7, 7, 7, 9, 7]]), torch.tensor([[False, False, True, True, True]])
    assert changed(options.bind(context(ids, mask, vocab_size=VOCAB, pad=7, prompt_width=4)), ids) == of_made


# -- B03: negative scores --------------------------------------------------------------------------------


@pytest.mark.parametrize("often", [1, 3])
@pytest.mark.parametrize(("penalty", "want"), [(1.5, [-2 / 1.5, 1.5]), (0.5, [-4.0, 0.5])])
def test_b03_the_encoder_penalty_lifts_negative_scores_too(penalty: float, want: list[float], often: int) -> None:
    ids, scores = torch.tensor([[0, 1] * often]), torch.tensor([[-2.0, 1.0]])
    alone = EncoderRepetitionPenaltyLogitsProcessor(penalty, ids)
    bound = EncoderRepetitionPenaltyLogitsProcessor(penalty).bind(context(ids, vocab_size=2))
    for runtime in (alone, bound):
        assert runtime(ids, scores)[0].tolist() == pytest.approx(want)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_b03_counted_penalties_subtract_whatever_the_sign(sign: float) -> None:
    ids = torch.tensor([[5, 5, 6]])
    scores = torch.full((1, VOCAB), sign)
    frequency, presence = (
        FrequencyPenaltyLogitsProcessor(0.5)(ids, scores),
        PresencePenaltyLogitsProcessor(0.5)(ids, scores),
    )
    assert (scores - frequency)[0, 4:8].tolist() == [0, 1, 0.5, 0]
    assert (scores - presence)[0, 4:8].tolist() == [0, 0.5, 0.5, 0]
    assert DRY()(torch.tensor([[5, 6, 5]]), scores)[0, 6] == sign - 1


# -- B04: bad words and biases of sequences ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NoBadWordsLogitsProcessor([[5], []]), r"none of them empty; got \(\)"),
        (lambda: SequenceBiasLogitsProcessor([[[5], 1.0], [[], 2.0]]), r"none of them empty; got \(\)"),
        (lambda: NoBadWordsLogitsProcessor([[5, -1]]), r"0 or more; got -1"),
        (lambda: NoBadWordsLogitsProcessor([[5, True]]), r"0 or more; got True"),
        (lambda: SequenceBiasLogitsProcessor({(5,): math.nan}), "got the bias nan"),
    ],
)
def test_b04_an_entry_that_cannot_be_meant_is_named_when_it_is_made(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("bound", [False, True])
def test_b04_a_sequence_longer_than_the_context_bans_nothing(bound: bool) -> None:
    for ids in (torch.tensor([[5]]), torch.tensor([[5], [9]])):
        for words in ([[1, 2, 3, 5, 9]], [[5, 5, 9]]):
            options: Any = NoBadWordsLogitsProcessor(words)
            assert changed(options.bind(context(ids, vocab_size=VOCAB)) if bound else options, ids) == []


@pytest.mark.parametrize("bound", [False, True])
def test_b04_sequences_that_end_alike_act_each_where_it_is_meant(bound: bool) -> None:
    ids, scores = torch.tensor([[1], [2], [4]]), torch.zeros(3, VOCAB)
    options: Any = SequenceBiasLogitsProcessor({(1, 7): -2.0, (2, 7): 3.0})
    runtime = options.bind(context(ids, vocab_size=VOCAB)) if bound else options
    assert runtime(ids, scores)[:, 7].tolist() == [-2, 3, 0]
    more: Any = SequenceBiasLogitsProcessor({(1, 7): -2.0, (7,): 0.5, (3, 1, 7): 4.0})
    ids = torch.tensor([[3, 1], [1, 1], [1, 3]])
    runtime = more.bind(context(ids, vocab_size=VOCAB)) if bound else more
    assert runtime(ids, scores)[:, 7].tolist() == [2.5, -1.5, 0.5]


@pytest.mark.parametrize("ends", [2, (2, 5), None])
def test_b04_an_end_token_is_never_a_bad_word_by_itself(ends: Any) -> None:
    """Set in the processor, or else the model's; as the end of a longer word it is."""
    options = NoBadWordsLogitsProcessor([[2], [5], [4, 2]], eos_token_id=ends)
    ids = torch.tensor([[3, 4]])
    of_model = changed(options.bind(context(ids, vocab_size=VOCAB, eos=(5,))), ids)
    assert of_model == {2: [2, 5], (2, 5): [2], None: [2]}[ends]
    assert changed(options, ids) == {2: [2, 5], (2, 5): [2], None: [2, 5]}[ends]
    assert changed(NoBadWordsLogitsProcessor([[2]], eos_token_id=2), ids) == []


# -- B06: f(batch)[i] == f(row i) ---------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("name", [name for name in HISTORY if not name.startswith("encoder")])
def test_b06_a_row_does_not_change_another(name: str, bound: bool) -> None:
    options = HISTORY[name][0]
    ids = torch.tensor([[7, 9, 7], [9, 9, 9], [1, 9, 7], [7, 9, 3]])
    scores = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0))

    def of(rows: slice) -> Tensor:
        runtime = options.bind(context(ids[rows], vocab_size=VOCAB, prompt_width=1)) if bound else options
        return runtime(ids[rows], scores[rows])  # type: ignore[no-any-return]

    together = of(slice(None))
    assert not torch.equal(together, scores)
    for row in range(4):
        assert torch.equal(of(slice(row, row + 1)), together[row : row + 1])


# -- The encoder's input --------------------------------------------------------------------------------------

OF_INPUT = {
    "encoder_repetition_penalty": (EncoderRepetitionPenaltyLogitsProcessor, 1.3, [5, 6]),
    "encoder_no_repeat_ngram_size": (EncoderNoRepeatNGramLogitsProcessor, 2, [6]),
}


@pytest.mark.parametrize("key", OF_INPUT)
def test_the_input_is_the_encoders_where_there_is_one(key: str) -> None:
    import attrs

    make, value, want = OF_INPUT[key]
    ids = torch.tensor([[1, 5], [1, 5]])
    ctx = context(ids, vocab_size=VOCAB)
    ctx.spec = attrs.evolve(ctx.spec, is_encoder_decoder=True)
    with pytest.warns(UserWarning, match=f"{key} is left out: .* pass encoder_input_ids"):
        assert make(value).bind(ctx) is None
    assert changed(make(value, [[5, 6]]).bind(ctx), ids, 1) == want
    ctx.encoder_input_ids = torch.tensor([[8, 8], [5, 6]])  # type: ignore[attr-defined]
    runtime = make(value).bind(ctx)
    assert changed(runtime, ids, 1) == want
    assert changed(runtime, ids, 0) == ([8] if want == [5, 6] else [])


@pytest.mark.parametrize("key", OF_INPUT)
def test_the_input_of_one_prompt_serves_its_copies(key: str) -> None:
    make, value, want = OF_INPUT[key]
    ids = torch.tensor([[5]] * 4)
    bound = make(value, [[5, 6], [5, 7]]).bind(context(ids, vocab_size=VOCAB))
    assert [changed(bound, ids, row) for row in range(4)] == [want, want] + [[x + (x == 6) for x in want]] * 2
    with pytest.raises(ValueError, match="have 3 rows, which does not fit 4 rows"):
        make(value, [[5], [6], [7]]).bind(context(ids, vocab_size=VOCAB))
    with pytest.raises(ValueError, match="encoder_input_ids is needed"):
        make(value)(ids, torch.zeros(4, VOCAB))
    # Negative ids, as in labels, are padding, also where there is nothing else.
    assert changed(make(value, [[-100, 5, -100, 6]]), ids) == want
    part = make(value, [[-100, -100], [5, 6]])
    for runtime in (part, part.bind(context(ids, vocab_size=VOCAB))):
        assert [changed(runtime, ids, row) for row in range(4)] == [[], [], want, want]
    assert make(value, [[]] * 4).bind(context(ids, vocab_size=VOCAB)) is not None
    assert changed(make(value, [[]] * 4), ids) == []


def test_ids_of_the_input_without_scores_are_passed_over() -> None:
    """An n-gram goes through them, but none of them is forbidden or made likelier."""
    theirs: Any = pytest.importorskip("transformers.generation.logits_process")
    source, ids = [[77, 5, 77, 6]], torch.tensor([[77]])
    assert changed(EncoderRepetitionPenaltyLogitsProcessor(1.3, source), ids) == [5, 6]
    assert changed(EncoderNoRepeatNGramLogitsProcessor(2, source), ids) == [5, 6]
    assert changed(EncoderNoRepeatNGramLogitsProcessor(2, source), torch.tensor([[5]])) == []
    assert changed(EncoderNoRepeatNGramLogitsProcessor(1, source), ids) == [5, 6]
    scores = torch.ones(1, VOCAB)
    with pytest.raises(RuntimeError):
        theirs.EncoderRepetitionPenaltyLogitsProcessor(1.3, torch.tensor(source))(ids, scores)
    with pytest.raises(IndexError):
        theirs.EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor(source))(torch.tensor([[5]]), scores)


@pytest.mark.parametrize(
    "options",
    [SequenceBiasLogitsProcessor({(1,): 1.0, (5, 6): 2.0}), NoBadWordsLogitsProcessor([[1], [5, 6]])],
    ids=["sequence_bias", "bad_words_ids"],
)
def test_one_object_serves_vocabularies_of_several_sizes(options: Any) -> None:
    ids = torch.tensor([[5]])
    for vocab in (10, 12, 7):
        assert options(ids, torch.zeros(1, vocab))[0].nonzero()[:, 0].tolist() == [1, 6]
    with pytest.raises(ValueError, match="token id 6 of .* is outside the vocabulary of 6"):
        options(ids, torch.zeros(1, 6))
    with pytest.raises(decodekit.ConfigError, match="outside the vocabulary"):
        decodekit.plan(decodekit.testing.TinyLM().eval(), [[5]], bad_words_ids=[[999]])


# -- Breakers and texts -----------------------------------------------------------------------------------------


def test_a_breaker_neither_joins_a_run_nor_costs_anything() -> None:
    """As in the source of DRY: what would be penalised for following a run, but ends runs itself, is left alone."""
    ids = torch.tensor([[5, 6, 3, 5]])
    assert changed(DRYLogitsProcessor(1.0, dry_allowed_length=1, dry_sequence_breakers=()), ids) == [6]
    assert changed(DRYLogitsProcessor(1.0, dry_allowed_length=1, dry_sequence_breakers=(6,)), ids) == []
    assert changed(DRYLogitsProcessor(1.0, dry_allowed_length=1, dry_sequence_breakers=(5,)), ids) == []
    assert changed(DRYLogitsProcessor(1.0, dry_penalty_last_n=3, dry_allowed_length=1), ids) == []
    assert changed(DRYLogitsProcessor(1.0, dry_penalty_last_n=0, dry_allowed_length=1), ids) == []


def test_breakers_by_text_need_the_tokenizer_but_for_the_usual_ones() -> None:
    ids = torch.tensor([[5, 6, 3, 5]])
    options = DRYLogitsProcessor(1.0, dry_allowed_length=1, dry_sequence_breakers=("f",))  # token 5
    with pytest.raises(ValueError, match="pass tokenizer="):
        options(ids, torch.zeros(1, VOCAB))
    assert changed(options.bind(context(ids, vocab_size=VOCAB, tokenizer=Letters())), ids) == []
    assert changed(DRYLogitsProcessor(1.0, dry_allowed_length=1, dry_sequence_breakers=BREAKERS), ids) == [6]


def test_a_text_that_is_not_one_token_is_shown_with_its_tokens() -> None:
    ctx = context(torch.tensor([[5]]), vocab_size=30, tokenizer=Letters())
    with pytest.raises(ValueError, match=r"'dog' is 3 tokens \(\['d', 'o', 'g'\]\)"):
        LogitBiasLogitsProcessor({"dog": 1.0}).bind(ctx)
    bound = LogitBiasLogitsProcessor({"d": 1.0, 3: 0.5, "7": -2.0}).bind(ctx)
    result = bound(torch.tensor([[5]]), torch.zeros(1, 30))[0]
    assert {i: x for i, x in enumerate(result.tolist()) if x} == {3: 1.5, 7: -2.0}
    with pytest.raises(ValueError, match="pass tokenizer="):
        LogitBiasLogitsProcessor({"d": 1.0})(torch.tensor([[5]]), torch.zeros(1, 30))


# -- B02 again, through a whole call ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"no_repeat_ngram_size": (1, 2, 3)},
        {"encoder_no_repeat_ngram_size": (1, 2, 3)},
        {"encoder_repetition_penalty": (1.5, 0.7, 1.0)},
        {"frequency_penalty": (0.3, 1.0, 0.0), "presence_penalty": (0.0, 0.5, 1.5)},
        {"dry_multiplier": (0.5, 0.0, 2.0), "dry_allowed_length": 1, "dry_sequence_breakers": ()},
        {"bad_words_ids": [[3, 4], [7], [9, 5, 6]], "sequence_bias": {(5,): 2.0, (5, 6): -4.0}},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_b02_a_padded_batch_gives_what_each_prompt_gives_alone(keys: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = decodekit.testing.TinyLM().eval().double()
    prompts = [[5, 6, 7, 5, 6], [9], [3, 4, 3]]
    more: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "eos_token_id": None, "pad_token_id": 6}
    together = decodekit.generate(model, prompts, **keys, **more)
    for row, prompt in enumerate(prompts):
        own = {key: value[row] if value and isinstance(value, tuple) else value for key, value in keys.items()}
        alone = decodekit.generate(model, [prompt], **own, **more)
        assert together[row, -12:].tolist() == alone[0, -12:].tolist()
