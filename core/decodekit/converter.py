"""One strict converter between plain data and options classes: no ``"5"`` -> 5, no ``"no"`` -> True."""

from __future__ import annotations

import contextlib
import enum
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

import attrs
import cattrs

from .errors import PluginBroken, suggest

NAMES = {int: "a whole number", float: "a number", bool: "True or False", str: "a string", dict: "a dict"}


def type_name(wanted: Any) -> str:
    """A type in words, for messages and the key table."""
    origin, args = get_origin(wanted), get_args(wanted)
    if wanted in NAMES or origin in NAMES:
        return NAMES[wanted if origin is None else origin]
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args if arg is not type(None))
    if origin in (tuple, list, set, frozenset) and args:
        if origin is tuple and Ellipsis not in args:
            return f"[{', '.join(map(type_name, args))}]"
        inner = type_name(args[0]).removeprefix("a ")
        return f"a list of {'lists' + inner[4:] if inner.startswith('list of') else inner + 's' * (inner[0] != '[')}"
    if origin is Literal:
        return f"one of {', '.join(map(repr, args))}"
    return getattr(wanted, "__name__", str(wanted))


def _mismatch(wanted: Any, value: Any) -> ValueError:
    return ValueError(f"expected {type_name(wanted)}, got {value!r} ({type(value).__name__})")


def _simple(value: Any, wanted: Any) -> Any:
    accepted: Any = (int, float) if wanted is float else wanted
    if hasattr(value, "tolist"):  # a number of numpy or torch
        value = value.tolist()
    if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
        raise _mismatch(wanted, value)
    return float(value) if wanted is float else value


def _union(value: Any, wanted: Any) -> Any:
    members = [member for member in get_args(wanted) if member is not type(None)]
    if value is None and type(None) in get_args(wanted):
        return None
    if all(map(attrs.has, members)) and type(value) not in members and hasattr(value := _data(value), "keys"):
        # What has most of the names is meant.
        members = [max(members, key=lambda member: len(attrs.fields_dict(member).keys() & value.keys()))]
    if len(members) == 1:
        return _converter.structure(value, members[0])  # so that its own words are kept
    # An exact type wins, so that 2 stays an int where a float would also do.
    for member in sorted(members, key=lambda member: type(value) is not member):
        with contextlib.suppress(Exception):
            return _converter.structure(value, member)
    raise _mismatch(wanted, value)


def _sequence(value: Any, wanted: Any) -> Any:
    origin, kinds = get_origin(wanted), get_args(wanted)
    if not isinstance(value, (list, tuple, set, frozenset)):
        raise _mismatch(wanted, value)
    if origin is not tuple or kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        raise ValueError(f"expected {len(kinds)} values, got {len(value)}: {value!r}")
    return origin(_converter.structure(item, kind) for item, kind in zip(value, kinds, strict=True))


def _data(value: Any) -> Any:
    """What an object of the reference says of itself."""
    return value.to_dict() if hasattr(value, "to_dict") else value


def _mapping(value: Any, wanted: Any) -> Any:
    value, kinds = _data(value), get_args(wanted) or (Any, Any)
    # JSON has string keys only: `plain` writes other keys as a list of [key, value] pairs.
    paired = kinds[0] is not str and isinstance(value, list) and value and all(len(pair) == 2 for pair in value)
    pairs = value.items() if isinstance(value, Mapping) else value if paired else None
    if pairs is None:
        raise _mismatch(wanted, value)
    return {_converter.structure(k, kinds[0]): _converter.structure(v, kinds[1]) for k, v in pairs}


def _made_of(*origins: Any) -> Callable[[Any], bool]:
    return lambda wanted: get_origin(wanted) in origins and bool(get_args(wanted))


def _options(value: Any, wanted: Any) -> Any:
    if isinstance(value, wanted):
        return value
    if not isinstance(value := _data(value), Mapping):
        raise _mismatch(wanted, value)
    given, faults = checked(wanted, value)
    if faults:
        raise ValueError("; ".join(f"{name}: {words}" for name, words in faults.items()))
    return wanted(**given)


_converter = cattrs.Converter(detailed_validation=False)
for _kind in (int, float, bool, str):
    _converter.register_structure_hook(_kind, _simple)
_converter.register_structure_hook_func(_made_of(Union, types.UnionType), _union)
_converter.register_structure_hook_func(_made_of(tuple, list, set, frozenset), _sequence)
_converter.register_structure_hook_func(lambda wanted: dict in (wanted, get_origin(wanted)), _mapping)
_converter.register_structure_hook_func(lambda wanted: wanted in (Any, object), lambda value, _: value)
_converter.register_structure_hook_func(attrs.has, _options)


def structure(value: Any, wanted: Any) -> Any:
    """Turn plain data into `wanted`, strictly. Raises ValueError with the validator's own words."""
    if hasattr(value, "tolist"):  # tensors and numpy numbers are data too
        value = value.tolist()
    try:
        return _converter.structure(value, wanted)
    except ValueError:
        raise
    except Exception as error:
        raise _mismatch(wanted, value) from error


def checked(cls: type, data: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The values in `data` by the types of an options class, and the faults of the fields that do not fit, in words."""
    types, fields, given, faults = field_types(cls), attrs.fields_dict(cls), dict(data), {}
    for name, value in data.items():
        try:
            if name not in fields:
                raise ValueError(f"unknown option; {suggest(name, fields) or 'it has: ' + ', '.join(fields)}")
            given[name] = structure(value, types[name])
            check = fields[name].validator
            if check is not None and fields[name].converter is None:
                # One by one, so that every fault is found; a check that reads the whole object runs in the constructor.
                with contextlib.suppress(AttributeError):
                    check(None, fields[name], given[name])
        except Exception as error:
            faults[name] = words(error)
    missing = (f.name for f in fields.values() if f.init and f.default is attrs.NOTHING and f.name not in given)
    return given, faults | dict.fromkeys(missing, "is required")


def words(error: Exception) -> str:
    """What a check says; attrs puts more than the message into its errors."""
    return str(error.args[0] if error.args else error) or type(error).__name__


def plain(value: Any) -> Any:
    """Turn options into JSON-able data: attrs objects to dicts, tuples to lists, keys that are no strings to pairs."""
    if attrs.has(type(value)):
        return {k: plain(v) for k, v in attrs.asdict(value, recurse=False).items()}
    if isinstance(value := _data(value), Mapping):
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
