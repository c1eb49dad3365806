"""Reads words of a command line as values of config keys, as strictly as the keys' owners do."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union, get_args, get_origin

import attrs
from decodekit.converter import field_types, structure
from decodekit.errors import ConfigError, Problem
from decodekit.keys import keys

from .console import aside

_WORDS: dict[str, bool | None] = {"true": True, "false": False, "none": None, "null": None}


@attrs.frozen
class Declared:
    """What the owner of a key says about it."""

    type: Any
    field: Any = None
    """The attrs field, or None where the owner has none."""
    owner: str = ""


def declared(name: str) -> Declared:
    """Load the owner of a key and ask it. A name that is no key is a section of plugins, a dict."""
    key = keys.find(name)
    if key is None:
        return Declared(dict)
    with aside():
        cls = key.load()
    if not attrs.has(cls) or key.field not in attrs.fields_dict(cls):
        return Declared(Any, None, key.owner)
    return Declared(field_types(cls)[key.field], attrs.fields_dict(cls)[key.field], key.owner)


def members(wanted: Any) -> set[Any]:
    """The types of a union without None, or the type itself."""
    union = get_origin(wanted) in (Union, types.UnionType)
    return set(get_args(wanted)) - {type(None)} if union else {wanted}


def one_each(about: Declared, value: Any) -> bool:
    """Whether `value` holds one value for each prompt: the key says so, or takes a list and also a list of such."""
    if not isinstance(value, (list, tuple)):
        return False
    kinds = members(about.type)
    nested = [kind for kind in kinds if get_origin(kind) is tuple and tuple[kind, ...] in kinds]
    return bool(getattr(about.field, "metadata", {}).get("per_row")) or (
        bool(nested and value) and all(isinstance(item, (list, tuple)) for item in value)
    )


def typed(words: Mapping[str, Sequence[Any]], problems: list[Problem]) -> dict[str, Any]:
    """Key -> value of key -> words. Raises one `ConfigError` with `problems` and everything that is wrong here."""
    values = {}
    for name, given in words.items():
        about = declared(name)
        try:
            values[name] = read(given, about.type)
            check = getattr(about.field, "validator", None)
            # A check reads what the field's converter makes of a value; the owner itself runs both.
            if check is not None and values[name] is not None and about.field.converter is None:
                check(None, about.field, structure(values[name], about.type))
        except Exception as error:  # converters of foreign types raise what they like
            problems.append(Problem(name, str(error), about.owner))
    if problems:
        raise ConfigError(problems)
    return values


def read(given: Sequence[Any], wanted: Any) -> Any:
    """The first meaning of the words that `wanted` accepts, as plain data.

    Several words are a list, and so is one with commas where nothing else fits. Raises what `wanted` says about the
    likeliest meaning.
    """
    fault: Exception | None = None
    for meaning in _meanings(given):
        try:
            structure(meaning, wanted)
        except Exception as error:
            fault = fault or error
        else:
            return meaning
    first = given[0]
    if len(given) > 1:
        raise ValueError(f"was given {len(given)} times, but is no list; {fault}")
    if literal(first) is None:
        return None  # unsets any key
    if str(first).startswith(("[", "{")) and literal(first) == first:
        raise ValueError(f"is not valid JSON: {first}")
    raise ValueError(str(fault))


def _meanings(given: Sequence[Any]) -> Iterator[Any]:
    literals = [literal(word) for word in given]
    if len(given) == 1:
        yield literals[0]
        yield given[0]
    yield literals
    yield list(given)
    if len(given) == 1 and isinstance(given[0], str) and "," in given[0]:
        yield [literal(part.strip()) for part in given[0].split(",")]


def literal(word: Any) -> Any:
    """A word as data: number, True, False, None, JSON list or object; otherwise the word itself."""
    if not isinstance(word, str):
        return word
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if word[:1] in ("[", "{"):
        try:
            return json.loads(word)
        except ValueError:
            return word
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
