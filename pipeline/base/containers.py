"""Batches in classes of their own, taken apart and put together by torch's pytree.

It knows tuples, lists, dictionaries and named tuples. Collators of transformers return
dictionaries of another kind (``BatchEncoding``, a ``UserDict``), other code dataclasses: they
are registered when they are first seen, so that their tensors are moved, traced and stood in
for as those of a dictionary.
"""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True, slots=True)
class _Outline:
    """Of an object: what is not in its children."""

    keys: tuple[Any, ...]
    rest: dict[str, Any] = field(compare=False, repr=False)
    """Other attributes, kept as they are."""


def know_classes_in(batch: Any) -> None:
    """Register the classes of a batch that are like dictionaries."""
    while new := {type(leaf) for leaf in pytree.tree_leaves(batch)} - _known():
        if not (kinds := [kind for kind in new if _is_container(kind)]):
            return
        for kind in kinds:
            _register(kind)


def know_classes_of(structure: pytree.TreeSpec) -> None:
    """Register the classes of a structure that another process has found."""
    if structure.type is not None:
        if structure.type not in _known() and _is_container(structure.type):
            _register(structure.type)
        for child in structure.children():
            know_classes_of(child)


def opaque_class(batch: Any) -> str:
    """Return the name of a class in a batch whose tensors nobody can move; empty: none."""
    for leaf in pytree.tree_leaves(batch):
        inside = getattr(leaf, "__dict__", {}).values()
        if not isinstance(leaf, torch.Tensor) and any(
            isinstance(value, torch.Tensor) for value in pytree.tree_leaves([*inside])
        ):
            return type(leaf).__name__
    return ""


def _known() -> set[Any]:
    return set(pytree.SUPPORTED_NODES)


def _is_container(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, UserDict) or dataclasses.is_dataclass(kind))


def _register(kind: type) -> None:
    make = _made_dictionary if issubclass(kind, UserDict) else _made_dataclass
    pytree.register_pytree_node(kind, _taken_apart, partial(make, kind))


def _taken_apart(value: Any) -> tuple[list[Any], _Outline]:
    attributes = dict(getattr(value, "__dict__", {}))
    if isinstance(value, UserDict):
        content = attributes.pop("data")
    else:
        names = [one.name for one in dataclasses.fields(value)]
        content = {name: getattr(value, name) for name in names}
        attributes = {k: v for k, v in attributes.items() if k not in content}
    return [*content.values()], _Outline((*content,), attributes)


def _made_dictionary(kind: type, children: Iterable[Any], outline: _Outline) -> Any:
    made: Any = object.__new__(kind)
    data = dict(zip(outline.keys, children, strict=True))
    made.__dict__.update(outline.rest, data=data)
    return made


def _made_dataclass(kind: type, children: Iterable[Any], outline: _Outline) -> Any:
    made: Any = object.__new__(kind)
    content = dict(zip(outline.keys, children, strict=True))
    for name, value in {**outline.rest, **content}.items():
        object.__setattr__(made, name, value)  # it may be frozen
    return made
