"""Copies of the manager's state with other values in some fields."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["replace"]

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import replace
else:

    def replace(value: T, /, **changes: Any) -> T:
        """Return ``dataclasses.replace(value, **changes)``.

        A class whose instances have a ``__dict__``, check nothing and keep nothing that was
        computed, as ``State`` and its parts, is copied at once, not field by field: an event
        copies several.

        Raises:
            TypeError: There is no such field.
        """
        cls = type(value)
        if _is_copied_at_once(cls):
            fields = value.__dict__ | changes
            if len(fields) == len(value.__dict__):
                copy = object.__new__(cls)
                object.__setattr__(copy, "__dict__", fields)
                return copy
        return dataclasses.replace(value, **changes)


@functools.cache
def _is_copied_at_once(cls: type) -> bool:
    if hasattr(cls, "__slots__") or hasattr(cls, "__post_init__"):
        return False
    return not any(
        isinstance(value, functools.cached_property)
        for base in cls.__mro__
        for value in vars(base).values()
    )
