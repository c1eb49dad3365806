"""Train the bundled language model, or distil its draft, on a CPU in about an hour.

    python train.py main  --data build --out build/main  --minutes 55
    python train.py draft --data build --out build/draft --minutes 15 --dropout 0 --teacher build/main/last.pt

The schedule is a matter of time: warm up, hold, and over the last part of --minutes go down to zero, wherever the
clock finds the run. A checkpoint is written every few minutes; the same command picks the newest one up and goes
on. Progress is printed and kept in --out/log.jsonl.

Matrices are trained with Muon, embeddings and norms with AdamW, in bfloat16 autocast. Dropout is added by hooks
here and is no part of the model. The draft learns the main model's distribution (not the text's), on the corpus and
on text which the main model wrote.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import torch
import torch.nn.functional as F
from decodekit_plugins.models.native.module import NativeConfig, NativeLM
from torch import Tensor, nn

SHAPES = {
    "main": {"hidden": 192, "layers": 8, "mlp": 448, "heads": 4, "kv_heads": 2, "head_dim": 48},
    "draft": {"hidden": 128, "layers": 3, "mlp": 256, "heads": 4, "kv_heads": 2, "head_dim": 32},
}
CONTEXT = 1024
LENGTHS = ((0.0, 256), (0.6, 512), (0.88, CONTEXT))
"""From this share of the run on, rows are this long: short rows are cheaper, the last part teaches the context."""


def build(role: str, vocab: int) -> NativeLM:
    """A fresh model: small normal weights, those that write into the residual stream smaller."""
    shape = SHAPES[role]
    config = NativeConfig(
        vocab_size=vocab,
        hidden_size=shape["hidden"],
        intermediate_size=shape["mlp"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    model = NativeLM(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            writes = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(weight, 0.0, 0.02 / math.sqrt(2 * shape["layers"]) if writes else 0.02)
    return model


def add_dropout(model: NativeLM, p: float) -> None:
    """While training, drop channels of the embeddings and of what each sublayer adds to the residual stream.

    One mask serves all places of a row: drawing one per token costs a third of the step on a CPU.
    """

    def hook(module: nn.Module, _: Any, out: Tensor) -> Tensor:
        return out * F.dropout(out.new_ones(out.shape[0], 1, out.shape[2]), p, module.training)

    places = [model.model.embed_tokens, *(m for b in model.model.layers for m in (b.self_attn.o_proj, b.mlp.down_proj))]
    for place in places if p else ():
        place.register_forward_hook(hook)


class Texts:
    """Rows of token ids: passes over an array in random order, cut at a new offset each pass."""

    def __init__(self, ids: np.ndarray, rng: np.random.Generator) -> None:
        self.ids, self.rng, self.rows, self.length = ids.astype(np.int64), rng, iter(()), 0

    def take(self, count: int, length: int) -> Tensor:
        """int64 [count, length + 1]."""
        if length != self.length:
            self.rows, self.length = iter(()), length
        out: list[np.ndarray] = []
        while len(out) < count:
            row = next(self.rows, None)
            if row is None:
                self.rows = self._pass(length)
            else:
                out.append(row)
        return torch.from_numpy(np.stack(out))

    def _pass(self, length: int) -> Iterator[np.ndarray]:
        starts = np.arange(self.rng.integers(length), len(self.ids) - length - 1, length)
        self.rng.shuffle(starts)
        return (self.ids[s : s + length + 1] for s in starts)


@attrs.define
class FixedCache:
    """Keys and values of one batch in buffers of a set length."""

    length: int
    keys: dict[int, Tensor] = attrs.field(factory=dict)
    values: dict[int, Tensor] = attrs.field(factory=dict)
    seen: dict[int, int] = attrs.field(factory=dict)

    def update(self, key: Tensor, value: Tensor, layer_idx: int, /) -> tuple[Tensor, Tensor]:
        start = self.seen.get(layer_idx, 0)
        end = self.seen[layer_idx] = start + key.shape[2]
        for store, new in ((self.keys, key), (self.values, value)):
            if layer_idx not in store:
                store[layer_idx] = new.new_zeros(*new.shape[:2], self.length, new.shape[3])
            store[layer_idx][:, :, start:end] = new
        return self.keys[layer_idx][:, :, :end], self.values[layer_idx][:, :, :end]

    def get_mask_sizes(self, query_length: int, layer_idx: int, /) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0

    def get_seq_length(self, layer_idx: int = 0, /) -> int:
        return self.seen.get(layer_idx, 0)


@torch.inference_mode()
def sample(model: NativeLM, prompts: Tensor, length: int, temperature: float = 0.9) -> Tensor:
    """Continue int64 [B, Q] prompts to [B, length] tokens."""
    cache, out = FixedCache(length), prompts
    new = prompts
    while out.shape[1] < length:
        positions = torch.arange(out.shape[1] - new.shape[1], out.shape[1]).expand_as(new)
        logits = model(new, positions, cache, last=1).logits[:, -1].float()
        new = torch.multinomial((logits / temperature).softmax(-1), 1)
        out = torch.cat([out, new], 1)
    return out


def optimizers(model: NativeLM, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers, AdamW for the rest; each group remembers its peak rate."""
    # Muon sees q, k and v of a layer as one matrix, and gate and up: they are fused.
    inside = [p for p in model.model.layers.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    found: list[torch.optim.Optimizer] = [
        torch.optim.Muon(inside, lr=args.lr, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [
                {"params": [model.model.embed_tokens.weight], "weight_decay": args.weight_decay},
                {"params": norms, "weight_decay": 0.0},
            ],
            lr=args.embed_lr,
            betas=(0.9, 0.95),
        ),
    ]
    for group in (g for o in found for g in o.param_groups):
        group["peak"] = group["lr"]
    return found


def rate(done: float, step: int, hold: float) -> float:
    """Share of the peak rate: up over 100 steps, level, then straight down to zero from `hold` to 1."""
    return min(1.0, (step + 1) / 100, max(0.0, (1 - done) / (1 - hold)))


@torch.inference_mode()
def validate(model: NativeLM, ids: np.ndarray, length: int = 512) -> float:
    """Mean loss in nats per token over held-out rows, in float32."""
    model.eval()
    rows = torch.from_numpy(ids[: (len(ids) - 1) // length * length + 1].astype(np.int64))
    x, y = rows[:-1].view(-1, length), rows[1:].view(-1, length)
    total = 0.0
    for a, b in zip(x.split(8), y.split(8), strict=True):
        logits = model(a, torch.arange(length).expand_as(a)).logits
        total += float(F.cross_entropy(logits.flatten(0, 1).float(), b.flatten(), reduction="sum"))
    model.train()
    return total / y.numel()


def save(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint beside the old one, then swap: a kill at any time leaves a whole file."""
    partial = path.with_suffix(".part")
    torch.save(state, partial)
    os.replace(partial, path)


def load_weights(path: Path, which: str = "average") -> NativeLM:
    """The model of a checkpoint, in eval mode: its running average of weights, or the raw ones (`model`)."""
    state = torch.load(path, map_location="cpu")
    model = build(state["role"], state["vocab"])
    model.load_state_dict(state[which])
    return model.eval()


def objective(model: NativeLM, teacher: NativeLM | None) -> Any:
    """Loss of int64 rows [B, T + 1]: cross-entropy of the text, or to the teacher's distribution."""

    def loss(x: Tensor, y: Tensor, positions: Tensor, soft: Tensor | None) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(x, positions).logits.flatten(0, 1)
        if soft is None:
            return F.cross_entropy(logits.float(), y.flatten())
        return -(soft.float() * F.log_softmax(logits.float(), -1)).sum(-1).mean()

    compiled = torch.compile(loss, dynamic=False)

    def target(x: Tensor, positions: Tensor) -> Tensor:
        assert teacher is not None
        with torch.autocast("cpu", torch.bfloat16):
            return F.softmax(teacher(x, positions).logits.flatten(0, 1).float(), -1).bfloat16()

    soften = torch.compile(target, dynamic=False) if teacher else None

    def run(rows: Tensor) -> Tensor:
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        positions = torch.arange(x.shape[1]).expand_as(x)
        soft = None
        if soften is not None:
            with torch.no_grad():
                soft = soften(x, positions)
        return compiled(x, y, positions, soft)

    return run


def written_by(teacher: NativeLM, source: Texts, rows: int) -> np.ndarray:
    """Tokens of texts the teacher wrote: short prompts from the corpus, continued to 256 tokens."""
    parts = []
    for start in range(0, rows, 128):
        prompts = source.take(min(128, rows - start), 15)[:, :16]
        parts.append(sample(teacher, prompts, 256).numpy().astype(np.uint16))
        print(f"  the main model wrote {start + len(prompts)} of {rows} texts", flush=True)
    return np.concatenate(parts).reshape(-1)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=tuple(SHAPES))
    parser.add_argument("--data", type=Path, required=True, help="what prepare.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder of checkpoints and log")
    parser.add_argument("--minutes", type=float, required=True, help="length of the whole run, pauses included")
    parser.add_argument("--teacher", type=Path, help="checkpoint of the main model (draft only)")
    parser.add_argument(
        "--written", type=int, default=1024, help="texts the teacher writes for the draft to learn from"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="tokens a step")
    parser.add_argument("--lr", type=float, default=5e-3, help="peak rate of Muon")
    parser.add_argument("--embed-lr", type=float, default=5e-3, help="peak rate of AdamW")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.15)
    parser.add_argument("--hold", type=float, default=0.5, help="share of the run before the rate goes down")
    parser.add_argument("--prose", type=float, default=0.15, help="share of prose rows; goes to 0 after --hold")
    parser.add_argument("--averaging", type=float, default=0.998, help="decay of the running average of weights")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if (args.role == "draft") != bool(args.teacher):
        parser.error("--teacher goes with draft, and draft needs it")
    return args


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    counts = json.loads((args.data / "corpus.json").read_text())["austen.val"]
    val = np.load(args.data / "austen.val.npy")
    vocab = len(json.loads((args.data / "tokenizer.json").read_text())["model"]["vocab"])

    model = build(args.role, vocab)
    add_dropout(model, args.dropout)
    average = build(args.role, vocab).eval()
    average.load_state_dict(model.state_dict())
    chosen = optimizers(model, args)
    step = tokens = 0
    spent = 0.0
    newest = args.out / "last.pt"
    if newest.exists():
        state = torch.load(newest, map_location="cpu")
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        for optimizer, saved in zip(chosen, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, tokens, spent = state["step"], state["tokens"], state["spent"]
        print(f"going on from step {step:,} ({spent / 60:.1f} minutes)")
    print(f"{args.role}: {sum(p.numel() for p in model.parameters()):,} parameters")

    began = time.time() - spent
    rng = np.random.default_rng(args.seed + step)
    main_text = Texts(np.load(args.data / "austen.train.npy"), rng)
    side_text = Texts(np.load(args.data / "prose.train.npy"), rng)
    side_share = args.prose
    teacher = load_weights(args.teacher) if args.teacher else None
    if teacher is not None:
        store = args.out / "written.npy"
        if not store.exists():
            np.save(store, written_by(teacher, main_text, args.written))
        side_text, side_share = Texts(np.load(store), rng), 0.5
    model.rotary(torch.arange(CONTEXT)[None], CONTEXT)  # build the table before compiling
    loss_of = objective(model, teacher)
    model.train()

    def checkpoint() -> None:
        state = {"role": args.role, "vocab": vocab, "step": step, "tokens": tokens, "spent": time.time() - began}
        state |= {"model": model.state_dict(), "average": average.state_dict()}
        state |= {"settings": {name: value for name, value in vars(args).items() if not isinstance(value, Path)}}
        save(newest, state | {"optimizers": [o.state_dict() for o in chosen]})

    def report(loss: float) -> None:
        found = {"raw": validate(model, val), "average": validate(average, val)}
        per_byte = min(found.values()) * (counts["tokens"] - 1) / counts["bytes"]
        row = {"step": step, "tokens": tokens, "minutes": round((time.time() - began) / 60, 2), "train": loss, **found}
        row |= {"nats_per_byte": per_byte, "bits_per_byte": per_byte / math.log(2)}
        with (args.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(row) + "\n")
        print(
            f"step {step:6,} {tokens / 1e6:6.1f}M tokens {row['minutes']:5.1f} min  train {loss:.3f}  validation "
            f"{found['raw']:.3f} (average {found['average']:.3f}, {row['bits_per_byte']:.3f} bits/byte)",
            flush=True,
        )

    saved = reported = time.time()
    losses: list[float] = []
    while (done := (time.time() - began) / (args.minutes * 60)) < 1:
        length = max(size for start, size in LENGTHS if done >= start)
        fade = 1.0 if teacher else min(1.0, max(0.0, (args.hold + 0.2 - done) / 0.2))
        count = args.tokens // length
        beside = int(rng.binomial(count, side_share * fade))
        rows = torch.cat([t.take(n, length) for t, n in ((main_text, count - beside), (side_text, beside)) if n])
        for group in (g for o in chosen for g in o.param_groups):
            group["lr"] = group["peak"] * rate(done, step, args.hold)
        loss = loss_of(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            pairs = list(zip(average.parameters(), model.parameters(), strict=True))
            torch._foreach_lerp_(
                [a for a, _ in pairs], [m for _, m in pairs], 1 - min(args.averaging, step / (step + 10))
            )
        step, tokens = step + 1, tokens + rows.shape[0] * (rows.shape[1] - 1)
        losses.append(loss.item())
        if time.time() - reported > 60:
            report(sum(losses) / len(losses))
            losses, reported = [], time.time()
        if time.time() - saved > 180:
            checkpoint()
            saved = time.time()
    checkpoint()
    report(sum(losses) / max(len(losses), 1))


if __name__ == "__main__":
    main()
