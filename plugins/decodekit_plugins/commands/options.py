"""Every config key as a command-line option: ``top_p`` is ``--top-p VALUE``, whoever owns it.

Which options exist is read from metadata; only the owners of options that are used are imported, to learn their type.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from decodekit.errors import ConfigError, InputError, Problem, suggest
from decodekit.keys import SECTIONS, keys

from .console import aside
from .values import declared, members, typed

if TYPE_CHECKING:
    from decodekit import LM

TRUTHS = ("yes", "no", "on", "off", "y", "n", "t", "f", "1", "0", "maybe")
"""Words that are meant to say true or false, and do not: behind a True/False option nobody means them as a prompt."""

EPILOG = """Every key of `decodekit keys` is an option, those of installed plugins included:
  --top-p 0.9                                a value; `none` unsets what the model's own configuration says
  --do-sample, --no-do-sample                True/False keys (--do-sample false works, too)
  --stop-strings END --stop-strings '###'    lists: repeat the option, or give JSON: '["END", "###"]'
  --top-p 0.9,0.5                            numbers: with commas, too; where `decodekit keys` says so, one per prompt
  --stop-strings $'\\n'                      a line break, as bash and zsh write it
  --stop-strings=--                          a value that begins with two dashes
  --processors '{"sharpen": {"power": 2}}'   plugins without keys of their own, as JSON
  --acme:top-k 5                             the key of distribution acme, where several have one of this name"""


def parser(command: str, description: str, example: str) -> argparse.ArgumentParser:
    """A parser with the options that all commands with a model share."""
    made = argparse.ArgumentParser(
        prog=f"decodekit {command}",
        usage=f"decodekit {command} [PROMPT ...] [options] [--KEY VALUE ...]",
        description=description,
        epilog=f"{EPILOG}\n\nexample:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("prompts", nargs="*", metavar="PROMPT", help="text to continue")
    made.add_argument("--model", metavar="M", help="plugin name, folder or Hub id (bundled)")
    made.add_argument("--adapter", metavar="A", help="models plugin that shall open it (the first that can)")
    made.add_argument("--dtype", metavar="D", help="number type of the weights, such as bfloat16")
    made.add_argument("--device", metavar="D", help="where the model runs, such as cpu or cuda:0")
    made.add_argument("--chat", action="store_true", help="the prompt is a message: use the model's chat template")
    made.add_argument("--config", metavar="FILE", help="generation_config.json whose keys apply; options win over it")
    made.add_argument("--json", action="store_true", help="for machines")
    return made


def read(made: argparse.ArgumentParser, argv: list[str]) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Split a command line into the command's own arguments and config keys, each value of its declared type.

    The file of ``--config`` comes as the key ``generation_config``. Raises `ConfigError` with every wrong option.
    """
    # After a bare -- everything is a prompt.
    cut = argv.index("--") if "--" in argv else len(argv)
    words, prompts = argv[:cut], argv[cut + 1 :]
    if {"-h", "--help"} & set(words):
        made.parse_args(["--help"])
    own = set(made._option_string_actions)
    _refuse_unknown(words, own)
    problems: list[Problem] = []
    given: dict[str, list[Any]] = {}
    rest: list[str] = []
    while words:
        word = words.pop(0)
        if _is_key(word, own):
            _take(word, words, given, problems)
        else:
            rest.append(word)
    args = made.parse_intermixed_args(rest)
    args.prompts += prompts
    if args.config is not None and not Path(args.config).is_file():
        problems.append(Problem("--config", f"there is no file {args.config!r}"))
    if args.adapter is not None and args.model is None:
        problems.append(Problem("--adapter", f"{args.adapter} opens what --model names: give a folder or Hub id, too"))
    args.model = args.model or "bundled"
    values = typed(given, problems)
    if args.config is not None:
        from decodekit.config import GenerationConfig

        values["generation_config"] = GenerationConfig.from_pretrained(args.config)
    return args, values


def open_model(args: argparse.Namespace) -> LM:
    """The model that the arguments name."""
    from decodekit import load

    wanted = {name: getattr(args, name) for name in ("dtype", "device") if getattr(args, name) is not None}
    with aside():
        return load(args.model, adapter=args.adapter, **wanted)


def shape(args: argparse.Namespace, prompt: str) -> Any:
    """A prompt as `LM` takes it. Raises `InputError` where it is no text."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the prompt {prompt!r} is not valid UTF-8") from error
    return [{"role": "user", "content": prompt}] if args.chat else prompt


def _is_key(word: str, own: Iterable[str]) -> bool:
    return word.startswith("--") and word.partition("=")[0] not in own


def _key(option: str) -> str:
    """The config key that an option stands for, or an empty string."""
    name = option.removeprefix("--")
    owner, colon, bare = name.rpartition(":")
    names = (owner + colon + bare.replace("-", "_"), name)
    return next((known for known in names if known in keys or known in SECTIONS), "")


def _negated(option: str) -> str:
    """The config key that ``--no-KEY`` is about, or an empty string."""
    return _key(option[5:]) if option.startswith(("--no-", "--no_")) else ""


def _refuse_unknown(words: Iterable[str], own: set[str]) -> None:
    """Find misspelt options before anything is imported."""
    problems = []
    for word in words:
        option = word.partition("=")[0]
        if not _is_key(word, own) or _key(option) or _negated(option):
            continue
        about = keys.unknown(option.removeprefix("--").replace("-", "_"))
        if not about.startswith("unknown key"):  # its plugin is switched off or missing, or there is none yet
            problems.append(Problem(option, about))
            continue
        hint = suggest(option, [*own, *(f"--{name.replace('_', '-')}" for name in keys.names())])
        problems.append(Problem(option, f"unknown option; {hint or '`decodekit keys` lists all keys'}"))
    if problems:
        raise ConfigError(problems)


def _take(word: str, words: list[str], given: dict[str, list[Any]], problems: list[Problem]) -> None:
    """Put an option's value into `given`, taking it from `words` where it is the next one."""
    option, equals, value = word.partition("=")
    name = _key(option) or _negated(option)
    kinds = members(declared(name).type)
    following = words[0] if words and not words[0].startswith("--") else None
    taken: Any = value if equals else None
    if not _key(option):
        if bool not in kinds or equals:
            hint = f"--{name.replace('_', '-')} none unsets it"
            problems.append(Problem(option, f"only True/False keys can be switched off, without a value; {hint}"))
            return
        taken = False
    elif not equals and bool in kinds:
        # A word after a True/False option is a prompt, unless it says true or false itself, or means to.
        if kinds == {bool} and following is not None and following.lower() in TRUTHS:
            wanted = "true" if following.lower() in ("yes", "on", "y", "t", "1") else "false"
            fix = f"write {option}={wanted}, or --no-{option[2:]}; a prompt {following!r} goes before the options"
            problems.append(Problem(option, f"is followed by {following!r}, which is neither true nor false: {fix}"))
            words.pop(0)
            return
        speaks = following is not None and (following.lower() in ("true", "false", "none") or kinds != {bool})
        taken = words.pop(0) if speaks else True
    elif not equals and following is not None:
        taken = words.pop(0)
    elif not equals:
        problems.append(Problem(option, "needs a value"))
        return
    given.setdefault(name, []).append(taken)
