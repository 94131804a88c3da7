"""What the user's code keeps in Python objects from one call to the next, by name.

It is found by looking: from the parts of a job along attributes, containers, closures and
the globals that functions name. What is not found that way (memory of libraries in C, a
file) has no name here; that results depend on it is seen by running code twice.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, GeneratorType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

_MOST_OBJECTS = 50_000
_MOST_ITEMS = 64
"""Of a container that are looked at."""
_MOST_BYTES = 1 << 22
"""Of a tensor or an array whose values are looked at."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_OF_MODULES = frozenset({"_parameters", "_buffers", "training"})
"""Attributes of modules that are no state of Python's."""
_SEEDED = (random._inst, np.random.mtrand._rand, torch.default_generator)
"""Generators that are seeded before each section and each example."""


@dataclass(slots=True)
class Snapshot:
    """Values that were found, by a name that tells the user where."""

    values: dict[str, list[object]] = field(default_factory=dict)
    numbers: dict[str, list[tuple[float, Callable[[float], object]]]] = field(default_factory=dict)
    """Of Python, with what sets them."""

    def changed(self, later: Snapshot) -> set[str]:
        """Return the names whose values are others in a later one."""
        names = {*self.values, *later.values}
        return {n for n in names if self.values.get(n) != later.values.get(n)}


def snapshot(roots: Iterable[object]) -> Snapshot:
    """Return what can be reached from objects of the user's."""
    return _Walk().run(roots)


class _Walk:
    def __init__(self) -> None:
        self._found = Snapshot()
        self._seen: dict[int, object] = {id(one): one for one in _SEEDED}
        """Kept, so that no ``id`` is used again."""
        self._queue: deque[tuple[str, object]] = deque()

    def run(self, roots: Iterable[object]) -> Snapshot:
        self._queue.extend((_name_of(root), root) for root in roots)
        while self._queue and len(self._seen) < _MOST_OBJECTS:
            self._visit(*self._queue.popleft())
        return self._found

    def _note(self, label: str, value: object) -> None:
        self._found.values.setdefault(label, []).append(value)

    def _put(self, label: str, value: object, set_it: Callable[[Any], object]) -> None:
        """Visit something that has a name of its own."""
        if type(value) in (int, float):
            place = value, set_it
            self._found.numbers.setdefault(label, []).append(place)  # type: ignore[arg-type]
        self._queue.append((label, value))

    def _visit(self, label: str, value: object) -> None:
        if isinstance(value, _PLAIN):
            exact = isinstance(value, float | complex)  # one nan is as another
            self._note(label, (type(value), repr(value) if exact else value))
            return
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if (contents := _contents(value)) is not None:
            self._note(label, contents)
        elif isinstance(value, dict):
            self._note(label, len(value))
            for key, item in itertools.islice(value.items(), _MOST_ITEMS):
                self._put(label, item, functools.partial(operator.setitem, value, key))
        elif isinstance(value, list | tuple | deque | set | frozenset):
            self._note(label, len(value))
            ends = [*itertools.islice(value, _MOST_ITEMS)]
            if isinstance(value, list | tuple | deque):
                ends += list(value)[-_MOST_ITEMS:]
            self._queue.extend((label, item) for item in ends)
            if hasattr(value, "__dict__"):  # of a class of the user's
                self._visit_instance(value)
        elif isinstance(value, functools.partial):
            self._queue.extend((label, one) for one in (value.func, value.args))
            self._queue.append((label, value.keywords))
        elif isinstance(value, MethodType):
            self._queue.extend((label, one) for one in (value.__self__, value.__func__))
        elif isinstance(value, GeneratorType):
            frame = value.gi_frame
            self._note(label, None if frame is None else frame.f_lasti)
            self._queue.append((label, {} if frame is None else dict(frame.f_locals)))
        elif isinstance(value, FunctionType):
            self._visit_function(value)
        elif isinstance(value, type):
            self._visit_class(value)
        elif not isinstance(value, ModuleType):
            self._visit_instance(value)

    def _visit_function(self, function: FunctionType) -> None:
        if hasattr(function, "__wrapped__"):
            self._queue.append((function.__name__, function.__wrapped__))
        if not _is_theirs(function.__module__):
            return
        name = function.__name__
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for variable, cell in cells:
            try:
                value = cell.cell_contents
            except ValueError:  # not set yet
                continue
            set_it = functools.partial(setattr, cell, "cell_contents")
            self._put(f"{variable} (around {name})", value, set_it)
        for part in (function.__defaults__, function.__kwdefaults__):
            self._queue.append((f"a default of {name}", part))
        for attribute, value in function.__dict__.items():
            set_it = functools.partial(setattr, function, attribute)
            self._put(f"{name}.{attribute}", value, set_it)
        names = set(_names_in(function.__code__))
        self._visit_globals(function.__module__, function.__globals__, names)

    def _visit_globals(self, module: str, variables: dict[str, Any], names: set[str]) -> None:
        for name in sorted(names & variables.keys()):
            value = variables[name]
            if isinstance(value, ModuleType) and _is_theirs(value.__name__):
                self._visit_globals(value.__name__, vars(value), names)
            else:
                set_it = functools.partial(operator.setitem, variables, name)
                self._put(f"{module}.{name}", value, set_it)

    def _visit_class(self, kind: type) -> None:
        if not _is_theirs(kind.__module__):
            return
        self._queue.extend((base.__name__, base) for base in kind.__bases__)
        for attribute, value in list(vars(kind).items()):
            if isinstance(value, staticmethod | classmethod | property):
                inner = value.fget if isinstance(value, property) else value.__func__
                self._queue.append((f"{kind.__name__}.{attribute}", inner))
            elif isinstance(value, FunctionType) or not attribute.startswith("__"):
                set_it = functools.partial(setattr, kind, attribute)
                self._put(f"{kind.__name__}.{attribute}", value, set_it)

    def _visit_instance(self, value: object) -> None:
        kind = type(value)
        self._queue.append((kind.__name__, kind))
        left_out = _OF_MODULES if isinstance(value, nn.Module) else frozenset()
        attributes = {
            name: getattr(value, name)
            for base in kind.__mro__
            for name in _slots(base)
            if hasattr(value, name)
        }
        attributes |= getattr(value, "__dict__", {})
        for name, item in attributes.items():
            if name not in left_out:
                set_it = functools.partial(setattr, value, name)
                self._put(f"{kind.__name__}.{name}", item, set_it)


