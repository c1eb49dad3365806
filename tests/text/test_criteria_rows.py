"""Stopping rules with a value for each prompt, rules for drafts, and rules that callers bring along."""

from __future__ import annotations

import time
from typing import Any

import attrs
import pytest
import torch
from decodekit import ConfigError, GenerationConfig, InputError, generate, plan
from decodekit.converter import plain, structure
from decodekit.settings import build
from decodekit.testing import TinyLM
from decodekit.testing import context as kit
from decodekit_plugins.stopping.confidence import ConfidenceCriteria
from decodekit_plugins.stopping.eos import EosTokenCriteria
from decodekit_plugins.stopping.length import MaxLengthCriteria
from decodekit_plugins.stopping.time import MaxTimeCriteria
from hypothesis import given
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")
PROMPTS = [[5, 6, 7], [8], [9, 10]]
MODEL = TinyLM().double()


def rows_of(output: Any) -> list[list[int]]:
    """New tokens of each row, up to its end."""
    made = output.sequences[:, output.prompt_width :].tolist()
    return [row[:length] for row, length in zip(made, output.lengths, strict=True)]


def run(prompts: Any, **keys: Any) -> list[list[int]]:
    keys = {"pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True, "use_cache": True, **keys}
    return rows_of(generate(MODEL, prompts, do_sample=True, temperature=3.0, seed=(3, 4, 5)[: len(prompts)], **keys))


def alone(row: int, **keys: Any) -> list[int]:
    keys = {"pad_token_id": 0, "eos_token_id": None, "return_dict_in_generate": True, **keys}
    return rows_of(generate(MODEL, [PROMPTS[row]], do_sample=True, temperature=3.0, seed=((3, 4, 5)[row],), **keys))[0]


# -- in a run ------------------------------------------------------------------------------------------

ENDS = st.lists(st.integers(3, 36), max_size=20).map(tuple)


@given(ends=st.tuples(ENDS, ENDS, ENDS), new=st.tuples(*[st.integers(1, 9)] * 3), total=st.booleans())
def test_every_row_ends_as_if_alone(ends: Any, new: tuple[int, ...], total: bool) -> None:
    def limit(row: int) -> int:
        return new[row] + (len(PROMPTS[row]) if total else 0)

    key = "max_length" if total else "max_new_tokens"
    limits = {key: tuple(map(limit, range(3)))}
    together = run(PROMPTS, eos_token_id=[list(row) for row in ends], **limits)
    for row in range(3):
        own = {"eos_token_id": list(ends[row]) or None, key: limit(row)}
        assert together[row] == alone(row, **own)


def test_every_row_ends_as_if_alone_with_everything_at_once() -> None:
    keys = [
        {"eos_token_id": [3, 4, 5, 6, 7, 8], "min_new_tokens": 4, "max_new_tokens": 9},
        {"eos_token_id": list(range(9, 30)), "min_new_tokens": 1, "max_new_tokens": 7},
        {"eos_token_id": list(range(3, 36)), "min_new_tokens": 6, "max_new_tokens": 8},
    ]
    forced = {"forced_eos_token_id": 36, "exponential_decay_length_penalty": (2, 1.2)}
    merged = {name: [own[name] for own in keys] for name in keys[0]}
    together = run(PROMPTS, **merged, **forced)
    for row, own in enumerate(keys):
        assert together[row] == alone(row, **own, **forced)
        assert len(together[row]) >= own["min_new_tokens"]
    assert len({len(row) for row in together}) > 1


def test_copies_of_a_prompt_share_its_values() -> None:
    out = generate(
        MODEL, PROMPTS[:2], eos_token_id=[list(range(3, 37)), []], max_new_tokens=(4, 2), pad_token_id=0,
        do_sample=True, num_return_sequences=2, seed=1, return_dict_in_generate=True,
    )  # fmt: skip
    assert out.lengths == (1, 1, 2, 2)
    assert out.stop_reasons == ("eos", "eos", "max_length", "max_length")


def test_the_limit_of_the_run_is_the_largest() -> None:
    assert plan(MODEL, PROMPTS, max_new_tokens=(3, 8, 5)).context.max_length == 3 + 8
    assert plan(MODEL, PROMPTS, max_length=(9, 8, 7)).context.max_length == 3 + 7
    config = GenerationConfig(max_new_tokens=[3, 8, 5], eos_token_id=[[2], [5, 7], []], max_time=[1.5, 2, 3])
    again = GenerationConfig.from_dict(config.to_dict())
    assert again == config
    assert plan(MODEL, PROMPTS, again).context.max_length == 11


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"eos_token_id": [[2], [3]]}, "eos_token_id: has 2 lists for 3 prompts"),
        ({"max_new_tokens": (1, 2)}, "max_new_tokens: has 2 values for 3 prompts"),
        ({"max_length": (1, 2, 3, 4)}, "max_length: has 4 values for 3 prompts"),
        ({"max_length": (9, 1, 9)}, "is 1, but the prompt has 1 tokens already"),
        ({"max_time": (1.0, 2.0)}, "max_time: has 2 values for 3 prompts"),
        ({"max_new_tokens": (1, 0, 2)}, "at least 1, got 0"),
        ({"max_new_tokens": ()}, "empty"),
        ({"eos_token_id": [[2], ["a"], [3]]}, "eos_token_id: expected"),
        ({"eos_token_id": [[2], 5, [3]]}, "eos_token_id: expected"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_anything_runs(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(MODEL, PROMPTS, **keys)
    assert words in str(caught.value)


# -- the classes -----------------------------------------------------------------------------------------


def test_lists_of_end_tokens() -> None:
    options = EosTokenCriteria([[2], [5, 7, -1, 5], []])
    assert options.eos_token_id == ((2,), (5, 7, -1, 5), ())
    assert options.tokens() == (2, 5, 7)
    assert structure(plain(options), EosTokenCriteria) == options
    assert build(EosTokenCriteria, plain(options), "x", []) == options
    last = torch.tensor([[2], [2], [2]])
    assert options(last, None).tolist() == [True, False, False]
    assert options(torch.tensor([[7], [7], [-1]]), None).tolist() == [False, True, False]
    with pytest.raises(ValueError, match="3 lists for 2 rows"):
        options(last[:2], None)
    with pytest.raises(ValueError, match="not both in one"):
        EosTokenCriteria([2, [3]])  # type: ignore[list-item]
    bound = options.bind(kit(rows=3))
    assert bound is not None
    assert bound(last, None).dtype == torch.bool
    assert repr(bound) == "EosTokenCriteria(eos_token_id=[[2], [5, 7], []])"
    assert EosTokenCriteria([[], [-1]]).bind(kit(rows=2)) is None


def test_equal_lists_take_the_path_of_one() -> None:
    assert repr(EosTokenCriteria([[2, 3], [3, 2]]).bind(kit(rows=2))) == repr(
        EosTokenCriteria([2, 3]).bind(kit(rows=2))
    )


def test_lengths_alone() -> None:
    options = MaxLengthCriteria((3, 5))
    assert options(torch.zeros(2, 4).long(), None).tolist() == [True, False]
    with pytest.raises(InputError, match="2 values for 3 rows"):
        options(torch.zeros(3, 4).long(), None)


def test_times_for_each_row() -> None:
    ids = torch.zeros(3, 4).long()
    bound = MaxTimeCriteria((-1.0, 60, 0.05)).bind(kit(rows=3))
    assert bound(ids, None).tolist() == [True, False, False]
    time.sleep(0.06)
    assert bound(ids, None).tolist() == [True, False, True]
    bound.reorder(torch.tensor([1, 1, 0]))
    assert bound(ids, None).tolist() == [False, False, True]
    assert MaxTimeCriteria((50, 60)).bind(kit(rows=2))(ids[:2], None) is False
    assert MaxTimeCriteria((-1, 60))(ids[:2], None).tolist() == [True, False]
    assert MaxTimeCriteria((50, 60))(ids[:2], None).tolist() == [False, False]
    with pytest.raises(ValueError, match="2 values for 3 rows"):
        MaxTimeCriteria((50, 60))(ids, None)


# -- drafts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threshold", [0.05, 0.3, 0.9, 1.0])
def test_confidence_is_the_reference_for_one_row_and_knows_several(threshold: float) -> None:
    theirs = transformers.generation.stopping_criteria.ConfidenceCriteria(threshold)
    ours, seen = ConfidenceCriteria(threshold), set()
    for seed in range(30):
        random = torch.Generator().manual_seed(seed)
        scores = (torch.randn(3, 9, generator=random) * 9, torch.randn(3, 9, generator=random) * 3)
        ids = torch.randint(0, 9, (3, 4), generator=random)
        got = ours(ids, scores)
        assert got.tolist() == [theirs(ids[i : i + 1], [s[i : i + 1] for s in scores]) for i in range(3)]
        seen |= set(got.tolist())
    assert len(seen) > 1 or threshold == 1.0


def test_confidence_acts_in_drafts_only_and_needs_scores() -> None:
    draft = kit(rows=2)
    assert ConfidenceCriteria(0.4).bind(draft) is None
    draft.drafting = True  # type: ignore[attr-defined]
    bound = ConfidenceCriteria(0.4).bind(draft)
    assert bound is not None
    with pytest.raises(InputError, match="output_scores=True"):
        bound(torch.zeros(2, 4).long(), None)
    assert ConfidenceCriteria(0.0).bind(draft) is None
    assert "confidence" in plan(MODEL, [[3]], assistant_confidence_threshold=0.4).left_out
    with pytest.raises(ConfigError, match=r"in \[0, 1\]"):
        plan(MODEL, [[3]], assistant_confidence_threshold=1.4)


# -- what callers bring along ------------------------------------------------------------------------------


def after(width: int) -> Any:
    return lambda ids, scores: torch.full((ids.shape[0],), ids.shape[1] >= width)


class Counter:
    """Not of anybody's class, with state of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> bool:
        self.calls += 1
        return self.calls >= 3


def width(**keys: Any) -> int:
    keys = {"max_new_tokens": 9, "eos_token_id": None, "pad_token_id": 0, **keys}
    return generate(MODEL, [[5, 6, 7], [8, 9, 10]], **keys).shape[1]


def test_criteria_of_callers() -> None:
    own = transformers.StoppingCriteriaList
    assert width() == 12
    assert width(stopping_criteria=after(5)) == 5
    assert width(stopping_criteria=[after(7), after(6)]) == 6
    assert width(stopping_criteria=own([after(7), transformers.MaxLengthCriteria(8)])) == 7
    assert width(stopping_criteria=own([transformers.MaxLengthCriteria(8)])) == 8
    assert width(stopping_criteria=[own([after(7), after(9)])]) == 7
    assert width(stopping_criteria=[transformers.MaxTimeCriteria(-1.0)]) == 4
    assert width(stopping_criteria=[transformers.generation.stopping_criteria.EosTokenCriteria(list(range(37)))]) == 4
    counter = Counter()
    for _ in range(2):
        assert width(stopping_criteria=[counter]) == 6
    assert counter.calls == 0
    keys = {"output_scores": True, "return_dict_in_generate": True, "max_new_tokens": 9, "eos_token_id": None}
    sure = transformers.generation.stopping_criteria.ConfidenceCriteria(1.0)
    assert generate(MODEL, [[5, 6]], stopping_criteria=[sure], **keys).sequences.shape[1] == 3


def test_a_rule_for_some_rows_leaves_the_others() -> None:
    def first(ids: Any, scores: Any) -> torch.Tensor:
        return torch.tensor([ids.shape[1] >= 5, False])

    out = generate(
        MODEL, [[5, 6, 7], [8, 9, 10]], stopping_criteria=[first], max_new_tokens=(9, 4), eos_token_id=None,
        pad_token_id=0, return_dict_in_generate=True,
    )  # fmt: skip
    assert out.lengths == (2, 4)
    assert out.stop_reasons == ("first", "max_length")


def test_processors_of_callers() -> None:
    processors = transformers.LogitsProcessorList(
        [
            transformers.SuppressTokensLogitsProcessor(list(range(3, 30))),
            transformers.RepetitionPenaltyLogitsProcessor(1.3),
        ]
    )
    keys = {"max_new_tokens": 9, "eos_token_id": None, "pad_token_id": 0}
    ours = generate(MODEL, [[5, 6, 7]], suppress_tokens=list(range(3, 30)), repetition_penalty=1.3, **keys)
    for passed in (processors, [processors], list(processors)):
        assert torch.equal(generate(MODEL, [[5, 6, 7]], logits_processor=passed, **keys), ours)


@attrs.define
class Even:
    """A criterion that says nothing about itself but its name."""

    def __call__(self, input_ids: Any, scores: Any, /) -> Any:
        return input_ids[:, -1] % 2 == 0


def test_objects_of_callers_name_the_reason() -> None:
    keys = {"max_new_tokens": 30, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    out = generate(MODEL, PROMPTS, stopping_criteria=Even(), do_sample=True, seed=1, temperature=3.0, **keys)
    assert set(out.stop_reasons) == {"Even"}
    assert all(row[-1] % 2 == 0 and all(token % 2 for token in row[:-1]) for row in rows_of(out))
