"""Processors that look at history, at the input, or at named tokens: parity, plain definitions, and state."""

from __future__ import annotations

import random
from typing import Any

import decodekit
import pytest
import torch
from decodekit.testing import context
from decodekit_processors.dry import DRYLogitsProcessor
from decodekit_processors.ngrams import EncoderNoRepeatNGramLogitsProcessor, NoRepeatNGramLogitsProcessor
from decodekit_processors.repeats import (
    EncoderRepetitionPenaltyLogitsProcessor,
    FrequencyPenaltyLogitsProcessor,
    PresencePenaltyLogitsProcessor,
    distinct,
)
from decodekit_processors.words import (
    LogitBiasLogitsProcessor,
    NoBadWordsLogitsProcessor,
    SequenceBiasLogitsProcessor,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

theirs: Any = pytest.importorskip("transformers.generation.logits_process")
VOCAB = 23


def case(seed: int) -> tuple[random.Random, Tensor, Tensor]:
    """Few tokens, so that they repeat: ids int64 [B, T], scores float32 [B, V]."""
    draw = random.Random(seed)
    make = torch.Generator().manual_seed(seed)
    rows, width = draw.randint(1, 4), draw.randint(1, 20)
    ids = torch.randint(0, draw.choice([3, 6, VOCAB]), (rows, width), generator=make)
    return draw, ids, torch.randn(rows, VOCAB, generator=make) * 3


def same(ours: Any, other: Any, ids: Tensor, scores: Tensor) -> None:
    before = scores.clone()
    got = ours(ids, scores)
    assert torch.equal(scores, before), "wrote into the scores"
    torch.testing.assert_close(got, other(ids, scores.clone()), rtol=0, atol=0)


@pytest.mark.parametrize("seed", range(300))
def test_parity(seed: int) -> None:
    draw, ids, scores = case(seed)
    size = draw.randint(1, 4)
    same(NoRepeatNGramLogitsProcessor(size), theirs.NoRepeatNGramLogitsProcessor(size), ids, scores)
    source = torch.randint(0, 6, (len(ids), draw.randint(1, 12)), generator=torch.Generator().manual_seed(seed))
    same(
        EncoderNoRepeatNGramLogitsProcessor(size, source),
        theirs.EncoderNoRepeatNGramLogitsProcessor(size, source),
        ids,
        scores,
    )
    penalty = draw.choice([0.4, 1.2, 3.0])
    same(
        EncoderRepetitionPenaltyLogitsProcessor(penalty, source),
        theirs.EncoderRepetitionPenaltyLogitsProcessor(penalty, source),
        ids,
        scores,
    )
    words = [[draw.randrange(6) for _ in range(draw.randint(1, 3))] for _ in range(draw.randint(1, 6))]
    words = [list(word) for word in dict.fromkeys(map(tuple, words))]
    ends = draw.choice([None, 2, [2, 5]])
    theirs_words = theirs.NoBadWordsLogitsProcessor(words, eos_token_id=ends)
    same(NoBadWordsLogitsProcessor(words, eos_token_id=ends), theirs_words, ids, scores)
    bias = {tuple(word): draw.choice([-2.5, 0.5, 4.0]) for word in words}
    for form in (bias, [[list(word), value] for word, value in bias.items()]):
        ours, other = SequenceBiasLogitsProcessor(form), theirs.SequenceBiasLogitsProcessor(form)
        torch.testing.assert_close(ours(ids, scores), other(ids, scores.clone()), rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", range(60))
def test_counted_penalties_are_what_they_say(seed: int) -> None:
    draw, ids, scores = case(seed)
    penalty = draw.choice([-1.5, 0.25, 2.0])
    prompt = draw.randint(0, ids.shape[1] - 1) if ids.shape[1] > 1 else 1
    frequency, presence = scores.clone(), scores.clone()
    for row, tokens in enumerate(ids[:, max(prompt, 1) :].tolist()):
        for token in tokens:
            frequency[row, token] -= penalty
        for token in set(tokens):
            presence[row, token] -= penalty
    ctx = context(ids, vocab_size=VOCAB, prompt_width=max(prompt, 1))
    for options, want in (
        (FrequencyPenaltyLogitsProcessor(penalty), frequency),
        (PresencePenaltyLogitsProcessor(penalty), presence),
    ):
        torch.testing.assert_close(options.bind(ctx)(ids, scores), want)
    if max(prompt, 1) < ids.shape[1]:
        alone = FrequencyPenaltyLogitsProcessor(penalty)(ids[:, max(prompt, 1) :], scores)
        torch.testing.assert_close(alone, frequency)


def plain_dry(ids: list[int], scores: Tensor, options: DRYLogitsProcessor, breaks: tuple[int, ...]) -> Tensor:
    """The definition, tried on every earlier place."""
    lowered = scores.clone()
    costs: dict[int, float] = {}
    for end in range(len(ids) - 1):
        run = 0
        while run <= end and ids[end - run] == ids[len(ids) - 1 - run] and ids[end - run] not in breaks:
            run += 1
        if run >= options.dry_allowed_length and ids[end + 1] not in breaks:
            cost = options.dry_multiplier * options.dry_base ** (run - options.dry_allowed_length)  # type: ignore[operator]
            costs[ids[end + 1]] = max(costs.get(ids[end + 1], 0.0), cost)
    for token, cost in costs.items():
        lowered[token] -= cost
    return lowered


@pytest.mark.parametrize("seed", range(120))
def test_dry_is_what_it_says(seed: int) -> None:
    draw, ids, scores = case(seed)
    breaks = draw.choice([(), (1,), (0, 2)])
    options = DRYLogitsProcessor(
        draw.choice([0.5, 2.0]),
        dry_base=1.5,
        dry_allowed_length=draw.randint(1, 3),
        dry_penalty_last_n=draw.choice([-1, 5, 50]),
        dry_sequence_breakers=breaks,
    )
    last = options.dry_penalty_last_n
    want = torch.stack(
        [
            plain_dry(row[-last:] if last > 0 else row, score, options, breaks)
            for row, score in zip(ids.tolist(), scores, strict=True)
        ]
    )
    torch.testing.assert_close(options(ids, scores), want)
    torch.testing.assert_close(options.bind(context(ids, vocab_size=VOCAB))(ids, scores), want)


def test_dry_breakers_by_text() -> None:
    lm = decodekit.load("bundled")
    text = "the end of it\nthe end of"
    ids = torch.tensor([lm.tokenizer.encode(text)])
    scores = torch.zeros(1, lm.adapter.spec.vocab_size)
    ctx = context(ids, vocab_size=scores.shape[-1], tokenizer=lm.tokenizer)
    assert (DRYLogitsProcessor(1.0).bind(ctx)(ids, scores) < 0).any()
    assert not (DRYLogitsProcessor(1.0, dry_sequence_breakers=(" of",)).bind(ctx)(ids, scores) < 0).any()
    with pytest.raises(ValueError, match="pass tokenizer="):
        DRYLogitsProcessor(1.0, dry_sequence_breakers=(" of",)).bind(context(ids, vocab_size=scores.shape[-1]))


@given(data=st.data(), size=st.integers(1, 4))
def test_kept_ngrams_equal_a_search(data: st.DataObject, size: int) -> None:
    """Through accepts of one or several tokens, rollbacks and rows that trade places."""
    rows = data.draw(st.integers(1, 3))
    start = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=rows, max_size=rows))
    ids = torch.tensor(start)
    kept = NoRepeatNGramLogitsProcessor(size).bind(context(ids, vocab_size=VOCAB))
    scores, history = torch.zeros(rows, VOCAB), [ids]
    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["accept", "accept", "several", "back", "reorder"]))
        if what == "back" and len(history) > 1:
            steps = data.draw(st.integers(1, len(history) - 1))
            kept.rollback(steps)
            del history[len(history) - steps :]
        elif what == "reorder":
            order = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows)))
            kept.reorder(order)
            history = [history[-1][order]]
        elif what in ("accept", "several"):
            count = 1 if what == "accept" else 3
            new = torch.tensor(data.draw(st.lists(st.lists(st.integers(0, 3), min_size=count, max_size=count),
                                                  min_size=rows, max_size=rows)))  # fmt: skip
            kept.accept(new[:, 0] if count == 1 else new, None)
            history.append(torch.cat([history[-1], new], 1))
        want = NoRepeatNGramLogitsProcessor(size)(history[-1], scores)
        assert torch.equal(kept(history[-1], scores), want)


