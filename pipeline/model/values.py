"""Values that an optimizer keeps outside of its state, as text: compared, kept, restored.

Text is JSON in which every value comes back as it was: numbers of Python in their type,
floats and tensors to the last bit, NaN included.
"""

from __future__ import annotations

import base64
import functools
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from spottrain.errors import UserCodeError
from spottrain.units import counted

Json = Any

_SET_BY_US = frozenset({"params", "param_names", "lr"})
"""Keys of a parameter group that are no values of the optimizer's."""

_KEPT = frozenset({"state", "param_groups"})
"""Attributes of optimizers that are committed."""

_SET_LATER = {
    "_opt_called",  # lr_scheduler.patch_track_step_called
    "_step_count",  # the same before torch 2.5
    "_need_device_dtype_check_for_fused",  # Adam, AdamW, SGD, Adagrad
    "_warned_capturable_if_run_uncaptured",  # Optimizer._cuda_graph_capture_health_check
    "_step_supports_amp_scaling",
    "grad_scale",  # amp.GradScaler.step
    "found_inf",
}
"""Attributes of optimizers that torch's own code sets after they are made."""


@functools.cache
def _set_by_torch() -> frozenset[str]:
    """Return the attributes that torch's own code sets; none changes results."""
    # Not when this is imported: the first optimizer imports torch._dynamo, for a second.
    return frozenset(vars(torch.optim.Optimizer([torch.zeros(())], {}))) | _SET_LATER


class Encoder:
    """Writes values as JSON.

    Args:
        device: Where the parameters are.
        shared: ``id`` of objects that are kept elsewhere: only named.
        identities: Whether objects of unknown types are told apart by their identity.
    """

    def __init__(
        self,
        device: torch.device,
        shared: Iterable[int] = (),
        *,
        identities: bool = True,
    ) -> None:
        self.lossless = True
        """False once a value was met that cannot be restored from its text."""
        self._device = device
        self._path: set[int] = set(shared)
        """Of ``shared``, and of the containers around the current value."""
        self._identities = identities

    def encode(self, value: object) -> Json:
        """Return ``value`` as JSON."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if isinstance(value, float) and kind is float:
            return {"float": struct.pack(">d", value).hex()}
        if id(value) in self._path:
            self.lossless = False
            return {"shared": None}
        self._path.add(id(value))
        try:
            return self._encode_object(value)
        finally:
            self._path.remove(id(value))

    def _encode_object(self, value: object) -> Json:
        if isinstance(value, torch.Tensor):
            if type(value) is torch.Tensor and value.layout is torch.strided:
                return {"tensor": self._tensor(value)}
            return self._opaque(value)
        if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
            array = np.asarray(value)
            data = base64.b64encode(array.tobytes()).decode()
            is_array = isinstance(value, np.ndarray)
            return {"numpy": [array.dtype.str, array.shape, data, is_array]}
        if isinstance(value, list | tuple):
            items = [self.encode(item) for item in value]
            if type(value) in (list, tuple):
                return {type(value).__name__: items}
            return self._opaque(value, items)
        if isinstance(value, Mapping):
            items = [[self.encode(k), self.encode(v)] for k, v in value.items()]
            return {"dict": items} if type(value) is dict else self._opaque(value, items)
        if isinstance(value, torch.Generator):
            return self._opaque(value, self.encode(value.get_state()))
        if isinstance(value, set | frozenset):
            return self._opaque(value, sorted(map(json.dumps, map(self.encode, value))))
        return self._opaque(value, self._attributes(value))

    def _attributes(self, value: object) -> Json:
        if isinstance(value, torch.optim.Optimizer):
            inner = {"state": value.state, "param_groups": value.param_groups}
            return [self.encode(inner), attributes(value, self)]
        of_torch = type(value).__module__.partition(".")[0] == "torch"
        if of_torch or callable(value) or isinstance(value, ModuleType):
            return None
        return self.encode(dict(getattr(value, "__dict__", {})))

    def _opaque(self, value: object, contents: Json = None) -> Json:
        self.lossless = False
        name = f"{type(value).__module__}.{type(value).__qualname__}"
        return {"opaque": [name, id(value) if self._identities else 0, contents]}

    def _tensor(self, value: torch.Tensor) -> Json:
        host = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        data = base64.b64encode(host.numpy().tobytes()).decode()
        with_parameters = value.device == self._device
        name = str(value.dtype).removeprefix("torch.")
        return [name, list(value.shape), data, with_parameters]


def decode(encoded: Json, device: torch.device) -> Any:
    """Return the value that ``Encoder`` wrote without loss, tensors with parameters on
    ``device``."""
    if not isinstance(encoded, dict):
        return encoded
    ((kind, content),) = encoded.items()
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(content))[0]
    if kind == "tensor":
        name, shape, data, with_parameters = content
        value = torch.empty(shape, dtype=getattr(torch, name))
        if data:
            host = torch.frombuffer(bytearray(base64.b64decode(data)), dtype=torch.uint8)
            value = host.view(value.dtype).reshape(shape)
        return value.to(device) if with_parameters else value
    if kind == "numpy":
        name, shape, data, is_array = content
        array = np.frombuffer(bytearray(base64.b64decode(data)), name).reshape(shape)
        return array if is_array else array[()]
    if kind == "dict":
        return {decode(k, device): decode(v, device) for k, v in content}
    items = [decode(item, device) for item in content]
    return tuple(items) if kind == "tuple" else items


def attributes(
    optimizer: torch.optim.Optimizer,
    encoder: Encoder | None = None,
    *,
    among_all: bool = False,
) -> dict[str, Json]:
    """Return what an optimizer holds beside state and parameter groups, by name.

    Args:
        optimizer: The optimizer.
        encoder: Of an object that holds it.
        among_all: Also what torch's own code sets.
    """
    if encoder is None:
        shared = (optimizer.state, *optimizer.param_groups)
        values = optimizer.state.values()
        encoder = Encoder(_device_of(optimizer.param_groups), map(id, (*shared, *values)))
    return {
        name: encoder.encode(value)
        for name, value in vars(optimizer).items()
        if name not in (_KEPT if among_all else _set_by_torch())
    }


def differing(one: Mapping[str, Json], other: Mapping[str, Json]) -> list[str]:
    """Return the names whose values differ."""
    return sorted(k for k in {*one, *other} if one.get(k, ...) != other.get(k, ...))


class GroupValues:
    """Values of an optimizer's parameter groups that its steps change.

    All others are configuration, which the factory sets anew each time.

    Args:
        optimizer: As built, before its first step.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups: Sequence[dict[str, Any]] = optimizer.param_groups
        self._device = _device_of(self._groups)
        self._built = [
            {key: self._encode(number, key) for key in self._keys(group)}
            for number, group in enumerate(self._groups)
        ]
        self._constants = [
            {key: value for key, value in group.items() if _is_constant(value)}
            for group in self._groups
        ]
        """Values that are the same as long as they are the same objects."""
        self._changed: set[tuple[int, str]] = set()

    def restore(self, text: bytes) -> None:
        """Set the values that ``text`` of an equal optimizer returned.

        Raises:
            UserCodeError: There are fewer groups.
        """
        for number, key, *value in json.loads(text) if text else ():
            if number >= len(self._groups):
                raise UserCodeError(
                    f"optimizer has {len(self._groups)} parameter groups in a section: "
                    f"its saved state has a {key!r} of group {number}; build as many "
                    "groups as when it was saved"
                )
            self._changed.add((number, key))
            if value:
                self._groups[number][key] = decode(value[0], self._device)
            else:
                self._groups[number].pop(key, None)

    def text(self) -> bytes:
        """Return all values that a step has ever changed; none as empty text.

        Raises:
            UserCodeError: One of them is neither number nor tensor, nor lists or
                dictionaries of such.
        """
        if len(self._groups) != len(self._built):
            raise UserCodeError(
                "optimizer adds or drops parameter groups in its step: build all of "
                f"its {counted(len(self._built), 'group')} at once, and keep what was built"
            )
        for number, (group, built) in enumerate(zip(self._groups, self._built, strict=True)):
            constants = self._constants[number]
            for key in {*self._keys(group), *built}:
                if key in constants and group.get(key, ...) is constants[key]:
                    continue
                same = key in group and key in built
                if not same or self._encode(number, key) != built[key]:
                    self._changed.add((number, key))
        if not self._changed:
            return b""
        in_order = sorted(self._changed, key=lambda at: (at[0], str(at[1])))
        kept = [self._entry(number, key) for number, key in in_order]
        return json.dumps(kept, separators=(",", ":")).encode()

    def _entry(self, number: int, key: str) -> list[Json]:
        if key not in self._groups[number]:
            return [number, key]
        encoder = Encoder(self._device)
        encoded = encoder.encode(self._groups[number][key])
        if not encoder.lossless:
            raise UserCodeError(
                f"optimizer changes {key!r} of its param_groups, a "
                f"{type(self._groups[number][key]).__name__}: only numbers, tensors, and "
                "lists or dictionaries of them can be kept; keep it in optimizer.state"
            )
        return [number, key, encoded]

    def _encode(self, number: int, key: str) -> str:
        """Return JSON as text, where True is not 1."""
        return json.dumps(Encoder(self._device).encode(self._groups[number][key]))

    @staticmethod
    def _keys(group: Mapping[str, Any]) -> list[str]:
        return [key for key in group if key not in _SET_BY_US]


