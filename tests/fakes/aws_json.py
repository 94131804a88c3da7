"""The JSON service beside EC2: Service Quotas."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from botocore.validate import ParamValidator
from tests.fakes.aws_model import DriftError, check_json, model
from tests.fakes.aws_world import World
from werkzeug.wrappers import Response

_PLENTY = 1000.0
_NEEDED = {
    "GetServiceQuota": {"ServiceCode", "QuotaCode"},
}


def answer_json(
    world: World,
    service: str,
    region: str,
    environ: dict[str, Any],
    body: bytes,
    moto: Callable[[], Response],
) -> Response:
    """Answer a request that has been checked against the model."""
    if service == "servicequotas":
        service = "service-quotas"
    operation = _operation(environ)
    world.json_log.append(operation)
    try:
        if operation and environ["REQUEST_METHOD"] == "POST":
            _check(service, operation, json.loads(body or b"{}"))
    except DriftError as error:
        world.drift.append(str(error))
        told = {"__type": "FakeDrift", "message": str(error)}
        return Response(json.dumps(told), 400, content_type="application/json")
    if operation == "GetServiceQuota":
        asked = json.loads(body)
        return _quota(world, asked["ServiceCode"], asked["QuotaCode"])
    return moto()


def _operation(environ: dict[str, Any]) -> str:
    return str(environ.get("HTTP_X_AMZ_TARGET", "")).rpartition(".")[2]


def _check(service: str, operation: str, arguments: dict[str, Any]) -> None:
    check_json(service, operation, arguments)
    if missing := _NEEDED.get(operation, set()) - arguments.keys():
        raise DriftError(f"{operation}: missing: {sorted(missing)}")


def _quota(world: World, service: str, code: str) -> Response:
    """Answer with a limit; the disks' is of another service than the machines'."""
    if service != ("ebs" if code == "L-7A658B76" else "ec2"):
        refused = {"__type": "NoSuchResourceException", "message": f"{service} {code}"}
        kind = "application/x-amz-json-1.1"
        return Response(json.dumps(refused), 400, content_type=kind)
    told = {
        "Quota": {
            "ServiceCode": service,
            "QuotaCode": code,
            "Value": world.quotas.get(code, _PLENTY),
            "Unit": "None",
            "Adjustable": True,
        }
    }
    shape = model("service-quotas").operation_model("GetServiceQuota").output_shape
    report = ParamValidator().validate(told, shape)
    assert not report.has_errors(), report.generate_report()
    return Response(json.dumps(told), content_type="application/x-amz-json-1.1")
