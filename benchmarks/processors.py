"""What a step of each logits processor costs, beside transformers' class of the same name and options.

Scores are [B, 151936], normal with deviation 6 (peaked) or 3 (flat), a different tensor each round; the history begins
with 1,024 tokens and grows by one a round, as in a run. Both sides get the same tensors in one process, interleaved
round by round, threads pinned. Ours runs as the loop runs it: bound, chained, on shortlists, state advanced by the new
token. Reported are medians in microseconds, and ours as a share of theirs: least, median and greatest of the rounds.
Chains end with a drawn token. What is not installed is left out with a note.

A processor that may write in place has two lines. On its own it makes the copy of the scores that a chain needs once.
"in a chain" it is one of several: the copy was made before it, outside of what is timed, as transformers' loop copies
the logits on every step before its processors, which copy them once more each.

Example: python benchmarks/processors.py --rounds 20 --batch 1 16 --only top_p chain --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import torch
from decodekit.chain import Chain, Part
from decodekit.context import BindContext
from decodekit.registry import registry
from decodekit.testing import context
from decodekit.traits import traits_of
from overhead import machine
from torch import Tensor

VOCAB, HISTORY, EOS = 151_936, 1_024, 2
DEVIATIONS = {"peaked": 6.0, "flat": 3.0}

many = list(range(100, 190))
biases = {(7,): 1.0, (8, 9): -2.0, (10, 11, 12): 3.0}
allowed = list(range(1_000))

# Class -> options of ours, and arguments of transformers' constructor (functions get the prompt) where they differ.
CLASSES: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    "TemperatureLogitsWarper": ({"temperature": 0.8}, None),
    "TopKLogitsWarper": ({"top_k": 50}, None),
    "TopPLogitsWarper": ({"top_p": 0.9}, None),
    "MinPLogitsWarper": ({"min_p": 0.05}, None),
    "TypicalLogitsWarper": ({"mass": 0.9}, None),
    "TopHLogitsWarper": ({"top_h": 0.5}, None),
    "EpsilonLogitsWarper": ({"epsilon": 3e-4}, None),
    "EtaLogitsWarper": ({"epsilon": 3e-4}, None),
    "RepetitionPenaltyLogitsProcessor": ({"penalty": 1.1}, None),
    "EncoderRepetitionPenaltyLogitsProcessor": (
        {"penalty": 1.1},
        {"penalty": 1.1, "encoder_input_ids": lambda ids: ids},
    ),
    "NoRepeatNGramLogitsProcessor": ({"ngram_size": 3}, None),
    "EncoderNoRepeatNGramLogitsProcessor": (
        {"encoder_ngram_size": 3},
        {"encoder_ngram_size": 3, "encoder_input_ids": lambda ids: ids},
    ),
    "SequenceBiasLogitsProcessor": ({"sequence_bias": biases}, None),
    "NoBadWordsLogitsProcessor": (
        {"bad_words_ids": ((7,), (8, 9), (10, 11, 12))},
        {"bad_words_ids": [[7], [8, 9], [10, 11, 12]], "eos_token_id": EOS},
    ),
    "MinLengthLogitsProcessor": ({"min_length": 4_000}, {"min_length": 4_000, "eos_token_id": EOS}),
    "MinNewTokensLengthLogitsProcessor": (
        {"min_new_tokens": 3_000},
        {"prompt_length_to_skip": HISTORY, "min_new_tokens": 3_000, "eos_token_id": EOS},
    ),
    "SuppressTokensLogitsProcessor": ({"suppress_tokens": tuple(many)}, {"suppress_tokens": many}),
    "SuppressTokensAtBeginLogitsProcessor": (
        {"begin_suppress_tokens": tuple(many)},
        {"begin_suppress_tokens": many, "begin_index": HISTORY},
    ),
    "ForcedBOSTokenLogitsProcessor": ({"bos_token_id": 1}, None),
    "ForcedEOSTokenLogitsProcessor": (
        {"max_length": 4_000, "eos_token_id": EOS},
        {"max_length": 4_000, "eos_token_id": EOS},
    ),
    "ExponentialDecayLengthPenalty": (
        {"exponential_decay_length_penalty": (1, 1.01)},
        {"exponential_decay_length_penalty": (1, 1.01), "eos_token_id": EOS, "input_ids_seq_length": HISTORY},
    ),
    "PrefixConstrainedLogitsProcessor": (
        {"prefix_allowed_tokens_fn": lambda row, ids: allowed},
        {"prefix_allowed_tokens_fn": lambda row, ids: allowed, "num_beams": 1},
    ),
    "InfNanRemoveLogitsProcessor": ({}, None),
    "LogitNormalization": ({}, None),
}

HITS = ("NoRepeatNGramLogitsProcessor", "EncoderNoRepeatNGramLogitsProcessor")
"""Also measured where they forbid a token in each row at every step."""

DRAW, ARGMAX = "draw", "argmax"
CHAINS: dict[str, list[str | tuple[str, dict[str, Any]]]] = {
    "chain: repetition, temperature, top-k, top-p, min-p, draw": [
        "RepetitionPenaltyLogitsProcessor", "TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper",
        "MinPLogitsWarper", DRAW,
    ],
    "chain: temperature, top-p, draw": ["TemperatureLogitsWarper", "TopPLogitsWarper", DRAW],
    "chain: temperature, min-p, draw": ["TemperatureLogitsWarper", "MinPLogitsWarper", DRAW],
    "chain: repetition, n-grams, argmax": [
        "RepetitionPenaltyLogitsProcessor", "NoRepeatNGramLogitsProcessor", ARGMAX,
    ],
    "softmax and draw": [DRAW],
}  # fmt: skip


@attrs.frozen
class Case:
    """One line of the table."""

    name: str
    classes: tuple[str, ...]
    ends: str | None
    """How a token is chosen at the end: draw, argmax, or not at all."""
    own: bool = False
    """Whether our side gets scores that are the chain's own."""


