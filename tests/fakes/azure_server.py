"""The fake Azure's process: prints its port, ends when its standard input does."""

from __future__ import annotations

import base64
import json
import os
import ssl
import sys
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

from tests.fakes import http_server
from tests.fakes.azure_arm import Arm
from tests.fakes.azure_http import Call, Reply
from tests.fakes.azure_world import World


class _Server(http_server.Server):
    world: World
    arm: Arm
    tls: ssl.SSLContext

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Shake hands in the connection's own thread: a slow client stops nobody."""
        try:
            request = self.tls.wrap_socket(request, server_side=True)
        except OSError:
            return
        super().process_request_thread(request, client_address)


class _Handler(http_server.Handler):
    server: _Server

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Tell the cloud's time."""
        world = self.server.world
        return super().date_time_string(timestamp or world.now() + world.skew_s)

    def _serve(self) -> None:
        url = urlsplit(self.path)
        if (body := self.body()) is None:
            return
        base = f"https://{self.headers['Host']}"
        if url.path == "/fake":
            self.send(200, json.dumps(self._knob(json.loads(body))).encode(), {})
        elif "/oauth2/" in url.path or "/.well-known/" in url.path:
            self._send(Reply(200, _login(base, url.path, body.decode())))
        else:
            try:
                parsed = json.loads(body) if body else None
            except ValueError:
                parsed = "no JSON"
            query = dict(parse_qsl(url.query, keep_blank_values=True))
            headers = {name.lower(): text for name, text in self.headers.items()}
            call = Call(self.command, url.path, query, headers, parsed, base)
            reply = self.server.arm.answer(call)
            if reply is None:
                self.break_off()
            else:
                self._send(reply)

    do_GET = do_PUT = do_POST = do_DELETE = _serve  # noqa: N815 - http.server's names

    def _knob(self, command: dict[str, Any]) -> Any:
        with self.server.world.lock:
            return getattr(self.server.world, command["call"])(**command["arguments"])

    def _send(self, reply: Reply) -> None:
        body = b"" if reply.told is None else json.dumps(reply.told).encode()
        kind = {"Content-Type": "application/json; charset=utf-8"} if body else {}
        self.send(reply.status, body, reply.headers | kind)


def _login(base: str, path: str, form: str) -> dict[str, Any]:
    """Answer as the identity platform does; the object id is that of the client."""
    tenant = path.split("/")[1]
    if path.endswith("/token"):
        client = parse_qs(form).get("client_id", [""])[0]
        claims = json.dumps({"oid": client, "tid": tenant}).encode()
        body = base64.urlsafe_b64encode(claims).decode().rstrip("=")
        token = f"e30.{body}.c2lnbmVk"
        return {"token_type": "Bearer", "expires_in": 3599, "access_token": token}
    return {
        "token_endpoint": f"{base}/{tenant}/oauth2/v2.0/token",
        "authorization_endpoint": f"{base}/{tenant}/oauth2/v2.0/authorize",
        "issuer": f"{base}/{tenant}/v2.0",
    }


def main() -> None:
    """Serve until standard input ends; the argument is a file with key and
    certificate.
    """
    world = World()
    server = _Server(("127.0.0.1", 0), _Handler)
    server.world, server.arm = world, Arm(world)
    server.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.tls.load_cert_chain(sys.argv[1])
    with world.retail.serving():
        http_server.serve(server)
        world.reset()  # its machines are processes
    os._exit(0)


if __name__ == "__main__":
    main()
