"""Prompts of different length in one batch: a row is what it is alone, or the batch is refused with the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decodekit import ConfigError, PipelineError, generate
from decodekit.models import adapter_for

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {"vocab_size": 100, "num_hidden_layers": 2, "pad_token_id": 0, "eos_token_id": 2}
IDS = torch.tensor([[0, 0, 0, 0, 0, 49], [15, 29, 87, 33, 77, 97]])
MASK = (IDS != 0).long()


def made(name: str, **more: Any) -> Any:
    """A model of a family, with weights so large that every change of what it reads changes what it says."""
    torch.manual_seed(0)
    family = name.removesuffix("ForCausalLM")
    config = next(
        getattr(transformers, kind)
        for kind in (f"{family}TextConfig", f"{family}Config")
        if hasattr(transformers, kind)
    )
    model = getattr(transformers, name)(config(**{**SMALL, **more})).eval()
    source = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.normal_(0, 0.2, generator=source)
    return model


def alone_and_together(model: Any, **keys: Any) -> tuple[list[list[int]], list[list[int]]]:
    keys = {"max_new_tokens": 10, "repetition_penalty": 1.5, "eos_token_id": -1, **keys}
    alone = [generate(model, IDS[:1, 5:], **keys)[0, 1:].tolist(), generate(model, IDS[1:], **keys)[0, 6:].tolist()]
    return alone, generate(model, IDS, attention_mask=MASK, **keys)[:, 6:].tolist()


STATES: dict[str, dict[str, Any]] = {
    "MambaForCausalLM": {"hidden_size": 32, "state_size": 4},
    "FalconMambaForCausalLM": {"hidden_size": 32, "state_size": 4},
    "Mamba2ForCausalLM": {"hidden_size": 32, "state_size": 8, "num_heads": 4, "head_dim": 16, "n_groups": 1},
}


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", STATES)
def test_a_state_is_not_scaled_by_the_mask_of_old_tokens(name: str, use_cache: bool) -> None:
    alone, together = alone_and_together(made(name, **STATES[name]), use_cache=use_cache)
    assert together == alone


def test_a_configuration_in_which_layers_differ() -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 6}
    model = made(
        "Gemma4ForCausalLM",
        **shape,
        intermediate_size=48,
        global_head_dim=16,
        vocab_size_per_layer_input=100,
        hidden_size_per_layer_input=8,
    )
    alone, together = alone_and_together(model)
    assert together == alone
    assert adapter_for(model).spec.head_dim is None
    assert adapter_for(model).spec.num_heads == 4


def test_any_error_of_a_configuration_is_nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> Any:
        raise RuntimeError("each layer has its own")

    model = made("LlamaForCausalLM", hidden_size=32, intermediate_size=48, num_attention_heads=4)
    want = generate(model, IDS[1:], max_new_tokens=4)
    for name in ("head_dim", "num_key_value_heads", "sliding_window", "max_position_embeddings", "layer_types"):
        monkeypatch.setattr(type(model.config), name, property(refuse), raising=False)
        from decodekit_plugins.models.transformers import adapter

        adapter._models.clear()
        assert torch.equal(generate(model, IDS[1:], max_new_tokens=4, use_cache=False), want)
        monkeypatch.undo()


DECODER: dict[str, Any] = {
    "d_model": 32,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
}
COUNTS: dict[str, dict[str, Any]] = {
    "BartForCausalLM": DECODER,
    "PegasusForCausalLM": DECODER,
    "RwkvForCausalLM": {"hidden_size": 32, "attention_hidden_size": 32, "context_length": 64},
}


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("name", COUNTS)
def test_what_counts_padding_is_refused_a_padded_batch(name: str, use_cache: bool) -> None:
    model = made(name, **COUNTS[name])
    with pytest.raises(PipelineError, match=f"{name} counts padding .* pass prompts of one length, or one by one"):
        alone_and_together(model, use_cache=use_cache)
    same = generate(model, IDS[1:].repeat(2, 1), attention_mask=torch.ones(2, 6), use_cache=use_cache, max_new_tokens=3)
    assert torch.equal(same[0], same[1])


ASKS_THE_MASK: dict[str, dict[str, Any]] = {
    "BloomForCausalLM": {"hidden_size": 32, "n_head": 4, "n_layer": 2},
    "OPTForCausalLM": {**SMALL, "hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4, "word_embed_proj_dim": 32},
    "XGLMForCausalLM": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
}


@pytest.mark.parametrize("name", ASKS_THE_MASK)
def test_what_places_tokens_by_the_mask_is_not_refused(name: str) -> None:
    alone, together = alone_and_together(made(name, **ASKS_THE_MASK[name]))
    assert together == alone


def test_the_law_holds_whoever_brings_the_padding() -> None:
    model = made("BartForCausalLM", **DECODER)
    embeds = torch.randn(2, 6, 32)
    with pytest.raises(PipelineError, match="counts padding"):
        generate(model, inputs_embeds=embeds, attention_mask=MASK, max_new_tokens=2)
    with pytest.raises(PipelineError, match="counts padding"):
        generate(model, [[5], [6, 7]], max_new_tokens=2)


# -- families that decode in ways of their own -------------------------------------------------------


def test_cpm_ant_runs_without_a_cache() -> None:
    shape = {"hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48}
    model = made("CpmAntForCausalLM", **shape, prompt_types=4, prompt_length=4, segment_types=4)
    want = model.generate(IDS[1:], max_new_tokens=6, use_cache=False, eos_token_id=None)
    assert torch.equal(generate(model, IDS[1:], max_new_tokens=6, eos_token_id=-1), want)
    alone, together = alone_and_together(model)
    assert together == alone
    with pytest.raises(PipelineError, match="CpmAntForCausalLM counts padding"):  # it knows token 0 as padding
        generate(model, [[5], [6, 7]], max_new_tokens=2, pad_token_id=3)
    with pytest.raises(ConfigError, match="cache_implementation: is 'dynamic', but the model takes no cache"):
        generate(model, IDS[1:], max_new_tokens=6, cache_implementation="dynamic")


def test_xlstm_makes_its_own_cache() -> None:
    model = made("xLSTMForCausalLM", hidden_size=128, num_heads=2)
    want = generate(model, IDS[1:], max_new_tokens=6, use_cache=False, repetition_penalty=1.5)
    assert torch.equal(generate(model, IDS[1:], max_new_tokens=6, repetition_penalty=1.5), want)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("XLMWithLMHeadModel", {"emb_dim": 32, "n_layers": 2, "n_heads": 4}),
        ("XLNetLMHeadModel", {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    ],
)
def test_models_of_masked_places_are_refused(name: str, shape: dict[str, Any]) -> None:
    config = getattr(transformers, name.replace("WithLMHeadModel", "Config").replace("LMHeadModel", "Config"))
    model = getattr(transformers, name)(config(vocab_size=100, **shape)).eval()
    with pytest.raises(PipelineError, match=f"{name} says what stands at a masked place, .* wrap it in"):
        generate(model, IDS[1:], max_new_tokens=2)