def installed() -> dict[str, tuple[str, Any]]:
    """decodekit's processors by the name of their class: plugin name and class."""
    own = [p for p in registry.plugins("processors") if p.distribution == "decodekit" and not p.disabled]
    return {p.value.rpartition(":")[2]: (p.name, p.load()) for p in own}


def cases(wanted: list[str], known: dict[str, tuple[str, Any]]) -> tuple[list[Case], list[str]]:
    """What can be measured, and notes on what cannot."""
    found, notes = [], []
    named = {name: [name] for name in CLASSES} | CHAINS
    for title, parts in named.items():
        ends = next((part for part in parts if part in (DRAW, ARGMAX)), None)
        classes = tuple(str(part) for part in parts if part != ends)
        missing = [name for name in classes if name not in known]
        label = known[title][0] if title in known else title
        if wanted and not any(word in label or word in title for word in wanted):
            continue
        if missing:
            notes.append(f"{label}: left out, not installed: {', '.join(missing)}")
        else:
            found.append(Case(label, classes, ends))
            acts = (
                bound(title, known, context(torch.full((1, HISTORY), 5), vocab_size=VOCAB)) if title in known else None
            )
            if hasattr(acts, "edit"):
                found.append(Case(f"{label}, in a chain", classes, ends, own=True))
    return found, notes


def bound(name: str, known: dict[str, tuple[str, Any]], ctx: BindContext) -> Any:
    """What acts in a run; None where nothing does."""
    options = known[name][1](**CLASSES[name][0])
    return options.bind(ctx) if hasattr(options, "bind") else options


def ours(case: Case, known: dict[str, tuple[str, Any]], ctx: BindContext) -> Callable[[Tensor, Tensor], Any]:
    """A step as the loop runs it."""
    found = [(name, bound(name, known, ctx)) for name in case.classes]
    chain = Chain(
        Part(known[name][0], "decodekit", acts, traits_of(known[name][1]), "benchmark")
        for name, acts in found
        if acts is not None
    )
    if case.own:
        edit = found[0][1].edit

        def alone(ids: Tensor, scores: Tensor) -> Tensor:
            return edit(ids, scores, True)

        alone.chain = chain  # type: ignore[attr-defined]
        return alone
    if case.ends is None:
        return chain
    selector = registry.load("selectors", case.ends)()

    def step(ids: Tensor, scores: Tensor) -> Any:
        return selector(chain(ids, scores), ctx)

    step.chain = chain  # type: ignore[attr-defined]
    return step


