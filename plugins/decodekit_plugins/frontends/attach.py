"""`attach` puts decodekit's `generate` in the place of a model's own."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from decodekit.errors import InputError, PipelineError
from decodekit.models import adapter_for
from torch import nn

from .calls import generate_as


class Attachment:
    """Undoes an `attach`: by `detach`, or at the end of a ``with`` block, which begins with the model."""

    def __init__(self, model: nn.Module, before: bool) -> None:
        self.model = model
        self._before = before

    def detach(self) -> None:
        """Give the model its own `generate` again; nothing where it has that. Raises PipelineError where its class
        was changed by others since."""
        model = self.model
        own = getattr(type(model), "__decodekit_attached__", None)
        if own is None:
            return
        if type(model) is not _attached(own):
            raise PipelineError(f"the class of this {own.__name__} was changed after attach: undo that first")
        model.__class__ = own

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *_: object) -> None:
        if not self._before:  # an outer block is not over yet
            self.detach()


def attach(model: nn.Module) -> Attachment:
    """Make ``model.generate`` decodekit's, for this object only, with transformers' arguments and all of decodekit's.

    model: any ``nn.Module`` that some models plugin knows. Its class becomes one derived from it, of the same name, so
    that copies and pickles are attached, too; attaching twice changes nothing.

    Raises `InputError` for what is no module, and what `adapter_for` raises for models decodekit cannot run.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"attach takes a torch.nn.Module, not {type(model).__name__}")
    before = hasattr(type(model), "__decodekit_attached__")
    if not before:
        adapter_for(model)
        try:
            model.__class__ = _attached(type(model))
        except TypeError as error:
            raise InputError(f"{type(model).__name__} lets nobody change its generate: {error}") from error
    return Attachment(model, before)


def _derive(own: Any) -> Any:
    """The class derived from `own`, its `generate` replaced. A property: it wins over what objects hold themselves."""

    def generate(self: Any) -> Callable[..., Any]:
        return types.MethodType(generate_as, self)

    def assign(self: Any, value: Any) -> None:
        raise AttributeError("generate is decodekit's here: detach() the model before giving it another")

    def reduce(self: Any, protocol: Any) -> Any:
        # Nobody could find this class by its name.
        function, arguments, *rest = own.__reduce_ex__(self, protocol)
        plain = tuple(own if item is type(self) else item for item in arguments)
        return (_again, (function, plain), *rest)

    body = {
        "__module__": own.__module__,
        "__qualname__": own.__qualname__,
        "__doc__": own.__doc__,
        "__reduce_ex__": reduce,
        "__decodekit_attached__": own,
        "generate": property(generate, assign, doc=generate_as.__doc__),
    }
    return type(own.__name__, (own,), body)


_attached: Any = functools.cache(_derive)


def _again(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """An attached object as `copy` and `pickle` make it, before it has its state."""
    made = function(*arguments)
    made.__class__ = _attached(type(made))
    return made
