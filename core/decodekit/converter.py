"""One strict converter between plain data and options classes: no ``"5"`` -> 5, no ``"no"`` -> True."""

from __future__ import annotations

import contextlib
import enum
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import cattrs

from .errors import PluginBroken

NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "a string",
    type(None): "None",
}


def type_name(wanted: Any) -> str:
    """A type in words, for messages and the key table."""
    if wanted in NAMES:
        return NAMES[wanted]
    origin, args = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args if arg is not type(None))
    if origin in (tuple, list, set, frozenset) and args:
        inner = type_name(args[0]).removeprefix("a ")
        return f"a list of {'lists' + inner[4:] if inner.startswith('list of') else inner + 's'}"
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    if origin is dict:
        return "a dict"
    return getattr(wanted, "__name__", str(wanted))


def _strict(kind: type) -> Any:
    def structure(value: Any, _: Any) -> Any:
        if hasattr(value, "tolist"):  # a number of numpy or torch
            value = value.tolist()
        good = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if not good:
            raise ValueError(f"expected {NAMES[kind]}, got {value!r} ({type(value).__name__})")
        return value

    return structure


def _origin(wanted: Any) -> Any:
    return get_origin(wanted)


def _make() -> cattrs.Converter:
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)
    for kind in (int, float, bool, str):
        converter.register_structure_hook(kind, _strict(kind))

    def union(wanted: Any) -> Any:
        members = get_args(wanted)
        real = [m for m in members if m is not type(None)]

        def structure(value: Any, _: Any) -> Any:
            if len(real) == 1 and value is not None:
                return converter.structure(value, real[0])  # so that its own words are kept
            # An exact type wins, so that 2 stays an int where a float would also do.
            exact = [m for m in members if isinstance(m, type) and type(value) is m]
            for member in (*exact, *members):
                if member is type(None):
                    if value is None:
                        return None
                    continue
                with contextlib.suppress(Exception):
                    return converter.structure(value, member)
            raise ValueError(f"expected {type_name(wanted)}, got {value!r} ({type(value).__name__})")

        return structure

    def sequence(wanted: Any) -> Any:
        origin = get_origin(wanted)
        args = get_args(wanted)
        fixed = origin is tuple and args[-1] is not Ellipsis

        def structure(value: Any, _: Any) -> Any:
            if not isinstance(value, (list, tuple, set, frozenset)):
                raise ValueError(f"expected {type_name(wanted)}, got {value!r} ({type(value).__name__})")
            if fixed and len(value) != len(args):
                raise ValueError(f"expected {len(args)} values, got {len(value)}: {value!r}")
            kinds = args if fixed else [args[0]] * len(value)
            return origin(converter.structure(item, kind) for item, kind in zip(value, kinds, strict=True))

        return structure

    def mapping(wanted: Any) -> Any:
        kinds = get_args(wanted) or (Any, Any)

        def structure(value: Any, _: Any) -> Any:
            # JSON has string keys only: `plain` writes other keys as a list of [key, value] pairs.
            paired = kinds[0] is not str and isinstance(value, list) and value and all(len(v) == 2 for v in value)
            if not isinstance(value, Mapping) and not paired:
                raise ValueError(f"expected a dict, got {value!r} ({type(value).__name__})")
            pairs = value if paired else value.items()
            return {converter.structure(k, kinds[0]): converter.structure(v, kinds[1]) for k, v in pairs}

        return structure

    def options(wanted: Any) -> Any:
        build = cattrs.gen.make_dict_structure_fn(wanted, converter, _cattrs_forbid_extra_keys=True)

        def structure(value: Any, _: Any) -> Any:
            return value if isinstance(value, wanted) else build(value, _)

        return structure

    def anything(value: Any, _: Any) -> Any:
        return value

    converter.register_structure_hook_factory(lambda t: _origin(t) in (Union, types.UnionType), union)
    converter.register_structure_hook_factory(
        lambda t: _origin(t) in (tuple, list, set, frozenset) and bool(get_args(t)), sequence
    )
    converter.register_structure_hook_factory(attrs.has, options)
    converter.register_structure_hook_factory(lambda t: t is dict or _origin(t) is dict, mapping)
    converter.register_structure_hook_func(lambda t: t in (Any, object), anything)
    return converter


_converter = _make()


def structure(value: Any, wanted: Any) -> Any:
    """Turn plain data into `wanted`, strictly. Raises ValueError with the validator's own words."""
    if hasattr(value, "tolist"):  # tensors and numpy numbers are data too
        value = value.tolist()
    if attrs.has(wanted) and isinstance(value, wanted):
        return value
    try:
        return _converter.structure(value, wanted)
    except ValueError:
        raise
    except cattrs.ForbiddenExtraKeysError as error:
        raise ValueError(str(error)) from error
    except Exception as error:
        raise ValueError(f"expected {type_name(wanted)}, got {value!r} ({type(value).__name__})") from error


def plain(value: Any) -> Any:
    """Turn options into JSON-able data: attrs objects to dicts, tuples to lists, keys that are no strings to pairs."""
    if attrs.has(type(value)):
        return {k: plain(v) for k, v in attrs.asdict(value, recurse=False).items()}
    if isinstance(value, Mapping):
        if not all(isinstance(k, str) for k in value):
            return [[plain(k), plain(v)] for k, v in value.items()]
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(v) for v in value]
    if hasattr(value, "tolist"):
        return value.tolist()
    return value


def field_types(cls: type) -> dict[str, Any]:
    """The fields of an attrs class with their types resolved. Raises `PluginBroken` where one cannot be."""
    try:
        attrs.resolve_types(cls)
    except NameError as error:
        where = f"{cls.__module__}:{cls.__qualname__}"
        raise PluginBroken(f"the options of {where} have a type that cannot be resolved: {error}") from error
    return {field.name: field.type if field.type is not None else Any for field in attrs.fields(cls)}
