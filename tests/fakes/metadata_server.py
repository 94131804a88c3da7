"""A fake metadata service's process: prints its port, ends when its standard input does.

``python -m tests.fakes.metadata_server aws|azure|gcp``. The first part of each path names
the VM that asks.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from tests.fakes.metadata_aws import AwsWorld
from tests.fakes.metadata_azure import AzureWorld
from tests.fakes.metadata_gcp import GcpWorld
from tests.fakes.metadata_world import Reply, Request, World

WORLDS: dict[str, Callable[[], World]] = {
    "aws": AwsWorld,
    "azure": AzureWorld,
    "gcp": GcpWorld,
}


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits for an acknowledgement
    wbufsize = -1
    world: World

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        if parts.path == "/fake":
            command = json.loads(body)
            told = getattr(self.world, command["call"])(**command["arguments"])
            self._send(Reply(200, json.dumps(told)))
            return
        _, vm, *rest = parts.path.split("/")
        path, query = "/" + "/".join(rest), dict(parse_qsl(parts.query, True))
        request = Request(vm, self.command, path, query, self.headers, body)
        reply = self.world.answer(request)
        if reply is None:
            self.close_connection = True
        else:
            self._send(reply)

    def _send(self, reply: Reply) -> None:
        sent = reply.body.encode()
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)

    do_GET = do_POST = do_PUT = _answer  # noqa: N815 - http.server's names

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Return the date of an answer, by the service's clock."""
        return formatdate(self.world.now(), usegmt=True)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """Takes many connections at once."""

    daemon_threads = True
    request_queue_size = 256


def main() -> None:
    """Serve until standard input ends."""
    handler = type("Bound", (Handler,), {"world": WORLDS[sys.argv[1]]()})
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # threads still serve


if __name__ == "__main__":
    main()
