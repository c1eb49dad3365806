"""What torch.compile is told: plain data by the reference's names."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import attrs
from decodekit.fields import option

USUAL = "reduce-overhead"
"""The mode that stands where nobody chose one."""


def _known(instance: Any, attribute: Any, value: Any) -> None:
    """Raise ValueError for a backend that is neither a function nor a name."""
    if not isinstance(value, str) and not callable(value):
        raise ValueError(f"must be the name of a backend or a function, got {value!r}")


@attrs.define(slots=False)
class CompileConfig:
    """Arguments of ``torch.compile`` for the decoding step.

    torch takes either a mode or options: where there are options, the usual mode is left out.
    """

    fullgraph: bool = option("Refuse graph breaks: the step is one graph, or an error.", default=False)
    dynamic: bool | None = option(
        "Shapes as symbols from the first graph on (True), never (False), or from the second one on (unset).",
        default=None,
    )
    backend: str | Any = option(
        "Backend of torch.compile by name, or a function (graph, example inputs) -> callable.",
        default="inductor",
        check=_known,
    )
    mode: str | None = option("Mode of the inductor backend.", default=USUAL)
    options: dict[str, Any] | None = option("Options of the backend, instead of a mode.", default=None)

    _compile_all_devices: ClassVar[bool | None] = None
    """May be set on an instance. True: compile on a CPU, whoever says so; False: on accelerators only. None: on a CPU
    where the call asks for it."""

    def to_dict(self) -> dict[str, Any]:
        """The five fields, an independent copy; a backend that is an object is the same one."""
        return {**attrs.asdict(self, recurse=False), "options": copy.deepcopy(self.options)}

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for ``torch.compile``. Raises ValueError for options beside a mode of one's own."""
        given = {name: value for name, value in self.to_dict().items() if value is not None}
        if "options" in given and self.mode not in (None, USUAL, "default"):
            raise ValueError(f"options and mode={self.mode!r} exclude each other: give the options alone")
        # Other backends are handed the mode, and most do not take one; the usual one was not meant for them.
        if "options" in given or (self.backend != "inductor" and self.mode == USUAL):
            given.pop("mode", None)
        return given
