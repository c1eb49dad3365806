"""One value for each prompt: every row gets bit for bit what it gets alone with its own number."""

from __future__ import annotations

import math
from typing import Any

import decodekit
import pytest
import torch
from decodekit.chain import Chain, Part
from decodekit.shortlist import Shortlist
from decodekit.testing import context, score_cases
from decodekit.traits import traits_of
from decodekit_processors.cutoffs import EpsilonLogitsWarper, EtaLogitsWarper
from decodekit_processors.mirostat import MirostatLogitsWarper
from decodekit_processors.scale import TemperatureLogitsWarper
from decodekit_processors.sigma import TopNSigmaLogitsWarper
from decodekit_processors.toph import TopHLogitsWarper
from decodekit_processors.truncation import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from decodekit_processors.typical import TypicalLogitsWarper
from decodekit_processors.xtc import XTCLogitsWarper
from torch import Tensor

ROWS = 4
CASES: list[tuple[Any, dict[str, tuple[float, ...]], dict[str, Any]]] = [
    (TemperatureLogitsWarper, {"temperature": (0.7, 1.0, 3, 0.1)}, {}),
    (TemperatureLogitsWarper, {"temperature": (0.7, 1.0, 3, 0.1)}, {"dynatemp_range": 0.4}),
    (TemperatureLogitsWarper, {"dynatemp_range": (0.0, 0.5, 1, 0.1)}, {"temperature": 1.2}),
    (
        TemperatureLogitsWarper,
        {"temperature": (0.7, 1, 2, 1), "dynatemp_range": (0, 0.5, 1, 2), "dynatemp_exponent": (1, 2, 0.5, 3)},
        {},
    ),
    (TopKLogitsWarper, {"top_k": (5, 0, 1, 900)}, {}),
    (TopKLogitsWarper, {"top_k": (5, 2, 1, 9)}, {"min_tokens_to_keep": 3}),
    (TopKLogitsWarper, {"top_k": (5, 2, 1, 9)}, {"filter_value": -77.0}),
    (TopPLogitsWarper, {"top_p": (0.5, 1.0, 0.0, 0.95)}, {}),
    (TopPLogitsWarper, {"top_p": (0.5, 0.2, 0, 0.95)}, {"min_tokens_to_keep": 3}),
    (TopPLogitsWarper, {"top_p": (0, 0, 1, 1)}, {"filter_value": -77.0}),
    (MinPLogitsWarper, {"min_p": (0.1, 0, 1.0, 0.003)}, {}),
    (MinPLogitsWarper, {"min_p": (0.1, 0.2, 1, 0.003)}, {"min_tokens_to_keep": 3}),
    (TypicalLogitsWarper, {"mass": (0.9, 1.0, 0.2, 0.5)}, {}),
    (TypicalLogitsWarper, {"mass": (0.9, 0.999, 0.2, 0.5)}, {"min_tokens_to_keep": 3}),
    (TopHLogitsWarper, {"top_h": (0.9, 1, 0.2, 0.5)}, {}),
    (EpsilonLogitsWarper, {"epsilon": (0.1, 0, 0.9, 1e-4)}, {}),
    (EpsilonLogitsWarper, {"epsilon": (0.1, 0.3, 0.9, 1e-4)}, {"min_tokens_to_keep": 3}),
    (EtaLogitsWarper, {"epsilon": (0.1, 0.0, 0.9, 1e-4)}, {}),
    (EtaLogitsWarper, {"epsilon": (0.1, 0.3, 0.9, 1e-4)}, {"filter_value": -77.0}),
    (TopNSigmaLogitsWarper, {"top_n_sigma": (0, 1, 2.5, 0.1)}, {}),
    (XTCLogitsWarper, {"xtc_probability": (1.0, 0.0, 0.5, 1)}, {"xtc_threshold": 0.02}),
    (XTCLogitsWarper, {"xtc_threshold": (0.02, 0.1, 0.4, 0.9)}, {"xtc_probability": 1.0}),
    (MirostatLogitsWarper, {"mirostat_tau": (3, 0, 1.0, 0.1)}, {"mirostat_eta": 0.5}),
    (MirostatLogitsWarper, {"mirostat_eta": (0, 1, 0.5, 0.1)}, {"mirostat_tau": 1.5}),
]
names = [f"{cls.__name__} {rows} {more}" for cls, rows, more in CASES]