def theirs(case: Case, prompt: Tensor) -> Callable[[Tensor, Tensor], Any]:
    """The same with transformers' classes, chosen from as its `generate` does."""
    from transformers.generation import logits_process

    items = logits_process.LogitsProcessorList()
    for name in case.classes:
        own, other = CLASSES[name]
        options = {k: v(prompt) if k == "encoder_input_ids" else v for k, v in (other or own).items()}
        items.append(getattr(logits_process, name)(**options))
    if case.ends is None:
        return items
    if case.ends == ARGMAX:
        return lambda ids, scores: items(ids, scores).argmax(-1)
    return lambda ids, scores: torch.multinomial(items(ids, scores).softmax(-1), num_samples=1).squeeze(1)


def timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def rounds_of(case: Case, known: Any, batch: int, deviation: float, rounds: int) -> Iterator[tuple[float, float]]:
    """Microseconds of ours and theirs, round by round; the first two rounds warm up and are not given."""
    random = torch.Generator().manual_seed(batch)
    pool = [torch.randn(batch, VOCAB, generator=random) * deviation for _ in range(8 if batch == 1 else 3)]
    # Real texts repeat themselves: draw the history from a few hundred tokens.
    prompt = torch.randint(3, 400, (batch, HISTORY), generator=random)
    ctx = context(
        prompt, vocab_size=VOCAB, eos=(EOS,), capacity=HISTORY + rounds + 8, max_length=4_000, seeds=range(batch)
    )
    mine, other = ours(case, known, ctx), theirs(case, prompt)
    stateful = [p.runtime for p in getattr(mine, "chain", mine).parts if hasattr(p.runtime, "accept")]
    # One tensor for both: a new one each time would have theirs find other memory than it does elsewhere.
    tokens, room = torch.zeros(batch, dtype=torch.long), torch.empty_like(pool[0])

    def advance() -> None:
        for item in stateful:
            item.accept(tokens, None)

    for round_ in range(rounds + 2):
        scores, ids = pool[round_ % len(pool)], ctx.input_ids.contiguous()
        # Whoever goes second finds the scores in the caches: take turns.
        took = [0.0, 0.0]
        for side in (0, 1) if round_ % 2 else (1, 0):
            given = room.copy_(scores) if case.own else scores
            took[side] = timed(lambda: (mine, other)[side](ids, given))  # noqa: B023
        tokens.random_(3, 400, generator=random)
        ctx.tokens[:, ctx.length] = tokens
        ctx.length += 1
        took[0] += timed(advance)
        if round_ >= 2:
            yield took[0], took[1]


def hits(name: str, known: Any, batch: int, rounds: int) -> Iterator[tuple[float, float]]:
    """Microseconds where each row repeats six tokens, so that every step forbids one, and nothing is in the caches."""
    case = Case(name, (name,), None)
    random = torch.Generator().manual_seed(batch)
    some = torch.randint(3, 400, (batch, 6), generator=random)
    prompt, sweep = some.repeat(1, 3), torch.zeros(1 << 26)
    ctx = context(prompt, vocab_size=VOCAB, eos=(EOS,), capacity=rounds + 32, max_length=4_000, seeds=range(batch))
    mine, other = ours(case, known, ctx), theirs(case, prompt)
    scores = torch.randn(batch, VOCAB, generator=random)
    for round_ in range(rounds + 2):
        ids, took = ctx.input_ids.contiguous(), [0.0, 0.0]
        for side in (0, 1) if round_ % 2 else (1, 0):
            sweep.add_(1)
            took[side] = timed(lambda: (mine, other)[side](ids, scores))  # noqa: B023
        tokens = some[:, round_ % 6]
        ctx.tokens[:, ctx.length] = tokens
        ctx.length += 1
        for part in mine.parts:
            if hasattr(part.runtime, "accept"):
                took[0] += timed(lambda: part.runtime.accept(tokens, None))  # noqa: B023
        if round_ >= 2:
            yield took[0], took[1]