def test_padding_is_part_of_no_ngram_word_or_bias() -> None:
    """B02 in its other forms: the pad token, whatever its id, neither begins nor ends anything."""
    mask = torch.tensor([[False, False, True, True], [True, True, True, True]])
    for pad in (0, 5, 22):
        ids = torch.tensor([[pad, pad, 5, 6], [5, 6, 7, 5]])
        ctx = context(ids, mask, vocab_size=VOCAB)
        scores = torch.zeros(2, VOCAB)
        single = NoRepeatNGramLogitsProcessor(1).bind(ctx)(ids, scores)[0]
        assert single.isinf().nonzero()[:, 0].tolist() == [5, 6]
        copied = EncoderNoRepeatNGramLogitsProcessor(2).bind(ctx)(ids, scores)[0]
        assert copied.isinf().nonzero()[:, 0].tolist() == []
        bias = SequenceBiasLogitsProcessor({(pad, 5, 6, 9): 3.0, (5, 6, 8): 1.0}).bind(ctx)(ids, scores)
        assert bias[0].nonzero()[:, 0].tolist() == [8]
        liked = EncoderRepetitionPenaltyLogitsProcessor(2.0).bind(ctx)(ids, scores + 1)[0]
        assert (liked != 1).nonzero()[:, 0].tolist() == [5, 6]


