"""XTC and mirostat: what they drop, and how their state follows the rows."""

from __future__ import annotations

import math
from typing import Any

import decodekit
import pytest
import torch
from decodekit.context import BindContext, RowRandom, mix_seed
from decodekit.shortlist import Shortlist
from decodekit.testing import TinyLM, context, score_cases
from decodekit_processors.mirostat import MirostatLogitsWarper
from decodekit_processors.undo import Past
from decodekit_processors.xtc import XTCLogitsWarper
from torch import Tensor

A, B = [0.5, 0.3, 0.15, 0.05], [0.85, 0.1, 0.03, 0.02]
AB = torch.tensor([A, B]).log()
IDS = torch.zeros(2, 1, dtype=torch.long)


def ctx_of(rows: int, **more: Any) -> BindContext:
    return context(torch.zeros(rows, 1, dtype=torch.long), **more)


def kept(scores: Tensor) -> list[list[int]]:
    return [(row > -math.inf).nonzero()[:, 0].tolist() for row in scores]


def listed(scores: Tensor) -> Shortlist:
    values, ids = scores.sort(-1, descending=True)
    return Shortlist(values, ids, scores.shape[-1])


# -- XTC -----------------------------------------------------------------------------------------------


def test_b06_the_shape_of_one_row_does_not_cut_another() -> None:
    options = XTCLogitsWarper(1.0, 0.25)
    for got in (options(IDS, AB), options.bind(ctx_of(2))(IDS, AB)):
        assert kept(got) == [[1, 2, 3], [0, 1, 2, 3]]
        assert torch.equal(got[1], AB[1])
    short = options.bind(ctx_of(2)).shorten(IDS, listed(AB))
    assert kept(short.dense()) == [[1, 2, 3], [0, 1, 2, 3]]
    assert short.ids[0].tolist() == [1, 2, 3, 0]


@pytest.mark.parametrize("threshold", [0, 0.0, -0.1, 1.1, math.nan])
def test_b06_a_threshold_that_would_leave_the_least_likely_token_alone_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match=r"must be in \(0, 1\]"):
        XTCLogitsWarper(1.0, threshold)


def test_xtc_keeps_the_least_likely_of_the_good_tokens_and_all_that_tie_with_it() -> None:
    scores = torch.tensor([[0.25, 0.15, 0.15, 0.15, 0.06, 0.24]]).log()
    assert kept(XTCLogitsWarper(1.0, 0.1)(scores.long(), scores)) == [[1, 2, 3, 4]]
    assert kept(XTCLogitsWarper(1.0, 0.2)(scores.long(), scores)) == [[1, 2, 3, 4, 5]]
    even = torch.zeros(1, 5)
    assert torch.equal(XTCLogitsWarper(1.0, 0.1)(even.long(), even), even)


@pytest.mark.parametrize("off", [XTCLogitsWarper(0.0), XTCLogitsWarper(1.0, 0.5), XTCLogitsWarper(1.0, 0.9)], ids=str)
def test_xtc_switched_off(off: XTCLogitsWarper) -> None:
    assert off.bind(ctx_of(2)) is None
    assert torch.equal(off(IDS, AB), AB)


def test_xtc_acts_with_its_probability() -> None:
    rows = 4000
    options = XTCLogitsWarper(0.3, 0.25)
    bound = options.bind(ctx_of(rows, seeds=range(rows)))
    scores = AB[:1].expand(rows, -1)
    cut = int((bound(scores.long(), scores)[:, 0] == -math.inf).sum())
    assert abs(cut - 0.3 * rows) < 5 * math.sqrt(rows * 0.3 * 0.7)


