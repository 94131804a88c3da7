"""Messages, frozen dataclasses, as one line of JSON and back, strictly.

An unknown or missing field, a wrong type or another schema version raises ``WireError``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from spottrain.errors import WireError, shortened
from spottrain.printable import printable_data

SCHEMA_VERSION = 1
"""Version of every message and file defined here."""

Message = TypeVar("Message")


def encode(message: Any) -> str:
    """Return a message as one line of JSON."""
    return _ENCODER.encode(message)


def _fields(message: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, those of others within it as they are."""
    if not dataclasses.is_dataclass(message):
        raise TypeError(
            f"messages hold no {type(message).__name__}: got {shortened(message)}"
        )
    cls: Any = type(message)
    return {name: getattr(message, name) for name in _names(cls)}


@functools.cache
def _names(cls: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(cls))


_ENCODER = json.JSONEncoder(default=_fields, separators=(",", ":"))


def decode(cls: Any, text: str | bytes, *, trusted: bool = True) -> Any:
    """Return the ``cls`` (a dataclass or a union of them) that ``text`` encodes.

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
        if isinstance(data, Mapping):
            _check_version(data, "")
        try:
            return _reader(cls)(data)
        except _UnfitError as error:
            raise _UnfitError(f"message{error}") from None
    except _UnfitError as error:
        raise WireError(str(error)) from None


class _UnfitError(Exception):
    """Data does not fit its type. The place is put before it on the way out, since only
    errors need it."""


_Reader = Callable[[Any], Any]
"""Returns data as a certain type, or raises ``_UnfitError``."""


def _check_version(data: Mapping[str, Any], place: str) -> None:
    version = data.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise _UnfitError(
            f"{place}schema_version must be {SCHEMA_VERSION}: got {shortened(version)}; "
            "run the same version of spottrain everywhere"
        )


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


@functools.cache
def _reader(hint: Any) -> _Reader:
    """Return what reads data as the type ``hint``."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return functools.partial(_read_union, get_args(hint))
    if origin is Literal:
        return functools.partial(_read_literal, get_args(hint))
    if origin is tuple:
        return functools.partial(_read_tuple, _reader(get_args(hint)[0]), hint)
    if dataclasses.is_dataclass(hint):
        return functools.partial(_read_dataclass, hint)
    if hint is float:
        return _read_float
    return functools.partial(_read_plain, hint)


def _unfit(hint: Any, data: Any) -> _UnfitError:
    return _UnfitError(
        f" must be {getattr(hint, '__name__', hint)}: got {shortened(data)}"
    )


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
    raise _UnfitError(f" must be one of {listed}: got {shortened(data)}")


def _read_tuple(read: _Reader, hint: Any, data: Any) -> tuple[Any, ...]:
    if not isinstance(data, (list, tuple)):
        raise _unfit(hint, data)
    items = []
    try:
        for item in data:
            items.append(read(item))
    except _UnfitError as error:
        raise _UnfitError(f"[{len(items)}]{error}") from None
    return tuple(items)


def _read_union(members: tuple[Any, ...], data: Any) -> Any:
    """Choose the member whose ``kind`` fits, or ``None``."""
    if data is None and type(None) in members:
        return None
    if isinstance(data, Mapping) and "kind" in data:
        for member in members:
            if dataclasses.is_dataclass(member):
                kinds = get_args(_hints(typing.cast(type, member))["kind"])
                if data["kind"] in kinds:
                    return _reader(typing.cast(type, member))(data)
        raise _UnfitError(f".kind is unknown: got {shortened(data['kind'])}")
    plain = [m for m in members if m is not type(None)]
    if len(plain) == 1:
        return _reader(plain[0])(data)
    raise _UnfitError(f" must be an object with a kind: got {shortened(data)}")


@functools.cache
def _field_readers(cls: Any) -> tuple[dict[str, _Reader], frozenset[str]]:
    """Return what reads each field of a dataclass, and the names of those it needs."""
    fields, unset = dataclasses.fields(cls), dataclasses.MISSING
    required = frozenset(field.name for field in fields if field.default is unset)
    return {name: _reader(hint) for name, hint in _hints(cls).items()}, required


def _read_dataclass(cls: Any, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise _unfit(cls, data)
    readers, required = _field_readers(cls)
    _check_version(data, ".")
    if not data.keys() <= readers.keys():
        unknown = min(data.keys() - readers.keys())
        raise _UnfitError(f".{unknown} is not a field of {cls.__name__}")
    if not required <= data.keys():
        missing = min(required - data.keys())
        raise _UnfitError(f".{missing} is missing from {cls.__name__}")
    values = {}
    for name, value in data.items():
        try:
            values[name] = readers[name](value)
        except _UnfitError as error:
            raise _UnfitError(f".{name}{error}") from None
    return cls(**values)
