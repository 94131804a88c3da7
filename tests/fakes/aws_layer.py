"""A layer in front of moto: checks both ways, then a market, faults and lagging lists.

moto-internal names are used here (the server's dispatcher, serializers, backends):
constraints.txt pins it, and the contract suite notices.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import socket
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qsl, urlencode
from xml.etree import ElementTree

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from moto.core.serialize import EC2Serializer
from moto.core.utils import get_service_model
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication,
    create_backend_app,
)
from tests.fakes.aws_json import answer_json
from tests.fakes.aws_model import DriftError, check_reply, read_form
from tests.fakes.aws_rules import check_rules
from tests.fakes.aws_world import ACCOUNT, World, vcpus_of
from tests.fakes.throttling import AWS
from werkzeug.wrappers import Request, Response

_SCOPE = re.compile(r"Credential=(\w+)/\d+/([\w-]+)/([\w-]+)/")
_ERROR = (
    "<Response><Errors><Error><Code>{}</Code><Message>{}</Message></Error></Errors>"
    "<RequestID>fake</RequestID></Response>"
)
_SPOT_QUOTA = {"g": "L-3819A6DF", "p": "L-7212CCBC"}
_IMAGE_GIB = 15
"""Size of moto's images."""
_DISK_QUOTA = "L-7A658B76"
_ON_DEMAND_QUOTA = {"g": "L-DB2E81BA", "p": "L-417A185B"}

Environ = dict[str, Any]
Start = Callable[..., Any]


class RefusedError(Exception):
    """EC2 says no.

    Args:
        code: EC2's.
        message: One line.
        status: HTTP's.
    """

    def __init__(self, code: str, message: str, status: int = 400) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.status = code, message, status


def _error(code: str, message: str, status: int = 400) -> Response:
    return Response(_ERROR.format(code, message), status, content_type="text/xml")