def test_xtc_draws_once_a_step_from_the_stream_of_the_row() -> None:
    options = XTCLogitsWarper(0.5, 0.25)
    together, alone = ctx_of(4, seeds=[5, 6, 7, 8]), ctx_of(1, seeds=[7])
    numbers = RowRandom([mix_seed(seed, 1, salt=2) for seed in (5, 6, 7, 8)], torch.device("cpu"))
    many, one = options.bind(together), options.bind(alone)
    scores = AB[:1].repeat(4, 1)
    seen = set()
    for _ in range(30):
        number = numbers.uniform()
        got = many(scores.long(), scores)
        assert torch.equal(got, many(scores.long(), scores)), "asked twice in one step, it drew twice"
        assert torch.equal(got, many.shorten(scores.long(), listed(scores)).dense())
        assert (got[:, 0] == -math.inf).tolist() == (number < 0.5).tolist()
        assert torch.equal(one(scores.long()[:1], scores[:1])[0], got[2])
        seen.add(tuple((got[:, 0] == -math.inf).tolist()))
        many.accept(torch.zeros(4, dtype=torch.long), None)
        one.accept(torch.zeros(1, dtype=torch.long), None)
    assert len(seen) > 5
    assert torch.equal(together.uniform(), ctx_of(4, seeds=[5, 6, 7, 8]).uniform()), "it drew what tokens are drawn by"


def test_a_row_that_xtc_is_off_for_draws_the_tokens_it_draws_alone() -> None:
    model, prompts = TinyLM().eval(), [[5], [6], [7]]
    keys: dict[str, Any] = {"do_sample": True, "max_new_tokens": 30, "eos_token_id": None, "xtc_threshold": 0.01}
    each = (0.0, 0.7, 0.0)
    batch = decodekit.generate(model, torch.tensor(prompts), seed=(3, 4, 5), xtc_probability=each, **keys)
    for row, (prompt, chance) in enumerate(zip(prompts, each, strict=True)):
        alone = decodekit.generate(model, torch.tensor([prompt]), seed=(3 + row,), xtc_probability=chance, **keys)
        assert torch.equal(batch[row], alone[0]), row
    off = decodekit.generate(model, torch.tensor(prompts), seed=(3, 4, 5), xtc_probability=0.0, **keys)
    assert [torch.equal(*pair) for pair in zip(batch, off, strict=True)] == [True, False, True]


def test_xtc_without_a_seed_follows_the_global_one() -> None:
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        bound, scores = XTCLogitsWarper(0.5, 0.25).bind(ctx_of(64)), AB[:1].repeat(64, 1)
        found.append(bound(scores.long(), scores)[:, 0].isneginf())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert 10 < int(found[0].sum()) < 54


def test_xtc_rolls_back_and_follows_the_rows() -> None:
    options, scores, token = XTCLogitsWarper(0.5, 0.25), AB[:1].repeat(6, 1), torch.zeros(6, dtype=torch.long)
    bound = options.bind(ctx_of(6, seeds=range(6)))
    steps = []
    for _ in range(4):
        steps.append(bound(scores.long(), scores))
        bound.accept(token, None)
    bound.rollback(2)
    assert torch.equal(bound(scores.long(), scores), steps[2])
    rows = torch.tensor([3, 3, 0, 5, 1, 2])
    bound.reorder(rows)
    assert torch.equal(bound(scores.long(), scores), steps[2][rows])
    bound.rollback(1)
    assert torch.equal(bound(scores.long(), scores), steps[1][rows])
    with pytest.raises(ValueError, match="cannot take 5 steps back"):
        bound.rollback(5)


def test_the_past_survives_several_moves() -> None:
    past, now, random = Past(), torch.arange(5), torch.Generator().manual_seed(0)
    history = []  # the states of today's rows, followed the long way
    for step in range(40):
        if step % 3 == 2:
            rows = torch.randint(0, 5, (5,), generator=random)
            past.reorder(rows)
            history, now = [state[rows] for state in history], now[rows]
        past.push(now)
        history.append(now)
        now = now * 7 + step
        if step % 10 == 9:
            now = past.back(4)
            assert torch.equal(now, history[-4])
            history = history[:-4]


def test_a_bounded_past_forgets_what_is_too_old() -> None:
    past, rows = Past(3), torch.tensor([1, 0])
    for step in range(10):
        past.push(torch.tensor([step, step + 100]))
        past.reorder(rows)
        past.reorder(rows)
        past.reorder(rows)
    with pytest.raises(ValueError, match="cannot take 4 steps back: kept are the last 3"):
        past.back(4)
    assert past.back(3).tolist() == [107, 7]
    with pytest.raises(ValueError, match="cannot take 1 steps back: there were 0"):
        past.back(1)


# -- mirostat ------------------------------------------------------------------------------------------


