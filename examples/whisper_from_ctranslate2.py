"""Turns a Whisper model in CTranslate2's format into a folder of safetensors that decodekit opens.

Example: python examples/whisper_from_ctranslate2.py faster-whisper-tiny.en/ whisper-tiny.en/

The source folder holds model.bin (version 6, float32 or float16), config.json and tokenizer.json. The new folder has
model.safetensors, config.json, generation_config.json, preprocessor_config.json and tokenizer.json. Weights keep their
precision.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

DTYPES = {0: torch.float32, 1: torch.int8, 2: torch.int16, 3: torch.int32, 4: torch.float16, 5: torch.bfloat16}
NORMS = {"gamma": "weight", "beta": "bias"}


class Reader:
    """Reads little-endian numbers, strings and arrays one after another."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def number(self, kind: str) -> int:
        (value,) = struct.unpack_from(f"<{kind}", self.data, self.place)
        self.place += struct.calcsize(kind)
        return int(value)

    def take(self, size: int) -> bytes:
        self.place += size
        return self.data[self.place - size : self.place]

    def text(self) -> str:
        return self.take(self.number("H"))[:-1].decode()  # the length counts a final NUL

    def array(self) -> torch.Tensor:
        shape = [self.number("I") for _ in range(self.number("B"))]
        dtype = DTYPES[self.number("B")]
        raw = bytearray(self.take(self.number("I")))
        return torch.frombuffer(raw, dtype=dtype).reshape(shape)


def read(file: Path) -> dict[str, torch.Tensor]:
    """All arrays of a model.bin by name. Raises ValueError for another format or model."""
    reader = Reader(file.read_bytes())
    if (version := reader.number("I")) != 6:
        raise ValueError(f"{file} is of version {version} of the format; this reads version 6")
    if (spec := reader.text()) != "WhisperSpec":
        raise ValueError(f"{file} holds a {spec}, not a Whisper model")
    reader.number("I")  # revision
    found = {reader.text(): reader.array() for _ in range(reader.number("I"))}
    if quantized := [name for name in found if name.endswith("weight_scale")]:
        raise ValueError(f"{file} is quantized ({len(quantized)} matrices): take one of float32 or float16")
    return found


def weights(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same arrays by the names of transformers."""
    made: dict[str, torch.Tensor] = {}
    for name, value in found.items():
        if not value.dim():  # settings
            continue
        parts = name.split("/")
        home, kind = f"model.{parts[0]}", NORMS.get(parts[-1], parts[-1])
        if parts[1] == "embeddings":
            made[f"{home}.embed_tokens.weight"] = value
        elif parts[1] == "position_encodings":
            made[f"{home}.embed_positions.weight"] = value
        elif (layer := re.fullmatch(r"layer_(\d+)", parts[1])) is None:
            made[f"{home}.{parts[1]}.{kind}"] = value  # conv1, conv2, layer_norm
        else:
            for inner, piece in _of_layer(parts[2:-1], kind, value):
                made[f"{home}.layers.{layer[1]}.{inner}.{kind}"] = piece
    return {name: value.contiguous() for name, value in made.items()}  # the head is the embedding


def _of_layer(parts: list[str], kind: str, value: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Names and pieces of one array of a layer. A key has no bias."""
    block, part = parts
    if block == "ffn":
        return [({"linear_0": "fc1", "linear_1": "fc2", "layer_norm": "final_layer_norm"}[part], value)]
    attention = {"self_attention": "self_attn", "attention": "encoder_attn"}[block]
    if part == "layer_norm":
        return [(f"{attention}_layer_norm", value)]
    fused = {
        ("self_attention", "linear_0"): "qkv", ("self_attention", "linear_1"): "o",
        ("attention", "linear_0"): "q", ("attention", "linear_1"): "kv", ("attention", "linear_2"): "o",
    }[block, part]  # fmt: skip
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "o": "out_proj"}
    pieces = zip(fused, value.chunk(len(fused)), strict=True)
    return [(f"{attention}.{names[one]}", piece) for one, piece in pieces if (one, kind) != ("k", "bias")]


def settings(found: dict[str, torch.Tensor], given: dict[str, Any], tokens: dict[str, int]) -> dict[str, Any]:
    """config.json, generation_config.json and preprocessor_config.json, by file name."""
    vocab, width = found["decoder/embeddings/weight"].shape
    bins, frames = found["encoder/conv1/weight"].shape[1], found["encoder/position_encodings/encodings"].shape[0]
    most = found["decoder/position_encodings/encodings"].shape[0]
    counts, sizes = {}, {}
    for side in ("encoder", "decoder"):
        counts[side] = len(
            {name.split("/")[1] for name in found if name.startswith(f"{side}/layer_") and "/ffn/" in name}
        )
        sizes[side] = found[f"{side}/layer_0/ffn/linear_0/weight"].shape[0]
    end, start, mark = (tokens[name] for name in ("<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"))
    special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end, "decoder_start_token_id": start}
    config: dict[str, Any] = {
        "model_type": "whisper", "architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True,
        "vocab_size": vocab, "d_model": width, "num_mel_bins": bins, "max_source_positions": frames,
        "max_target_positions": most, "activation_function": "gelu", "scale_embedding": False,
        "dtype": str(found["encoder/conv1/weight"].dtype).removeprefix("torch."), **special,
    }  # fmt: skip
    for side in counts:
        config[f"{side}_layers"], config[f"{side}_ffn_dim"] = counts[side], sizes[side]
        config[f"{side}_attention_heads"] = int(found[f"{side}/num_heads"])
    generation: dict[str, Any] = {
        **special, "max_length": most, "no_timestamps_token_id": mark, "max_initial_timestamp_index": 50,
        "prev_sot_token_id": tokens["<|startofprev|>"], "return_timestamps": False,
        "suppress_tokens": given.get("suppress_ids", []), "begin_suppress_tokens": given.get("suppress_ids_begin", []),
        "is_multilingual": vocab >= 51865,  # the English models' vocabulary is one token smaller
    }  # fmt: skip
    if generation["is_multilingual"]:
        known = set(given.get("lang_ids", []))
        generation["lang_to_id"] = {name: number for name, number in tokens.items() if number in known}
        generation["task_to_id"] = {task: tokens[f"<|{task}|>"] for task in ("transcribe", "translate")}
    features = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": bins,
        "processor_class": "WhisperProcessor",
    }
    return {"config.json": config, "generation_config.json": generation, "preprocessor_config.json": features}


def convert(source: Path, target: Path) -> None:
    """Write the new folder. Raises ValueError or OSError for a source that is no such model."""
    found = read(source / "model.bin")
    words = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {token["content"]: token["id"] for token in words["added_tokens"]}
    given = json.loads((source / "config.json").read_text(encoding="utf-8"))
    target.mkdir(parents=True, exist_ok=True)
    for name, content in settings(found, given, tokens).items():
        (target / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    shutil.copyfile(source / "tokenizer.json", target / "tokenizer.json")
    save_file(weights(found), target / "model.safetensors", metadata={"format": "pt"})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="folder with model.bin, config.json and tokenizer.json")
    parser.add_argument("target", type=Path, help="folder to write; it is made where there is none")
    args = parser.parse_args()
    try:
        convert(args.source, args.target)
    except (OSError, ValueError, KeyError) as error:
        print(f"{args.source} cannot be converted: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
