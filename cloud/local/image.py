"""The image of the cloud's VMs: a process that has imported torch, from which they boot.

Two cores would import torch for four VMs in ten seconds and more; forked, VMs boot within
one, at the price of one import. Only our own agent boots from it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from typing import BinaryIO

from spottrain import spawn
from spottrain.cloud.process import die_with_parent
from spottrain.machine import OWNER_VARIABLE, owner, supervisor_environment

_log = logging.getLogger(__name__)

AGENT_ARGV: tuple[str, ...] = (sys.executable, "-P", "-m", "spottrain.varuna_manager.agent.main")
"""Command of an agent; the path of its ``agent.json`` is appended."""
_IMAGE_ARGV = (
    sys.executable,
    "-P",
    "-m",
    "spottrain.start",
    "spottrain.pipeline.process.image",
)
_BOOT_S = 60.0
"""How long a fork may take: without its image, no VM lives that has booted from it."""


class VmImage:
    """The image; methods run on one event loop, in the main thread.

    Args:
        job: Whose VMs boot from it.
    """

    def __init__(self, job: str) -> None:
        self._owner = {OWNER_VARIABLE: owner(job)}
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._answer: asyncio.Task[bool] | None = None

    async def ready(self) -> bool:
        """Wait until VMs can boot from it; false: they cannot, as without torch."""
        if self._answer is None:
            self._answer = asyncio.create_task(self._wait(self._start()))
        return await asyncio.shield(self._answer)

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        shim = (sys.executable, "-I", "-S", die_with_parent.__file__, str(os.getpid()))
        with theirs:
            self._process = subprocess.Popen(
                [*shim, *_IMAGE_ARGV],
                stdin=theirs.fileno(),
                env=supervisor_environment(os.environ) | self._owner,
            )
        return ours

    def close(self) -> None:
        """End the image, and with it whatever has booted from it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()

    async def _wait(self, connection: socket.socket) -> bool:
        connection.setblocking(False)
        if not await asyncio.get_running_loop().sock_recv(connection, 1):
            connection.close()
            return False
        connection.settimeout(_BOOT_S)
        self._connection = connection
        return True

    def boot(self, program: spawn.Program, log: BinaryIO) -> tuple[int, int] | None:
        """Boot a VM that runs ``program``, in a session of its own.

        Returns:
            The program's process id and a descriptor of the process; ``None``: there is no
            image.
        """
        if self._connection is None:
            return None
        try:
            with open(os.devnull, "rb") as nothing:
                files = nothing.fileno(), log.fileno(), log.fileno()
                spawn.send(self._connection, program, files)
            answer, handles, _, _ = socket.recv_fds(self._connection, 32, 1)
            return int(answer), handles[0]
        except (OSError, ValueError):
            _log.exception("the image of VMs is lost: they import torch themselves")
            self._connection.close()
            self._connection = None
            return None
