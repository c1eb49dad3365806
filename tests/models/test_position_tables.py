"""Models that look positions up in a table have room for so many tokens; what that means is known before the run."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from decodekit import ConfigError, InputError, generate, plan

transformers = pytest.importorskip("transformers")

ROOM = 16
SMALL = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 39, "pad_token_id": 0}
BART = {
    "vocab_size": 40, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": ROOM,
    "forced_eos_token_id": None,
}  # fmt: skip


@functools.cache
def built(name: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if name == "gpt2":
            config = transformers.GPT2Config(**SMALL, n_embd=32, n_layer=1, n_head=2, n_positions=ROOM)
            made = transformers.GPT2LMHeadModel(config)
        elif name == "opt":
            config = transformers.OPTConfig(
                **SMALL, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, ffn_dim=32, word_embed_proj_dim=32,
                max_position_embeddings=ROOM,
            )  # fmt: skip
            made = transformers.OPTForCausalLM(config)
        elif name == "bart":
            made = transformers.BartForConditionalGeneration(transformers.BartConfig(**BART))
        else:
            special = {"pad_token_id": 39, "decoder_start_token_id": 39, "eos_token_id": 0}
            made = transformers.MarianMTModel(transformers.MarianConfig(**BART, **special))
    return made.eval()


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_text_ends_with_the_table(name: str) -> None:
    model, prompt = built(name), [[5, 6, 7, 8]]
    keys: dict[str, Any] = {"eos_token_id": None, "num_beams": 2}
    most = generate(model, prompt, max_new_tokens=ROOM - 3, **keys)
    assert most.shape == (1, ROOM + 1), "the last token is not read"
    assert torch.equal(most, generate(model, prompt, max_length=ROOM + 1, **keys))
    assert torch.equal(most, generate(model, prompt, max_length=ROOM + 1, use_cache=False, **keys))
    for more in ({"max_new_tokens": ROOM - 2}, {"max_length": ROOM + 2}):
        with pytest.raises(ConfigError, match="has room for"):
            plan(model, prompt, **more)
    with pytest.raises(ConfigError, match="has room for 12; lower it"):
        plan(model, prompt, max_new_tokens=13, penalty_alpha=0.5, top_k=3)
    assert generate(model, prompt, max_new_tokens=12, penalty_alpha=0.5, top_k=3, eos_token_id=None).shape == (1, ROOM)
    assert generate(model, [[5] * ROOM], max_new_tokens=1).shape == (1, ROOM + 1)
    with pytest.raises(InputError, match="the prompt has 17 tokens, but .* has room for 16"):
        plan(model, [[5] * (ROOM + 1)], max_new_tokens=1)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
@pytest.mark.parametrize("limit", [{}, {"max_length": 500}, {"max_new_tokens": 500}])
def test_limits_that_nobody_asked_for_are_lowered(
    name: str, limit: dict[str, int], monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Each row goes as far as it would alone, although the shorter one goes on when the other has ended."""
    model, rows = built(name), [[5, 6, 7], [6] * 12]
    for key, value in limit.items():
        monkeypatch.setattr(model.generation_config, key, value)
    together = generate(model, rows, eos_token_id=None)
    for row, own in enumerate(rows):
        alone = generate(model, [own], eos_token_id=None)[0].tolist()
        assert len(alone) == ROOM + 1
        assert together[row, 12 - len(own) :].tolist()[: len(alone)] == alone
    assert not [each for each in recwarn if "expect worse text" in str(each.message)]


@pytest.mark.parametrize("name", ["bart", "marian"])
def test_encoders_and_decoders_have_tables_of_their_own(name: str) -> None:
    model = built(name)
    assert generate(model, [[5] * ROOM], max_new_tokens=ROOM, eos_token_id=None).shape == (1, ROOM + 1)
    with pytest.raises(ConfigError, match="has room for 16; lower it"):
        plan(model, [[5, 6]], max_new_tokens=ROOM + 1)
    with pytest.raises(InputError, match="the encoder's input has 17 tokens, but the encoder of .* has room for 16"):
        plan(model, [[5] * (ROOM + 1)], max_new_tokens=2)
    with pytest.raises(InputError, match="the encoder's input has 17 tokens"):
        plan(model, inputs_embeds=torch.randn(1, ROOM + 1, 32), max_new_tokens=2)
    with pytest.raises(InputError, match="tokens, but the decoder of .* has room for 16"):
        plan(model, [[5, 6]], decoder_input_ids=[[7] * (ROOM + 1)], max_new_tokens=2)


def test_rotary_positions_have_no_end() -> None:
    config = transformers.LlamaConfig(
        **SMALL, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=ROOM,
    )  # fmt: skip
    with pytest.warns(UserWarning, match="expect worse text"):
        out = generate(transformers.LlamaForCausalLM(config).eval(), [[5, 6]], max_new_tokens=20, eos_token_id=None)
    assert out.shape == (1, 22)
