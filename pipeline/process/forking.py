"""Forks the supervisor's children: workers, stores, tasks."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

_PR_SET_PDEATHSIG = 1

Body = Callable[[socket.socket], None]
"""What a child runs, given its end of the socket to the supervisor."""


@dataclass(slots=True)
class Child:
    """A forked process and the socket to it."""

    pid: int
    pidfd: int
    connection: socket.socket
    slot: int | None
    """The slot that a worker drives; ``None`` for a store or a task."""
    what: str
    generation: int = 0
    running: bool = False
    task_slot: int = 0
    """The slot that a task is told as, when it dies."""
    said: str = ""
    """Pieces of a long report."""


def fork_child(
    what: str, slot: int | None, body: Body, inherited: Sequence[int]
) -> Child:
    """Fork a process that runs ``body`` and ends, at the latest when we do.

    Args:
        what: What it is, for messages.
        slot: The slot it drives, if it is a worker.
        body: What it runs.
        inherited: Our file descriptors, which it closes first.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid == 0:
        _run(theirs, body, [ours.fileno(), *inherited])
    theirs.close()
    return Child(pid, os.pidfd_open(pid), ours, slot, what)


def _run(connection: socket.socket, body: Body, inherited: Sequence[int]) -> NoReturn:
    code = 1
    try:
        _die_with_parent()
        for fd in inherited:
            os.close(fd)
        os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
        body(connection)
        code = 0
    except BaseException:  # noqa: BLE001  nothing may unwind into the supervisor
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(code)


def _die_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it dies."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(0)