def test_a_bad_word_that_is_the_end_is_left_out() -> None:
    ids, scores = torch.tensor([[4, 5]]), torch.zeros(1, VOCAB)
    ctx = context(ids, vocab_size=VOCAB, eos=(2,))
    assert NoBadWordsLogitsProcessor([[2]]).bind(ctx) is None
    both = NoBadWordsLogitsProcessor([[2], [7], [5, 9]]).bind(ctx)(ids, scores)
    assert both[0].isinf().nonzero()[:, 0].tolist() == [7, 9]


@pytest.mark.parametrize(
    "make",
    [
        lambda: SequenceBiasLogitsProcessor({}),
        lambda: SequenceBiasLogitsProcessor({(): 1.0}),
        lambda: SequenceBiasLogitsProcessor({(-1,): 1.0}),
        lambda: SequenceBiasLogitsProcessor({(1,): "much"}),
        lambda: SequenceBiasLogitsProcessor([[1, 2, 3]]),
        lambda: NoBadWordsLogitsProcessor([]),
        lambda: NoBadWordsLogitsProcessor([[]]),
        lambda: NoBadWordsLogitsProcessor([["word"]]),
        lambda: NoRepeatNGramLogitsProcessor(-1),
        lambda: NoRepeatNGramLogitsProcessor(2.0),  # type: ignore[arg-type]
        lambda: LogitBiasLogitsProcessor({}),
        lambda: LogitBiasLogitsProcessor({"": 1.0}),
        lambda: LogitBiasLogitsProcessor({-3: 1.0}),
        lambda: LogitBiasLogitsProcessor({5: "x"}),
        lambda: DRYLogitsProcessor(-1.0),
        lambda: DRYLogitsProcessor(1.0, dry_sequence_breakers=("",)),
    ],
)
def test_what_cannot_be_meant_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match="must"):
        make()


