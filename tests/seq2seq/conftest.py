"""Tiny random models with an encoder, the same weights for the same name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

BART = {
    "vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64,
    "init_std": 0.5, "forced_eos_token_id": None,
}  # fmt: skip
SPEECH = {
    "vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_target_positions": 40,
    "init_std": 0.5, "decoder_start_token_id": 2, "eos_token_id": 3, "pad_token_id": 1,
}  # fmt: skip
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}


def _t5(decoder_layers: int = 3) -> Any:
    config = transformers.T5Config(
        vocab_size=60, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_decoder_layers=decoder_layers, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, initializer_factor=4.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _bart() -> Any:
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**BART))


def _marian() -> Any:
    special = {"pad_token_id": 59, "decoder_start_token_id": 59, "eos_token_id": 0}
    return transformers.MarianMTModel(transformers.MarianConfig(**{**BART, **special}))


def _whisper() -> Any:
    more = {"num_mel_bins": 8, "max_source_positions": 20, "suppress_tokens": None, "begin_suppress_tokens": None}
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**{**SPEECH, **more}))
    model.generation_config.suppress_tokens = model.generation_config.begin_suppress_tokens = None
    return model


def _speech2text() -> Any:
    more = {"input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 60}
    return transformers.Speech2TextForConditionalGeneration(transformers.Speech2TextConfig(**{**SPEECH, **more}))


def _speech() -> Any:
    encoder = transformers.Wav2Vec2Config(
        vocab_size=32, **SMALL, conv_dim=(16, 16), conv_stride=(5, 2), conv_kernel=(10, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
    )  # fmt: skip
    # transformers makes a cache of as many layers as BART's encoder would have.
    decoder = transformers.BartConfig(**{**BART, "decoder_layers": 2, "is_decoder": True, "add_cross_attention": True})
    decoder.is_encoder_decoder = False
    config = transformers.SpeechEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return _special(transformers.SpeechEncoderDecoderModel(config=config))


def _vision() -> Any:
    encoder = transformers.ViTConfig(**SMALL, image_size=8, patch_size=4)
    decoder = transformers.GPT2Config(
        vocab_size=60, n_embd=32, n_layer=2, n_head=4, n_positions=64, add_cross_attention=True, is_decoder=True,
        initializer_range=0.6, bos_token_id=2, eos_token_id=3,
    )  # fmt: skip
    config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    return _special(transformers.VisionEncoderDecoderModel(config=config))


def _llava() -> Any:
    text = transformers.LlamaConfig(
        vocab_size=60, **SMALL, initializer_range=0.5, bos_token_id=2, eos_token_id=3, pad_token_id=1
    )
    vision = transformers.CLIPVisionConfig(**SMALL, image_size=8, patch_size=4, projection_dim=32)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=50, vision_feature_layer=-1, image_seq_length=4
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = 3, 1
    return model


def _special(model: Any) -> Any:
    kept = model.generation_config
    kept.decoder_start_token_id, kept.pad_token_id, kept.eos_token_id = 2, 1, 3
    return model


MAKERS: dict[str, Callable[[], Any]] = {
    "t5": _t5,
    "t5-uneven": lambda: _t5(decoder_layers=2),
    "bart": _bart,
    "marian": _marian,
    "whisper": _whisper,
    "speech2text": _speech2text,
    "speech": _speech,
    "vision": _vision,
    "llava": _llava,
}


@functools.cache
def _build(name: str) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return MAKERS[name]().eval()


@pytest.fixture(scope="session")
def small() -> Callable[[str], Any]:
    """``small("t5")``: the model of that name, shared between tests."""
    return _build
