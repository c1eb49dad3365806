"""Decoding and `torch.compile`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def outside_graphs(call: F) -> F:
    """Let ``torch.compile`` step around `call`: a decoding loop is no graph.

    A compiled model is not compiled there, either. ``torch.compiler.disable`` as a decorator would import the compiler
    for callers who compile nothing.
    """

    @functools.wraps(call)
    def entry(*args: Any, **kwargs: Any) -> Any:
        outside: Any = torch.compiler.disable
        return (outside(call) if torch.compiler.is_compiling() else call)(*args, **kwargs)

    return cast(F, entry)