def ctx_of(rows: int, seeds: Any) -> Any:
    return context(torch.zeros(rows, 1, dtype=torch.long), seeds=seeds)


def chain(options: Any, ctx: Any) -> Chain:
    bound = options.bind(ctx)
    return Chain([] if bound is None else [Part("it", "test", bound, traits_of(options), "test")])


def dense(scores: Tensor | Shortlist) -> Tensor:
    return scores.dense() if isinstance(scores, Shortlist) else scores


def lists(scores: Tensor) -> Shortlist:
    values, ids = scores.topk(min(20, scores.shape[-1]))
    return Shortlist(values, ids, scores.shape[-1])


@pytest.mark.parametrize(("cls", "values", "more"), CASES, ids=names)
@pytest.mark.parametrize("vocab", [1, 37, 9000])
def test_a_row_gets_what_it_gets_alone(
    cls: Any, values: dict[str, tuple[float, ...]], more: dict[str, Any], vocab: int
) -> None:
    ids, seeds = torch.zeros(ROWS, 1, dtype=torch.long), [5, 6, 7, 8]
    together = cls(**values, **more)
    acted = False
    for name, scores in score_cases(ROWS, vocab).items():
        many = chain(together, ctx_of(ROWS, seeds))
        alone = [
            chain(cls(**{key: item[row] for key, item in values.items()}, **more), ctx_of(1, seeds[row : row + 1]))
            for row in range(ROWS)
        ]
        for step in range(3):
            got, whole = dense(many(ids, scores)), many.dense(ids, scores)
            want = torch.cat([dense(one(ids[:1], scores[row : row + 1])) for row, one in enumerate(alone)])
            assert torch.equal(got, want), (name, step)
            assert torch.equal(whole, want), (name, step)
            acted = acted or not torch.equal(got, scores)
            runtime = many.parts[0].runtime
            if hasattr(runtime, "shorten"):
                short = runtime.shorten(ids, lists(scores)).dense()
                for row, one in enumerate(alone):
                    mine = lists(scores[row : row + 1])
                    if len(one):
                        mine = one.parts[0].runtime.shorten(ids[:1], mine)
                    assert torch.equal(short[row], mine.dense()[0]), (name, step)
            many.dense(ids, scores)
            tokens = scores.argmax(-1)
            for one, token in [(many, tokens), *zip(alone, tokens.split(1), strict=True)]:
                if len(one):
                    one.dense(ids[: len(token)], scores if one is many else scores[alone.index(one)][None])
                    if hasattr(one.parts[0].runtime, "accept"):
                        one.parts[0].runtime.accept(token, None)
    assert acted or vocab == 1


@pytest.mark.parametrize(("cls", "values", "more"), CASES, ids=names)
def test_values_follow_their_rows(cls: Any, values: dict[str, tuple[float, ...]], more: dict[str, Any]) -> None:
    scores, rows = score_cases(ROWS, 37)["random"], torch.tensor([2, 3, 3, 0, 1])
    ids = torch.zeros(5, 1, dtype=torch.long)
    ctx = ctx_of(ROWS, [5, 6, 7, 8])
    bound = cls(**values, **more).bind(ctx)
    want = bound(ids[:ROWS], scores)
    bound.reorder(rows)
    assert torch.equal(bound(ids, scores[rows]), want[rows])
    if hasattr(bound, "shorten"):
        listed = Shortlist(*scores[rows].sort(-1, descending=True), 37)
        again = bound.shorten(ids, listed)
        assert torch.equal(again.dense(), want[rows])


