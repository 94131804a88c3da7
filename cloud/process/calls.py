"""What goes between a provider in a child process and its stand-in: JSON, no pickle.

Every method of the cloud port goes over by name. Its own annotations say how arguments
and results become JSON and come back; errors keep their class and fields.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter
from pydantic_core import to_jsonable_python

from spottrain import errors as roots
from spottrain.cloud.port import errors
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import (
    ChecksAccount,
    CloudProvider,
    FindsOrphans,
    ReachedBySsh,
    ReleasesJob,
    ReportsPlacementScore,
    ReportsPriceHistory,
    ReportsQuota,
    SimulatesInterruption,
    StartsAgents,
)
from spottrain.errors import SpottrainError

PORT: type = CloudProvider
ABILITIES: Mapping[str, type] = {
    ability.__name__: ability
    for ability in (
        ChecksAccount,
        FindsOrphans,
        ReachedBySsh,
        ReleasesJob,
        ReportsPlacementScore,
        ReportsPriceHistory,
        ReportsQuota,
        SimulatesInterruption,
        StartsAgents,
    )
}
"""What a child can offer beside the port, by name. Not ``CarriesCalls``: connections to
VMs belong to the manager's own process."""


@dataclass(frozen=True, slots=True)
class ProviderCall:
    """One method of a protocol."""

    name: str
    signature: inspect.Signature
    arguments: Mapping[str, TypeAdapter[Any]]
    result: TypeAdapter[Any]

    def pack(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the arguments as JSON by name."""
        bound = self.signature.bind(None, *args, **kwargs).arguments
        bound.pop("self")
        return {name: to_jsonable_python(value) for name, value in bound.items()}

    def unpack(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments that ``pack`` has packed."""
        return {
            name: self.arguments[name].validate_python(value)
            for name, value in arguments.items()
        }


@functools.cache
def calls_of(protocol: type) -> tuple[ProviderCall, ...]:
    """Return the methods of a protocol of the cloud port."""
    functions = (f for f in vars(protocol).values() if inspect.isfunction(f))
    return tuple(_call(f) for f in functions if not f.__name__.startswith("_"))


def _call(function: types.FunctionType) -> ProviderCall:
    hints = get_type_hints(function)
    result = _plain(hints.pop("return"))
    return ProviderCall(
        name=function.__name__,
        signature=inspect.signature(function),
        arguments={name: TypeAdapter(_plain(hint)) for name, hint in hints.items()},
        result=TypeAdapter(result),
    )


def _plain(hint: Any) -> Any:
    """Return what JSON can tell from others: any run of items is a tuple."""
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
    """Return an error as JSON; one of a class that nobody else knows as its parent."""
    kind = next(k for k in type(error).__mro__ if _ERRORS.get(k.__name__) is k)
    fields = inspect.signature(kind.__init__).parameters.keys() & vars(error).keys()
    return {
        "kind": kind.__name__,
        "message": str(error),
        "fields": {name: vars(error)[name] for name in sorted(fields)},
        "causes": list(roots.causes(error)),
    }


def unpack_error(packed: Mapping[str, Any]) -> SpottrainError:
    """Return the error that was packed; one that is unknown here is a ``CloudError``."""
    kind = _ERRORS.get(packed["kind"], CloudError)
    error = kind(packed["message"], **packed["fields"])
    for line in packed["causes"]:
        error.add_note(line)
    return error
