"""Where real supervisors run, and the process that forks them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from spottrain.machine import SUPERVISOR_VARIABLES

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Host:
    """Where a machine is in the network."""

    address: str = "127.0.0.1"
    interface: str = "lo"
    namespace: str = ""
    """Path of its network namespace; that of the tests if empty."""
    num_slots: int = 1
    device: str = "cpu"
    """Of every slot."""
    memory_share: float = 1.0
    """Of the device's memory, for each slot."""
    threads: int = 1
    """CPU threads of each worker."""


class Zygote:
    """Starts machines in milliseconds; see zygote.py."""

    def __init__(self) -> None:
        self._requests, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path = filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH")))  # of tests
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=theirs.fileno(),
            env={**os.environ, **SUPERVISOR_VARIABLES, "PYTHONPATH": os.pathsep.join(path)},
        )
        theirs.close()

    def start(
        self,
        greeting: str,
        environment: Mapping[str, str],
        fds: Sequence[int],
        namespace: str = "",
    ) -> int:
        """Fork a supervisor on three file descriptors; return its pid."""
        request = {
            "greeting": greeting,
            "environment": dict(environment),
            "namespace": namespace,
        }
        socket.send_fds(self._requests, [json.dumps(request).encode()], list(fds))
        return int(self._requests.recv(64))

    def close(self) -> None:
        self._requests.close()
        self._process.wait()
