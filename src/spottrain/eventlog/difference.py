"""The difference of two states: what a journal keeps of a decision.

States are immutable and share what has not changed, so the difference is found by identity
first, and costs what has changed. It is JSON data:

- ``{field: difference, …}`` of a dataclass,
- ``["=", value]``: another value,
- ``["map", [[key, difference], …], [key, …]]``: entries of a mapping that were changed or
  added at its end, and those that were taken out before, to be added again or not,
- ``["seq", [[position, number, [value, …]], …]]``: of a tuple, how many items from a
  position on were replaced by which; positions are those before the change.

``apply`` puts a difference into the state before it and gets the one after it, order of
mappings included. It decides nothing.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from spottrain.codec import (
    UnfitError,
    field_readers,
    hints,
    kept_fields,
    reader,
    required,
    to_data,
)
from spottrain.errors import WireError
from spottrain.eventlog.changed import replace

Difference = dict[str, Any] | list[Any]
T = TypeVar("T")


def difference(before: Any, after: Any) -> Difference | None:
    """Return what leads from one value to another; None: they are the same."""
    if before is after:
        return None
    cls = type(after)
    if type(before) is not cls:
        return ["=", to_data(after)]
    if dataclasses.is_dataclass(cls):
        changed = {}
        for name in kept_fields(cls):
            old, new = getattr(before, name), getattr(after, name)
            if old is not new and (one := difference(old, new)) is not None:
                changed[name] = one
        return changed or None
    if isinstance(after, Mapping):
        return _of_mappings(before, after)
    if cls is tuple:
        return _of_tuples(before, after)
    return None if before == after else ["=", to_data(after)]


def _of_mappings(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> Difference | None:
    if len(before) == len(after) and all(map(operator.eq, before, after)):
        changed = [
            [to_data(key), one]
            for key, value in after.items()
            if (one := difference(before[key], value)) is not None
        ]
        return ["map", changed, []] if changed else None
    places = {key: at for at, key in enumerate(before)}
    newest, stays = -1, True
    put, out = [], [key for key in before if key not in after]
    for key, value in after.items():
        # Keys stay in order up to the first that is new or was moved; the rest is added.
        place = places.get(key, -1)
        stays = stays and place > newest
        newest = place
        if not stays and key in before:
            out.append(key)
        one = difference(before[key], value) if key in before else ["=", to_data(value)]
        if one is not None or not stays:
            put.append([to_data(key), one or {}])
    return ["map", put, [to_data(key) for key in out]] if put or out else None


def _of_tuples(before: tuple[Any, ...], after: tuple[Any, ...]) -> Difference | None:
    """Return the edits between items that stay: those that are equal at both ends, and the
    same objects in between."""
    shorter = min(len(before), len(after))
    begin = 0
    while begin < shorter and _same(before[begin], after[begin]):
        begin += 1
    tail = 0
    while tail < shorter - begin and _same(before[-1 - tail], after[-1 - tail]):
        tail += 1
    old_end, new_end = len(before) - tail, len(after) - tail
    if begin == old_end and begin == new_end:
        return None
    places = {id(before[at]): at for at in range(begin, old_end)}
    edits, old_from, new_from = [], begin, begin
    for at in range(begin, new_end + 1):
        place = old_end if at == new_end else places.get(id(after[at]), -1)
        if place < old_from:
            continue
        if place > old_from or at > new_from:
            values = [to_data(one) for one in after[new_from:at]]
            edits.append([old_from, place - old_from, values])
        old_from, new_from = place + 1, at + 1
    return ["seq", edits]


def _same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


def apply(before: T, changes: Difference | None) -> T:
    """Return the value that a difference leads to.

    Raises:
        WireError: The difference is not one of such a value.
    """
    if changes is None:
        return before
    try:
        after: T = _apply(type(before), before, changes)
    except (UnfitError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise WireError(str(error)) from error
    return after


def _apply(hint: Any, before: Any, changes: Any) -> Any:
    if not changes:
        return before
    if isinstance(changes, dict):
        cls: Any = type(before)
        readers, values = field_readers(cls), {}
        for name, one in changes.items():
            if name not in readers:
                raise WireError(f"{cls.__name__} has no field {name}")
            if type(one) is list and one[0] == "=":
                # Most are. A reader is faster found by its field than by its type.
                values[name] = readers[name](one[1])
            else:
                values[name] = _apply(hints(cls)[name], getattr(before, name), one)
        return replace(before, **values)
    kind, *rest = changes
    if kind == "=":
        return reader(hint)(rest[0])
    if kind == "map":
        return _apply_to_mapping(get_args(required(hint)), before, *rest)
    if kind == "seq":
        return _apply_to_tuple(hint, before, rest[0])
    raise WireError(f"{kind!r} is not a kind of difference")


def _apply_to_mapping(
    types: Any, before: Mapping[Any, Any], put: Any, removed: Any
) -> dict[Any, Any]:
    of_key, of_value = types
    read_key, result = reader(of_key), dict(before)
    for key in removed:
        del result[read_key(key)]
    for data, one in put:
        key = read_key(data)
        result[key] = _apply(of_value, before.get(key), one)
    return result


def _apply_to_tuple(hint: Any, before: tuple[Any, ...], edits: Any) -> Any:
    items = get_args(required(hint))
    each = reader(items[0]) if items[-1] is Ellipsis else None
    result, upto = list[Any](), 0
    for place, number, values in edits:
        result += before[upto:place]
        for one in values:
            result.append((each or reader(items[len(result)]))(one))
        upto = place + number
    return tuple(result + list(before[upto:]))
