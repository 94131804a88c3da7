"""The fake GCP's process: prints its port, ends when its standard input does."""

from __future__ import annotations

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.fakes.gcp_layer import Layer
from tests.fakes.gcp_world import World


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits for an acknowledgement
    wbufsize = -1
    layer: Layer
    world: World

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Tell the cloud's time."""
        now_s = self.world.now() + self.world.skew_s
        return super().date_time_string(timestamp or now_s)

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # whoever asked was killed in the middle
            self.close_connection = True
            return
        answer = self.layer.answer(self.command, self.path, self.headers, body)
        if answer is None:
            self.close_connection = True
            return
        sent = json.dumps(answer.told).encode()
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    do_GET = do_POST = do_PATCH = do_DELETE = _answer  # noqa: N815 - http.server's names

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """Takes many connections at once."""

    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


def main() -> None:
    """Serve until standard input ends."""
    world = World()
    handler = type("Bound", (Handler,), {"layer": Layer(world), "world": world})
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # threads still serve


if __name__ == "__main__":
    main()
