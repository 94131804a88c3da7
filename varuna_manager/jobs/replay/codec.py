"""Immutable values of the manager as JSON data, and back by their types.

Values are what states consist of: dataclasses, named tuples, tuples, lists, sets, mappings,
enums and plain values. A mapping whose keys are not texts is a list of pairs. Fields that do
not count in comparisons are left out, as they decide nothing.

A field that the data lacks gets its default: what an earlier version wrote is read. A field
that a class lacks was written by a newer version, and is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Union, get_args, get_origin

Decoder = Callable[[Any], Any]
_PLAIN = (str, int, float, bool, type(None))
_COLLECTIONS = (tuple, list, frozenset, deque)


class CodecError(ValueError):
    """Data does not fit a type."""


# --- To data --------------------------------------------------------------------------


def to_data(value: Any) -> Any:
    """Return a value as what ``json.dumps`` takes."""
    cls = type(value)
    if cls in _PLAIN:
        return value
    if dataclasses.is_dataclass(cls):
        return {name: to_data(getattr(value, name)) for name in kept_fields(cls)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            return {key: to_data(one) for key, one in value.items()}
        return [[to_data(key), to_data(one)] for key, one in value.items()]
    if isinstance(value, frozenset):
        return sorted(map(to_data, value))
    if isinstance(value, (tuple, list, deque)):
        return [to_data(one) for one in value]
    raise TypeError(f"{cls.__name__} cannot be kept in a journal")


@functools.cache
def kept_fields(cls: Any) -> tuple[str, ...]:
    """Return the names of a dataclass's fields that are kept."""
    return tuple(one.name for one in dataclasses.fields(cls) if one.compare)


# --- From data ------------------------------------------------------------------------


def from_data(hint: Any, data: Any) -> Any:
    """Return the value of a type that data stands for.

    Raises:
        CodecError: It does not fit.
    """
    try:
        return decoder(hint)(data)
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        raise CodecError(f"not a {getattr(hint, '__name__', hint)}: {error}") from error


@functools.cache
def hints(cls: Any) -> Mapping[str, Any]:
    """Return the types of a class's fields."""
    return typing.get_type_hints(cls)


@functools.cache
def required(hint: Any) -> Any:
    """Return a type without None."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    (only,) = (one for one in get_args(hint) if one is not type(None))
    return only


@functools.cache
def decoder(hint: Any) -> Decoder:
    """Return the function that makes values of a type from data."""
    if (only := required(hint)) is not hint:
        decode = decoder(only)
        return lambda data: None if data is None else decode(data)
    origin = get_origin(hint) or hint
    if origin in _COLLECTIONS:
        return _sequence_decoder(origin, get_args(hint))
    if isinstance(origin, type):
        if dataclasses.is_dataclass(origin):
            return _dataclass_decoder(origin)
        if issubclass(origin, tuple):
            of_field = [decoder(one) for one in hints(origin).values()]
            return lambda data: origin(
                *(decode(one) for decode, one in zip(of_field, data, strict=True))
            )
        if issubclass(origin, Mapping):
            return _mapping_decoder(*get_args(hint))
        if issubclass(origin, Enum):
            return origin
    if origin is float:
        return _float
    return lambda data: data


def _float(data: Any) -> float:
    """Return a number as it is: a whole one may stand where a float is expected."""
    if not isinstance(data, (int, float)):
        raise CodecError(f"must be a number: got {data!r}")
    return data


def _sequence_decoder(origin: Any, args: tuple[Any, ...]) -> Decoder:
    if origin is tuple and args[-1] is not Ellipsis:
        of_item = [decoder(one) for one in args]
        return lambda data: tuple(
            decode(one) for decode, one in zip(of_item, data, strict=True)
        )
    of_any = decoder(args[0])
    return lambda data: origin(map(of_any, data))


def _mapping_decoder(key: Any, value: Any) -> Decoder:
    of_key, of_value = decoder(key), decoder(value)

    def decode(data: Any) -> dict[Any, Any]:
        pairs = data.items() if isinstance(data, dict) else data
        return {of_key(k): of_value(v) for k, v in pairs}

    return decode


def _dataclass_decoder(cls: Any) -> Decoder:
    of_field = {name: decoder(hints(cls)[name]) for name in kept_fields(cls)}

    def decode(data: Any) -> Any:
        if unknown := data.keys() - of_field.keys():
            raise CodecError(f"{cls.__name__} has no field {min(unknown)}")
        return cls(**{name: of_field[name](one) for name, one in data.items()})

    return decode