@pytest.mark.parametrize(("cls", "values", "more"), CASES, ids=names)
def test_values_that_do_not_fit_the_batch_are_refused(
    cls: Any, values: dict[str, tuple[float, ...]], more: dict[str, Any]
) -> None:
    options, scores = cls(**values, **more), torch.zeros(3, 9)
    with pytest.raises(ValueError, match="4 values for 3 prompts"):
        options.bind(context(torch.zeros(3, 1, dtype=torch.long)))
    with pytest.raises(ValueError, match="4 values for 3 rows"):
        options(scores.long(), scores)


@pytest.mark.parametrize(("cls", "values", "more"), CASES, ids=names)
def test_called_on_its_own_there_is_a_value_for_each_row(
    cls: Any, values: dict[str, tuple[float, ...]], more: dict[str, Any]
) -> None:
    if cls is XTCLogitsWarper and "xtc_probability" in values:
        pytest.skip("outside of a run it draws from the global generator")
    options, scores = cls(**values, **more), score_cases(ROWS, 37)["random"]
    got = options(scores.long(), scores)
    for row in range(ROWS):
        alone = cls(**{key: item[row] for key, item in values.items()}, **more)
        assert torch.equal(got[row], alone(scores[row : row + 1].long(), scores[row : row + 1])[0])
    if hasattr(options, "shorten") and options.__class__ is not XTCLogitsWarper and more.get("filter_value") is None:
        if hasattr(options, "open_shortlist"):
            short = options.open_shortlist(scores.long(), scores)
            assert short is None or torch.equal(short.dense(), got)
        listed = Shortlist(*scores.sort(-1, descending=True), 37)
        assert torch.equal(options.shorten(scores.long(), listed).dense(), got)


@pytest.mark.parametrize(
    "off", [TopKLogitsWarper((0, 0)), TopPLogitsWarper((1, 1.0)), TemperatureLogitsWarper((1, 1.0)),
            MinPLogitsWarper((0, 0.0)), TypicalLogitsWarper((1.0, 1)), MirostatLogitsWarper((0, 0)),
            XTCLogitsWarper((0, 0)), XTCLogitsWarper((1, 1), (0.5, 0.9))], ids=str)  # fmt: skip
def test_values_that_are_all_off_are_left_out(off: Any) -> None:
    assert off.bind(context(torch.zeros(2, 1, dtype=torch.long))) is None
    scores = torch.randn(2, 9)
    assert torch.equal(off(scores.long(), scores), scores)


def test_several_rows_of_a_prompt_share_its_value() -> None:
    """Through a whole run: two prompts, three sequences each, as with each prompt alone."""
    table = torch.randn(60, 60, generator=torch.Generator().manual_seed(6)) * 2

    class Table(torch.nn.Module):
        def forward(self, input_ids: Tensor) -> Tensor:
            return table[input_ids]

    prompts = torch.tensor([[3, 4], [5, 6]])
    usual: dict[str, Any] = {"do_sample": True, "max_new_tokens": 9, "num_return_sequences": 3}
    rows: dict[str, Any] = {
        "temperature": (0.5, 1.5), "top_k": (40, 5), "top_p": (0.9, 1.0), "min_p": (0, 0.1), "typical_p": (1.0, 0.7),
        "dynatemp_range": (0.3, 0.0), "eta_cutoff": (0.01, 0.0), "mirostat_tau": (2.0, 3.0), "top_h": (0.9, 1.0),
    }  # fmt: skip
    with pytest.warns(UserWarning, match="no effect without do_sample=True"):  # nor does it disturb a greedy run
        greedy = decodekit.generate(Table(), prompts, max_new_tokens=5, top_k=(5, 3))
    assert torch.equal(greedy, decodekit.generate(Table(), prompts, max_new_tokens=5))
    both = decodekit.generate(Table(), prompts, seed=(1, 2), **usual, **rows)
    for i in (0, 1):
        own = {key: value[i] for key, value in rows.items()}
        alone = decodekit.generate(Table(), prompts[i : i + 1], seed=(i + 1,), **usual, **own)
        assert torch.equal(both[3 * i : 3 * i + 3], alone)
    assert not math.isnan(float(both.sum()))