def test_ids_outside_the_vocabulary_are_named() -> None:
    ids, scores = torch.tensor([[4, 5]]), torch.zeros(1, VOCAB)
    for options in (SequenceBiasLogitsProcessor({(4, 99): 1.0}), NoBadWordsLogitsProcessor([[99]])):
        with pytest.raises(ValueError, match="99 of .* outside the vocabulary of 23"):
            options(ids, scores)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            options.bind(context(ids, vocab_size=VOCAB))
    assert not NoRepeatNGramLogitsProcessor(1)(torch.tensor([[99, 4]]), scores)[0, :4].isinf().any()


def test_the_input_is_held_as_each_token_once() -> None:
    ids = torch.tensor([[5, 6, 5, 5, 9, 6], [7, 7, 7, 7, 7, 7], [1, 2, 3, 4, 4, 4]])
    found = distinct(ids)
    assert found.shape == (3, 4)
    assert [set(row) for row in found.tolist()] == [{5, 6, 9}, {7}, {1, 2, 3, 4}]


def test_biases_by_text() -> None:
    lm = decodekit.load("bundled")
    plain = lm.generate("It was a", do_sample=False, max_new_tokens=8)
    encode = lm.tokenizer.encode
    first = lm.tokenizer.decode([encode("It was a" + plain)[len(encode("It was a"))]])
    without = lm.generate("It was a", do_sample=False, max_new_tokens=8, logit_bias={first: -100.0})
    assert not without.startswith(first)
    with pytest.raises(decodekit.ConfigError, match=r"is \d+ tokens"):
        lm.generate("It was a", max_new_tokens=2, logit_bias={" incomprehensibilities": 1.0})
    with pytest.raises(decodekit.ConfigError, match="pass tokenizer="):
        decodekit.plan(decodekit.testing.TinyLM().eval(), [[5]], logit_bias={" the": 1.0})


def test_keys_reach_the_chain() -> None:
    """All of them by their config keys, tuple keys and JSON forms included."""
    keys: dict[str, Any] = {
        "no_repeat_ngram_size": 2,
        "encoder_no_repeat_ngram_size": 3,
        "encoder_repetition_penalty": 1.1,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "dry_multiplier": 0.5,
        "bad_words_ids": [[5], [6, 7]],
        "sequence_bias": {(5, 6): 1.5},
        "logit_bias": {"5": 1.0},
    }
    pipeline = decodekit.plan(decodekit.testing.TinyLM().eval(), [[5, 9]], **keys)
    names = [part.name for part in pipeline.chain.parts]
    assert names == [
        "sequence_bias", "logit_bias", "encoder_repetition_penalty", "frequency_penalty", "presence_penalty", "dry",
        "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
    ]  # fmt: skip
    config = decodekit.GenerationConfig(**keys)
    again = decodekit.GenerationConfig.from_dict(config.to_dict())
    assert (
        decodekit.plan(decodekit.testing.TinyLM().eval(), [[5, 9]], again).describe()["processors"]
        == (decodekit.plan(decodekit.testing.TinyLM().eval(), [[5, 9]], config).describe()["processors"])
    )


def test_generate_equals_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(num_attention_heads=4, initializer_range=0.3, pad_token_id=0, **shape)
    model = transformers.LlamaForCausalLM(config).eval()
    prompts = torch.randint(3, 40, (3, 7))
    asked = {"attention_mask": torch.ones_like(prompts), "eos_token_id": None, "max_new_tokens": 25}
    for keys in (
        {"no_repeat_ngram_size": 2},
        {"no_repeat_ngram_size": 1, "max_new_tokens": 15},
        {"encoder_no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.7},
        {"bad_words_ids": [[9], [11, 12], [3, 4, 5]]},
        {"sequence_bias": [[[9], -4.0], [[11, 12], 6.0]]},
        {"no_repeat_ngram_size": 3, "bad_words_ids": [[9]], "repetition_penalty": 1.2},
    ):
        want = model.generate(prompts, do_sample=False, **{**asked, **keys})
        got = decodekit.generate(model, prompts, **{**asked, **keys})
        assert torch.equal(got, want), keys
