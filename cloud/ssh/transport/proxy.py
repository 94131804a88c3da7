"""Connections to hosts through a tool of their cloud, as by OpenSSH's ProxyCommand.

The tool's standard input and output are the connection. A tool that opens a port on this
machine instead, as ``az network bastion tunnel`` does, is run by this module's ``main``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from spottrain.cloud.ssh.transport import hosts

CONNECT_S = 45.0
"""How long a tool may take to connect: they start slowly, and sign in first."""
PORT = "{local_port}"
"""Stands for the port that a tool shall open."""
_TRY_S = 0.1
_CHUNK_BYTES = 1 << 16
_SAID_BYTES = 4096

ProxyCommand = Callable[[hosts.Host], Sequence[str]]
"""Returns the command line that connects to a host."""


class ProxySocket(socket.socket):
    """The connection to a host through a tool, which ends when this is closed.

    Args:
        argv: The tool's command line.

    Raises:
        OSError: It cannot be started.
    """

    def __init__(self, argv: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        super().__init__(fileno=ours.detach())
        self.complaint = ""
        """The last line that the tool printed to stderr, once this is closed."""
        self._closing = threading.Lock()
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            with theirs:
                self._process = subprocess.Popen(
                    argv,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self._said,
                    start_new_session=True,  # tools start helpers of their own
                )
        except OSError:
            super().close()
            self._said.close()
            raise

    def close(self) -> None:
        """Close the connection and end the tool with its helpers."""
        super().close()
        with self._closing:  # several threads may close it
            if not self._said.closed:
                self._end()

    def _end(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        with self._said:
            size = self._said.seek(0, os.SEEK_END)
            self._said.seek(max(0, size - _SAID_BYTES))
            lines = self._said.read().decode(errors="replace").split("\n")
        self.complaint = next((x.strip() for x in reversed(lines) if x.strip()), "")


def dial_through(command: ProxyCommand) -> Callable[[hosts.Host], ProxySocket]:
    """Return what connects to hosts through a tool; see ``session.Dial``.

    It raises UnfitHostError if the tool cannot be started.
    """

    def dial(host: hosts.Host) -> ProxySocket:
        argv = command(host)
        try:
            return ProxySocket(argv)
        except OSError as error:
            raise hosts.UnfitHostError(
                f"{host.place}: is reached through {argv[0]}, which cannot be started "
                f"here: {error.strerror}"
            ) from error

    return dial


def through_jump(host: hosts.Host) -> list[str]:
    """Return the command line that connects through ``host.proxy_jump``, as OpenSSH does.

    The ``ssh`` of this machine logs in there, by what its own configuration says.
    """
    *before, last = host.proxy_jump.split(",")
    jumps = ["-J", ",".join(before)] if before else []
    to = f"[{host.address}]:{host.port}"
    return ["ssh", "-o", "BatchMode=yes", *jumps, "-W", to, "--", f"ssh://{last}"]


# --- Tools that open a port -----------------------------------------------------------


def through_port(argv: Sequence[str]) -> list[str]:
    """Return the command line that connects through a tool which opens a port.

    Args:
        argv: Of the tool, with ``PORT`` where the port belongs.
    """
    return [sys.executable, "-P", "-m", __name__, *argv]


def main(argv: Sequence[str]) -> None:
    """Run a tool that opens a port; join the port with stdin and stdout until one ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    tool = [part.replace(PORT, str(port)) for part in argv]
    # Both streams are the connection: what the tool prints must not get into it.
    process = subprocess.Popen(tool, stdin=subprocess.DEVNULL, stdout=sys.stderr)
    try:
        with _opened(port, process, tool[0]) as connection:
            threading.Thread(target=_send, args=(connection,), daemon=True).start()
            while data := connection.recv(_CHUNK_BYTES):
                os.write(1, data)
    finally:
        process.kill()
        process.wait()


def _opened(port: int, process: subprocess.Popen[bytes], tool: str) -> socket.socket:
    """Return a connection to a port that a tool is about to open."""
    until_s = time.monotonic() + CONNECT_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            sys.exit(process.returncode or 1)  # it has said why
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            time.sleep(_TRY_S)
    sys.exit(f"{tool} opened no port")


def _send(connection: socket.socket) -> None:
    while data := os.read(0, _CHUNK_BYTES):
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main(sys.argv[1:])