def mirostat_by_hand(scores: list[Tensor], tokens: list[int], tau: float, eta: float) -> tuple[list[list[int]], float]:
    """One row, step by step in float64 as the method is defined: the kept tokens of each step, and the last limit."""
    limit, sets = 2 * tau, []
    for row, token in zip(scores, tokens, strict=True):
        p = row.double().softmax(-1)
        stay = (-p.log2() <= limit) | (p == p.max())
        sets.append(stay.nonzero()[:, 0].tolist())
        if stay[token]:
            surprise = -math.log2(p[token] / p[stay].sum())
            limit -= eta * (surprise - tau)
    return sets, limit


@pytest.mark.parametrize("form", ["dense", "opened", "shortened"])
@pytest.mark.parametrize(("tau", "eta"), [(3.0, 0.1), (1.0, 0.5), (0.5, 2.0)])
def test_mirostat_is_the_method_step_by_step(form: str, tau: float, eta: float) -> None:
    rows, steps = 3, 12
    random = torch.Generator().manual_seed(1)
    scores = [torch.randn(rows, 300, generator=random) * 2.5 for _ in range(steps)]
    bound = MirostatLogitsWarper(tau, eta).bind(ctx_of(rows))
    tokens, sets = [], []
    for step in scores:
        ids = step.long()
        if form == "dense":
            got = bound(ids, step)
        elif form == "opened":
            short = bound.open_shortlist(ids, step)
            got = short.dense() if short is not None else bound(ids, step)
        else:
            got = bound.shorten(ids, listed(step)).dense()
        sets.append(kept(got))
        # Draw from what is left; now and then a token that is not, as another processor might force it.
        chosen = torch.multinomial(got.softmax(-1), 1, generator=random)[:, 0]
        if len(tokens) % 5 == 4:
            chosen[0] = step[0].argmin()
        tokens.append(chosen)
        bound.accept(chosen, None)
    for row in range(rows):
        want, limit = mirostat_by_hand([s[row] for s in scores], [int(t[row]) for t in tokens], tau, eta)
        assert [step[row] for step in sets] == want
        assert bound.limit[row].item() == pytest.approx(limit, abs=1e-5)


def test_mirostat_settles_at_its_target() -> None:
    """Over 400 tokens of a flat distribution of 9 bits the mean surprise comes to the 4 bits asked for."""
    rows, tau = 8, 4.0
    random = torch.Generator().manual_seed(2)
    bound = MirostatLogitsWarper(tau, 0.1).bind(ctx_of(rows))
    total = torch.zeros(rows, dtype=torch.float64)
    for step in range(400):
        scores = torch.randn(rows, 2000, generator=random)
        p = bound(scores.long(), scores).double().softmax(-1)
        chosen = torch.multinomial(p, 1, generator=random)
        if step >= 200:
            total += -p.gather(-1, chosen)[:, 0].log2()
        bound.accept(chosen[:, 0], None)
    assert ((total / 200 - tau).abs() < 0.3).all()


def test_mirostat_rolls_back_and_follows_the_rows() -> None:
    bound = MirostatLogitsWarper(1.0, 0.7).bind(ctx_of(3))
    scores, limits = torch.randn(3, 40, generator=torch.Generator().manual_seed(3)), []
    for _ in range(5):
        limits.append(bound.limit.clone())
        got = bound(scores.long(), scores)
        bound.accept(got.argmax(-1), None)
    rows = torch.tensor([2, 0, 0])
    bound.reorder(rows)
    bound.rollback(3)
    assert torch.equal(bound.limit, limits[2][rows])
    # Rows change places between the call and the token: each token is priced in the row it came from.
    plain = MirostatLogitsWarper(1.0, 0.7).bind(ctx_of(3))
    moved = MirostatLogitsWarper(1.0, 0.7).bind(ctx_of(3))
    tokens = plain(scores.long(), scores).argmax(-1)
    moved(scores.long(), scores)
    plain.accept(tokens, None)
    moved.reorder(rows)
    moved.accept(tokens[rows], None)
    assert torch.equal(moved.limit, plain.limit[rows])


