"""Checks JSON against the models of Azure's own SDK, which itself drops what it does
not know without a word.

Private names of the SDK are used here: constraints.txt pins it.
"""

from __future__ import annotations

import enum
import functools
import importlib
import operator
import sys
import types
import typing
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Union

_MODULES = {
    "compute": "azure.mgmt.compute.models",
    "network": "azure.mgmt.network.models",
    "resources": "azure.mgmt.resource.resources.models",
}
_OPEN = {"VirtualMachineSizeTypes"}
"""Enumerations that the SDK has stopped to keep up."""
_PLAIN: dict[Any, tuple[type, ...]] = {
    str: (str,),
    int: (int,),
    float: (int, float),
    bool: (bool,),
}


class DriftError(Exception):
    """A message does not fit the SDK's model, or the rules of this project."""


def model(name: str) -> Any:
    """Return a model of the SDK, such as ``compute.VirtualMachine``."""
    package, _, kind = name.partition(".")
    return getattr(importlib.import_module(_MODULES[package]), kind)


def check(name: str, told: Any, *, request: bool) -> None:
    """Check one message.

    Args:
        name: Of the model.
        told: The parsed JSON.
        request: Whether it is sent by us; then it must not set what is read-only.

    Raises:
        DriftError: it does not fit.
    """
    wrong = list(_misfits(model(name), told, name, request))
    if wrong:
        raise DriftError("; ".join(wrong))


def _misfits(hint: Any, told: Any, where: str, request: bool) -> Iterator[str]:
    """Yield what does not fit a type."""
    options = [each for each in _flat(hint) if each is not type(None)]
    if Any in options:
        return
    if enums := [each for each in options if _is(each, enum.Enum)]:
        known = {member.value for each in enums for member in each}
        if not isinstance(told, str):
            yield f"{where}: {told!r} is no text"
        elif told not in known and not any(e.__name__ in _OPEN for e in enums):
            yield f"{where}: {told!r} is none of {enums[0].__name__}"
        return
    best: list[str] | None = None
    for option in options:
        wrong = list(_misfit_of(option, told, where, request))
        if not wrong:
            return
        best = wrong if best is None or len(wrong) < len(best) else best
    yield from best or [f"{where}: {told!r} fits nothing"]


def _misfit_of(option: Any, told: Any, where: str, request: bool) -> Iterator[str]:
    origin, args = typing.get_origin(option), typing.get_args(option)
    if origin is list:
        if not isinstance(told, list):
            yield f"{where}: {told!r} is no list"
            return
        for number, item in enumerate(told):
            yield from _misfits(args[0], item, f"{where}[{number}]", request)
    elif origin is dict:
        if not isinstance(told, dict):
            yield f"{where}: {told!r} is no object"
            return
        for key, item in told.items():
            yield from _misfits(args[1], item, f"{where}.{key}", request)
    elif origin is typing.Literal:
        if told not in args:
            yield f"{where}: {told!r} is none of {args}"
    elif option in _PLAIN:
        right = isinstance(told, _PLAIN[option])
        if not right or (isinstance(told, bool) and option is not bool):
            yield f"{where}: {told!r} is no {option.__name__}"
    elif option is datetime:
        yield from _no_moment(told, where)
    else:
        yield from _no_model(option, told, where, request)


def _no_moment(told: Any, where: str) -> Iterator[str]:
    try:
        moment = datetime.fromisoformat(told)
    except (TypeError, ValueError):
        yield f"{where}: {told!r} is no moment"
        return
    if moment.tzinfo is None:
        yield f"{where}: {told!r} is in no time zone"


def _no_model(kind: Any, told: Any, where: str, request: bool) -> Iterator[str]:
    if not isinstance(told, dict):
        yield f"{where}: {told!r} is no {kind.__name__}"
        return
    fields = _fields(kind)
    for name, value in told.items():
        if name not in fields:
            yield f"{where}.{name}: {kind.__name__} has no such field"
            continue
        hint, writable, _ = fields[name]
        if request and not writable:
            yield f"{where}.{name}: cannot be set"
        yield from _misfits(hint, value, f"{where}.{name}", request)
    for name, (_, writable, needed) in fields.items():
        if needed and name not in told and (writable or not request):
            yield f"{where}.{name}: missing"


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool, bool]]:
    """Return (type, may be set, must be there) of each field by its name in JSON."""
    kind.__new__(kind)  # fills in what the next line reads
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        names = vars(sys.modules[base.__module__])
        scope = {
            **names,
            "_models": _package(base),
            "datetime": sys.modules["datetime"],
        }
        for name, text in vars(base).get("__annotations__", {}).items():
            hints[name] = _resolved(text, scope)
    found = {}
    for attribute, field in kind._attr_to_rest_field.items():
        hint = hints[attribute]
        writable = field._visibility is None or "create" in field._visibility
        needed = type(None) not in _flat(hint)
        found[field._rest_name] = hint, writable, needed
    return found


def _package(kind: Any) -> Any:
    return sys.modules[kind.__module__.removesuffix("._models")]


def _flat(hint: Any) -> Iterator[Any]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        for each in typing.get_args(hint):
            yield from _flat(each)
    else:
        yield hint


def _resolved(hint: Any, scope: dict[str, Any]) -> Any:
    """Return a type with all names in it looked up."""
    if isinstance(hint, typing.ForwardRef):
        hint = hint.__forward_arg__
    if isinstance(hint, str):
        return _resolved(eval(hint, scope), scope)
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if not args or origin is typing.Literal:
        return hint
    inner = tuple(_resolved(each, scope) for each in args)
    if origin is Union:
        return functools.reduce(operator.or_, inner)
    return origin[inner]


def _is(kind: Any, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)
