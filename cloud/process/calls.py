"""Protocol between a provider in a child process and its proxy: JSON, no pickle.

Methods of the cloud port are called by name. Their annotations define how arguments and
results are converted to JSON and back; errors keep their class and fields.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from spottrain import errors as roots
from spottrain.cloud.port import errors
from spottrain.cloud.port.errors import CloudError
from spottrain.codec import from_data, to_data
from spottrain.errors import SpottrainError
from spottrain.redaction import redacted


@dataclass(frozen=True, slots=True)
class ProviderCall:
    """One method of the port."""

    name: str
    method: Callable[..., Any]
    arguments: Mapping[str, Any]
    """Their types by name."""
    returns: Any
    """The type of the result."""

    def pack(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments as JSON by name."""
        bound = inspect.signature(self.method).bind(None, *args, **kwargs).arguments
        del bound["self"]
        return {name: _packed(self.arguments[name], value) for name, value in bound.items()}

    def unpack(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that ``pack`` packed."""
        return {name: from_data(self.arguments[name], value) for name, value in arguments.items()}

    def pack_result(self, result: Any) -> Any:
        """Return the result as JSON."""
        return _packed(self.returns, result)

    def unpack_result(self, data: Any) -> Any:
        """Return the result that ``pack_result`` packed."""
        return from_data(self.returns, data)


def _packed(hint: Any, value: Any) -> Any:
    return to_data(tuple(value) if get_origin(hint) is tuple else value)


@functools.cache
def call_of(method: Callable[..., Any]) -> ProviderCall:
    """Return one method of ``CloudProvider``."""
    hints = get_type_hints(method)
    returns = _plain(hints.pop("return"))
    return ProviderCall(
        name=method.__name__,
        method=method,
        arguments={name: _plain(hint) for name, hint in hints.items()},
        returns=returns,
    )


def _plain(hint: Any) -> Any:
    """Return a type that JSON can represent: a tuple for any sequence or collection."""
    if get_origin(hint) in (Sequence, Collection):
        return types.GenericAlias(tuple, (get_args(hint)[0], ...))
    return hint


def _errors() -> Iterator[type[SpottrainError]]:
    for module in (roots, errors):
        for kind in vars(module).values():
            if isinstance(kind, type) and issubclass(kind, SpottrainError):
                yield kind


_ERRORS = {kind.__name__: kind for kind in _errors()}


def pack_error(error: SpottrainError) -> dict[str, Any]:
    """Return an error as JSON; a private class is packed as its public base class."""
    kind = next(k for k in type(error).__mro__ if _ERRORS.get(k.__name__) is k)
    fields = inspect.signature(kind.__init__).parameters.keys() & vars(error).keys()
    return {
        "kind": kind.__name__,
        "message": redacted(str(error)),
        "fields": {name: vars(error)[name] for name in sorted(fields)},
        "causes": list(roots.causes(error)),
    }


def unpack_error(packed: Mapping[str, Any]) -> SpottrainError:
    """Return the packed error; one of an unknown class becomes a ``CloudError``."""
    kind = _ERRORS.get(packed["kind"], CloudError)
    error = kind(packed["message"], **packed["fields"])
    for line in packed["causes"]:
        error.add_note(line)
    return error
