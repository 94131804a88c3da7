"""HTTP requests over Unix sockets with paths of any length; standard library only."""

from __future__ import annotations

import http.client
import os
import socket


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
        folder = os.open(os.path.dirname(socket_path), os.O_PATH | os.O_DIRECTORY)
        try:
            connection.connect(address(folder, socket_path))
        finally:
            os.close(folder)
    except OSError:
        connection.close()
        raise
    return connection


def address(folder: int, socket_path: str) -> str:
    """Return the socket's address, given a descriptor of its folder.

    A socket address holds 108 bytes; the descriptor replaces the folder's path.
    """
    return f"/proc/self/fd/{folder}/{os.path.basename(socket_path)}"