def _is_constant(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return type(value) in (type(None), bool, int, float, str)


def group_of_each(
    optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, nn.Parameter]]
) -> dict[str, dict[str, Json]]:
    """Return the values of the group that each parameter is in."""
    encoder = Encoder(_device_of(optimizer.param_groups), identities=False)
    names = {id(parameter): name for name, parameter in named}
    return {
        names[id(parameter)]: values
        for group in optimizer.param_groups
        for values in [
            {
                key: encoder.encode(value)
                for key, value in group.items()
                if key == "lr" or key not in _SET_BY_US
            }
        ]
        for parameter in group["params"]
    }


def learning_rates(optimizer: torch.optim.Optimizer) -> list[Json]:
    """Return the learning rate of each group, to be compared."""
    encoder = Encoder(_device_of(optimizer.param_groups))
    return [encoder.encode(group.get("lr")) for group in optimizer.param_groups]


def tensors_of(group: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors among the values of a group."""
    found: list[torch.Tensor] = []

    def look(value: object) -> None:
        if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
            found.append(value)
        elif isinstance(value, list | tuple):
            for item in value:
                look(item)
        elif isinstance(value, dict):
            look(list(value.values()))

    look([value for key, value in group.items() if key not in _SET_BY_US])
    return found


def _device_of(groups: Sequence[Mapping[str, Any]]) -> torch.device:
    devices = (parameter.device for group in groups for parameter in group["params"])
    return next(devices, torch.device("cpu"))
