"""What a module of a user's own names in its signature, it gets: masks, positions and caches, in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit import PipelineError, generate
from decodekit.testing import TinyLM
from torch import Tensor, nn

V = 19
PROMPTS = [[5, 9], [7, 3, 4, 11, 6], [8]]


def greedy(model: Any, inputs: Any = PROMPTS, **keys: Any) -> Tensor:
    return generate(model.eval(), inputs, max_new_tokens=6, eos_token_id=None, **keys)


class NeedsMask(TinyLM):
    def forward(self, tokens: Tensor, attention_mask: Tensor, cache: Any) -> Tensor:  # type: ignore[override]
        held = 0 if cache is None else cache.get_seq_length()
        assert attention_mask.shape == (tokens.shape[0], held + tokens.shape[1])
        assert attention_mask.dtype == torch.long
        places = (attention_mask.cumsum(-1) - 1).clamp_min(0)[:, held:]
        return super().forward(tokens, attention_mask, places, cache)


class NeedsPadding(TinyLM):
    def forward(self, tokens: Tensor, *, key_padding_mask: Tensor, positions: Tensor) -> Tensor:  # type: ignore[override]
        assert not key_padding_mask[:, -1].any()
        return super().forward(tokens, ~key_padding_mask, positions)


class OtherOrder(TinyLM):
    def forward(self, attention_mask: Tensor, position_ids: Tensor, idx: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(idx, attention_mask, position_ids)


class ByName(TinyLM):
    def forward(self, *, mask: Any = False, input_ids: Tensor, position_ids: Any = 0) -> Tensor:  # type: ignore[override]
        assert mask is not False
        return super().forward(input_ids, mask, position_ids)


@pytest.mark.parametrize("cls", [NeedsMask, NeedsPadding, OtherOrder, ByName])
def test_what_is_named_is_passed(cls: type[TinyLM]) -> None:
    want = greedy(TinyLM(V))
    assert torch.equal(greedy(cls(V)), want)
    for prompt in PROMPTS:
        assert torch.equal(greedy(cls(V), [prompt]), greedy(TinyLM(V), [prompt]))
        assert torch.equal(greedy(cls(V), [prompt], use_cache=False), greedy(TinyLM(V), [prompt]))


def test_an_argument_that_nobody_passes_is_named() -> None:
    class Needy(TinyLM):
        def forward(self, tokens: Tensor, style: int) -> Tensor:  # type: ignore[override]
            return super().forward(tokens)

    with pytest.raises(PipelineError, match=r"Needy\.forward needs style, which nobody passed"):
        greedy(Needy(V))
    assert torch.equal(greedy(Needy(V), [[5, 9]], style=1), greedy(TinyLM(V), [[5, 9]]))


# -- caches ----------------------------------------------------------------------------------------


class Deaf(TinyLM):
    def forward(self, tokens: Tensor, cache: Any = None) -> Tensor:  # type: ignore[override]
        return super().forward(tokens)


class Recurrent(nn.Module):
    """Takes and returns a state of its own kind."""

    vocab_size = V

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.rnn, self.out = nn.Embedding(V, 12), nn.GRU(12, 12, batch_first=True), nn.Linear(12, V)
        nn.init.normal_(self.out.weight, std=2.0)

    def forward(self, tokens: Tensor, past_key_values: Any = None) -> Any:
        states, state = self.rnn(self.embed(tokens), past_key_values)
        return self.out(states), state


class Unpacks(Recurrent):
    def forward(self, tokens: Tensor, past_key_values: Any = None) -> Any:
        (state,) = past_key_values or (None,)
        logits, state = super().forward(tokens, state)
        return logits, (state,)


def test_a_cache_that_is_not_written_to_is_refused() -> None:
    with pytest.raises(PipelineError, match=r"Deaf\.forward takes cache, but wrote no token to it.*use_cache=False"):
        greedy(Deaf(V), [[5, 9]])
    assert torch.equal(greedy(Deaf(V), [[5, 9]], use_cache=False), greedy(TinyLM(V), [[5, 9]]))


@pytest.mark.parametrize("cls", [Recurrent, Unpacks])
def test_a_state_of_another_kind_is_refused(cls: type[Recurrent]) -> None:
    with pytest.raises(PipelineError, match=rf"{cls.__name__}\.forward .*past_key_values.*make_cache\(\).*use_cache"):
        greedy(cls(), [[5, 9]])
    assert greedy(cls(), [[5, 9]], use_cache=False).shape == (1, 8)


def test_a_state_of_its_own_kind() -> None:
    class Stateful(Recurrent):
        def make_cache(self) -> Any:
            return {}

        def forward(self, tokens: Tensor, cache: Any = None) -> Any:
            held = {} if cache is None else cache
            logits, held["state"] = super().forward(tokens, held.get("state"))
            return logits

    assert torch.equal(greedy(Stateful(), [[5, 9]]), greedy(Recurrent(), [[5, 9]], use_cache=False))


def test_errors_of_the_module_itself_stay_what_they_are() -> None:
    class Broken(TinyLM):
        def forward(self, tokens: Tensor, attention_mask: Any = None) -> Tensor:  # type: ignore[override]
            raise TypeError("my own fault")

    with pytest.raises(TypeError, match="my own fault"):
        greedy(Broken(V), [[5, 9]])