def test_mirostat_takes_tokens_of_some_rows_only() -> None:
    every, some = (MirostatLogitsWarper(1.0, 0.7).bind(ctx_of(3)) for _ in range(2))
    scores = torch.randn(3, 40, generator=torch.Generator().manual_seed(4))
    for short in (False, True):
        tokens = every(scores.long(), scores).argmax(-1)
        if short:
            some.shorten(scores.long(), listed(scores))
        else:
            some(scores.long(), scores)
        every.accept(tokens, None)
        before = some.limit.clone()
        some.accept(tokens[[2, 0]], torch.tensor([2, 0]))
        assert some.limit[1] == before[1]
        if not short:
            assert torch.equal(some.limit[[0, 2]], every.limit[[0, 2]])


def test_a_broken_row_leaves_the_limits_alone() -> None:
    bound = MirostatLogitsWarper(1.0).bind(ctx_of(4))
    scores = score_cases(4, 20)["random"]
    scores[0, 3], scores[1], scores[2, 5] = math.nan, -math.inf, math.inf
    bound(scores.long(), scores)
    bound.accept(torch.tensor([3, 3, 5, int(scores[3].argmax())]), None)
    assert bound.limit[:3].tolist() == [[2.0]] * 3
    assert bound.limit[3] != 2.0


def test_mirostat_switched_off() -> None:
    assert MirostatLogitsWarper(0).bind(ctx_of(2)) is None
    assert torch.equal(MirostatLogitsWarper(0)(IDS, AB), AB)


# -- in a run --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keys",
    [
        {"xtc_probability": 0.5, "xtc_threshold": 0.02},
        {"mirostat_tau": 2.0, "mirostat_eta": 0.3},
        {"typical_p": 0.6, "eta_cutoff": 1e-3},
        {"dynatemp_range": 0.5, "top_n_sigma": 1.0, "top_k": 0},
        {"xtc_probability": 0.5, "mirostat_tau": 3.0, "top_h": 0.8, "epsilon_cutoff": 1e-3},
    ],
    ids=str,
)
def test_a_row_gets_the_same_tokens_whoever_shares_the_batch(keys: dict[str, Any]) -> None:
    model = toy()
    prompts = torch.randint(3, 60, (3, 4), generator=torch.Generator().manual_seed(5))
    usual = {"do_sample": True, "max_new_tokens": 12, **keys}
    batch = decodekit.generate(model, prompts, seed=(11, 12, 13), **usual)
    for row, seed in enumerate((11, 12, 13)):
        alone = decodekit.generate(model, prompts[row : row + 1], seed=(seed,), **usual)
        assert torch.equal(alone[0], batch[row])


def toy() -> Any:
    """A model whose next token depends on the last one alone."""
    table = torch.randn(60, 60, generator=torch.Generator().manual_seed(6)) * 2

    class Table(torch.nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return table[input_ids]

    return Table()


@pytest.mark.parametrize("keys", [{"typical_p": 0.2}, {"xtc_probability": 1.0, "xtc_threshold": 0.01}], ids=str)
def test_without_sampling_the_likeliest_token_is_taken_and_a_warning_says_so(keys: dict[str, Any]) -> None:
    prompt = torch.tensor([[3, 4]])
    plain = decodekit.generate(toy(), prompt, max_new_tokens=6)
    with pytest.warns(UserWarning, match="without do_sample=True"):
        assert torch.equal(decodekit.generate(toy(), prompt, max_new_tokens=6, **keys), plain)
    with pytest.raises(decodekit.ConfigError, match="has no effect without do_sample=True"):
        decodekit.GenerationConfig(**keys).validate(strict=True)
    with pytest.warns(UserWarning, match="without do_sample=True"):
        left = decodekit.plan(toy(), prompt, max_new_tokens=6, **keys).left_out
    assert left["xtc" if "xtc_probability" in keys else "typical_p"].startswith("only matters when sampling")


def test_an_object_that_was_passed_acts_in_a_greedy_run_too() -> None:
    prompt, made = torch.tensor([[3, 4]]), XTCLogitsWarper(1.0, 0.01)
    plain = decodekit.generate(toy(), prompt, max_new_tokens=6)
    assert not torch.equal(decodekit.generate(toy(), prompt, max_new_tokens=6, logits_processor=[made]), plain)
