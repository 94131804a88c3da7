"""What an optimizer keeps for a parameter, as tensors: nested lists and dictionaries, too.

A leaf of a nested value is named as in Python, such as ``Q[0]`` or ``moments['slow']``, and
is committed like any other tensor. So is each of the tensors that a tensor of a subclass is made of,
such as ``exp_avg.codes`` and ``exp_avg.scale`` of a moment in 8 bits. How leaves are nested is fixed by the first step: every
process finds it out for itself, none of it is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.sections import TensorSpec

StateSpec = Mapping[str, Mapping[str, TensorSpec]]
"""Parameter name to leaf to tensor."""


@dataclass(frozen=True, slots=True)
class Form:
    """How one value of an optimizer's state is nested."""

    tree: pytree.TreeSpec
    leaves: tuple[str, ...]
    """Names of its tensors and numbers, in order."""
    constants: tuple[tuple[int, str | None], ...]
    """Texts and None between them: position among all, and value."""

    def build(self, leaves: Mapping[str, object]) -> object:
        """Return the value with these tensors and numbers."""
        values = [leaves[name] for name in self.leaves]
        for position, constant in self.constants:
            values.insert(position, constant)
        return pytree.tree_unflatten(values, self.tree)


Forms = Mapping[str, Form]
"""Of one parameter, by key of its state."""


@dataclass(frozen=True, slots=True)
class FlatState:
    """State of one parameter."""

    forms: Forms
    leaves: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """What an optimizer keeps."""

    state: StateSpec
    forms: Mapping[str, Forms]
    """How ``state`` is nested, by parameter."""
    group_bytes: Mapping[str, int]
    """Bytes of the tensors in each parameter group, by its first parameter's name."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        specs = (spec for keys in self.state.values() for spec in keys.values())
        return sum(spec.num_bytes for spec in specs) + sum(self.group_bytes.values())


def flatten(name: str, state: Mapping[str, object]) -> FlatState:
    """Return the state of a parameter as its leaves; what is None is left out.

    Args:
        name: Of the parameter.
        state: What ``optimizer.state`` has for it.

    Raises:
        UserCodeError: Something else than tensors, numbers, texts and None is kept, or two
            leaves have one name.
    """
    forms: dict[str, Form] = {}
    leaves: dict[str, object] = {}
    for key, value in state.items():
        if value is None:
            continue
        paths, tree = pytree.tree_flatten_with_path(_opened(value))
        names, constants = [], []
        for position, (path, leaf) in enumerate(paths):
            at = key + pytree.keystr(path)
            if leaf is None or isinstance(leaf, str):
                constants.append((position, leaf))
            elif not isinstance(leaf, torch.Tensor | bool | int | float):
                raise UserCodeError(
                    f"optimizer state {at!r} of {name} must be a tensor or a number, or "
                    f"lists or dictionaries of them: got {type(leaf).__name__}; use an "
                    "optimizer that keeps such state only"
                )
            elif at in leaves:
                raise UserCodeError(
                    f"optimizer state {at!r} of {name} is there twice, by itself and "
                    "within a list or a dictionary: rename one of the keys"
                )
            else:
                names.append(at)
                leaves[at] = leaf
        forms[key] = Form(tree, tuple(names), tuple(constants))
    return FlatState(forms, leaves)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A tensor of a subclass as the tensors that it is made of (torch's protocol of "wrapper
    subclasses": ``__tensor_flatten__``)."""

    kind: Any
    parts: dict[str, object]
    """By attribute, opened themselves."""
    constants: object
    shape: torch.Size
    stride: tuple[int, ...]


def _opened(value: object) -> object:
    """Return a value of an optimizer's state with each tensor of a subclass opened."""
    return pytree.tree_map_only(torch.Tensor, _open, value)


def _open(tensor: torch.Tensor) -> object:
    if not is_traceable_wrapper_subclass(tensor):
        return tensor
    names, constants = tensor.__tensor_flatten__()
    parts = {name: _open(getattr(tensor, name)) for name in names}
    return _Opened(type(tensor), parts, constants, tensor.shape, tensor.stride())


