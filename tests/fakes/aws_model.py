"""Checks what goes over the wire against botocore's own model of EC2, both ways.

botocore itself ignores what it does not know in a reply, and moto in a request; so a
drift between them and AWS would go unnoticed.
"""

from __future__ import annotations

import base64
import binascii
import functools
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl
from xml.etree import ElementTree

import botocore.session
from botocore.model import ServiceModel, Shape
from botocore.validate import ParamValidator

_BEYOND_MODEL = {
    # EC2's own documentation says so, its enum does not have it.
    "DescribeInternetGateways.internetGatewaySet.attachmentSet.state": {"available"},
    "CreateInternetGateway.internetGateway.attachmentSet.state": {"available"},
}


class DriftError(Exception):
    """What was sent does not fit the model."""


@functools.cache
def model(service: str) -> ServiceModel:
    """Return botocore's model of a service."""
    return botocore.session.get_session().get_service_model(service)


# --- requests -------------------------------------------------------------------------


def read_form(body: str) -> tuple[str, dict[str, Any]]:
    """Return (operation, arguments) of an EC2 request, strictly.

    Raises:
        DriftError: a field is unknown, mistyped or missing.
    """
    fields = parse_qsl(body, keep_blank_values=True, strict_parsing=True)
    form = dict(fields)
    if len(form) < len(fields):
        raise DriftError("a field came twice")
    name = form.pop("Action", "")
    if name not in model("ec2").operation_names:
        raise DriftError(f"Action: no such operation: got {name!r}")
    if form.pop("Version", "") != model("ec2").api_version:
        raise DriftError("Version: missing or not the model's")
    tree: dict[str, Any] = {}
    for key, value in form.items():
        *folders, leaf = key.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
            if not isinstance(node, dict):
                raise DriftError(f"{key}: part of it is a value")
        if leaf in node:
            raise DriftError(f"{key}: a value and a structure")
        node[leaf] = value
    shape = model("ec2").operation_model(name).input_shape
    if shape is None:
        return name, {}
    arguments: dict[str, Any] = _read(tree, shape, name)
    return name, arguments


def is_checked(operation: str, key: str) -> bool:
    """Return whether a form field can hold a wrong value: it is not just any text."""
    shape: Any = model("ec2").operation_model(operation).input_shape
    for part in key.split("."):
        if shape.type_name == "list":
            shape = shape.member
        else:
            members = shape.members.items()
            shape = next(m for name, m in members if _query_name(name, m) == part)
    return shape.type_name != "string" or bool(shape.enum)


def _query_name(name: str, shape: Shape) -> str:
    if "queryName" in shape.serialization:
        return str(shape.serialization["queryName"])
    sent = str(shape.serialization.get("name", name))
    return sent[0].upper() + sent[1:]


def _read(value: Any, shape: Shape, path: str) -> Any:
    if shape.type_name == "structure":
        return _read_structure(value, shape, path)
    if shape.type_name == "list":
        if not isinstance(value, dict):
            raise DriftError(f"{path}: a list was due, got {value!r}")
        if sorted(value, key=_number) != [str(n + 1) for n in range(len(value))]:
            raise DriftError(f"{path}: not numbered from 1: {sorted(value)}")
        return [_read(value[k], shape.member, path) for k in sorted(value, key=_number)]
    if not isinstance(value, str):
        raise DriftError(f"{path}: a {shape.type_name} was due, got a structure")
    return _read_scalar(value, shape, path)


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1


def _read_structure(value: Any, shape: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DriftError(f"{path}: a structure was due, got {value!r}")
    known = {_query_name(name, member): name for name, member in shape.members.items()}
    if unknown := value.keys() - known.keys():
        raise DriftError(f"{path}: no such field: {sorted(unknown)}")
    read = {
        known[key]: _read(item, shape.members[known[key]], f"{path}.{known[key]}")
        for key, item in value.items()
    }
    if missing := set(shape.required_members) - read.keys():
        raise DriftError(f"{path}: missing: {sorted(missing)}")
    return read


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text]


def _decoded(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


_SCALARS: Mapping[str, Callable[[str], Any]] = {
    "integer": int,
    "long": int,
    "float": float,
    "double": float,
    "boolean": _boolean,
    "timestamp": datetime.fromisoformat,
    "blob": _decoded,
}


def _read_scalar(text: str, shape: Any, path: str) -> Any:
    try:
        value = _SCALARS.get(shape.type_name, str)(text)
    except (ValueError, KeyError, binascii.Error):
        raise DriftError(f"{path}: not a {shape.type_name}: {text!r}") from None
    if shape.type_name == "string" and shape.enum and text not in shape.enum:
        raise DriftError(f"{path}: none of {shape.enum}: {text!r}")
    pattern = shape.metadata.get("pattern")
    if pattern and not re.search(pattern, text):
        raise DriftError(f"{path}: does not match {pattern}: {text!r}")
    return value


def check_json(service: str, operation: str, arguments: Mapping[str, Any]) -> None:
    """Check the arguments of a request to one of AWS's JSON services.

    Raises:
        DriftError: a field is unknown, mistyped or missing.
    """
    shape = model(service).operation_model(operation).input_shape
    _check_known(arguments, shape, operation)
    report = ParamValidator().validate(arguments, shape)
    if report.has_errors():
        raise DriftError(f"{operation}: {report.generate_report()}")


def _check_known(value: Any, shape: Any, path: str) -> None:
    """Check names, which botocore's validator takes as they come."""
    if shape.type_name == "structure":
        if not isinstance(value, Mapping) or value.keys() - shape.members.keys():
            raise DriftError(f"{path}: no such field in {value!r}")
        for name, item in value.items():
            _check_known(item, shape.members[name], f"{path}.{name}")
    elif shape.type_name == "map" and isinstance(value, Mapping):
        for name, item in value.items():
            _check_known(item, shape.value, f"{path}.{name}")


# --- replies --------------------------------------------------------------------------


def check_reply(operation: str, xml: bytes) -> None:
    """Check an EC2 reply: every tag known, every value of its type.

    Raises:
        DriftError: botocore would drop or misread something.
    """
    root = ElementTree.fromstring(xml)
    shape = model("ec2").operation_model(operation).output_shape
    for child in list(root):
        if _bare(child.tag) in ("requestId", "RequestId"):
            root.remove(child)
    if shape is None:
        if len(root) and _bare(root[0].tag) != "return":
            raise DriftError(f"{operation}: nothing was due")
        return
    _check(root, shape, operation)


def _bare(tag: str) -> str:
    return tag.rpartition("}")[2]


def _check(element: ElementTree.Element, shape: Any, path: str) -> None:
    if shape.type_name == "structure":
        names = {
            member.serialization.get("name", name): member for name, member in shape.members.items()
        }
        for child in element:
            tag = _bare(child.tag)
            if tag not in names:
                raise DriftError(f"{path}: no such field: {tag}")
            _check(child, names[tag], f"{path}.{tag}")
    elif shape.type_name == "list":
        due = shape.member.serialization.get("name", "member")
        for child in element:
            if _bare(child.tag) != due:
                raise DriftError(f"{path}: {due} was due, got {_bare(child.tag)}")
            _check(child, shape.member, path)
    elif len(element):
        raise DriftError(f"{path}: a {shape.type_name} was due, got a structure")
    elif element.text:
        _check_scalar(element.text, shape, path)


def _check_scalar(text: str, shape: Any, path: str) -> None:
    if shape.type_name == "blob" or text in _BEYOND_MODEL.get(path, ()):
        return
    _read_scalar(text, shape, path)
