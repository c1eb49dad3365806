"""B01 and B27: positions come from the mask's running count, on every path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit import InputError, generate
from decodekit.models import adapter_for
from decodekit.testing import TinyLM
from torch import Tensor

SHAPE: dict[str, Any] = {
    "vocab_size": 71,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.25,
}
LENGTHS, NEW = (2, 5, 9), 8


def rotary() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))


def windowed() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE, num_key_value_heads=2, sliding_window=4))


def learned() -> Any:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 71, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.25}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape))


def native() -> Any:
    from decodekit_plugins.models.native.module import NativeConfig, NativeLM

    model = NativeLM(NativeConfig.from_hf({"model_type": "llama", **SHAPE}))
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.25)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "rotary": rotary,
    "learned": learned,
    "windowed": windowed,
    "native": native,
    "own module": lambda: TinyLM(71),
}


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(3)
    return MODELS[request.param]().eval()


def prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(5)
    return [torch.randint(3, 71, (n,), generator=random).tolist() for n in LENGTHS]


def batch(pad: int) -> tuple[Tensor, Tensor]:
    """The prompts left-padded with `pad`, and their mask."""
    width = max(LENGTHS)
    rows = [[pad] * (width - len(p)) + p for p in prompts()]
    mask = [[0] * (width - len(p)) + [1] * len(p) for p in prompts()]
    return torch.tensor(rows), torch.tensor(mask)


def ask(model: Any, inputs: Any, **keys: Any) -> Any:
    keys = {"max_new_tokens": NEW, "eos_token_id": None, **keys}
    return generate(model, inputs, return_dict_in_generate=True, output_logits=True, **keys)


def alone(model: Any, prompt: list[int]) -> tuple[Tensor, Tensor]:
    """New tokens [N] and logits [N, V] of one prompt without any padding or cache."""
    out = ask(model, [prompt], use_cache=False)
    return out.sequences[0, len(prompt) :], torch.cat(out.logits)


def check(out: Any, row: int, want: tuple[Tensor, Tensor], what: str) -> None:
    new = out.sequences[row, out.prompt_width :]
    logits = torch.stack([step[row] for step in out.logits])
    assert torch.equal(new, want[0][-len(new) :]), f"{what}: other tokens"
    torch.testing.assert_close(logits, want[1][-len(new) :], rtol=1e-3, atol=1e-4, msg=lambda m: f"{what}: {m}")


@pytest.mark.parametrize(
    "keys", [{"cache_implementation": "dynamic"}, {"use_cache": False}, {"cache_implementation": "model"}], ids=str
)
def test_b01_padded_rows_equal_rows_alone(model: Any, keys: dict[str, Any]) -> None:
    for pad in (0, 1, 66):
        tokens, mask = batch(pad)
        out = ask(model, tokens, attention_mask=mask, pad_token_id=pad, **keys)
        for row, prompt in enumerate(prompts()):
            check(out, row, alone(model, prompt), f"prompt of {len(prompt)}, pad token {pad}")


def test_b01_padded_rows_continue_from_a_cache(model: Any) -> None:
    """Generate four tokens, then go on from the cache: once with the whole sequence, once with the new token only."""
    tokens, mask = batch(0)
    for fresh in (False, True):
        first = ask(model, tokens, attention_mask=mask, max_new_tokens=4, pad_token_id=0)
        seen = first.sequences
        whole = torch.cat([mask, torch.ones(len(LENGTHS), 4, dtype=mask.dtype)], 1)
        given = seen[:, -1:] if fresh else seen
        out = ask(model, given, attention_mask=whole, cache=first.cache, max_new_tokens=NEW - 4, pad_token_id=0)
        for row, prompt in enumerate(prompts()):
            check(out, row, alone(model, prompt), f"prompt of {len(prompt)}, only the new token: {fresh}")


def held(model: Any, tokens: Tensor) -> Any:
    """A cache of decodekit's own that holds `tokens` [B, T]."""
    from decodekit.registry import registry
    from decodekit.testing import context

    adapter = adapter_for(model)
    cache = registry.load("caches", "dynamic")().bind(context(tokens))
    with torch.no_grad():
        return adapter.forward(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), cache).cache


class TestB27:
    """Nine tokens are in the cache, then it goes on."""

    prompt = torch.tensor([[5, 9, 33, 60, 8, 17, 42, 29, 11]])
    last = torch.tensor([[50]])

    @property
    def whole(self) -> Tensor:
        return torch.cat([self.prompt, self.last], 1)

    def want(self, model: Any) -> tuple[Tensor, Tensor]:
        return alone(model, self.whole[0].tolist())

    def test_a_only_the_last_id_and_a_full_mask(self, model: Any) -> None:
        mask = torch.ones(1, 10, dtype=torch.long)
        out = ask(model, self.last, attention_mask=mask, cache=held(model, self.prompt))
        check(out, 0, self.want(model), "only the last id")

    def test_b_the_full_ids(self, model: Any) -> None:
        for mask in (None, torch.ones(1, 10, dtype=torch.long)):
            out = ask(model, self.whole, attention_mask=mask, cache=held(model, self.prompt))
            check(out, 0, self.want(model), "all ids")

    def test_many_new_ids_and_a_full_mask(self, model: Any) -> None:
        """More new tokens than the cache holds: the width of the mask says that they are new."""
        out = ask(model, self.whole[:, 3:], attention_mask=torch.ones(1, 10), cache=held(model, self.prompt[:, :3]))
        check(out, 0, self.want(model), "seven new ids")

    def test_c_a_cropped_cache(self, model: Any) -> None:
        cache = held(model, self.prompt)
        cache.crop(6)
        check(ask(model, self.whole, cache=cache), 0, self.want(model), "cropped")

    def test_d_a_mask_of_the_wrong_length(self, model: Any) -> None:
        mask = torch.ones(1, 7, dtype=torch.long)
        with pytest.raises(
            InputError, match="attention_mask covers 7 tokens, but the cache holds 9 tokens and inputs are 1"
        ):
            ask(model, self.last, attention_mask=mask, cache=held(model, self.prompt))

    def test_e_the_same_cache_twice(self, model: Any) -> None:
        """A cache follows the run: used again for the same prompt it is refused, since it holds more by then."""
        cache = held(model, self.prompt)
        out = ask(model, self.whole, cache=cache)
        assert cache.get_seq_length() == out.sequences.shape[1] - 1
        with pytest.raises(InputError, match="the cache holds 17 tokens"):
            ask(model, self.whole, attention_mask=torch.ones(1, 10), cache=cache)
        # Cropped to what the prompts share, it works again.
        cache.crop(9)
        check(ask(model, self.whole, cache=cache), 0, self.want(model), "cropped and used again")
