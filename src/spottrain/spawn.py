"""Tells a process that was forked ahead what to become; standard library only.

Importing torch takes seconds of a core, forking a process that has done so milliseconds.
The local cloud keeps one such process, the image of its VMs (``pipeline/process/image.py``);
each of its VMs has a child of that, which waits until the agent makes it the supervisor.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

VARIABLE = "SPOTTRAIN_WAITING"
"""Environment variable of an agent with such a child: ``PID:FD``, the socket to it."""

_PR_SET_PDEATHSIG = 1
_MAX_FDS = 16
_UNUSED_FD = 512
"""Files received are moved beyond it while they take their places."""


@dataclass(frozen=True, slots=True)
class Program:
    """What a process is to become."""

    argv: Sequence[str]
    folder: str
    """Its working folder."""
    environment: Mapping[str, str]
    """All of its variables."""
    fds: Sequence[int] = ()
    """Files that it gets besides its standard ones, under the numbers of the sender."""


class Received:
    """A program, and the files that came with it."""

    def __init__(self, program: Program, files: list[int]) -> None:
        self.program = program
        self._files = files

    def close(self) -> None:
        """Close the files; another process becomes the program."""
        for file in self._files:
            os.close(file)

    def take_over(self) -> None:
        """Give this process the program's folder, variables and files."""
        os.chdir(self.program.folder)
        os.environ.clear()
        os.environ.update(self.program.environment)
        high = [fcntl.fcntl(file, fcntl.F_DUPFD, _UNUSED_FD) for file in self._files]
        self.close()
        for file, place in zip(high, (0, 1, 2, *self.program.fds), strict=True):
            os.dup2(file, place)
            os.close(file)


def send(connection: socket.socket, program: Program, stdio: tuple[int, int, int]) -> None:
    """Send a program to the process that waits at the other end.

    Args:
        connection: To it.
        program: What it becomes.
        stdio: Its standard input, output and error.

    Raises:
        OSError: It has ended.
    """
    with tempfile.TemporaryFile() as text:  # of any length, unlike a message
        text.write(json.dumps(asdict(program)).encode())
        text.flush()
        files = [text.fileno(), *stdio, *program.fds]
        socket.send_fds(connection, [b"\0"], files)


def receive(connection: socket.socket) -> Received | None:
    """Wait for a program; ``None``: the sender is gone."""
    data, files, _, _ = socket.recv_fds(connection, 1, _MAX_FDS)
    if not data:
        return None
    text, *rest = files
    with os.fdopen(text, "rb") as stream:
        stream.seek(0)
        program = Program(**json.load(stream))
    return Received(program, rest)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends.

    Args:
        parent: Its process id. If it has ended already, so does this one.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os._exit(1)