def _contents(value: object) -> object | None:
    """Return what tells whether an object without parts has changed; ``None``: it has parts."""
    if isinstance(value, torch.Tensor):
        look = (type(value), value.shape, value.dtype, value.device.type)
        if value.is_meta or value.layout is not torch.strided:
            return *look, id(value)
        if value.nbytes > _MOST_BYTES:
            return *look, value.data_ptr(), value._version
        flat = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        content = flat.reshape(-1).view(torch.uint8).numpy().tobytes()
        return *look, hashlib.sha256(content).digest()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, np.ndarray | np.generic):
        small = value.nbytes <= _MOST_BYTES and not value.dtype.hasobject
        return (value.dtype, value.shape, value.tobytes() if small else id(value))
    if isinstance(value, itertools.count):
        return repr(value)
    if isinstance(value, Iterator) and hasattr(value, "__length_hint__"):
        return operator.length_hint(value)
    return None


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if not name.startswith("__"))


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that code and the functions in it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _name_of(root: object) -> str:
    name = getattr(root, "__name__", type(root).__name__)
    return str(name)


@functools.cache
def _is_theirs(module: str | None) -> bool:
    """Return whether a module is the user's own, not a library's."""
    if module is None or module.partition(".")[0] in ("spottrain", "torch"):
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return module == "__main__"
    return not file.startswith(_LIBRARIES)


_LIBRARIES = tuple({sysconfig.get_path(one) for one in ("stdlib", "purelib", "platlib")})
