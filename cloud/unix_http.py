"""HTTP requests over Unix sockets with paths of any length; standard library only."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import socket
import sys
from collections.abc import Iterator

_MAX_ADDRESS_BYTES = 104
"""Of a Unix socket's address on macOS, its end included; 108 on Linux."""


def request(
    socket_path: str,
    method: str,
    target: str,
    *,
    timeout_s: float,
    body: bytes | None = None,
) -> tuple[int, bytes]:
    """Return status and body of the response.

    Raises:
        TimeoutError: no response in time.
        OSError: nothing listens, or the connection broke.
        http.client.HTTPException: the response is incomplete.
    """
    connection = http.client.HTTPConnection("localhost")
    connection.sock = connect(socket_path, timeout_s)
    try:
        connection.request(method, target, body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def connect(socket_path: str, timeout_s: float) -> socket.socket:
    """Return a connection to a Unix socket.

    Raises:
        OSError: nothing listens there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        with address(socket_path) as there:
            connection.connect(there)
    except OSError:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def address(socket_path: str) -> Iterator[str]:
    """Yield an address at which the socket with this path is bound or reached.

    Raises:
        OSError: Its folder does not exist; not on Linux, the path is too long.
    """
    if len(os.fsencode(socket_path)) < _MAX_ADDRESS_BYTES:
        yield socket_path
        return
    if sys.platform != "linux":
        raise OSError(errno.ENAMETOOLONG, "path of a socket is too long", socket_path)
    folder = os.open(os.path.dirname(socket_path), os.O_PATH | os.O_DIRECTORY)
    try:  # the descriptor stands for the folder's path
        yield f"/proc/self/fd/{folder}/{os.path.basename(socket_path)}"
    finally:
        os.close(folder)
