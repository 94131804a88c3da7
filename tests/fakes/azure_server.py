"""The fake Azure's process: prints its port, ends when its standard input does."""

from __future__ import annotations

import base64
import json
import os
import socket
import ssl
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

from tests.fakes.azure_arm import Arm
from tests.fakes.azure_http import Call, Reply
from tests.fakes.azure_world import World


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
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

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Tell the cloud's time."""
        world = self.server.world
        return super().date_time_string(timestamp or world.now() + world.skew_s)

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        url = urlsplit(self.path)
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        if len(body) < length:  # whoever asked was killed in the middle
            self.close_connection = True
            return
        base = f"https://{self.headers['Host']}"
        if url.path == "/fake":
            self._send(Reply(200, {"said": self._knob(json.loads(body))}))
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
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)
            else:
                self._send(reply)

    def do_GET(self) -> None:
        """See ``_serve``."""
        self._serve()

    def do_PUT(self) -> None:
        """See ``_serve``."""
        self._serve()

    def do_POST(self) -> None:
        """See ``_serve``."""
        self._serve()

    def do_DELETE(self) -> None:
        """See ``_serve``."""
        self._serve()

    def _knob(self, command: dict[str, Any]) -> Any:
        with self.server.world.lock:
            return getattr(self.server.world, command["call"])(**command["arguments"])

    def _send(self, reply: Reply) -> None:
        body = b"" if reply.told is None else json.dumps(reply.told).encode()
        self.send_response(reply.status)
        for name, text in reply.headers.items():
            self.send_header(name, text)
        if body:
            self.send_header("Content-Type", "application/json; charset=utf-8")
        if reply.status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


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
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdout.write(f"{server.server_port}\n")
        sys.stdout.flush()
        sys.stdin.read()
        world.reset()  # its machines are processes
    os._exit(0)  # threads still serve


if __name__ == "__main__":
    main()
