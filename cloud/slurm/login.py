"""The way to Slurm's commands and the shared folder: none, or SSH to a login node."""

from __future__ import annotations

import ipaddress
import random
import re
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

from spottrain.cloud.port.errors import CloudError, MisconfiguredError
from spottrain.cloud.slurm import on_login, queue
from spottrain.cloud.slurm.settings import HERE, SlurmSettings
from spottrain.cloud.ssh.transport.openssh import OpensshProgram

_PAUSE_S = 10.0
"""Between two tries to log in: a site may ban who is refused again and again."""
_PORTS = range(20000, 30000)
"""For the way back, on the login node's loopback: one is taken, unless it is not free."""


class Login:
    """A login node.

    Args:
        settings: Of the cluster.
    """

    def __init__(self, settings: SlurmSettings) -> None:
        self._settings = settings
        self._here = on_login.OnLogin() if settings.login == HERE else None
        self._lock = threading.Lock()
        self._calls: OpensshProgram | None = None
        self._relay: OpensshProgram | None = None
        """A connection of its own, which carries the calls of agents."""
        self._failed: tuple[float, CloudError] | None = None

    def call(self, operation: str, data: bytes | None = None, **arguments: Any) -> Any:
        """Return the result of an operation of ``OnLogin``.

        Args:
            data: An archive for it.

        Raises:
            CloudError: it failed, or the login node cannot be reached.
        """
        if self._here is None:
            return self._connected().call(operation, data, **arguments)
        try:
            if data is not None:
                with tempfile.NamedTemporaryFile(delete=False) as file:
                    file.write(data)
                arguments["archive"] = file.name
            return getattr(self._here, operation)(**arguments)
        except (OSError, ValueError) as error:
            raise CloudError(f"slurm: {error}") from error

    def run(self, argv: Sequence[str], data: str = "") -> str:
        """Return what a command of Slurm's prints; of one that only tests, also to stderr.

        Raises:
            CloudError: it failed; see ``queue.refusal``.
        """
        code, out, err = self.call("run", argv=argv, given=data)
        if code == on_login.NO_PROGRAM:
            raise MisconfiguredError(
                f"slurm.login: {self._settings.login}: has no {argv[0]}; name a login node of the "
                "cluster"
            )
        if code:
            raise queue.refusal(argv[0], err)
        return f"{out}{err}" if "--test-only" in argv else str(out)

    def relay(self, address: str, manager_port: int) -> str:
        """Relay agents' calls to the manager from now on; return where they call.

        Args:
            address: Of the login node for the nodes.
            manager_port: On this machine's loopback.

        Raises:
            CloudError: it cannot listen there, or the login node cannot be reached.
        """
        if self._here is not None:
            return str(self.call("relay", address=address, target=manager_port))
        if self._relay is not None:
            self._relay.close()
        port = random.choice(_PORTS)
        self._relay = self._open("-R", f"127.0.0.1:{port}:127.0.0.1:{manager_port}")
        return str(self._relay.call("relay", address=address, target=port))

    @property
    def relays(self) -> bool:
        """False if a relay has ended with its connection."""
        return self._relay is None or self._relay.alive

    def would_take(self, partition: str) -> str:
        """Return when a batch job would begin, if it were submitted now.

        Raises:
            CloudError: it would be refused.
        """
        folder = self.call("folder", path=self._settings.folder)
        argv = queue.launch_argv(self._settings, folder, partition, "spottrain", {})
        said = self.run([*argv, "--test-only"], "#!/bin/sh\n")
        found = re.search(r"to start at (\d+)", said)
        return f"would start a job at {queue.clock(float(found[1]))}" if found else "takes jobs"

    def address(self) -> str:
        """Return the login node's address for the nodes, at which agents can be served.

        Raises:
            CloudError: it is not known, or one of the whole world.
        """
        address = self._settings.address or self.call("own_address")
        if not address:
            raise CloudError("slurm: its controller does not answer; give slurm.address")
        try:
            is_public = ipaddress.ip_address(address).is_global
        except ValueError as error:
            raise MisconfiguredError(f"slurm.address: {error}; give an IP address") from error
        if is_public:
            raise MisconfiguredError(
                f"slurm.address: {address} is public; give the login node's address in the "
                "nodes' network"
            )
        return str(address)

    def close(self) -> None:
        """Close the connections."""
        for connection in (self._calls, self._relay):
            if connection is not None:
                connection.close()

    def _connected(self) -> OpensshProgram:
        with self._lock:
            if self._calls is None or not self._calls.alive:
                if self._failed is not None and time.monotonic() < self._failed[0] + _PAUSE_S:
                    raise self._failed[1]
                self._calls = self._open()
            return self._calls

    def _open(self, *options: str) -> OpensshProgram:
        settings = self._settings
        try:
            return OpensshProgram(settings.login, settings.python, on_login.__name__, *options)
        except CloudError as error:
            self._failed = time.monotonic(), error
            raise
