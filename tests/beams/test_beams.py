"""Beam search: the laws, the faults that users met, and what comes out."""

from __future__ import annotations

import itertools
import math
from typing import Any

import attrs
import decodekit
import pytest
import torch
from decodekit import ConfigError, GenerationError, generate
from decodekit.registry import registry
from decodekit.testing import ScriptedLM, TinyLM
from torch import Tensor

PROMPT = torch.tensor([[5, 9, 4]])


def search(model: Any, inputs: Any = PROMPT, **keys: Any) -> Any:
    keys = {"num_beams": 4, "max_new_tokens": 6, "eos_token_id": None, "pad_token_id": 0, **keys}
    return generate(model, inputs, return_dict_in_generate=True, output_scores=True, **keys)


class Table(torch.nn.Module):
    """A model of which the logits of the next token follow from the last token alone."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits, requires_grad=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.logits[input_ids]


@pytest.mark.parametrize("early", [False, "never"])
@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_b23_enough_beams_find_the_best_of_all(penalty: float, early: Any) -> None:
    model = Table(torch.randn(4, 4, generator=torch.Generator().manual_seed(3)) * 2)
    steps = model.logits.log_softmax(-1)
    scores = {}
    for length in range(1, 5):
        for new in itertools.product(range(4), repeat=length):
            if 2 in new[:-1] or (length < 4 and new[-1] != 2):
                continue
            total = sum(float(steps[a, b]) for a, b in itertools.pairwise((1, *new)))
            scores[new] = total / length**penalty
    best = sorted(scores, key=lambda new: -scores[new])
    found = search(
        model,
        torch.tensor([[3, 1]]),
        num_beams=81,
        num_return_sequences=1 if early is False else 3,
        max_new_tokens=4,
        eos_token_id=2,
        length_penalty=penalty,
        early_stopping=early,
    )
    if early is False and penalty > 0:
        # Judged by the length so far, the search may end before a longer one would have won: that is what False means.
        assert found.sequences_scores[0] <= scores[best[0]] + 1e-5
        return
    for row, new in enumerate(best[: len(found.sequences)]):
        assert found.sequences[row, 2 : 2 + found.lengths[row]].tolist() == list(new)
        assert float(found.sequences_scores[row]) == pytest.approx(scores[new], abs=1e-5)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("early", [True, False, "never"])
def test_b23_a_prompt_does_not_depend_on_its_neighbours(early: Any, sample: bool) -> None:
    model = TinyLM().eval()
    prompts = [[5, 9, 4, 7, 8], [11], [30, 31, 6]]
    for penalty in (-1.0, 0.0, 1.0, 2.0):
        keys = {"early_stopping": early, "length_penalty": penalty, "do_sample": sample, "num_return_sequences": 2}
        keys |= {"eos_token_id": [3, 9, 14, 20], "max_new_tokens": 12}
        batch = search(model, prompts, seed=(1, 2, 3), **keys)
        for row, prompt in enumerate(prompts):
            alone = search(model, [prompt], seed=row + 1, **keys)
            for copy in range(2):
                length = alone.lengths[copy]
                assert batch.lengths[2 * row + copy] == length
                new = batch.sequences[2 * row + copy, 5 : 5 + length]
                assert torch.equal(new, alone.sequences[copy, len(prompt) : len(prompt) + length])
                assert float(batch.sequences_scores[2 * row + copy]) == pytest.approx(
                    float(alone.sequences_scores[copy]), abs=1e-4
                )


def test_b24_the_prompt_is_no_part_of_the_length() -> None:
    """Every token has log-probability -log 8: whatever the length, the mean is the same."""
    model = Table(torch.zeros(8, 8))
    for width in (1, 5, 40):
        found = search(model, torch.full((1, width), 4), eos_token_id=2, num_beams=3, num_return_sequences=3)
        for score in found.sequences_scores.tolist():
            assert score == pytest.approx(-math.log(8), abs=1e-5)


def test_scores_add_up() -> None:
    model = TinyLM().eval()
    for penalty in (-1.0, 0.5, 2.0):
        found = search(model, [[5, 9, 4], [7]], num_return_sequences=3, length_penalty=penalty, eos_token_id=[3, 9])
        for row, score in enumerate(found.sequences_scores.tolist()):
            length = found.lengths[row]
            new = found.sequences[row, found.prompt_width :][:length].tolist()
            rows = found.beam_indices[row].tolist()
            assert rows[length:] == [-1] * (len(rows) - length)
            total = sum(float(found.scores[t][rows[t], token]) for t, token in enumerate(new))
            assert score == pytest.approx(total / length**penalty, abs=1e-4)


@attrs.frozen
class Spell:
    """Allows 1, 2, 3 and then the end, by state that each row keeps."""

    traits = decodekit.Traits(phase=decodekit.Phase.CONSTRAIN, pure=True)

    def bind(self, ctx: Any, /) -> _Spelling:
        return _Spelling(ctx.rows)


class _Spelling:
    def __init__(self, rows: int) -> None:
        self.at = [0] * rows

    def accept(self, tokens: Tensor, rows: Any, /) -> None:
        self.at = [at + 1 for at in self.at]

    def reorder(self, rows: Tensor, /) -> None:
        self.at = [self.at[row] for row in rows.tolist()]

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        kept = torch.full_like(scores, -torch.inf)
        for row, at in enumerate(self.at):
            token = (1, 2, 3, 9)[min(at, 3)]
            kept[row, token] = scores[row, token]
        return kept


@pytest.mark.parametrize("beams", [2, 3])
def test_b10_state_follows_the_parent(beams: int) -> None:
    found = search(
        TinyLM().eval(),
        [[5, 6, 7], [11]],
        num_beams=beams,
        logits_processor=[Spell()],
        eos_token_id=9,
    )
    assert found.sequences[:, found.prompt_width :].tolist() == [[1, 2, 3, 9]] * 2
    assert found.stop_reasons == ("eos", "eos")


class _Lasting:
    """Bans whatever a row has made so far, from what it was told, not from what it sees."""

    def __init__(self, rows: int, told: list[Any]) -> None:
        self.seen: list[list[int]] = [[] for _ in range(rows)]
        self.told = told

    def accept(self, tokens: Tensor, rows: Any, /) -> None:
        for seen, token in zip(self.seen, tokens.tolist(), strict=True):
            seen.append(token)

    def reorder(self, rows: Tensor, /) -> None:
        self.seen = [list(self.seen[row]) for row in rows.tolist()]

    def __call__(self, input_ids: Tensor, scores: Tensor, /) -> Tensor:
        self.told.append([seen == row[3:] for seen, row in zip(self.seen, input_ids.tolist(), strict=True)])
        return scores


def test_b10_every_beam_knows_its_own_tokens() -> None:
    told: list[Any] = []

    @attrs.frozen
    class Watch:
        traits = decodekit.Traits(pure=True)

        def bind(self, ctx: Any, /) -> _Lasting:
            return _Lasting(ctx.rows, told)

    search(TinyLM().eval(), num_beams=5, max_new_tokens=15, logits_processor=[Watch()])
    assert len(told) == 15
    assert all(all(row) for row in told)


def test_caches_give_the_beams_of_no_cache() -> None:
    model = TinyLM().eval()
    keys = {"num_beams": 5, "num_return_sequences": 5, "max_new_tokens": 20, "eos_token_id": [3, 9]}
    want = search(model, [[5, 9, 4], [7]], use_cache=False, **keys)
    for cache in registry.names("caches"):
        # This model says nothing of its layers: a window must be named, and one as long as the text changes nothing.
        options = {"window": 40} if cache == "sliding_window" else None
        got = search(model, [[5, 9, 4], [7]], cache_implementation=cache, cache_config=options, **keys)
        assert torch.equal(got.sequences, want.sequences), cache
        torch.testing.assert_close(got.sequences_scores, want.sequences_scores)


def test_stop_strings_end_hypotheses() -> None:
    lm = decodekit.load("bundled")
    texts, found = lm.details(
        "It was a fine day, and",
        do_sample=False,
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=40,
        stop_strings=[","],
    )
    for text, reason, detail in zip(texts, found.stop_reasons, found.stop_details, strict=True):
        assert "," not in text
        assert (reason, detail) in {("stop_strings", ","), ("max_length", None)}
    assert "stop_strings" in found.stop_reasons


class _Ear:
    def __init__(self) -> None:
        self.heard: list[Tensor] = []
        self.ends = 0

    def put(self, value: Tensor, /) -> None:
        self.heard.append(value.clone())

    def end(self) -> None:
        self.ends += 1

    def bind(self, ctx: Any, /) -> _Ear:
        return self


@pytest.mark.parametrize("prompts", [[[5, 9, 4]], [[5, 9, 4], [7], [8, 8]]])
def test_what_is_streamed_is_what_is_returned(prompts: list[list[int]]) -> None:
    for new in (1, 2, 12):
        for ends in ([3, 9, 14], None):
            ear = _Ear()
            found = search(TinyLM().eval(), prompts, max_new_tokens=new, eos_token_id=ends, streamer=ear)
            assert ear.ends == 1
            heard = torch.cat([ear.heard[0], *(token[:, None] for token in ear.heard[1:])], 1)
            assert torch.equal(heard, found.sequences)


def test_settled_tokens_come_before_the_end() -> None:
    lm, steps = decodekit.load("bundled"), []
    ear = _Ear()
    for step in decodekit.stream(lm, "It was a fine day, and", num_beams=3, max_new_tokens=40, streamer=ear):
        steps.append(len(ear.heard))
        assert step.tokens.shape == (3,)
    assert steps[20] > 1, "after twenty steps nothing was settled"


def test_draws_are_without_replacement_and_by_weight() -> None:
    """The first place drawn follows the weights, the second the weights that are left."""
    from decodekit_strategies.beam import BeamSearch

    weights = torch.tensor([0.5, 0.3, 0.2])
    ctx = decodekit.plan(TinyLM().eval(), [[5]], num_beams=2, do_sample=True, seed=3).context
    beams = BeamSearch(num_beams=2).bind(ctx)
    n = 4000
    seen: dict[tuple[int, ...], int] = {}
    for _ in range(n):
        drawn = tuple(beams.draw(weights.log()[None], 2)[0].tolist())
        seen[drawn] = seen.get(drawn, 0) + 1
    for a, b in itertools.permutations(range(3), 2):
        want = float(weights[a] * weights[b] / (1 - weights[a]))
        got = seen.get((a, b), 0) / n
        assert abs(got - want) < 4 * math.sqrt(want * (1 - want) / n), (a, b, got, want)
    assert beams.draw(torch.tensor([[0.0, -torch.inf, -torch.inf]]), 2).tolist() == [[0, -1]]


def test_seeds_repeat_and_matter() -> None:
    model = TinyLM().eval()
    first = search(model, do_sample=True, temperature=3.0, seed=1).sequences
    assert torch.equal(search(model, do_sample=True, temperature=3.0, seed=1).sequences, first)
    assert any(
        not torch.equal(search(model, do_sample=True, temperature=3.0, seed=seed).sequences, first)
        for seed in (2, 3, 4)
    )


def test_dead_beams_are_dropped_while_others_live() -> None:
    """Only one continuation is ever allowed: the other beams have nowhere to go, and that is no error."""

    def only(input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf).index_copy_(1, torch.tensor([7]), scores[:, 7:8])

    with pytest.warns(UserWarning, match="only"):
        found = search(TinyLM().eval(), logits_processor=[only])
    assert found.sequences[0, 3:].tolist() == [7] * 6
    with pytest.warns(UserWarning, match="prompt 0: only 1 of 3 sequences can be found"):
        some = search(TinyLM().eval(), logits_processor=[only], num_return_sequences=3)
    assert some.lengths == (6, 0, 0)
    assert some.stop_reasons[1:] == ("no continuation",) * 2
    assert some.sequences_scores[1:].tolist() == [-math.inf] * 2


def test_no_beam_left_is_an_error_that_names_the_part() -> None:
    def nothing(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] < 5 else torch.full_like(scores, -torch.inf)

    with (
        pytest.warns(UserWarning, match="nothing"),
        pytest.raises(GenerationError, match="nothing.*step 2|step 2.*nothing"),
    ):
        search(TinyLM().eval(), logits_processor=[nothing])


def test_nan_is_an_error_that_names_the_part() -> None:
    def broken(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] < 5 else scores * torch.nan

    with pytest.warns(UserWarning, match="broken"), pytest.raises(GenerationError, match="broken"):
        search(TinyLM().eval(), logits_processor=[broken])


def test_more_sequences_than_beams_are_refused() -> None:
    with pytest.raises((ConfigError, ValueError), match="num_return_sequences=5 needs num_beams"):
        search(TinyLM().eval(), num_return_sequences=5)


def test_a_cache_that_cannot_reorder_is_refused() -> None:
    class Fixed:
        def get_seq_length(self, layer_idx: int = 0) -> int:
            return 0

        def offers(self) -> frozenset[str]:
            return frozenset()

    with pytest.raises(ConfigError, match="cache:reorder"):
        search(TinyLM().eval(), cache=Fixed())


def test_one_beam_is_greedy() -> None:
    model = TinyLM().eval()
    greedy = generate(model, PROMPT, max_new_tokens=6, eos_token_id=None)
    assert torch.equal(search(model, num_beams=1).sequences, greedy)
    assert torch.equal(search(model, num_beams=1, strategy="beam").sequences, greedy)


def test_the_names_of_modes() -> None:
    model = TinyLM().eval()
    assert decodekit.plan(model, PROMPT, num_beams=3).strategy_name == "beam"
    drawn = decodekit.plan(model, PROMPT, num_beams=3, do_sample=True, temperature=0.7)
    assert drawn.strategy_name == "beam"
    assert "temperature" in [part.name for part in drawn.chain.parts]


def test_truncation_reaches_drawn_beams() -> None:
    found = search(TinyLM().eval(), do_sample=True, top_k=1, num_beams=3, seed=1)
    greedy = generate(TinyLM().eval(), PROMPT, max_new_tokens=6, eos_token_id=None)
    assert torch.equal(found.sequences, greedy)


def test_a_cancelled_run_gives_the_beams_it_has() -> None:
    run = decodekit.Run(decodekit.plan(TinyLM().eval(), PROMPT, num_beams=3, max_new_tokens=9, eos_token_id=None))
    steps = iter(run)
    for _ in range(4):
        next(steps)
    steps.close()
    output = run.output()
    assert output.lengths == (4,)
    assert output.stop_reasons == ("cancelled",)


def test_scripted_end() -> None:
    """A script of one token each step: the beam that follows it wins."""
    model = ScriptedLM(torch.nn.functional.one_hot(torch.tensor([4, 8, 6, 2]), 12) * 5.0)
    found = search(model, torch.tensor([[1]]), eos_token_id=2, num_beams=3)
    assert found.sequences[0].tolist() == [1, 4, 8, 6, 2]
