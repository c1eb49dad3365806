"""Top-n-sigma and the dynamic temperature by their definitions, and the options that the new processors refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from decodekit.errors import ConfigError
from decodekit.settings import resolve
from decodekit.shortlist import Shortlist
from decodekit.testing import context, score_cases
from decodekit_processors.cutoffs import EpsilonLogitsWarper, EtaLogitsWarper
from decodekit_processors.mirostat import MirostatLogitsWarper
from decodekit_processors.scale import TemperatureLogitsWarper
from decodekit_processors.sigma import TopNSigmaLogitsWarper
from decodekit_processors.toph import TopHLogitsWarper
from decodekit_processors.typical import TypicalLogitsWarper
from decodekit_processors.xtc import XTCLogitsWarper
from torch import Tensor

IDS = torch.zeros(4, 1, dtype=torch.long)


def kept(scores: Tensor) -> Tensor:
    return scores > -math.inf


# -- top_n_sigma -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 2, 37, 9000])
@pytest.mark.parametrize("n", [0.1, 0.5, 1.0, 2.0, 5.0])
def test_top_n_sigma_by_its_definition(vocab: int, n: float) -> None:
    for name, scores in score_cases(4, vocab).items():
        got = kept(TopNSigmaLogitsWarper(n)(IDS, scores))
        for row in range(4):
            exact = scores[row].double()
            live = exact[exact > -math.inf]
            floor = live.max() - n * ((live - live.mean()) ** 2).mean().sqrt()
            doubtful = (exact - floor).abs() < 1e-5 * (1 + floor.abs())
            assert ((got[row] == (exact >= floor)) | doubtful | (exact == -math.inf)).all(), name


@pytest.mark.parametrize("temperature", [0.3, 2.0, 10.0])
def test_a_temperature_changes_nothing_that_top_n_sigma_keeps(temperature: float) -> None:
    scores = score_cases(4, 500)["random"]
    warm = TemperatureLogitsWarper(temperature)(IDS, scores)
    assert torch.equal(kept(TopNSigmaLogitsWarper(1.0)(IDS, scores)), kept(TopNSigmaLogitsWarper(1.0)(IDS, warm)))


def test_top_n_sigma_counts_removed_tokens_nowhere() -> None:
    scores = score_cases(4, 60)["random"]
    wider = torch.cat([scores, torch.full((4, 10_000), -math.inf)], dim=-1)
    assert torch.equal(TopNSigmaLogitsWarper(1.0)(IDS, wider)[:, :60], TopNSigmaLogitsWarper(1.0)(IDS, scores))


# -- dynamic temperature -----------------------------------------------------------------------------------


def by_hand(row: Tensor, temperature: float, moves: float, exponent: float) -> Tensor:
    """One row in float64, as llama.cpp computes it, but never colder than 0.001."""
    live = row[row > -math.inf].double()
    if len(live) < 2:
        return row
    p = live.softmax(-1)
    share = float(torch.special.entr(p).sum()) / math.log(len(live))
    low, high = max(0.0, temperature - moves), temperature + moves
    return row / max(low + (high - low) * share**exponent, 1e-3)


@pytest.mark.parametrize(("temperature", "moves"), [(1.0, 0.5), (0.7, 0.7), (1.3, 0.2), (2.0, 1.9)])
@pytest.mark.parametrize("exponent", [1.0, 0.5, 2.5])
def test_dynamic_temperature_by_its_definition(temperature: float, moves: float, exponent: float) -> None:
    options = TemperatureLogitsWarper(temperature, moves, exponent)
    for vocab in (2, 37, 9000):
        for name, scores in score_cases(4, vocab).items():
            got = options(IDS, scores)
            assert torch.equal(got, options.bind(context(IDS))(IDS, scores))
            for row in range(4):
                want = by_hand(scores[row], temperature, moves, exponent)
                assert torch.allclose(got[row], want, rtol=2e-4, atol=1e-6), (name, vocab)


def test_dynamic_temperature_acts_on_shortlists_alike() -> None:
    options = TemperatureLogitsWarper(1.0, 0.8, 1.5)
    for scores in score_cases(4, 300).values():
        values, ids = scores.topk(20)
        short = Shortlist(values, ids, 300)
        assert torch.equal(options.shorten(IDS, short).dense(), options(IDS, short.dense()))


def test_a_range_as_large_as_the_temperature_leaves_finite_scores() -> None:
    scores = torch.tensor([[5000.0, 0.0, -3.0], [2.0, -math.inf, -math.inf]])
    for dtype in (torch.float32, torch.float64):
        got = TemperatureLogitsWarper(1.0, 1.0)(IDS[:2], scores.to(dtype))
        assert (got[0, 0] > got[0, 1]).item()
        assert got[0].isfinite().all()
        assert torch.equal(got[1], scores[1].to(dtype))


def test_broken_rows_are_not_made_worse() -> None:
    scores = torch.tensor([[1.0, math.inf, 2.0], [1.0, math.nan, 2.0], [-math.inf] * 3])
    got = TemperatureLogitsWarper(1.0, 0.5)(IDS[:3], scores)
    assert torch.allclose(got, scores, equal_nan=True)


def test_a_range_alone_is_enough_in_a_configuration() -> None:
    active = resolve([("call", {"dynatemp_range": 0.4})]).kind("processors")
    options = next(item.options for item in active if item.plugin.name == "temperature")
    assert (options.temperature, options.dynatemp_range, options.dynatemp_exponent) == (1.0, 0.4, 1.0)


# -- what is refused ---------------------------------------------------------------------------------------

REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (TypicalLogitsWarper, {"mass": 0.0}, r"in \(0, 1\]"),
    (TypicalLogitsWarper, {"mass": 1.2}, r"in \(0, 1\]"),
    (TypicalLogitsWarper, {"mass": 0.5, "min_tokens_to_keep": 0}, "at least 1"),
    (TypicalLogitsWarper, {"mass": 0.5, "min_tokens_to_keep": 2.0}, "whole number"),
    (TopHLogitsWarper, {"top_h": 0}, r"in \(0, 1\]"),
    (TopHLogitsWarper, {"top_h": 1.01}, r"in \(0, 1\]"),
    (EpsilonLogitsWarper, {"epsilon": -0.1}, r"in \[0, 1\)"),
    (EpsilonLogitsWarper, {"epsilon": 1.0}, r"in \[0, 1\)"),
    (EtaLogitsWarper, {"epsilon": 1}, r"in \[0, 1\)"),
    (EtaLogitsWarper, {"epsilon": math.nan}, "got nan"),
    (TopNSigmaLogitsWarper, {"top_n_sigma": -1}, "at least 0"),
    (XTCLogitsWarper, {"xtc_probability": 1.5}, r"in \[0, 1\]"),
    (MirostatLogitsWarper, {"mirostat_tau": -1}, "at least 0"),
    (MirostatLogitsWarper, {"mirostat_eta": -0.1}, "at least 0"),
    (TemperatureLogitsWarper, {"dynatemp_range": -0.5}, "at least 0"),
    (TemperatureLogitsWarper, {"dynatemp_range": 0.5, "dynatemp_exponent": 0}, "greater than 0"),
    (TemperatureLogitsWarper, {"temperature": (0.7, 0)}, "do_sample=False"),
]


@pytest.mark.parametrize(("cls", "options", "words"), REFUSED, ids=lambda x: getattr(x, "__name__", str(x)))
def test_b35_values_out_of_range_are_refused(cls: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        cls(**options)


def test_b35_every_key_reports_its_range() -> None:
    bad = {"typical_p": 1.7, "epsilon_cutoff": 1.0, "eta_cutoff": -1, "top_h": 2, "xtc_threshold": 0, "top_n_sigma": -1}
    with pytest.raises(ConfigError) as caught:
        resolve([("call", bad)])
    assert all(key in str(caught.value) for key in bad)


def test_the_reference_defaults_switch_everything_off() -> None:
    off = {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "top_p": 1.0, "temperature": 1.0}
    for item in resolve([("call", off)], library=False).kind("processors"):
        assert item.options.bind(context()) is None, item.plugin.name