class Layer:
    """The WSGI application.

    Args:
        world: What moto does not know.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._own: dict[str, Callable[[Call], Response]] = {
            "RunInstances": self._run_instances,
            "DescribeImages": self._describe_images,
            "DescribeInstances": self._describe_instances,
            "TerminateInstances": self._terminate_instances,
            "DescribeSpotPriceHistory": self._price_history,
            "GetSpotPlacementScores": self._placement_scores,
            "GetConsoleOutput": self._console,
        }

    def __call__(self, environ: Environ, start: Start) -> Iterable[bytes]:
        request = Request(environ)
        body = request.get_data()
        if request.path == "/fake":
            return self._knob(json.loads(body))(environ, start)
        scope = _SCOPE.search(request.headers.get("Authorization", ""))
        if scope is None:
            return self._forward(environ, body)(environ, start)
        call = Call(environ, body, scope[2])
        call.key_id = scope[1]
        service = scope[3]
        answer = self._ec2(call) if service == "ec2" else self._json(call, service)
        if answer is None:
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
            answer = Response()
        return answer(environ, start)

    def _knob(self, command: dict[str, Any]) -> Response:
        with self._world.lock:
            said = getattr(self._world, command["call"])(**command["arguments"])
        return Response(json.dumps(said), content_type="application/json")

    def _forward(self, environ: Environ, body: bytes) -> Response:
        environ["wsgi.input"] = io.BytesIO(body)
        environ["CONTENT_LENGTH"] = str(len(body))
        return Response.from_app(self._moto, environ)

    def _json(self, call: Call, service: str) -> Response | None:
        return answer_json(
            self._world,
            service,
            call.region,
            call.environ,
            call.body,
            lambda: self._forward(call.environ, call.body),
        )

    # --- one EC2 request ----------------------------------------------------------------

    def _ec2(self, call: Call) -> Response | None:
        """Return the answer, None where the line breaks."""
        world = self._world
        operation = dict(parse_qsl(call.body.decode())).get("Action", "")
        with world.lock:
            world.log.append({"operation": operation, "body": call.body.decode()})
        changing = not operation.startswith(("Describe", "Get", "List"))
        outcome = world.meet(operation, changing=changing)
        if (fault := outcome.error) is not None:
            answer = _error(fault.code, "scripted", fault.status)
            answer.headers.extend(fault.headers)
            return answer
        if not outcome.is_carried_out:
            return None
        with world.lock:
            said = self._checked(call)
        outcome.finish()
        return said if outcome.is_answered else None

    def _checked(self, call: Call) -> Response:
        try:
            if not self._world.credentials_good or call.key_id in self._world.expired:
                raise RefusedError("RequestExpired", "Request has expired.")
            call.operation, call.arguments = read_form(call.body.decode())
            self._check_rate(call.operation)
            if call.operation in self._world.denied:
                raise RefusedError("UnauthorizedOperation", "You may not.", 403)
            _check_key(call.operation, call.arguments)
            if call.arguments.get("DryRun"):
                raise RefusedError("DryRunOperation", "It would have worked.", 412)
            check_rules(call.operation, call.arguments)
            own = self._own.get(call.operation)
            answer = own(call) if own else self._forward(call.environ, call.body)
            if answer.status_code == 200:
                check_reply(call.operation, answer.get_data())
        except DriftError as error:
            self._world.drift.append(str(error))
            return _error("FakeDrift", str(error).replace("<", "("))
        except RefusedError as error:
            return _error(error.code, error.message, error.status)
        return answer

    def _check_rate(self, operation: str) -> None:
        is_read = operation.startswith(("Describe", "Get"))
        kind = operation if operation in AWS else "read" if is_read else "write"
        world = self._world
        if not world.throttle.passes(operation, kind, world.now()):
            raise RefusedError("RequestLimitExceeded", "Request limit exceeded.", 503)

    # --- what moto lacks ----------------------------------------------------------------

    def _run_instances(self, call: Call) -> Response:
        asked, world = call.arguments, self._world
        form = dict(parse_qsl(call.body.decode()))
        print_of_it = hashlib.sha256(call.body).hexdigest()
        token = f"{call.region}/{asked['ClientToken']}"
        if token in world.tokens:
            before, body, headers = world.tokens[token]
            if before != print_of_it:
                raise RefusedError("IdempotentParameterMismatch", "token was used")
            return Response(body, 200, headers)
        self._check_policy(call)
        count = self._granted(call)
        form.update(MinCount=str(count), MaxCount=str(count))
        answer = self._forward(call.environ, urlencode(form).encode())
        if answer.status_code != 200:
            return answer
        body, headers = answer.get_data(), {"Content-Type": "text/xml"}
        for instance_id in _instance_ids(answer):
            chosen, address = world.boot(call.region, instance_id)
            body = body.replace(f">{chosen}<".encode(), f">{address}<".encode())
        world.tokens[token] = print_of_it, body, headers
        return Response(body, 200, headers)

    def _check_policy(self, call: Call) -> None:
        """Refuse a launch without the tags that the organisation demands.

        AWS's words, of an assumed role (aws/karpenter-provider-aws 8190).
        """
        for spec in call.arguments["TagSpecifications"]:
            lacks = self._world.due_tags - {tag["Key"] for tag in spec["Tags"]}
            if spec["ResourceType"] == "instance" and lacks:
                told = (
                    "You are not authorized to perform this operation. User: "
                    f"arn:aws:sts::{ACCOUNT}:assumed-role/engineers/us is not authorized "
                    "to perform: ec2:RunInstances on resource: arn:aws:ec2:"
                    f"{call.region}:{ACCOUNT}:instance/* with an explicit deny in a "
                    "service control policy. Encoded authorization failure message: x"
                )
                raise RefusedError("UnauthorizedOperation", told, 403)

    def _granted(self, call: Call) -> int:
        """Return how many machines there are for a launch.

        Raises:
            RefusedError: none, or what was asked for does not exist.
        """
        asked, world, backend = call.arguments, self._world, call.backend(self._world)
        kind, count = asked["InstanceType"], asked["MaxCount"]
        try:
            vcpus = vcpus_of(kind)
        except KeyError:
            raise RefusedError("InvalidParameterValue", f"type {kind}") from None
        gone = world.images.get(asked["ImageId"]) == "deregistered"
        if gone or asked["ImageId"] not in backend.amis:
            raise RefusedError("InvalidAMIID.NotFound", asked["ImageId"])
        if asked["KeyName"] not in backend.key_pairs:
            raise RefusedError("InvalidKeyPair.NotFound", asked["KeyName"])
        subnet_id = asked["NetworkInterfaces"][0]["SubnetId"]
        zone = str(backend.get_subnet(subnet_id).availability_zone)
        if f"{zone}/{kind}" in world.not_offered:
            raise RefusedError("Unsupported", f"{kind} is not supported in {zone}")
        spot = "InstanceMarketOptions" in asked
        codes = _SPOT_QUOTA if spot else _ON_DEMAND_QUOTA
        limit = world.quotas.get(codes.get(kind[0], ""), float("inf"))
        # The whole call: MaxCount is "between 1 and the quota you can specify".
        if world.vcpus(call.region, spot=spot) + vcpus * count > limit:
            code = "MaxSpotInstanceCountExceeded" if spot else "VcpuLimitExceeded"
            raise RefusedError(code, "quota")
        disk_gib = asked["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"]
        if disk_gib < _IMAGE_GIB:  # as users of Terraform and Packer are told
            told = f"Volume of size {disk_gib}GB is smaller than snapshot 'snap-1', expect"
            raise RefusedError("InvalidBlockDeviceMapping", f"{told} size >= 15GB")
        limit_tib = world.quotas.get(_DISK_QUOTA, float("inf"))
        if (len(list(world.live(call.region))) + count) * disk_gib > 1024 * limit_tib:
            told = f"You have exceeded your maximum gp3 storage limit of {limit_tib:g} TiB"
            raise RefusedError("VolumeLimitExceeded", f"{told} in this region.")
        live = sum(
            each.instance_type == kind and each.placement.zone == zone
            for each in world.live(call.region)
        )
        free = world.capacity.get(f"{zone}/{kind}", 0) - live
        if free < asked["MinCount"]:
            raise RefusedError("InsufficientInstanceCapacity", f"none in {zone}", 500)
        return int(min(free, count))

    def _describe_images(self, call: Call) -> Response:
        """Deprecated images are listed for who asks for them ("Deprecate an Amazon EC2
        AMI").
        """
        answer = self._forward(call.environ, call.body)
        hidden = {"deregistered"}
        if not call.arguments.get("IncludeDeprecated"):
            hidden.add("deprecated")
        root = ElementTree.fromstring(answer.get_data())
        space = root.tag.partition("}")[0] + "}"
        for images in root.iter(f"{space}imagesSet"):
            for item in list(images):
                image_id = item.findtext(f"{space}imageId", "")
                if self._world.images.get(image_id) in hidden:
                    images.remove(item)
        body = ElementTree.tostring(root)
        return Response(body, answer.status_code, content_type="text/xml")

    def _describe_instances(self, call: Call) -> Response:
        """Answer as a list that lags behind does."""
        world = self._world
        world.forget(call.region)
        answer = self._forward(call.environ, call.body)
        if answer.status_code != 200 or not (world.hide_s or world.linger_s):
            return answer
        root = ElementTree.fromstring(answer.get_data())
        space = root.tag.partition("}")[0] + "}"
        for instances in root.iter(f"{space}instancesSet"):
            for item in list(instances):
                instance_id = item.findtext(f"{space}instanceId", "")
                if self._hidden(call, instance_id):
                    instances.remove(item)
                ended_at = world.ends.get(instance_id)
                if ended_at is not None and world.now() < ended_at + world.linger_s:
                    state = item.find(f"{space}instanceState")
                    assert state is not None
                    state[0].text, state[1].text = "16", "running"
        return Response(ElementTree.tostring(root), 200, content_type="text/xml")

    def _hidden(self, call: Call, instance_id: str) -> bool:
        for each in call.backend(self._world).all_instances():
            if each.id == instance_id:
                made_at: float = each.launch_time.replace(tzinfo=UTC).timestamp()
                return self._world.now() < made_at + self._world.hide_s
        return False

    def _terminate_instances(self, call: Call) -> Response:
        for instance_id in call.arguments["InstanceIds"]:
            if self._hidden(call, instance_id):
                raise RefusedError("InvalidInstanceID.NotFound", instance_id)
        instances = call.backend(self._world).all_instances()
        dead = {i.id for i in instances if i.state == "terminated"}
        # moto fails over network interfaces when an instance is terminated twice.
        wanted = [i for i in call.arguments["InstanceIds"] if i not in dead]
        if wanted:
            form = dict(parse_qsl(call.body.decode()))
            form = {k: v for k, v in form.items() if not k.startswith("InstanceId.")}
            form |= {f"InstanceId.{n}": i for n, i in enumerate(wanted, 1)}
            answer = self._forward(call.environ, urlencode(form).encode())
            if answer.status_code != 200:
                return answer
        for instance_id in wanted:
            self._world.ends.setdefault(instance_id, self._world.now())
            self._world.switch_off(instance_id)
        return _render(
            call.operation,
            {
                "TerminatingInstances": [
                    {
                        "InstanceId": instance_id,
                        "CurrentState": {"Code": 48, "Name": "terminated"}
                        if instance_id in dead
                        else {"Code": 32, "Name": "shutting-down"},
                    }
                    for instance_id in call.arguments["InstanceIds"]
                ]
            },
        )

    def _price_history(self, call: Call) -> Response:
        """Answer with what held at StartTime and all that came after."""
        asked = call.arguments
        start_s = asked["StartTime"].timestamp()
        series: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for row in self._world.prices:
            wanted = row["instance_type"] in asked["InstanceTypes"]
            if wanted and row["zone"].startswith(call.region):
                series.setdefault((row["zone"], row["instance_type"]), []).append(row)
        rows = []
        for changes in series.values():
            changes.sort(key=lambda row: row["at_s"])
            first = max(
                (n for n, row in enumerate(changes) if row["at_s"] <= start_s),
                default=0,
            )
            rows += changes[first:]
        return _render(
            call.operation,
            {
                "SpotPriceHistory": [
                    {
                        "AvailabilityZone": row["zone"],
                        "InstanceType": row["instance_type"],
                        "ProductDescription": "Linux/UNIX",
                        "SpotPrice": f"{row['usd']:.6f}",
                        "Timestamp": datetime.fromtimestamp(row["at_s"], UTC),
                    }
                    for row in rows
                ],
                "NextToken": "",
            },
        )

    def _placement_scores(self, call: Call) -> Response:
        rows = [
            {"Region": call.region, "AvailabilityZoneId": zone_id, "Score": score}
            for zone_id, score in self._world.scores.items()
        ]
        return _render(call.operation, {"SpotPlacementScores": rows})

    def _console(self, call: Call) -> Response:
        instance_id = call.arguments["InstanceId"]
        keys = self._world.shown_keys(instance_id)
        text = "booting\r\n"
        if keys is not None:
            text += (
                "-----BEGIN SSH HOST KEY KEYS-----\r\n"
                f"{keys}\r\n-----END SSH HOST KEY KEYS-----\r\n"
            )
        output = base64.b64encode(text.encode()).decode()
        told = {"InstanceId": instance_id, "Output": output}
        return _render(call.operation, {**told, "Timestamp": datetime.now(UTC)})


class Call:
    """One request to EC2."""

    def __init__(self, environ: Environ, body: bytes, region: str) -> None:
        self.environ, self.body, self.region = environ, body, region
        self.operation = self.key_id = ""
        self.arguments: dict[str, Any] = {}

    def backend(self, world: World) -> Any:
        """moto's EC2 of the region."""
        return world.backend(self.region)


def _instance_ids(answer: Response) -> list[str]:
    """Return which instances a reply names."""
    root = ElementTree.fromstring(answer.get_data())
    named = (x for x in root.iter() if x.tag.rpartition("}")[2] == "instanceId")
    return [each.text or "" for each in named]


def _render(operation: str, result: dict[str, Any]) -> Response:
    """Return a reply that moto's serializer makes from the model."""
    serializer = EC2Serializer(get_service_model("ec2").operation_model(operation))
    made = serializer.serialize(result)
    return Response(made["body"], made["status_code"], dict(made["headers"]))


def _check_key(operation: str, arguments: Mapping[str, Any]) -> None:
    """Check the key that is imported, of a dry run too: EC2 reads parameters first.

    Raises:
        RefusedError: it is no public key. Words of the error: EC2 API reference, "Client
            error codes", InvalidKey.Format.
    """
    if operation != "ImportKeyPair":
        return
    try:
        load_ssh_public_key(arguments["PublicKeyMaterial"])
    except (ValueError, UnsupportedAlgorithm):
        message = "Key is not in valid OpenSSH public key format"
        raise RefusedError("InvalidKey.Format", message) from None
