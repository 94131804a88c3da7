"""Immutable values as JSON data, and back by their types, strictly.

What crosses a process or a disk is made of frozen dataclasses, pydantic's models, named
tuples, tuples, frozen sets, mappings, enums and plain values. A mapping whose keys are not
all texts is a list of pairs. Fields that do not count in comparisons are left out, as they
decide nothing. A field that the data lacks gets its default. Models are read as dataclasses
are: what their validators check was checked when a person wrote it.

Of a union of ``Message``s, data has the class as its ``kind``: ``worker_died`` of ``WorkerDied``.

An unknown or missing field, a wrong type or another schema version raises ``WireError``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import types
import typing
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

from spottrain.errors import WireError, shortened
from spottrain.printable import printable_data

SCHEMA_VERSION = 1
"""Of every message and file that is written with this module."""
_PLAIN = (str, int, float, bool, type(None))


class Message:
    """The base of dataclasses that are told apart by their class, see the module."""

    __slots__ = ()

    @property
    def kind(self) -> str:
        """Its ``kind`` in data."""
        cls: Any = type(self)
        return kind_of(cls)


@functools.cache
def kind_of(cls: Any) -> str:
    """Return the ``kind`` of a class of messages; empty: it is no message."""
    if not issubclass(cls, Message):
        return ""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()


# --- To data --------------------------------------------------------------------------


def encode(value: Any) -> str:
    """Return a value as one line of JSON."""
    return json.dumps(to_data(value), separators=(",", ":"))


def to_data(value: Any) -> Any:
    """Return a value as what ``json.dumps`` takes."""
    cls: Any = type(value)
    if cls in _PLAIN:
        return value
    if _has_fields(cls):
        data = {name: to_data(getattr(value, name)) for name in kept_fields(cls)}
        return {**data, "kind": kind} if (kind := kind_of(cls)) else data
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
    if isinstance(value, (str, int, float)):  # of a class of its own, such as numpy's
        return value
    raise TypeError(f"{cls.__name__} cannot be JSON: got {shortened(value)}")


def _has_fields(cls: Any) -> bool:
    return hasattr(cls, "__dataclass_fields__") or hasattr(cls, "model_fields")


@functools.cache
def kept_fields(cls: Any) -> tuple[str, ...]:
    """Return the names of the fields of a dataclass or model that are kept."""
    if not dataclasses.is_dataclass(cls):
        return tuple(cls.model_fields)
    return tuple(one.name for one in dataclasses.fields(cls) if one.compare)


# --- From data ------------------------------------------------------------------------


def decode(cls: Any, text: str | bytes, *, trusted: bool = True) -> Any:
    """Return the ``cls`` (a type, or a union of dataclasses) that ``text`` encodes.

    Args:
        cls: The class, or classes.
        text: JSON.
        trusted: False: its texts are made ``printable``, as they will be shown.

    Raises:
        WireError: ``text`` is not JSON or does not fit ``cls``.
    """
    try:
        data = json.loads(text)
        if not trusted:
            data = printable_data(data)
    except (ValueError, RecursionError) as error:
        raise WireError(f"message is not JSON: {error}") from error
    return from_data(cls, data)


def from_data(cls: Any, data: Any) -> Any:
    """Like ``decode``, from parsed JSON."""
    try:
        if type(data) is dict:
            _check_version(data, "")
        try:
            return reader(cls)(data)
        except UnfitError as error:
            raise UnfitError(f"message{error}") from None
        except (TypeError, ValueError, RecursionError) as error:
            raise UnfitError(f"message does not fit: {error}") from error
    except UnfitError as error:
        raise WireError(str(error)) from None


class UnfitError(Exception):
    """Data does not fit its type. The place is put before it on the way out, since only
    errors need it."""


Reader = Callable[[Any], Any]
"""Returns data as a certain type, or raises."""


def _check_version(data: Mapping[str, Any], place: str) -> None:
    version = data.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise UnfitError(
            f"{place}schema_version must be {SCHEMA_VERSION}: got {shortened(version)}; "
            "run the same version of spottrain everywhere"
        )


@functools.cache
def hints(cls: type) -> dict[str, Any]:
    """Return the types of a class's fields."""
    return typing.get_type_hints(cls)


@functools.cache
def field_readers(cls: Any) -> dict[str, Reader]:
    """Return what reads each of a dataclass's fields that are kept."""
    return {name: reader(hints(cls)[name]) for name in kept_fields(cls)}


@functools.cache
def required(hint: Any) -> Any:
    """Return a type without None."""
    if get_origin(hint) not in (Union, types.UnionType):
        return hint
    members = tuple(one for one in get_args(hint) if one is not type(None))
    return members[0] if len(members) == 1 else Union[members]  # noqa: UP007


@functools.cache
def reader(hint: Any) -> Reader:
    """Return what reads data as the type ``hint``."""
    origin, args = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, types.UnionType):
        return functools.partial(_read_union, args)
    if origin is Literal:
        return functools.partial(_read_literal, args)
    if hint is float:
        return _read_float
    if not isinstance(origin, type):
        return lambda data: data
    if _has_fields(origin):
        return functools.partial(_read_object, origin)
    if issubclass(origin, Enum):
        return functools.partial(_read_enum, origin)
    if issubclass(origin, Mapping):
        of_key, of_value = map(reader, args)
        return functools.partial(_read_mapping, of_key, of_value, hint)
    if issubclass(origin, tuple) and (not args or args[-1] is not Ellipsis):
        each = tuple(map(reader, args or hints(origin).values()))
        return functools.partial(_read_fields, each, hint)
    if issubclass(origin, (tuple, list, frozenset, deque)):
        return functools.partial(_read_items, origin, reader(args[0]), hint)
    return functools.partial(_read_plain, hint)