def stop_strings(rounds: int) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    """Stop strings over a byte-level vocabulary of 151,936: making the criterion, and a step of 1 and of 16 rows."""
    from decodekit.text import as_tokenizer
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.generation import stopping_criteria as reference

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: n for n, char in enumerate(letters)}
    random = torch.Generator().manual_seed(0)
    while len(vocab) < VOCAB:
        length = int(torch.randint(2, 9, (), generator=random))
        name = "".join(letters[i] for i in torch.randint(0, 256, (length,), generator=random).tolist())
        vocab.setdefault(name, len(vocab))
    core = Tokenizer(models.BPE(vocab, []))
    core.decoder = decoders.ByteLevel()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    stops = ["\n\n", "<|end|>", "Question:", "STOP"]
    options = registry.load("criteria", "stop_strings")
    shared = PreTrainedTokenizerFast(tokenizer_object=core)

    def make_ours(tokenizer: Any, rows: int = 1) -> Any:
        prompt = torch.zeros(rows, HISTORY, dtype=torch.long)
        return options(stop_strings=tuple(stops)).bind(context(prompt, vocab_size=VOCAB, tokenizer=tokenizer))

    def make_theirs() -> Any:
        reference.STOP_STRING_EMBEDDING_CACHE.clear()
        return reference.StopStringCriteria(shared, stops)

    pairs = []
    for _ in range(min(rounds, 3)):
        # A tokenizer that nobody has read yet: nothing is remembered from another round.
        fresh = PreTrainedTokenizerFast(tokenizer_object=core)
        pairs.append((timed(lambda: make_ours(as_tokenizer(fresh))), timed(make_theirs)))  # noqa: B023
    yield "stop_strings: made", pairs
    for rows in (1, 16):
        mine, other, pairs = make_ours(as_tokenizer(shared), rows), make_theirs(), []
        # A text comes back to the same few hundred tokens: what they are is read in the first steps.
        first = 100
        ids = torch.randint(0, VOCAB, (400,), generator=random)
        ids = ids[torch.randint(0, 400, (rows, HISTORY + rounds + first), generator=random)]
        for round_ in range(rounds + first):
            seen = ids[:, : HISTORY + round_ + 1]

            def step(seen: Tensor = seen, mine: Any = mine) -> None:
                mine.accept(seen[:, -1], None)
                mine(seen, None)

            pair = (timed(step), timed(lambda: other(seen, None)))  # noqa: B023
            pairs += [pair] if round_ >= first else []
        yield f"stop_strings: step of {rows}", pairs


def row(name: str, batch: int, kind: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = [a / b for a, b in pairs]
    return {
        "name": name, "batch": batch, "scores": kind,
        "ours_us": statistics.median(a for a, _ in pairs), "theirs_us": statistics.median(b for _, b in pairs),
        "ratio_min": min(ratios), "ratio": statistics.median(ratios), "ratio_max": max(ratios),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--scores", nargs="+", choices=DEVIATIONS, default=list(DEVIATIONS))
    parser.add_argument("--only", nargs="+", default=[], help="words of which a line's name must hold one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    known = installed()
    chosen, notes = cases(args.only, known)
    where = machine(args.threads)
    if not args.json:
        print(f"{where}\nvocabulary {VOCAB}, history {HISTORY}, medians of {args.rounds} interleaved rounds\n")
        print(
            f"{'':58}{'rows':>5} {'scores':8}{'ours us':>9}{'theirs us':>10}{'share: min':>12}{'median':>8}{'max':>8}"
        )
    rows = []

    def report(line: dict[str, Any]) -> None:
        rows.append(line)
        if not args.json:
            print(
                f"{line['name']:58}{line['batch']:5} {line['scores']:8}{line['ours_us']:9.0f}{line['theirs_us']:10.0f}"
                f"{line['ratio_min']:12.3f}{line['ratio']:8.3f}{line['ratio_max']:8.3f}",
                flush=True,
            )

    for case in chosen:
        for batch in args.batch:
            for kind in args.scores:
                with torch.no_grad():
                    pairs = list(rounds_of(case, known, batch, DEVIATIONS[kind], args.rounds))
                report(row(case.name, batch, kind, pairs))
    for name in HITS:
        label = f"{known[name][0]}, a hit, caches cold" if name in known else ""
        if label and (not args.only or any(word in label for word in args.only)):
            for batch in args.batch:
                with torch.no_grad():
                    report(row(label, batch, "", list(hits(name, known, batch, args.rounds))))
    if not args.only or any(word in "stop_strings" for word in args.only):
        for name, pairs in stop_strings(args.rounds):
            report(row(name, 16 if name.endswith("16") else 1, "", pairs))
    if args.json:
        print(json.dumps({"machine": where, "rounds": args.rounds, "rows": rows, "notes": notes}, indent=2))
    else:
        print("", *notes, sep="\n")


if __name__ == "__main__":
    main()
