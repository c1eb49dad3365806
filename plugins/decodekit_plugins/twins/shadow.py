"""A second tree of modules over the same weights, so that some modules can be exchanged and the caller's stay."""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable
from typing import Any

from decodekit.protocols import ModelAdapter
from torch import jit, nn

COPIED = ("_modules", "_forward_hooks", "_forward_pre_hooks")
"""Collections of a module of which a twin has its own. Others (of gradients, of state dicts) no run adds to."""
Swap = Callable[[nn.Module], nn.Module | None]
"""Gives the module that shall stand in for another one, or None to go on with what is inside it."""


class Twin:
    """A tree of modules like that of `root`, some of them exchanged.

    Each new module is of the class of its original and holds the same dicts of parameters and buffers: what is put into
    these later is seen by both. Attributes, hooks and children are copied, so that what a forward pass writes stays in
    the twin; `stale` tells when the original got others.
    """

    def __init__(self, root: nn.Module, swap: Swap) -> None:
        self._seen: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self._classes: list[tuple[Any, type, Any]] = []
        self._made: dict[int, nn.Module] = {}
        self._alive: list[nn.Module] = []  # no other object gets the id of an original, the root's aside
        self.root = self._grow(root, swap)
        for made in self._made.values():
            self._turn(made.__dict__)

    def _grow(self, module: nn.Module, swap: Swap) -> nn.Module:
        if id(module) in self._made:
            return self._made[id(module)]
        own = module.__dict__
        self._seen.append((own, dict(own)))
        self._seen.append((own["_parameters"], dict(own["_parameters"])))  # a bias where there was none
        self._classes.append((weakref.ref(module), type(module), type(module).forward))
        self._seen += [(own[name], dict(own[name])) for name in COPIED]
        if self._made:
            self._alive.append(module)
        made = swap(module)
        if made is None:
            if sealed(module):
                self._made[id(module)] = module
                return module
            made = like(module)
        self._made[id(module)] = made
        children = own["_modules"]
        grown = type(children)((name, child and self._grow(child, swap)) for name, child in children.items())
        made.__dict__["_modules"] = grown
        return made

    def _turn(self, attributes: dict[str, Any]) -> None:
        """Let attributes that are modules of the original, or methods of them, be those of the twin."""
        for name, value in attributes.items():
            if isinstance(value, nn.Module) and id(value) in self._made:
                attributes[name] = self._made[id(value)]
            elif isinstance(value, types.MethodType) and id(value.__self__) in self._made:
                attributes[name] = types.MethodType(value.__func__, self._made[id(value.__self__)])

    def stale(self) -> bool:
        """Whether a module of the original was exchanged, or got another class or attribute, since this was made.

        Also where a class got another forward pass.
        """
        for module, cls, forward in self._classes:
            if type(module()) is not cls or cls.forward is not forward:
                return True
        try:
            for now, was in self._seen:
                if now != was:
                    return True
        except (RuntimeError, ValueError):  # other tensors or arrays cannot be compared to a truth
            return True
        return False

    def through(self, adapter: ModelAdapter) -> Any:
        """A copy of `adapter` that runs this tree wherever it ran the original."""
        made = copy.copy(adapter)
        self._turn(made.__dict__)
        return made


def like(module: nn.Module, cls: type | None = None) -> nn.Module:
    """A module of the same class (or of `cls`) with the attributes of `module`, its parameters and hooks included."""
    made: nn.Module = object.__new__(cls or type(module))
    made.__dict__.update(module.__dict__)
    for name in COPIED:
        made.__dict__[name] = module.__dict__[name].copy()
    return made


def sealed(module: nn.Module) -> bool:
    """Whether a module runs code of its own that attributes of a copy would not reach: scripted or compiled."""
    return isinstance(module, jit.ScriptModule) or "_orig_mod" in vars(module).get("_modules", {})
