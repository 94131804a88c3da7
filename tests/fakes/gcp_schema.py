"""Checks what goes over the wire against the SDK's own messages, both ways.

The SDK ignores fields of a reply that it does not know; so a drift between a fake and
Compute Engine would go unnoticed. Its routes are the SDK's own as well.
"""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from google.protobuf import json_format
from google.protobuf.descriptor import Descriptor, FieldDescriptor

SERVICES = {
    "accelerator_types": "AcceleratorTypes",
    "advice": "Advice",
    "firewalls": "Firewalls",
    "global_operations": "GlobalOperations",
    "images": "Images",
    "instances": "Instances",
    "machine_types": "MachineTypes",
    "networks": "Networks",
    "projects": "Projects",
    "region_operations": "RegionOperations",
    "regions": "Regions",
    "subnetworks": "Subnetworks",
    "zone_operations": "ZoneOperations",
}
_TEXT = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)


class DriftError(Exception):
    """What was sent does not fit the model."""


@dataclass(frozen=True)
class Route:
    """One call of the SDK."""

    operation: str
    """``instances.bulk_insert``."""
    method: str
    path: re.Pattern[str]
    body: str
    """Field of the request that the body is; empty: none."""
    request: Any
    """The SDK's class."""
    reply: Any


def routes() -> list[Route]:
    """Return every call that the SDK can make of SERVICES."""
    return [route for name, kind in SERVICES.items() for route in _routes(name, kind)]


def _routes(name: str, kind: str) -> list[Route]:
    package = f"google.cloud.compute_v1.services.{name}.transports"
    rest = importlib.import_module(f"{package}.rest_base")
    base = importlib.import_module(f"{package}.base")
    bases = getattr(rest, f"_Base{kind}RestTransport")
    transport = getattr(base, f"{kind}Transport")
    found = []
    for method, member in inspect.getmembers(transport):
        if not isinstance(member, property) or method.startswith("_"):
            continue
        rpc = "".join(word.capitalize() for word in method.split("_"))
        call = getattr(bases, f"_Base{rpc}", None)
        if call is None:
            continue
        hints = typing.get_type_hints(member.fget, vars(base))["return"]
        (asked,), answered = typing.get_args(hints)
        (options,) = call._get_http_options()
        uri = re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", options["uri"])
        found.append(
            Route(
                operation=f"{name}.{method}",
                method=options["method"].upper(),
                path=re.compile(uri),
                body=options.get("body", ""),
                request=asked,
                reply=typing.get_args(answered)[0],
            )
        )
    return found


def find_route(known: list[Route], method: str, target: str) -> tuple[Route, str]:
    """Return the call that a request is, and its path.

    Raises:
        DriftError: it is none.
    """
    path = urlsplit(target).path
    for route in known:
        if route.method == method and route.path.fullmatch(path):
            return route, path
    raise DriftError(f"no such call: {method} {path}")


def read_request(route: Route, target: str, body: Any) -> dict[str, Any]:
    """Return a request by the names that JSON has, strictly read.

    Args:
        route: The call.
        target: Path and query.
        body: The JSON in it, None if there is none.

    Raises:
        DriftError: a field is unknown, mistyped or missing.
    """
    split = urlsplit(target)
    found = route.path.fullmatch(split.path)
    assert found is not None
    asked: dict[str, Any] = {
        _json_name(key): unquote(value) for key, value in found.groupdict().items()
    }
    query = parse_qsl(split.query, keep_blank_values=True, strict_parsing=bool(split.query))
    for key, value in query:
        if key in asked:
            raise DriftError(f"{key}: came twice")
        asked[key] = value
    if route.body:
        if not isinstance(body, dict):
            raise DriftError(f"{route.operation}: a body was due")
        asked[_json_name(route.body)] = body
    elif body is not None:
        raise DriftError(f"{route.operation}: no body was due")
    check(route.request, asked, route.operation)
    return asked


def _json_name(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def check(kind: Any, told: Any, path: str) -> None:
    """Check a JSON object against one of the SDK's messages.

    Raises:
        DriftError: a field is unknown or mistyped, or a value none of its enum's.
    """
    pb = kind.pb(kind())
    if not isinstance(told, dict):
        raise DriftError(f"{path}: an object was due, got {told!r}")
    _walk(pb.DESCRIPTOR, told, path)
    try:
        json_format.ParseDict(told, pb, ignore_unknown_fields=False)
    except json_format.ParseError as error:
        raise DriftError(f"{path}: {error}") from None


def _walk(kind: Descriptor, told: Mapping[str, Any], path: str) -> None:
    fields = {field.json_name: field for field in kind.fields}
    for key, value in told.items():
        if key not in fields:
            raise DriftError(f"{path}: no such field: {key}")
        if value is None:
            raise DriftError(f"{path}.{key}: null")
        _walk_field(fields[key], value, f"{path}.{key}")


def _walk_field(field: FieldDescriptor, value: Any, path: str) -> None:
    message = field.message_type
    if message is not None and message.GetOptions().map_entry:
        inner = message.fields_by_name["value"].message_type
        if not isinstance(value, dict):
            raise DriftError(f"{path}: a map was due, got {value!r}")
        each = value.items() if inner is not None else ()
        for key, item in each:
            _walk_object(inner, item, f"{path}[{key}]")
    elif field.is_repeated:
        if not isinstance(value, list):
            raise DriftError(f"{path}: a list was due, got {value!r}")
        for item in value:
            _walk_one(field, item, path)
    else:
        _walk_one(field, value, path)


def _walk_one(field: FieldDescriptor, value: Any, path: str) -> None:
    if field.message_type is not None:
        _walk_object(field.message_type, value, path)
        return
    enum = field.containing_type.enum_types_by_name.get(_enum_name(field.name))
    if enum is not None and field.type in _TEXT:
        known = [each.name for each in enum.values if each.number]
        if value not in known:
            raise DriftError(f"{path}: none of {known}: {value!r}")


def _walk_object(kind: Any, value: Any, path: str) -> None:
    if not isinstance(value, dict):
        raise DriftError(f"{path}: an object was due, got {value!r}")
    _walk(kind, value, path)


def _enum_name(name: str) -> str:
    return "".join(word[:1].upper() + word[1:] for word in name.split("_"))
