"""Transcribes wav files with a Whisper model, up to 30 seconds each.

Example: python examples/transcribe.py whisper-tiny.en/ one.wav two.wav --num-beams 5 --timestamps

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
STEP = 0.02
"""Seconds between one time token and the next."""


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


def pieces(lm: decodekit.LM, tokens: list[int]) -> list[dict[str, Any]]:
    """Texts between times, with the seconds at which they begin and end; the last may have no end."""
    mark, found = lm.model.generation_config.no_timestamps_token_id, []
    words: list[int] = []
    begin = 0.0
    for token in [*tokens, None]:
        if token is not None and token <= mark:
            words.append(token)
            continue
        time = None if token is None else round(STEP * (token - mark - 1), 2)
        if text := lm.tokenizer.decode(words).strip():
            found.append({"begin": begin, "end": time, "text": text})
        begin, words = time or 0.0, []
    return found


def transcribe(lm: decodekit.LM, features: Any, **keys: Any) -> dict[str, Any]:
    """The text, its pieces where times are asked for, and the language of models that know several."""
    out: Any = decodekit.generate(lm, input_features=features, return_dict_in_generate=True, **keys)
    row = out.sequences[0].tolist()
    begun, tokens = row[: out.prompt_width], row[out.prompt_width :][: out.lengths[0]]
    names = {number: name for name, number in getattr(lm.model.generation_config, "lang_to_id", {}).items()}
    made: dict[str, Any] = {}
    if language := next((names[token] for token in begun if token in names), None):
        made["language"] = language.strip("<|>")
    timed = pieces(lm, tokens) if keys.get("return_timestamps") else None
    if timed is not None:
        made["pieces"] = timed
    text = lm.tokenizer.decode(tokens).strip() if timed is None else " ".join(piece["text"] for piece in timed)
    return {**made, "text": text}


def show(made: dict[str, Any]) -> str:
    """Lines for people."""
    if "pieces" not in made:
        return str(made["text"])
    ends = ["" if piece["end"] is None else f"{piece['end']:.2f}" for piece in made["pieces"]]
    return "\n".join(
        f"[{piece['begin']:5.2f} - {end:>5}] {piece['text']}" for piece, end in zip(made["pieces"], ends, strict=True)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder or Hub id")
    parser.add_argument("files", nargs="+", type=Path, metavar="file.wav")
    parser.add_argument("--num-beams", type=int, default=1)
    parser.add_argument("--language", help="code or name, for models of several; found by the model unless given")
    parser.add_argument("--task", choices=["transcribe", "translate"], help="translate: into English")
    parser.add_argument("--timestamps", action="store_true", help="say when each piece of the text begins and ends")
    parser.add_argument(
        "--no-speech-threshold", type=float, help="leave out files that are silent with more probability"
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON for each file")
    args = parser.parse_args()
    from transformers import WhisperFeatureExtractor

    asked = {"num_beams": args.num_beams, "language": args.language, "task": args.task}
    asked |= {"return_timestamps": args.timestamps or None, "no_speech_threshold": args.no_speech_threshold}
    keys = {name: value for name, value in asked.items() if value is not None}
    failed = 0
    try:
        lm = decodekit.load(args.model, adapter="transformers")
    except decodekit.DecodekitError as error:
        print(f"transcribe: {error}", file=sys.stderr)
        return 1
    extractor = WhisperFeatureExtractor(feature_size=lm.model.config.num_mel_bins)
    for file in track(args.files, "transcribing", console=Console(stderr=True), disable=len(args.files) == 1):
        try:
            features = extractor(samples(file), sampling_rate=RATE, return_tensors="pt").input_features
        except (OSError, EOFError, ValueError, wave.Error) as error:
            print(f"transcribe: {file}: {str(error) or 'this is no wav file'}", file=sys.stderr)
            failed = 1
            continue
        try:
            made = transcribe(lm, features, **keys)
        except decodekit.DecodekitError as error:  # of the keys, which are the same for all files
            print(f"transcribe: {error}", file=sys.stderr)
            return 1
        print(json.dumps({"file": str(file), **made}) if args.json else show(made), flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
