"""``decodekit plugins``: what is installed, from metadata alone; with ``--check``, what of it works."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import pluggy
from decodekit import hooks
from decodekit.errors import PluginClash, PluginError, PluginNotFound, suggest
from decodekit.keys import KeyTable
from decodekit.registry import KINDS, Plugin, Registry
from decodekit.settings import resolve
from decodekit.traits import Traits

from .console import aside, dump, table
from .main import calm_registry

METHODS = {
    "processors": ("__call__", "bind"),
    "criteria": ("__call__", "bind"),
    "watermarkers": ("bind",),
    "strategies": ("decode", "bind"),
    "selectors": ("__call__", "bind"),
    "streamers": ("put", "bind"),
    "candidates": ("propose", "bind"),
    "preparers": ("prepare",),
    "tokenizers": ("adapt",),
    "models": ("adapt", "open"),
}
"""What a class of each kind needs at least one of, to take part in a run."""

EXAMPLES = """examples:
  decodekit plugins --kind processors       names, versions and entry points, without importing any
  decodekit plugins --check                 import each one and say which are broken or clash; exit code 1 if any
  decodekit plugins --offers cache:crop     which plugins can do this"""


def run(argv: list[str]) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="decodekit plugins",
        description="List installed plugins. Nothing is imported without --check or --offers.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--kind", choices=KINDS, metavar="K", help=f"only one kind: {', '.join(KINDS)}")
    parser.add_argument("--check", action="store_true", help="load each plugin and report the broken and the clashing")
    parser.add_argument("--offers", metavar="CAPABILITY", help="only plugins that provide it, such as cache:crop")
    parser.add_argument("--json", action="store_true", help="for machines")
    args = parser.parse_args(argv)
    source = calm_registry()
    plugins = source.plugins(args.kind)
    with aside():
        if args.offers:
            able = {plugin.qualified: _provides(plugin) for plugin in plugins}
            plugins = [plugin for plugin in plugins if args.offers in able[plugin.qualified]]
            if not plugins:
                known = sorted({ability for found in able.values() for ability in found})
                hint = suggest(args.offers, known) or f"there are: {', '.join(known) or 'none'}"
                raise PluginNotFound(f"no installed plugin offers {args.offers!r}; {hint}")
        rows = [_row(source, plugin, args.check) for plugin in plugins]
        if args.check and not args.kind and not args.offers:
            rows += _bad_keys(source)
    _print(rows, source.shadowed, args.json)
    return int(any(row["state"] in ("BROKEN", "CLASH") for row in rows)) if args.check else 0


def verdict(source: Registry, plugin: Plugin, check: bool = True) -> tuple[str, str]:
    """The state of a plugin and its cause; with `check` it is loaded and ``ok`` where that works."""
    if plugin.disabled:
        return plugin.state, plugin.disabled
    try:
        source.find(plugin.kind, plugin.name)
        fault = _unfit(plugin, plugin.load()) if check else ""
        if fault:
            return "BROKEN", fault
    except PluginClash as error:
        return "CLASH", str(error)
    except PluginError:
        return "BROKEN", f"{type(plugin.error).__name__}: {plugin.error}"
    return "ok" if check else plugin.state, ""


def _unfit(plugin: Plugin, made: Any) -> str:
    """What is wrong with an object that was loaded well, or an empty string."""
    if plugin.kind == "hooks":  # a module or any object
        return _unfit_hooks(made)
    if plugin.kind == "frontends":
        return ""
    traits = getattr(made, "traits", None)
    if traits is not None and not isinstance(traits, (Traits, property)):
        return f"its traits are {traits!r}, not Traits"
    methods = METHODS.get(plugin.kind, ())
    defined = {name for cls in getattr(made, "__mro__", ()) for name in vars(cls)}  # every class has a __call__ itself
    if defined and methods and not defined.intersection(methods):
        return f"{plugin.value} has neither {' nor '.join(methods)}"
    return ""


def _unfit_hooks(made: Any) -> str:
    """What keeps hooks from being called, or what is wrong with the advice that one gives on empty settings."""
    if not any(hasattr(getattr(made, name, None), "decodekit_impl") for name in dir(made)):
        return "it has no function marked by decodekit.hookimpl"
    manager = pluggy.PluginManager("decodekit")
    manager.add_hookspecs(hooks)
    try:
        manager.register(made)
        manager.check_pending()
        for found in manager.hook.doubts(settings=resolve([], library=False), samples=None, strategy=None):
            if not hooks.FITS["doubts"](found):
                return f"doubts returned {found!r}, which is no list of Problem"
    except Exception as error:  # plugins raise what they like
        return f"{type(error).__name__}: {error}"
    return ""


def _row(source: Registry, plugin: Plugin, check: bool) -> dict[str, Any]:
    state, cause = verdict(source, plugin, check)
    return {
        "kind": plugin.kind,
        "name": plugin.name,
        "distribution": plugin.distribution,
        "version": plugin.version,
        "state": state,
        "cause": cause,
        "entry_point": plugin.value,
    }


def _provides(plugin: Plugin) -> tuple[str, ...]:
    try:
        return () if plugin.disabled else tuple(getattr(plugin.load(), "provides", ()))
    except PluginError as error:
        print(f"decodekit: left out: {error}", file=sys.stderr)
    except TypeError:  # not a collection, so not the attribute we mean
        pass
    return ()


def _bad_keys(source: Registry) -> list[dict[str, Any]]:
    """Config keys that point nowhere or that several distributions declare."""
    owners = {(p.distribution, p.value): p for p in source.plugins()}
    known, rows = KeyTable(source), []
    for entry in source.plugins("keys"):
        target, _, field = entry.value.rpartition(".")
        owner = owners.get((entry.distribution, target))
        state, cause = "BROKEN", ""
        if owner is None:
            cause = f"{target} is no plugin of {entry.distribution}"
        elif not owner.disabled and not owner.error and not _has_option(owner.load(), field):
            cause = f"{target} has no option {field!r}"
        elif not entry.disabled:
            try:
                known.find(entry.name)
            except PluginClash as error:
                state, cause = "CLASH", str(error)
        if cause:
            rows.append({**_row(source, entry, False), "state": state, "cause": cause})
    return rows


def _has_option(cls: Any, name: str) -> bool:
    fields = getattr(cls, "__attrs_attrs__", None)
    return fields is None or any(field.name == name for field in fields)


def _print(rows: list[dict[str, Any]], shadowed: list[str], as_json: bool) -> None:
    if as_json:
        dump({"plugins": rows, "shadowed": shadowed}, indent=2)
        return
    causes = any(row["cause"] for row in rows)
    names = ("kind", "name", "distribution", "version", "state", "entry_point", *(("cause",) if causes else ()))
    table([name.replace("_", " ") for name in names], [[row[name] for name in names] for row in rows])
    for path in shadowed:
        print(f"left out: {path} (another metadata folder of the same distribution comes first)")
