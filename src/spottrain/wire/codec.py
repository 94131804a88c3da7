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
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from spottrain.errors import WireError

SCHEMA_VERSION = 1
"""Version of every message and file defined here."""

Message = TypeVar("Message")


def encode(message: Any) -> str:
    """Return a message as one line of JSON."""
    return json.dumps(dataclasses.asdict(message), separators=(",", ":"))


def decode(cls: Any, text: str | bytes) -> Any:
    """Return the ``cls`` (a dataclass or a union of them) that ``text`` encodes.

    Raises:
        WireError: ``text`` is not JSON or does not fit ``cls``.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"message is not JSON: {error}") from error
    return from_data(cls, data)


def from_data(cls: Any, data: Any) -> Any:
    """Like ``decode``, from parsed JSON."""
    if isinstance(data, Mapping):
        _check_version(data, "")
    return _build(cls, data, "message")


def _check_version(data: Mapping[str, Any], place: str) -> None:
    version = data.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise WireError(
            f"{place}schema_version must be {SCHEMA_VERSION}: got {version!r}; "
            "run the same version of spottrain everywhere"
        )


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _build(hint: Any, data: Any, where: str) -> Any:
    """Return ``data`` as the type ``hint``; ``where`` names the place in errors."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _build_union(get_args(hint), data, where)
    if origin is Literal:
        if data in get_args(hint):
            return data
        known = ", ".join(map(repr, get_args(hint)))
        raise WireError(f"{where} must be one of {known}: got {data!r}")
    if origin is tuple:
        if isinstance(data, (list, tuple)):
            item = get_args(hint)[0]
            return tuple(_build(item, x, f"{where}[{i}]") for i, x in enumerate(data))
    elif dataclasses.is_dataclass(hint):
        if isinstance(data, Mapping):
            return _build_dataclass(hint, data, where)
    elif hint is float:
        if isinstance(data, (int, float)) and not isinstance(data, bool):
            return _float(data)
    elif type(data) is hint:
        return data
    raise WireError(f"{where} must be {getattr(hint, '__name__', hint)}: got {data!r}")


def _float(number: float) -> float:
    """Return a number as one of Python's floats; what is too large as infinite."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _build_union(members: tuple[Any, ...], data: Any, where: str) -> Any:
    """Choose the member whose ``kind`` fits, or ``None``."""
    if data is None and type(None) in members:
        return None
    classes = [m for m in members if dataclasses.is_dataclass(m)]
    if isinstance(data, Mapping) and "kind" in data:
        for member in classes:
            if data["kind"] in get_args(_hints(typing.cast(type, member))["kind"]):
                return _build(member, data, where)
        raise WireError(f"{where}.kind is unknown: got {data['kind']!r}")
    plain = [m for m in members if m is not type(None)]
    if len(plain) == 1:
        return _build(plain[0], data, where)
    raise WireError(f"{where} must be an object with a kind: got {data!r}")


def _build_dataclass(cls: Any, data: Mapping[str, Any], where: str) -> Any:
    hints = _hints(cls)
    _check_version(data, f"{where}.")
    if unknown := sorted(set(data) - set(hints)):
        raise WireError(f"{where}.{unknown[0]} is not a field of {cls.__name__}")
    fields, unset = dataclasses.fields(cls), dataclasses.MISSING
    required = {field.name for field in fields if field.default is unset}
    if missing := sorted(required - set(data)):
        raise WireError(f"{where}.{missing[0]} is missing from {cls.__name__}")
    return cls(**{k: _build(hints[k], v, f"{where}.{k}") for k, v in data.items()})
