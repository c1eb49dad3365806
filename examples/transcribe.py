"""Transcribes wav files with a Whisper model, up to 30 seconds each.

Example: python examples/transcribe.py whisper-tiny.en/ one.wav two.wav --num-beams 5 --json

The model is a folder or Hub id that transformers opens; `whisper_from_ctranslate2.py` makes such a folder out of the
CTranslate2 form. Files are mono or stereo, 16 bits a sample, at 16 kHz. Needs numpy and the extra `transformers`.
"""

from __future__ import annotations

import argparse
import json
import sys
import wave
from pathlib import Path
from typing import Any

import decodekit
import numpy as np
from rich.console import Console
from rich.progress import track

RATE = 16000
LONGEST = 30


def samples(file: Path) -> Any:
    """The sound of a file: float32 in [-1, 1]. Raises ValueError for what the model cannot hear."""
    with wave.open(str(file)) as sound:
        rate, width, channels = sound.getframerate(), sound.getsampwidth(), sound.getnchannels()
        data = sound.readframes(sound.getnframes())
    if (rate, width) != (RATE, 2):
        raise ValueError(f"{file} has {rate} samples a second of {8 * width} bits; convert it to 16000 of 16 bits")
    found = np.frombuffer(data, dtype=np.int16).reshape(-1, channels).mean(1).astype(np.float32) / 32768
    if len(found) > LONGEST * RATE:
        raise ValueError(f"{file} is {len(found) / RATE:.0f} s long; cut it into pieces of at most {LONGEST} s")
    return found


def beginning(lm: decodekit.LM, language: str, task: str) -> list[int]:
    """How the model's text begins: start, language and task where it knows several, and no timestamps."""
    said = lm.model.generation_config
    begin = [said.decoder_start_token_id]
    if languages := getattr(said, "lang_to_id", None):
        if f"<|{language}|>" not in languages:
            raise ValueError(f"--language {language}: this model has {', '.join(sorted(languages))}")
        begin += [languages[f"<|{language}|>"], said.task_to_id[task]]
    return [*begin, said.no_timestamps_token_id]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or Hub id")
    parser.add_argument("files", nargs="+", type=Path, metavar="file.wav")
    parser.add_argument("--num-beams", type=int, default=1)
    parser.add_argument("--language", default="en", help="code of the language, for models of several (default: en)")
    parser.add_argument("--task", choices=["transcribe", "translate"], default="transcribe")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each file")
    args = parser.parse_args()
    from transformers import WhisperFeatureExtractor

    failed = 0
    try:
        lm = decodekit.load(args.model, adapter="transformers")
        begin = beginning(lm, args.language, args.task)
        extractor = WhisperFeatureExtractor(feature_size=lm.model.config.num_mel_bins)
    except (decodekit.DecodekitError, ValueError) as error:
        print(f"transcribe: {error}", file=sys.stderr)
        return 1
    for file in track(args.files, "transcribing", console=Console(stderr=True), disable=len(args.files) == 1):
        try:
            features = extractor(samples(file), sampling_rate=RATE, return_tensors="pt").input_features
        except (OSError, EOFError, ValueError, wave.Error) as error:
            print(f"transcribe: {file}: {str(error) or 'this is no wav file'}", file=sys.stderr)
            failed = 1
            continue
        out: Any = decodekit.generate(
            lm, input_features=features, decoder_input_ids=[begin], num_beams=args.num_beams,
            return_dict_in_generate=True,
        )  # fmt: skip
        text = lm.tokenizer.decode(out.sequences[0, out.prompt_width :][: out.lengths[0]].tolist()).strip()
        print(json.dumps({"file": str(file), "text": text}) if args.json else text, flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