def _parts_of(opened: _Opened) -> tuple[list[object], object]:
    outside = opened.kind, tuple(opened.parts), opened.constants, opened.shape, opened.stride
    return list(opened.parts.values()), outside


def _named_parts_of(opened: _Opened) -> tuple[list[tuple[pytree.KeyEntry, object]], object]:
    parts, outside = _parts_of(opened)
    keys = map(pytree.GetAttrKey, opened.parts)
    return list(zip(keys, parts, strict=True)), outside


def _close(parts: Iterable[object], outside: Any) -> object:
    kind, names, constants, shape, stride = outside
    parts = list(parts)
    if not all(isinstance(part, torch.Tensor) for part in parts):  # see ``_in_words``
        return kind.__name__
    return kind.__tensor_unflatten__(dict(zip(names, parts, strict=True)), constants, shape, stride)


pytree.register_pytree_node(_Opened, _parts_of, _close, flatten_with_keys_fn=_named_parts_of)


def check_forms(name: str, kept: Forms, made: Forms) -> None:
    """Refuse state that is nested differently from after the first step.

    Raises:
        UserCodeError: It is.
    """
    if kept == made:
        return
    if kept.keys() != made.keys():
        raise UserCodeError(
            f"optimizer state of {name} must keep the keys of the first step, "
            f"{sorted(kept)}: got {sorted(made)}; create all state in the first step"
        )
    key = next(key for key in kept if kept[key] != made[key])
    raise UserCodeError(
        f"optimizer state {key!r} of {name} must keep the lists, dictionaries and texts of "
        f"the first step, {_in_words(kept[key])}: got {_in_words(made[key])}; create all "
        "state in the first step"
    )


def _in_words(form: Form) -> str:
    shown = form.build(dict.fromkeys(form.leaves, "*"))
    return "*" if shown == "*" else repr(shown).replace("'*'", "*")


def spec_of_leaf(value: object) -> TensorSpec:
    """Return how a tensor or a number is committed."""
    if isinstance(value, torch.Tensor):
        return TensorSpec(shape=tuple(value.shape), dtype=value.dtype)
    kinds: Iterator[type[bool | int | float]] = iter((bool, int, float))
    kind = next(kind for kind in kinds if isinstance(value, kind))  # a bool is an int
    return TensorSpec(shape=(), dtype=torch.float64, number_type=kind)


def number(kept: torch.Tensor, number_type: type[bool | int | float]) -> bool | int | float:
    """Return a number in the type that it had after the first step, if it fits."""
    value = float(kept)
    fits = value.is_integer() and (number_type is int or value in (0, 1))
    return number_type(value) if fits else value


def keep_leaves(
    name: str, leaves: Mapping[str, object], places: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Copy leaves to their places in memory; return the places of tensors from elsewhere.

    Args:
        name: Of the parameter.
        leaves: Its state after a step.
        places: Of all of them.

    Raises:
        UserCodeError: A leaf is of another shape or type than after the first step.
    """
    ours = {place.untyped_storage().data_ptr() for place in places.values()}
    values: dict[str, torch.Tensor] = {}
    for leaf, place in places.items():
        value = leaves[leaf]
        if isinstance(value, int | float) and not place.shape:
            place.fill_(value)
            continue
        value = _checked(name, leaf, value, place)
        if (value.data_ptr(), value.stride()) != (place.data_ptr(), place.stride()):
            # Such as what a history has passed on: another leaf's place, overwritten here.
            shared = value.untyped_storage().data_ptr() in ours
            values[leaf] = value.clone() if shared else value
    for leaf, value in values.items():
        places[leaf].copy_(value)
    return {leaf: places[leaf] for leaf in values}


def _checked(name: str, leaf: str, value: object, place: torch.Tensor) -> torch.Tensor:
    got = type(value).__name__
    if isinstance(value, torch.Tensor):
        if (value.shape, value.dtype) == (place.shape, place.dtype):
            return value
        got = f"{tuple(value.shape)} {value.dtype}"
    raise UserCodeError(
        f"optimizer state {leaf!r} of {name} must be of one kind, whatever the values of "
        f"parameters and gradients: got {got} after {tuple(place.shape)} {place.dtype}; use "
        "an optimizer whose state is"
    )
