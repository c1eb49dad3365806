"""``decodekit generate``: text on the command line, as it is written, or as JSON lines."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from decodekit.errors import ConfigError, GenerationError, InputError, Problem

from .console import aside, dump
from .options import open_model, parser, read, shape
from .values import declared, one_each


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code: 1 where a prompt failed."""
    made = parser(
        "generate",
        "Continue prompts. Text appears while it is written. Prompts come from the command line, from --file, or\n"
        "from standard input, one a line (`-`, or when no prompt is given). A prompt with line breaks goes in quotes.",
        'decodekit generate "The cat sat on the" --max-new-tokens 30 --do-sample --top-p 0.9 --seed 1',
    )
    made.add_argument("--file", metavar="F", help="a file of prompts, one a line; empty lines are left out; - is stdin")
    made.add_argument("--no-stream", action="store_true", help="print a text when it is complete")
    made.add_argument("--no-echo", action="store_true", help="print only the new text, not the prompt before it")
    args, keys = read(made, argv)
    prompts = _prompts(args)
    if not prompts:
        made.error("there is no prompt: give one in quotes, or --file, or text on standard input")
    model = open_model(args)
    write = _json if args.json else _text
    failed = 0
    with _progress(len(prompts)) as advance:
        for index, prompt in enumerate(prompts):
            try:
                write(model, args, prompt, _own(keys, index, len(prompts)), index)
            except (InputError, GenerationError) as error:
                if len(prompts) == 1:
                    raise
                # The other prompts are still worth having.
                failed += 1
                print(f"decodekit: prompt {index + 1}: {error}", file=sys.stderr)
                if args.json:
                    dump({"prompt": prompt, "error": str(error)})
            advance()
    return int(failed > 0)


def _prompts(args: argparse.Namespace) -> list[str]:
    found: list[str] = []
    for prompt in args.prompts:
        found += _lines("-") if prompt == "-" else [prompt]
    if args.file is not None:
        found += _lines(args.file)
    if not args.prompts and args.file is None and not sys.stdin.isatty():
        found += _lines("-")
    return found


def _lines(path: str) -> list[str]:
    if not path:
        raise InputError("--file names no file")
    try:
        if path == "-":
            text = sys.stdin.buffer.read().decode("utf-8-sig")
        else:
            with open(path, encoding="utf-8-sig") as file:
                text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is not UTF-8 text ({error})"
        raise InputError(f"cannot read prompts from {path}: {why}") from error
    # Only real line ends: splitlines would cut at form feeds and the like, too.
    return [line.rstrip("\r") for line in text.split("\n") if line.strip()]


def _own(keys: dict[str, Any], index: int, prompts: int) -> dict[str, Any]:
    """The keys for one prompt, so that it gets what it would get in a call with all: its own value of those that hold
    one for each, and its own seed."""
    if prompts == 1:
        return keys
    config = keys.get("generation_config")
    own = dict(keys)
    for name, value in {**(config.set_keys if config is not None else {}), **keys}.items():
        about = declared(name)
        if one_each(about, value):
            if len(value) != prompts:
                words = f"has {len(value)} values for {prompts} prompts; give one, or one each"
                raise ConfigError([Problem(name, words, about.owner)])
            own[name] = value[index]
        elif name == "seed" and isinstance(value, int):
            from decodekit.context import mix_seed

            own[name] = mix_seed(value, index)
    return own


# -- output ------------------------------------------------------------------------------------------


def _json(model: Any, args: argparse.Namespace, prompt: str, keys: dict[str, Any], index: int) -> None:
    from decodekit.run import Run

    began, stopped = time.perf_counter(), None
    with aside():
        run = Run(model.plan(shape(args, prompt), **keys))
        model.only_text(run.pipeline)
        try:
            for _ in run:
                pass
        except KeyboardInterrupt as interrupt:  # what there is of the text is still worth having
            stopped = interrupt
        output = run.output()
        texts = model.texts(run, output)
    seconds = time.perf_counter() - began
    for row, text in enumerate(texts):
        tokens = int(output.lengths[row])
        dump(
            {
                "prompt": prompt,
                "text": text,
                "tokens": tokens,
                "stop_reason": output.stop_reasons[row],
                "stop_detail": output.stop_details[row],
                "seconds": round(seconds, 4),
                "tokens_per_second": round(tokens / seconds, 2) if seconds else None,
            }
        )
    if stopped is not None:
        raise stopped


def _text(model: Any, args: argparse.Namespace, prompt: str, keys: dict[str, Any], index: int) -> None:
    config = keys.get("generation_config")
    several = keys.get("num_return_sequences") or getattr(config, "num_return_sequences", None) or 1
    if args.no_stream or several > 1:
        texts = model.generate([shape(args, prompt)], **keys)
        pieces: list[Iterator[str]] = [iter([text]) for text in texts]
    else:
        pieces = [model.stream(shape(args, prompt), **keys)]
    for number, text in enumerate(pieces):
        if index or number:
            print()
        if not args.no_echo:
            print(_dim(prompt), end="\n" if args.chat else "", flush=True)
        for piece in text:
            print(piece, end="", flush=True)
        print(flush=True)


def _dim(text: str) -> str:
    """Text that stands back on a terminal; as it is elsewhere, and where NO_COLOR asks for that."""
    plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if plain else f"\x1b[2m{text}\x1b[0m"


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr for several prompts, where the texts go elsewhere; yields what to call after each."""
    if total == 1 or not sys.stderr.isatty() or sys.stdout.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)
