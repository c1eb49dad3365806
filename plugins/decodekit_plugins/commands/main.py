"""The ``decodekit`` command: finds the plugin of a command, runs it, and turns errors into words and exit codes.

Commands are plugins of kind ``commands``: functions of their arguments that return an exit code. Only the one that is
called is imported, so a broken or slow plugin never touches another command.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from decodekit import __version__
from decodekit.errors import ConfigError, DecodekitError, PluginNotFound, suggest
from decodekit.registry import TABLES, Plugin, Registry, registry

TITLE = "decodekit: text from any autoregressive PyTorch model, by a pipeline of plugins"
USAGE = "usage: decodekit [--version] [--help] [--debug] COMMAND [ARGUMENT ...]"
EXAMPLE = 'example: decodekit generate "The cat sat on the" --do-sample --top-p 0.9'
INTERRUPTED, BROKEN_PIPE = 130, 141
"""128 and the number of the signal, as shells report it."""


class _Interrupts:
    """Knows whether Ctrl-C was pressed while it was held.

    Code that is interrupted while it is imported may raise something else instead (torch's parts in C++ do), or leave
    modules behind that are half there: what goes wrong then is the interruption, whatever it calls itself.
    """

    def __init__(self) -> None:
        self.came = self._mine = False

    def __enter__(self) -> _Interrupts:
        ours = threading.current_thread() is threading.main_thread()
        if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._mine = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._mine:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _note(self, number: int, frame: Any) -> None:
        self.came = True
        raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0 done; 1 it failed; 2 the command line or a configuration is wrong; 130 interrupted; 141 the reader went away.
    """
    with _Interrupts() as interrupts:
        return _main(list(sys.argv[1:] if argv is None else argv), interrupts)


def _main(words: list[str], interrupts: _Interrupts) -> int:
    debug = os.environ.get("DECODEKIT_DEBUG", "") not in ("", "0")
    while words and words[0] == "--debug":
        debug = bool(words.pop(0))
    name = words[0] if words else ""
    plugin: Plugin | None = None
    for place in ("stdout", "stderr"):
        if getattr(sys, place) is None:  # closed by whoever started this
            setattr(sys, place, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:  # a terminal that lacks a character shows another instead of failing
            reconfigure(errors="replace")
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            # numpy is not needed: torch only says that tensors cannot become its arrays.
            warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
            if name in ("", "-h", "--help", "--version"):
                print(f"decodekit {__version__}" if name == "--version" else _help())
                return 0 if name else 2
            plugin, run = _command(name)
            cut = words.index("--") if "--" in words else len(words)
            if plugin.distribution == "decodekit" and "--debug" in words[:cut]:  # others may mean something else by it
                debug = True
                words = [word for word in words[:cut] if word != "--debug"] + words[cut:]
            code = run(words[1:])
            sys.stdout.flush()
            return int(code or 0)
    except SystemExit as stop:  # argparse: --help and wrong arguments
        maker = stop.__traceback__
        while maker is not None and maker.tb_next is not None:
            maker = maker.tb_next
        source = maker.tb_frame.f_globals.get("__name__", "?") if maker is not None else "?"
        if source != "argparse":
            print(f"decodekit: {source} ended the program (SystemExit: {stop.code})", file=sys.stderr)
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever reads has seen enough. Python would flush once more at exit and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except Exception as error:
        if debug:
            import traceback

            traceback.print_exc()
        if interrupts.came:
            print("\ninterrupted", file=sys.stderr)
            return INTERRUPTED
        known = isinstance(error, DecodekitError)
        print(f"decodekit: {error}" if known else _unexpected(error, plugin, words, debug), file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, _UnknownCommand)) else 1


class _UnknownCommand(PluginNotFound):
    """No command has this name."""


def calm_registry() -> Registry:
    """The registry, without loading everything first (DECODEKIT_STRICT) and without names that match nothing."""
    switches = attrs.evolve(registry.switches, strict=False)
    source = Registry(switches) if registry.switches.strict else registry
    try:
        source.plugins()
    except PluginNotFound as error:
        print(f"decodekit: warning: {error}", file=sys.stderr)
        every = Registry(attrs.evolve(switches, allow=(), prefer=()))
        known = {label for group in (None, *TABLES) for p in every.plugins(group) for label in p.labels}
        allow, prefer = (tuple(n for n in names if n in known) for names in (switches.allow, switches.prefer))
        source = Registry(attrs.evolve(switches, allow=allow, prefer=prefer))
    return source


def _command(name: str) -> tuple[Plugin, Callable[[list[str]], Any]]:
    source = calm_registry()
    offered = {label for plugin in source.plugins("commands") for label in (plugin.name, plugin.qualified)}
    if name not in offered:
        hint = suggest(name, offered) or "`decodekit --help` lists them all"
        what = "option" if name.startswith("-") else "command"
        raise _UnknownCommand(f"there is no {what} {name!r}; {hint}")
    plugin = source.find("commands", name)
    return plugin, plugin.load()


def _help() -> str:
    lines = [TITLE, "", USAGE, EXAMPLE, "", "commands:"]
    commands = calm_registry().plugins("commands")
    for plugin in sorted(commands, key=lambda p: (p.distribution != "decodekit", p.distribution, p.name)):
        notes = [] if plugin.distribution == "decodekit" else [f"from {plugin.distribution} {plugin.version}"]
        notes += [f"off: {plugin.disabled}"] if plugin.disabled else []
        lines.append(f"  {plugin.name}{'  (' + '; '.join(notes) + ')' if notes else ''}")
    lines += ["", "`decodekit COMMAND --help` tells more; --debug, or DECODEKIT_DEBUG=1, shows where errors come from."]
    return "\n".join(lines)


def _unexpected(error: Exception, plugin: Plugin | None, words: Sequence[str], debug: bool) -> str:
    whose = f"command {words[0]!r} of {plugin.distribution} {plugin.version}" if plugin else f"command {words[0]!r}"
    hint = "" if debug else f" `decodekit --debug {' '.join(words[:1])} ...` shows where."
    return f"decodekit: {whose} failed unexpectedly: {type(error).__name__}: {error}.{hint}"


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"decodekit: warning: {message}", file=sys.stderr)
