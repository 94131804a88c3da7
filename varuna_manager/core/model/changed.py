"""Copies of the manager's state with other values in some fields."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["replace"]

T = TypeVar("T")

if TYPE_CHECKING:
    from dataclasses import replace
else:

    def replace(value: T, /, **changes: Any) -> T:
        """Return ``dataclasses.replace(value, **changes)``.

        A class whose instances have a ``__dict__`` and check nothing, as ``State``, is
        copied at once, not field by field: an event copies it several times.

        Raises:
            TypeError: There is no such field.
        """
        cls = type(value)
        if hasattr(cls, "__slots__") or hasattr(cls, "__post_init__"):
            return dataclasses.replace(value, **changes)
        if not changes.keys() <= cls.__dataclass_fields__.keys():
            return dataclasses.replace(value, **changes)  # it says which one
        copy = object.__new__(cls)
        copy.__dict__.update(value.__dict__, **changes)
        return copy
