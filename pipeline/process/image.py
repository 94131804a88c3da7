"""The image of the local cloud's VMs: has imported torch, and forks VMs.

    python -m spottrain.pipeline.process.image < socket

A byte says that it is ready. Then it is sent programs (``spottrain.spawn``): agents. It
answers each with the agent's process id and a descriptor of the process. An agent begins
with a child that has imported all that a supervisor needs, and that becomes one as soon as the
agent says so. Nothing of any user's is imported here.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import torch

from spottrain import machine, spawn
from spottrain.pipeline.process import supervisor

logger = logging.getLogger(__name__)


def main() -> None:
    """Fork VMs until the local cloud ends."""
    torch.set_num_threads(1)
    requests = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    signal.signal(signal.SIGCHLD, _reap)
    requests.sendall(b"\0")
    while (received := spawn.receive(requests)) is not None:
        # A child that ends at once is not reaped before its descriptor is open.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        vm = _fork(functools.partial(_become_vm, received, requests))
        received.close()
        handle = os.pidfd_open(vm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        socket.send_fds(requests, [str(vm).encode()], [handle])
        os.close(handle)


def _reap(number: int, frame: FrameType | None) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork(body: Callable[[], object]) -> int:
    """Run ``body`` in a child that dies with this process; return its id."""
    parent = os.getpid()
    if (pid := os.fork()) != 0:
        return pid
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        spawn.die_with_parent(parent)
        body()
    except Exception:
        logger.exception("a VM ends")
    finally:
        os._exit(1)


def _become_vm(received: spawn.Received, requests: socket.socket) -> None:
    """Become an agent, of a session of its own, with a child that waits."""
    requests.close()
    os.setsid()
    ours, theirs = socket.socketpair()
    waiting = _fork(functools.partial(_become_supervisor, received, ours, theirs))
    theirs.close()
    received.take_over()
    ours.set_inheritable(True)
    os.environ[spawn.VARIABLE] = f"{waiting}:{ours.fileno()}"
    argv = received.program.argv
    os.execve(argv[0], [*argv], os.environ)


def _become_supervisor(agent: spawn.Received, ours: socket.socket, theirs: socket.socket) -> None:
    """Wait for the agent's word; it has this process as the leader of a group."""
    agent.close()
    ours.close()
    os.setpgid(0, 0)
    program = spawn.receive(theirs)
    theirs.close()
    if program is None:
        os._exit(0)
    program.take_over()
    sys.argv = [*program.program.argv]
    machine.raise_locked_memory_limit()  # the agent has raised its own meanwhile
    supervisor.main()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