def _unfit(hint: Any, data: Any) -> UnfitError:
    return UnfitError(f" must be {getattr(hint, '__name__', hint)}: got {shortened(data)}")


def _read_plain(hint: Any, data: Any) -> Any:
    if type(data) is hint:
        return data
    raise _unfit(hint, data)


def _read_float(data: Any) -> float:
    """Return one of Python's floats; what is too large is infinite."""
    if type(data) is float:
        return data
    if not isinstance(data, (int, float)) or isinstance(data, bool):
        raise _unfit(float, data)
    try:
        return float(data)
    except OverflowError:
        return math.inf if data > 0 else -math.inf


def _read_literal(known: tuple[Any, ...], data: Any) -> Any:
    if data in known:
        return data
    listed = ", ".join(map(repr, known))
    raise UnfitError(f" must be one of {listed}: got {shortened(data)}")


def _read_enum(cls: type[Enum], data: Any) -> Enum:
    try:
        return cls(data)
    except ValueError:
        listed = ", ".join(repr(one.value) for one in cls)
        raise UnfitError(f" must be one of {listed}: got {shortened(data)}") from None


def _read_items(origin: Any, read: Reader, hint: Any, data: Any) -> Any:
    if not isinstance(data, (list, tuple)):
        raise _unfit(hint, data)
    items: list[Any] = []
    try:
        for item in data:
            items.append(read(item))
    except UnfitError as error:
        raise UnfitError(f"[{len(items)}]{error}") from None
    return origin(items)


def _read_fields(each: tuple[Reader, ...], hint: Any, data: Any) -> Any:
    """Return a tuple of so many items, or a named tuple."""
    if not isinstance(data, (list, tuple)) or len(data) != len(each):
        raise _unfit(hint, data)
    items = [read(one) for read, one in zip(each, data, strict=True)]
    return hint(*items) if hasattr(hint, "_fields") else tuple(items)


def _read_mapping(of_key: Reader, of_value: Reader, hint: Any, data: Any) -> dict[Any, Any]:
    if not isinstance(data, (dict, list)):
        raise _unfit(hint, data)
    pairs = data.items() if isinstance(data, dict) else data
    found = {}
    for key, value in pairs:
        try:
            found[of_key(key)] = of_value(value)
        except UnfitError as error:
            raise UnfitError(f"[{shortened(key)}]{error}") from None
    return found


def _read_union(members: tuple[Any, ...], data: Any) -> Any:
    """Choose the member whose ``kind`` fits, or ``None``."""
    if data is None and type(None) in members:
        return None
    plain = [member for member in members if member is not type(None)]
    if len(plain) == 1:
        return reader(plain[0])(data)
    if all(get_origin(member) is Literal for member in plain):
        return _read_literal(sum(map(get_args, plain), ()), data)
    if not any(map(_has_fields, plain)):
        return _read_first(plain, data)
    if type(data) is dict and "kind" in data:
        for member in plain:
            if kind_of(member) == data["kind"]:
                return reader(member)(data)
        raise UnfitError(f".kind is unknown: got {shortened(data['kind'])}")
    raise UnfitError(f" must be an object with a kind: got {shortened(data)}")


def _read_first(members: list[Any], data: Any) -> Any:
    """Return data as the first type that it fits, such as one of ``bool | Literal["auto"]``."""
    for member in members[:-1]:
        with contextlib.suppress(UnfitError):
            return reader(member)(data)
    return reader(members[-1])(data)


class _Fields(NamedTuple):
    """How a dataclass is read."""

    readers: dict[str, Reader]
    needed: frozenset[str]
    """Names of the fields without a default."""
    has_version: bool
    kind: str
    """See ``kind_of``."""


@functools.cache
def _fields_of(cls: Any) -> _Fields:
    readers = field_readers(cls)
    if dataclasses.is_dataclass(cls):
        unset = dataclasses.MISSING
        defaults = {f.name: (f.default, f.default_factory) for f in dataclasses.fields(cls)}
        needed = {name for name in readers if defaults[name] == (unset, unset)}
    else:
        needed = {name for name in readers if cls.model_fields[name].is_required()}
    return _Fields(readers, frozenset(needed), "schema_version" in readers, kind_of(cls))


def _read_object(cls: Any, data: Any) -> Any:
    if type(data) is not dict:
        raise _unfit(cls, data)
    readers, needed, has_version, kind = _fields_of(cls)
    if has_version:
        _check_version(data, ".")
    if kind and "kind" in data:
        data = {**data}
        _read_literal((kind,), data.pop("kind"))
    if not data.keys() <= readers.keys():
        unknown = min(data.keys() - readers.keys())
        raise UnfitError(f".{unknown} is not a field of {cls.__name__}")
    if not needed <= data.keys():
        missing = min(needed - data.keys())
        raise UnfitError(f".{missing} is missing from {cls.__name__}")
    values, name = {}, ""
    try:
        for name, value in data.items():
            values[name] = readers[name](value)
    except UnfitError as error:
        raise UnfitError(f".{name}{error}") from None
    return getattr(cls, "model_construct", cls)(**values)
