"""Every installed models plugin keeps the laws, on small models of the kinds it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decodekit.models import adapter_for
from decodekit.registry import registry
from decodekit.testing import AdapterContract, TinyLM, results

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}


def theirs(name: str, attention: str = "eager", **extra: Any) -> Callable[[], Any]:
    def build() -> Any:
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**(GPT2 if name == "GPT2" else SHAPE), **extra})
        cls = getattr(transformers, f"{name.removesuffix('Text')}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}")
        return cls._from_config(config, attn_implementation=attention).eval()

    return build


def native(**extra: Any) -> Callable[[], Any]:
    def build() -> Any:
        from decodekit_plugins.models.native.module import NativeConfig, NativeLM

        torch.manual_seed(0)
        model = NativeLM(NativeConfig.from_hf({"model_type": "llama", **SHAPE, **extra})).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.2)
        return model

    return build


class OnlyTokens(torch.nn.Module):
    """A recurrent model of a user's own: tokens in, logits out, nothing else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(41, 16)
        self.rnn = torch.nn.GRU(16, 16, batch_first=True)
        self.out = torch.nn.Linear(16, 41)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, str]:
        return self.out(self.rnn(self.embed(x))[0]), "more"


# Small models for each plugin, by name. `None`: the plugin opens one itself.
MODELS: dict[str, dict[str, Callable[[], Any] | None]] = {
    "transformers": {
        "Llama": theirs("Llama", "sdpa"),
        "Llama eager": theirs("Llama"),
        "GPT2": theirs("GPT2", "sdpa"),
        "GPT2 eager": theirs("GPT2"),
        "Qwen3": theirs("Qwen3", "sdpa"),
        "Mistral, window 4": theirs("Mistral", "sdpa", sliding_window=4),
        "Gemma2, window 4": theirs("Gemma2", sliding_window=4),
        "Gemma3, window 4": theirs("Gemma3Text", "sdpa", sliding_window=4),
        "Gemma2, squeezed": theirs("Gemma2", final_logit_softcapping=2.0),
        "Cohere, scaled": theirs("Cohere", logit_scale=0.3),
        "Granite, scaled": theirs("Granite", logits_scaling=3.0),
        "Bloom": theirs("Bloom", n_layer=2, n_head=4),
        "OPT": theirs("OPT", ffn_dim=48, word_embed_proj_dim=32),
    },
    "native": {"Llama": native(), "Llama tied": native(tie_word_embeddings=True)},
    "module": {"tokens only": OnlyTokens, "everything": lambda: TinyLM().eval()},
    "bundled": {"bundled": None},
}

ENCODERS = {"decodekit:whisper"}
"""The suite runs decoders; models with an encoder are run beside transformers' own generate in seq2seq/."""

OWN = [plugin for plugin in registry.plugins("models") if plugin.distribution == "decodekit" and not plugin.disabled]
CASES = [(plugin, name, build) for plugin in OWN for name, build in MODELS.get(plugin.name, {}).items()]


def test_there_are_models_to_test() -> None:
    assert {"transformers", "native", "module", "bundled"} <= {plugin.name for plugin in OWN}
    untested = {plugin.qualified for plugin in OWN} - {plugin.qualified for plugin, _, _ in CASES}
    untested -= ENCODERS
    assert not untested, f"no example model for {', '.join(sorted(untested))}"


class TestEveryAdapter(AdapterContract):
    @pytest.fixture(autouse=True, params=CASES, ids=lambda case: f"{case[0].qualified}: {case[1]}")
    def _choose(self, request: pytest.FixtureRequest) -> None:
        self.plugin, self.name, self.build = request.param

    def make(self) -> Any:
        entry = self.plugin.load()()
        if self.build is None:
            return entry.open(self.plugin.name)
        adapter = entry.adapt(self.build())
        assert adapter is not None, f"{self.plugin.qualified} refuses {self.name}"
        return adapter


PREPARED = {"Llama", "GPT2", "Gemma3, window 4", "Bloom", "OPT", "Llama tied", "everything"}
"""Models whose prepared adapters are run as well: Conv1D, biases, scaled embeddings and tied ones among them."""
PACKED = [{"layout": "blocks"}, {"layout": "columns", "free": True}, {"layout": "blocks", "free": True}]


class TestPreparedAdapter(AdapterContract):
    @pytest.fixture(autouse=True, params=[c for c in CASES if c[1] in PREPARED], ids=lambda case: case[1])
    def _choose(self, request: pytest.FixtureRequest) -> None:
        self.build = request.param[2]

    @pytest.fixture(autouse=True, params=PACKED, ids=str)
    def _how(self, request: pytest.FixtureRequest) -> None:
        self.options = request.param

    def make(self) -> Any:
        # The twin keeps what it needs of a model that nobody else holds.
        made = registry.load("preparers", "packed")(**self.options).prepare(adapter_for(self.build()))
        assert any(row["rows"] == "all" for row in made.prepared())
        return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].qualified}: {case[1]}")
def test_model_objects_find_their_plugin(case: Any) -> None:
    plugin, _, build = case
    if build is None:
        pytest.skip("opened by name")
    assert type(adapter_for(build())) is type(plugin.load()().adapt(build()))


# -- adapters that lie fail exactly the tests of what they get wrong -------------------------------


def lying(wrong: Callable[[Any], Callable[..., Any]]) -> set[str]:
    """The tests that fail when `forward` of a good adapter is replaced by what `wrong` makes of it."""

    class Suite(AdapterContract):
        def make(self) -> Any:
            adapter = adapter_for(TinyLM().eval())
            adapter.forward = wrong(adapter.forward)
            return adapter

    return {name for name, verdict in results(Suite()).items() if verdict not in ("ok", "skipped")}


def test_honest_adapter_passes() -> None:
    assert lying(lambda forward: forward) == set()


PADDED = {"test_padded_equals_alone", "test_padded_and_cached_equals_alone"}


def test_b01_one_position_for_all_rows_is_found() -> None:
    def wrong(forward: Any) -> Any:
        return lambda tokens, places, cache, **more: forward(
            tokens, places[places[:, -1].argmax()].expand_as(places), cache, **more
        )

    assert lying(wrong) == PADDED


def test_a_dropped_mask_is_found() -> None:
    def wrong(forward: Any) -> Any:
        return lambda *args, mask=None, **more: forward(*args, **more)

    assert lying(wrong) == PADDED | {"test_pad_token_does_not_matter"}


def test_dropped_positions_are_found() -> None:
    def wrong(forward: Any) -> Any:
        def call(tokens: Any, places: Any, cache: Any, **more: Any) -> Any:
            past = 0 if cache is None else cache.get_seq_length()
            return forward(tokens, torch.arange(past, past + tokens.shape[1]).expand_as(tokens), cache, **more)

        return call

    assert lying(wrong) == PADDED | {"test_positions_count"}


def test_too_many_logits_are_found() -> None:
    def wrong(forward: Any) -> Any:
        return lambda *args, last=1, **more: forward(*args, last=99, **more)

    assert "test_last_positions" in lying(wrong)


def test_a_changed_model_is_found() -> None:
    def wrong(forward: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            forward.__self__.model.calls = getattr(forward.__self__.model, "calls", 0) + 1
            return forward(*args, **more)

        return call

    assert lying(wrong) == {"test_model_stays_as_it_was"}
