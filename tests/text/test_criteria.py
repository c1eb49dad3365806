"""Length, time and end-token criteria."""

from __future__ import annotations

import time
from typing import Any

import attrs
import pytest
import torch
from decodekit.converter import plain
from decodekit.errors import ConfigError, InputError
from decodekit.settings import build
from decodekit_plugins.stopping.eos import EosTokenCriteria
from decodekit_plugins.stopping.length import MaxLengthCriteria
from decodekit_plugins.stopping.time import MaxTimeCriteria
from transformers import EosTokenCriteria as OracleEos
from transformers import MaxLengthCriteria as OracleLength


def ids(rows: int, width: int) -> torch.Tensor:
    return torch.zeros(rows, width, dtype=torch.long)


def test_length_counts_the_prompt_or_new_tokens(context: Any) -> None:
    ctx = context([[0] * 5] * 2)
    assert MaxLengthCriteria(8).bind(ctx).limit(5) == 8
    assert MaxLengthCriteria(max_new_tokens=8).bind(ctx).limit(5) == 13
    assert MaxLengthCriteria(8, max_new_tokens=1).bind(ctx).limit(5) == 6
    assert MaxLengthCriteria().bind(ctx).limit(5) == 25
    runtime = MaxLengthCriteria(8).bind(ctx)
    assert runtime(ids(2, 7), None) is False
    assert [runtime(ids(2, n), None).tolist() for n in (8, 9)] == [[True] * 2] * 2
    assert runtime(ids(2, 8), None).dtype is torch.bool


def test_length_is_a_matter_of_each_row(context: Any) -> None:
    """A padded row ends where it would alone: three columns of padding are not part of its length."""
    runtime = MaxLengthCriteria(8).bind(context([[0, 0, 0, 1, 1], [1] * 5], mask=[[0, 0, 0, 1, 1], [1] * 5]))
    assert runtime.limit(5) == 11
    assert runtime(ids(2, 8), None).tolist() == [False, True]
    assert runtime(ids(2, 11), None).tolist() == [True, True]
    runtime.reorder(torch.tensor([1, 1]))
    assert runtime(ids(2, 8), None).tolist() == [True, True]


def test_length_alone_is_the_reference(context: Any) -> None:
    for width in (3, 4, 5):
        assert torch.equal(MaxLengthCriteria(4)(ids(3, width), None), OracleLength(4)(ids(3, width), None))
    with pytest.raises(InputError, match="max_new_tokens"):
        MaxLengthCriteria(max_new_tokens=4)(ids(1, 1), None)


@pytest.mark.parametrize("length", [5, 3])
def test_a_prompt_that_fills_the_length_is_an_error_that_names_both(length: int, context: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        MaxLengthCriteria(length).bind(context([[0] * 5]))
    message = str(caught.value)
    assert str(length) in message
    assert "5 tokens" in message
    assert "max_new_tokens" in message


def test_length_keys_shadow_each_other_and_check() -> None:
    fields = attrs.fields_dict(MaxLengthCriteria)
    assert fields["max_length"].metadata["shadows"] == ("max_new_tokens",)
    assert fields["max_new_tokens"].metadata["shadows"] == ("max_length",)
    for bad in (0, -1):
        with pytest.raises(ValueError, match="at least 1"):
            MaxLengthCriteria(max_new_tokens=bad)
        with pytest.raises(ValueError, match="at least 1"):
            MaxLengthCriteria(bad)


def test_default_length_stays_inside_the_model(context: Any) -> None:
    assert MaxLengthCriteria().bind(context([[0] * 5], positions=10)).limit(5) == 10
    assert MaxLengthCriteria().bind(context([[0] * 12], positions=10)).limit(12) == 32
    assert MaxLengthCriteria(max_new_tokens=9).bind(context([[0] * 5], positions=10)).limit(5) == 14


def test_going_past_the_positions_is_said_once(context: Any) -> None:
    runtime = MaxLengthCriteria(max_new_tokens=9).bind(context([[0] * 5], positions=6))
    runtime(ids(1, 6), None)
    with pytest.warns(UserWarning, match="6 positions"):
        runtime(ids(1, 7), None)
    runtime(ids(1, 8), None)


def test_time_runs_from_each_call(context: Any) -> None:
    options = MaxTimeCriteria(0.05)
    time.sleep(0.06)
    runtime = options.bind(context())
    assert runtime(ids(2, 3), None) is False
    time.sleep(0.06)
    assert runtime(ids(2, 3), None).tolist() == [True, True]
    assert options(ids(1, 1), None).tolist() == [True]  # alone: from when it was made
    assert options.bind(context())(ids(1, 1), None) is False


def test_time_with_a_start_given(context: Any) -> None:
    assert MaxTimeCriteria(1.0, time.time() - 2).bind(context())(ids(1, 1), None).all()
    assert MaxTimeCriteria(5.0, time.time() - 2).bind(context())(ids(1, 1), None) is False
    assert MaxTimeCriteria(-1.0).bind(context())(ids(1, 1), None).all()


def test_time_options_are_plain_data() -> None:
    options = MaxTimeCriteria(2.0)
    assert plain(options) == {"max_time": 2.0, "initial_timestamp": None}
    assert build(MaxTimeCriteria, plain(options), "x", []) == options
    assert hash(options) == hash(MaxTimeCriteria(2.0))


@pytest.mark.parametrize("eos", [3, [3], [3, 5], (5, 7), [3, -1], torch.tensor([3, 5])])
def test_eos_is_the_reference(eos: Any, context: Any) -> None:
    tokens = torch.tensor([[3, 1], [1, 3], [1, 5], [5, 7], [0, 0]])
    want = OracleEos(list(eos) if isinstance(eos, tuple) else eos)(tokens, None)
    options = EosTokenCriteria(eos)
    assert torch.equal(options(tokens, None), want)
    runtime = options.bind(context(tokens.tolist()))
    assert runtime is not None
    assert torch.equal(runtime(tokens, None), want)
    assert runtime(tokens, None).dtype is torch.bool


def test_eos_negative_ids_do_not_count(context: Any) -> None:
    assert EosTokenCriteria(-1).bind(context()) is None
    assert EosTokenCriteria([-1, -2]).bind(context()) is None
    assert not EosTokenCriteria(-1)(torch.tensor([[-1]]), None).any()
    runtime = EosTokenCriteria([-1, 4]).bind(context())
    assert runtime is not None
    assert runtime(torch.tensor([[4], [-1]]), None).tolist() == [True, False]


def test_eos_options_keep_their_form() -> None:
    assert EosTokenCriteria(3).eos_token_id == 3
    assert EosTokenCriteria([3, 4]) == EosTokenCriteria((3, 4))
    for value in (3, [3, 4]):
        options = EosTokenCriteria(value)
        assert build(EosTokenCriteria, plain(options), "x", []) == options
    for bad in (2.5, "2", [True], None):
        with pytest.raises(ValueError, match="token id"):
            EosTokenCriteria(bad)  # type: ignore[arg-type]
