"""Looks whether a request has what it must have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def has(value: Any, path: str) -> bool:
    """Whether something is there; in every item of the lists on the way.

    Args:
        value: Dicts and lists.
        path: Keys with dots between them.
    """
    name, _, rest = path.partition(".")
    if not isinstance(value, dict) or name not in value:
        return False
    inner = value[name]
    if inner in ("", [], {}):
        return False
    if not rest:
        return True
    return all(has(item, rest) for item in items(inner))


def items(value: Any) -> Iterator[Any]:
    """Yield the items of a list, or the one thing that is no list."""
    if isinstance(value, list):
        yield from value
    else:
        yield value
