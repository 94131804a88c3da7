"""What stands between the wire and the fake project: checks both ways, and faults."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Mapping
from email.message import Message
from typing import Any

from tests.fakes.gcp_answers import RefusedError, absent, passes
from tests.fakes.gcp_compute import Compute
from tests.fakes.gcp_rules import check_rules
from tests.fakes.gcp_schema import (
    DriftError,
    Route,
    check,
    find_route,
    read_request,
    routes,
)
from tests.fakes.gcp_world import IMAGE_PROJECT, PROJECT, Json, World

_SKEW_S = 300.0
"""How far a clock may be off before credentials are refused."""


class Answer:
    """What is sent back.

    Args:
        status: HTTP's.
        told: The JSON.
        headers: More than the usual ones.
    """

    def __init__(self, status: int, told: Any, headers: Mapping[str, str] | None = None) -> None:
        self.status, self.told, self.headers = status, told, dict(headers or {})


def refusal(status: int, reason: str, message: str) -> Answer:
    """Return an error as Compute Engine writes it."""
    error = {"message": message, "domain": "global", "reason": reason}
    return Answer(status, {"error": {"code": status, "message": message, "errors": [error]}})


class Layer:
    """Answers requests.

    Args:
        world: The project.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._compute = Compute(world)
        self._routes = routes()

    def answer(self, method: str, target: str, headers: Message, body: bytes) -> Answer | None:
        """Return the answer to one request, None where the line breaks."""
        told: Any = json.loads(body) if body else None
        if target == "/fake":
            with self._world.lock:
                return Answer(200, getattr(self._world, told["call"])(**told["arguments"]))
        if target == "/":  # asked for the time that every answer tells
            return refusal(404, "notFound", "Nothing is here.")
        try:
            route, _ = find_route(self._routes, method, target)
        except DriftError as error:
            return self._drifted(error)
        world, name = self._world, route.operation
        with world.lock:
            seen = {"operation": name, "method": route.method, "target": target, "body": told}
            world.log.append(seen)
        asks = name.endswith(".wait") or name.startswith("advice.")
        outcome = world.meet(name, changing=route.method != "GET" and not asks)
        if (fault := outcome.error) is not None:
            answer = refusal(fault.status, fault.code, "scripted")
            answer.headers |= fault.headers
            return answer
        if not outcome.is_carried_out:
            return None
        with world.lock:
            answer = self._checked(route, target, headers, told)
        outcome.finish()
        return answer if outcome.is_answered else None

    def _checked(self, route: Route, target: str, headers: Message, body: Any) -> Answer:
        world = self._world
        try:
            self._check_credentials(headers)
            method = route.operation.partition(".")[2]
            group = method if method in ("get", "list", "aggregated_list") else "other"
            if not world.throttle.passes(group, group, world.now()):
                raise RefusedError(403, "rateLimitExceeded", "Quota exceeded for metric 'Queries'")
            world.settle()
            asked = read_request(route, target, body)
            check_rules(route.operation, asked)
            passes({}, asked.get("filter", "any:*"))  # where there is nothing to pass
            if asked["project"] not in (PROJECT, IMAGE_PROJECT):
                raise absent(f"projects/{asked['project']}")
            call = getattr(self._compute, route.operation.replace(".", "__"), None)
            if call is None:
                raise DriftError(f"{route.operation}: not played here")
            told: Json = call(asked)
            check(route.reply, told, route.operation)
        except DriftError as error:
            return self._drifted(error)
        except RefusedError as error:
            return refusal(error.status, error.reason, error.message)
        return Answer(200, told)

    def _drifted(self, error: DriftError) -> Answer:
        self._world.drift.append(str(error))
        return refusal(400, "FakeDrift", str(error))

    def _check_credentials(self, headers: Message) -> None:
        """Check the signed token that the SDK made, but for its signature."""
        scheme, _, token = headers.get("Authorization", "").partition(" ")
        now_s = time.time() + self._world.skew_s
        try:
            claims = json.loads(base64.urlsafe_b64decode(token.split(".")[1] + "=="))
            fits = claims["iat"] - _SKEW_S <= now_s <= claims["exp"] + _SKEW_S
        except (IndexError, ValueError, KeyError):
            fits = False
        if scheme != "Bearer" or not fits or not self._world.credentials_good:
            told = "Request had invalid authentication credentials."
            raise RefusedError(401, "authError", told)
