"""How Dia's texts end, next to transformers' own: random inputs, and step by step."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from decodekit.testing.support import context
from decodekit_processors.families.dia import (
    DiaEOSChannelFilterLogitsProcessor,
    DiaEOSDelayPatternLogitsProcessor,
)
from torch import Tensor

from .shared import KINDS, SIZES, both, ids_of, scores_of

reference = pytest.importorskip("transformers.generation.logits_process")


@pytest.mark.parametrize("channels", [1, 2, 5])
@pytest.mark.parametrize("eos", [1, 4, 10])
def test_dia_filter_on_random_scores(channels: int, eos: int) -> None:
    mine, theirs = both(DiaEOSChannelFilterLogitsProcessor, channels, eos)
    ended = kept = 0
    for vocab, seed in itertools.product(SIZES, range(10)):
        for scores in scores_of(channels * 12, vocab, seed, (*KINDS, "tied", "all equal")):
            before = scores.clone()
            got = mine(ids_of(channels * 12, 3), scores)
            assert torch.equal(scores, before), "scores were written to"
            assert torch.equal(got, theirs(ids_of(channels * 12, 3), scores.clone()))
            first = got[::channels]
            ended += int((first.argmax(-1) == eos).sum())
            kept += int((first.argmax(-1) < eos).sum())
    assert min(ended, kept) > 20


def test_dia_filter_says_what_is_wrong() -> None:
    for options in ((0, 3), (2, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            DiaEOSChannelFilterLogitsProcessor(*options)
    with pytest.raises(ValueError, match="5 rows are no whole number of texts of 2 channels"):
        DiaEOSChannelFilterLogitsProcessor(2, 3)(ids_of(5, 2), torch.zeros(5, 9))
    with pytest.raises(ValueError, match="eos_token_id 9 is outside the vocabulary of 9"):
        DiaEOSChannelFilterLogitsProcessor(2, 9)(ids_of(4, 2), torch.zeros(4, 9))


EOS, PAD, VOCAB = 7, 9, 10


@pytest.mark.parametrize("pattern", [(0,), (0, 2, 3), [0, 1, 1, 4], (0, 0), (2, 0)])
@pytest.mark.parametrize("longest", [12, 25])
@pytest.mark.parametrize("start", [1, 3])
def test_dia_delay_step_by_step_as_generate_calls_it(pattern: Any, longest: int, start: int) -> None:
    """Filter, delay, draw; rows that have ended go on with the pad token, until all have or the width is reached."""
    channels, forced, late = len(pattern), 0, 0
    for seed in range(8):
        random = torch.Generator().manual_seed(seed)
        filters = DiaEOSChannelFilterLogitsProcessor(channels, EOS)
        direct, theirs = both(DiaEOSDelayPatternLogitsProcessor, pattern, EOS, longest)
        rows = 6 * channels
        ctx = context(ids_of(rows, start, EOS, seed), vocab_size=VOCAB, max_length=longest)
        bound = DiaEOSDelayPatternLogitsProcessor(pattern, EOS).bind(ctx)
        running = torch.ones(rows, dtype=torch.bool)
        while bool(running.any()) and ctx.length < longest:
            ids = ctx.input_ids
            scores = torch.randn(rows, VOCAB, generator=random)
            scores[:, EOS] += 0.4
            filtered = filters(ids, scores)
            want = theirs(ids, filtered.clone())
            before = filtered.clone()
            for form in (direct, bound):
                assert torch.equal(form(ids, filtered), want), (seed, ctx.length)
            assert torch.equal(filtered, before), "scores were written to"
            forced += int((want != filtered).any(-1).sum())
            new = want.softmax(-1).multinomial(1, generator=random)[:, 0].where(running, PAD)
            running &= new != EOS
            ctx.tokens[:, ctx.length] = new
            ctx.length += 1
            bound.accept(new, None)
        late += int(ctx.length == longest)
    assert forced > 20
    assert late or longest == 25


def test_dia_delay_takes_tokens_back_and_lets_texts_trade_places() -> None:
    pattern, channels = (0, 2, 3), 3
    options = DiaEOSDelayPatternLogitsProcessor(pattern, EOS, 40)
    ids = ids_of(4 * channels, 12, EOS, 1)
    ids[0, 4] = ids[3, 9] = ids[6, 11] = EOS  # channel 0 of three texts
    ids[1, 4] = EOS  # another channel's end means nothing
    scores = torch.zeros(4 * channels, VOCAB)
    scores[:, 2] = 1.0

    def check(ctx: Any, runtime: Any, tokens: Tensor) -> None:
        assert torch.equal(runtime(ctx.input_ids, scores), options(tokens, scores))

    ctx = context(ids, vocab_size=VOCAB, prompt_width=2)
    ctx.length = 3
    runtime = options.bind(ctx)
    for width in range(3, 12):
        check(ctx, runtime, ids[:, :width])
        ctx.length = width + 1
        runtime.accept(ids[:, width], None)
    check(ctx, runtime, ids)
    texts = torch.tensor([2, 0, 0, 1])
    rows = (texts[:, None] * channels + torch.arange(channels)).flatten()
    ctx.reorder(rows)
    runtime.reorder(rows)
    check(ctx, runtime, ids[rows])
    ctx.length = 10
    runtime.rollback(2)
    check(ctx, runtime, ids[rows, :10])
    ctx.length = 12
    runtime.accept(ids[rows, 10:12], None)  # two at once
    check(ctx, runtime, ids[rows])
    ctx.length = 11
    runtime.rollback(1)
    ctx.length = 12
    runtime.accept(ids[rows, 11][:1], torch.tensor([0]))  # some rows only
    check(ctx, runtime, ids[rows])


def test_dia_delay_reads_the_prompt_for_no_end_and_leaves_too_long_ones_alone() -> None:
    ids = ids_of(3, 6, EOS, 0)
    ids[0, 4] = EOS
    scores = torch.zeros(3, VOCAB)
    options = DiaEOSDelayPatternLogitsProcessor((0, 2, 3), EOS, 40)
    assert not torch.equal(options(ids, scores), scores)
    ctx = context(ids, vocab_size=VOCAB)
    assert torch.equal(options.bind(ctx)(ids, scores), scores)
    # No room for the delays: as in transformers nothing is forced.
    short, theirs = both(DiaEOSDelayPatternLogitsProcessor, (0, 1, 3), EOS, 9)
    runtime = short.bind(context(ids, vocab_size=VOCAB))
    for width in (6, 7, 8):
        assert torch.equal(theirs(ids_of(3, width, EOS), scores.clone()), scores)
        assert torch.equal(runtime(ids_of(3, width, EOS), scores), scores)


def test_dia_delay_says_what_is_wrong() -> None:
    for pattern in ((), 3, (0, -1), (0, 1.5)):
        with pytest.raises(ValueError, match="the delay of each channel"):
            DiaEOSDelayPatternLogitsProcessor(pattern, EOS)
    options = DiaEOSDelayPatternLogitsProcessor(torch.tensor([0, 2]), EOS)
    assert options.delay_pattern == (0, 2)
    with pytest.raises(ValueError, match="3 rows are no whole number of texts of 2 channels"):
        options.bind(context(ids_of(3, 2)))
    with pytest.raises(ValueError, match="max_generation_len is needed"):
        options(ids_of(2, 2), torch.zeros(2, VOCAB))
    told = DiaEOSDelayPatternLogitsProcessor((0, 2), EOS, 9)
    with pytest.raises(ValueError, match="3 rows are no whole number"):
        told(ids_of(3, 2), torch.zeros(3, VOCAB))
    with pytest.raises(ValueError, match="outside the vocabulary of 5"):
        told(ids_of(2, 2), torch.zeros(2, 5))
