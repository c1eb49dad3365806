"""One value for each prompt: every row gets bit for bit what it would get alone with its own value."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from decodekit.registry import registry
from decodekit.shortlist import Shortlist
from decodekit.testing import context, score_cases
from torch import Tensor

VOCAB, ROWS, WIDTH = 37, 4, 9
# Plugin -> (field with a value for each prompt -> four values, one of which does nothing where there is such a value),
# and what else it needs.
EXAMPLES: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {
    "temperature": [
        ({"temperature": (0.5, 1.0, 2.0, 0.7)}, {}),
        ({"dynatemp_range": (0.5, 0.0, 0.2, 0.9)}, {}),
        ({"dynatemp_exponent": (0.5, 1.0, 2.0, 0.7)}, {"dynatemp_range": 0.5}),
    ],
    "top_k": [({"top_k": (1, 0, 5, 20)}, {}), ({"top_k": (1, 3, 5, 20)}, {})],
    "top_p": [({"top_p": (0.1, 1.0, 0.5, 0.9)}, {}), ({"top_p": (0.1, 0.3, 0.5, 0.9)}, {})],
    "min_p": [({"min_p": (0.1, 0.0, 0.5, 1.0)}, {})],
    "top_h": [({"top_h": (0.1, 0.9, 0.5, 0.4)}, {})],
    "top_n_sigma": [({"top_n_sigma": (0.5, 1.0, 2.0, 1.5)}, {})],
    "typical_p": [({"mass": (0.1, 0.9, 0.5, 0.3)}, {})],
    "epsilon_cutoff": [({"epsilon": (0.1, 0.001, 0.05, 0.5)}, {})],
    "eta_cutoff": [({"epsilon": (0.1, 0.001, 0.05, 0.5)}, {})],
    "xtc": [
        ({"xtc_probability": (1.0, 0.0, 1.0, 1.0)}, {}),
        ({"xtc_threshold": (0.1, 0.01, 0.2, 0.3)}, {"xtc_probability": 1.0}),
    ],
    "mirostat": [
        ({"mirostat_tau": (1.0, 2.0, 0.5, 3.0)}, {}),
        ({"mirostat_eta": (0.1, 0.2, 0.5, 1.0)}, {"mirostat_tau": 1.0}),
    ],
    "repetition_penalty": [({"penalty": (1.3, 1.0, 0.5, 2.0)}, {})],
    "encoder_repetition_penalty": [({"penalty": (1.3, 1.0, 0.5, 2.0)}, {})],
    "frequency_penalty": [({"frequency_penalty": (0.5, 0.0, -1.0, 2.0)}, {})],
    "presence_penalty": [({"presence_penalty": (0.5, 0.0, -1.0, 2.0)}, {})],
    "dry": [({"dry_multiplier": (0.5, 0.0, 1.0, 2.0)}, {"dry_allowed_length": 1, "dry_sequence_breakers": ()})],
    "no_repeat_ngram_size": [({"ngram_size": (1, 0, 2, 3)}, {})],
    "encoder_no_repeat_ngram_size": [({"encoder_ngram_size": (1, 0, 2, 3)}, {})],
    "min_length": [({"min_length": (8, 0, 50, 10)}, {})],
    "min_new_tokens": [({"min_new_tokens": (4, 0, 50, 3)}, {})],
    "suppress_tokens": [({"suppress_tokens": ((5, 6), (), (5, 7, 99), (30,))}, {})],
    "begin_suppress_tokens": [({"begin_suppress_tokens": ((5, 6), (), (5, 7, 99), (30,))}, {})],
    "exponential_decay_length_penalty": [
        ({"exponential_decay_length_penalty": ((0, 1.5), (0, 1.0), (1, 0.5), (0, 3.0))}, {"eos_token_id": (2, 9)}),
    ],
    "bark_eos": [({"min_eos_p": (0.01, 0.02, 0.05, 0.3)}, {"eos_token_id": 5})],
    "guidance_scale": [],  # it needs a model: test_guidance covers it
}
OWN = [
    plugin for plugin in registry.plugins("processors") if plugin.distribution == "decodekit" and not plugin.disabled
]
CASES = [(plugin, *example) for plugin in OWN for example in EXAMPLES.get(plugin.name, [])]


def fields(plugin: Any) -> set[str]:
    """Fields that take a value for each prompt."""
    return {field.name for field in attrs.fields(plugin.load()) if field.metadata.get("per_row")}


def test_every_such_field_has_an_example() -> None:
    for plugin in OWN:
        shown = {name for values, _ in EXAMPLES.get(plugin.name, []) for name in values}
        missing = fields(plugin) - shown if EXAMPLES.get(plugin.name) != [] else set()
        assert not missing, f"{plugin.name}: no example for {', '.join(sorted(missing))}"


def tokens() -> Tensor:
    return torch.randint(3, 12, (ROWS, WIDTH), generator=torch.Generator().manual_seed(3))


def mask() -> Tensor:
    return torch.arange(WIDTH) >= torch.arange(ROWS)[:, None]


def outcome(
    options: Any, ids: Tensor, given: Tensor | None, scores: Tensor, rows: Tensor | None = None
) -> list[Tensor]:
    """Dense and shortlist forms, before and after two more tokens; `rows` trade places in between."""
    ctx = context(ids.clone(), given, vocab_size=VOCAB, prompt_width=6, samples=True)
    runtime = options.bind(ctx) if hasattr(options, "bind") else options
    found = []
    for step in range(3):
        if runtime is None:
            found.append(scores)
        else:
            found.append(runtime(ctx.input_ids.clone(), scores.clone()))
            short = getattr(runtime, "open_shortlist", lambda *_: None)(ctx.input_ids.clone(), scores.clone())
            if short is not None:
                assert torch.equal(short.dense(), found[-1])
            if hasattr(runtime, "shorten"):
                values, kept = scores.topk(11)
                listed = Shortlist(values, kept, VOCAB)
                got = runtime.shorten(ctx.input_ids.clone(), listed).dense()
                assert torch.equal(got, runtime(ctx.input_ids.clone(), listed.dense()))
        new = torch.full((len(ids),), 5 + step)
        ctx.reserve(ctx.length + 1)
        ctx.tokens[:, ctx.length] = new
        ctx.length += 1
        if hasattr(runtime, "accept"):
            runtime.accept(new, None)
        if step == 1 and rows is not None:
            ctx.reorder(rows)
            scores = scores[rows]
            if hasattr(runtime, "reorder"):
                runtime.reorder(rows)
    return found


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name} {case[1]}")
def test_a_row_gets_what_it_gets_alone(case: Any, padded: bool) -> None:
    plugin, values, more = case
    cls, ids, given = plugin.load(), tokens(), mask() if padded else None
    options = cls(**values, **more)
    for name, scores in score_cases(ROWS, VOCAB).items():
        together = outcome(options, ids, given, scores)
        for row in range(ROWS):
            own = cls(**{field: numbers[row] for field, numbers in values.items()}, **more)
            here = slice(row, row + 1)
            alone = outcome(own, ids[here], None if given is None else given[here], scores[here])
            for step, (batch, single) in enumerate(zip(together, alone, strict=True)):
                assert torch.equal(batch[here].nan_to_num(), single.nan_to_num()), f"{name}, row {row}, step {step}"


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name} {case[1]}")
def test_values_follow_rows_that_trade_places(case: Any) -> None:
    plugin, values, more = case
    options, rows = plugin.load()(**values, **more), torch.tensor([2, 0, 3, 1])
    scores = score_cases(ROWS, VOCAB)["random"]
    stayed = outcome(options, tokens(), mask(), scores)
    moved = outcome(options, tokens(), mask(), scores, rows)
    assert torch.equal(moved[2].nan_to_num(), stayed[2][rows].nan_to_num())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].name} {case[1]}")
def test_another_number_of_values_is_refused(case: Any) -> None:
    plugin, values, more = case
    options = plugin.load()(**{field: numbers[:3] for field, numbers in values.items()}, **more)
    with pytest.raises(ValueError, match="3 values for 4 prompts"):
        options.bind(context(tokens(), None, vocab_size=VOCAB, prompt_width=6, samples=True))
