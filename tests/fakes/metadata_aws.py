"""EC2's instance metadata service, version 2, as far as notices go."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

from tests.fakes.metadata_world import RefusedError, Reply, Request, World, needs_query

_DATA = "/latest/meta-data"


def _iso(at_s: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at_s))


_OPERATIONS = {
    ("PUT", "/latest/api/token"): "token",
    ("GET", f"{_DATA}/spot/instance-action"): "action",
    ("GET", f"{_DATA}/events/recommendations/rebalance"): "rebalance",
}


class AwsWorld(World):
    """The service."""

    def __init__(self) -> None:
        super().__init__(_OPERATIONS)
        self.reset()

    def reset(self) -> None:
        """Know no VM and no notice."""
        self.forget_script()
        self.tokens: dict[str, tuple[str, float]] = {}
        self.told: dict[tuple[str, str], dict[str, Any]] = {}

    def preempt(self, vm: str, lead_s: float, action: str = "terminate") -> None:
        """Give notice that a VM is taken."""
        told = {"action": action, "time": _iso(self.now() + lead_s)}
        self.told[vm, "action"] = told

    def recommend(self, vm: str) -> None:
        """Say that a VM is likelier than others to be taken."""
        self.told[vm, "rebalance"] = {"noticeTime": _iso(self.now())}

    def withdraw(self, vm: str) -> None:
        """Take a notice back."""
        del self.told[vm, "action"]

    def expire_tokens(self) -> None:
        """Let no token that was given be good any more."""
        self.tokens.clear()

    def carry_out(self, operation: str, request: Request) -> Reply:
        """See ``World``."""
        needs_query(request)
        if request.body:
            raise RefusedError(400, "a body")
        if operation == "token":
            return self._give_token(request)
        token = request.headers["X-aws-ec2-metadata-token"] or ""
        vm, until_s = self.tokens.get(token, ("", 0.0))
        if vm != request.vm or until_s < time.time():
            raise RefusedError(401, "no token that is good")
        told = self.told.get((request.vm, operation))
        if told is None:
            return Reply(404, "<html>404 - Not Found</html>")
        return Reply(200, json.dumps(told))

    def _give_token(self, request: Request) -> Reply:
        ttl = request.headers["X-aws-ec2-metadata-token-ttl-seconds"] or ""
        if not (ttl.isdecimal() and 1 <= int(ttl) <= 21600):
            raise RefusedError(400, f"a token cannot live for {ttl!r} s")
        token = secrets.token_urlsafe(40)
        self.tokens[token] = (request.vm, time.time() + int(ttl))
        return Reply(200, token, {"X-aws-ec2-metadata-token-ttl-seconds": ttl})
