"""What the processes of fake services have in common."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from typing import Any, TypeVar

S = TypeVar("S", bound=HTTPServer)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else every answer waits for an acknowledgement
    wbufsize = -1

    def body(self) -> bytes | None:
        """Return the body of a request; None: whoever asked was killed in the middle."""
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) == length:
            return body
        self.close_connection = True
        return None

    def send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def break_off(self) -> None:
        """Close the connection without an answer."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """Takes many connections at once."""

    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no error."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


@contextmanager
def running(server: S) -> Iterator[S]:
    """Serve by a thread until the end."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def url_of(server: HTTPServer) -> str:
    """Return where a server on loopback is."""
    return f"http://127.0.0.1:{server.server_port}"


def serve(server: Any) -> None:
    """Print the port, and serve until standard input ends; threads still serve then."""
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()
