"""The native decoder against transformers on tiny random models, and against itself: cached, padded, cut short."""

import itertools
from typing import Any

import pytest
import torch
from decodekit_plugins.models.native.module import NativeConfig, NativeLM
from torch import Tensor

transformers = pytest.importorskip("transformers")

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-bias": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
}


def pair(family: str) -> tuple[Any, NativeLM]:
    """A random transformers model and ours with the same weights, both float32 and in eval mode."""
    name, extra = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **extra})
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for key, value in theirs.named_parameters():  # biases and norms start at 0 and 1: make them matter
        if value.dim() == 1:
            torch.nn.init.normal_(value, float("norm" in key), 0.2)
    ours = NativeLM(NativeConfig.from_hf(config.to_dict())).eval()
    state = {k: v for k, v in theirs.state_dict().items() if k != "lm_head.weight" or not config.tie_word_embeddings}
    assert ours.load_state_dict(state, strict=True).missing_keys == []
    assert list(ours.state_dict()) == list(theirs.state_dict())
    return theirs, ours


def places(tokens: Tensor, start: int = 0) -> Tensor:
    return torch.arange(start, start + tokens.shape[1]).expand_as(tokens)


def near(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_same_logits_as_transformers(family: str) -> None:
    theirs, ours = pair(family)
    tokens = torch.randint(97, (2, 40))
    expected = theirs(tokens, output_hidden_states=True)
    out = ours(tokens, places(tokens), hidden=(0, 1, 2))
    near(out.logits, expected.logits)
    for tap, value in out.hidden.items():
        near(value, expected.hidden_states[tap])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_cached_in_chunks_is_uncached(family: str, cache: str) -> None:
    theirs, ours = pair(family)
    tokens = torch.randint(97, (2, 20))
    store = (
        transformers.DynamicCache(config=theirs.config)
        if cache == "dynamic"
        else transformers.StaticCache(config=theirs.config, max_cache_len=24)
    )
    whole = ours(tokens, places(tokens)).logits
    cuts = [0, 7, 8, 9, 12, 19, 20]
    for a, b in itertools.pairwise(cuts):
        part = tokens[:, a:b]
        near(ours(part, places(part, a), store, last=2).logits, whole[:, max(a, b - 2) : b])


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen3"])
@torch.inference_mode()
def test_left_padded_row_is_the_row_alone(family: str, cached: bool) -> None:
    _, ours = pair(family)
    lengths, width = [12, 5, 1], 12
    tokens = torch.randint(97, (3, width + 3))
    mask = torch.arange(width + 3) >= width - torch.tensor(lengths)[:, None]
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    if cached:
        store = transformers.DynamicCache()
        parts = [ours(tokens[:, :width], positions[:, :width], store, mask[:, :width]).logits]
        for i in range(width, width + 3):
            parts.append(ours(tokens[:, i : i + 1], positions[:, i : i + 1], store, mask[:, : i + 1]).logits)
        logits = torch.cat(parts, 1)
    else:
        logits = ours(tokens, positions, mask=mask).logits
    assert logits.isfinite().all()
    for row, length in enumerate(lengths):
        alone = tokens[row : row + 1, width - length :]
        near(logits[row : row + 1, width - length :], ours(alone, places(alone)).logits)


@torch.inference_mode()
def test_early_exit_is_a_shorter_model() -> None:
    _, ours = pair("llama")
    tokens = torch.randint(97, (2, 9))
    short = NativeLM(NativeConfig.from_hf({**SMALL, "model_type": "llama", "num_hidden_layers": 2})).eval()
    short.load_state_dict({k: v for k, v in ours.state_dict().items() if ".layers.2." not in k}, strict=True)
    near(ours(tokens, places(tokens), layers=2).logits, short(tokens, places(tokens)).logits)
    assert ours(tokens, places(tokens), last=20).logits.shape == (2, 9, 97)
    with pytest.raises(ValueError, match=r"outside 0\.\.2"):
        ours(tokens, places(tokens), layers=2, hidden=(3,))


def test_positions_beyond_the_table_and_training_after_inference() -> None:
    _, ours = pair("llama")
    tokens = torch.randint(97, (1, 3))
    with torch.inference_mode():
        near(ours(tokens, places(tokens, 5000)).logits, ours(tokens, places(tokens, 0)).logits)  # rotation is relative
    ours(tokens, places(tokens)).logits.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gemma2"}, "one of llama, mistral, qwen2, qwen3.*transformers adapter"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn'"),
        ({"hidden_act": "gelu"}, "'gelu'"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NativeConfig.from_hf({**SMALL, "model_type": "llama", **change})


def test_old_and_new_rope_spellings_agree() -> None:
    base = {**SMALL, "model_type": "llama"}
    old = NativeConfig.from_hf({**base, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = NativeConfig.from_hf({**base, "rope_parameters": {"rope_theta": 5e5, "type": "linear", "factor": 2.0}})
    assert old == new
