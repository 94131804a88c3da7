"""Requests to the program of a batch job, by way of the folder that it and we share."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from spottrain.cloud.port.errors import VmNotFoundError
from spottrain.cloud.slurm.login import Login
from spottrain.cloud.ssh.transport.hosts import Host, UnreachableHostError
from spottrain.cloud.ssh.transport.session import CALL_S, refusal

_WAIT_S = 1.0
"""How long one look for answers may last."""


@dataclass
class NodeSession:
    """What one process of the manager asks of a batch job; see ``on_node``.

    Args:
        host: The node, for messages.
        login: Where the shared folder is.
        folder: That of the job, in which what is sent to all nodes lies once.
        shared: That of the batch job.
        private_address: Of the node.
    """

    host: Host
    login: Login
    folder: str
    shared: str
    private_address: str

    def __post_init__(self) -> None:
        # Names are ordered: the node serves the newest.
        name = f"{self.shared}/{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
        self._requests, self._answers = f"{name}.requests", f"{name}.answers"
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._is_over = False

    def session(self) -> NodeSession:
        """Return itself: it is its own connection; see ``bootstrap.Connection``."""
        return self

    def status(self) -> tuple[dict[str, Any] | None, str]:
        """Return the claim on the node and its state; see ``HostAgent.status``."""
        seen = self.call("status")
        return seen["claim"], seen["state"]

    def close(self) -> None:
        """Wait for no answer any more."""
        self._is_over = True

    def call(self, operation: str, timeout_s: float = CALL_S, **arguments: Any) -> Any:
        """Return the result of an operation of ``host_agent.HostAgent``.

        Raises:
            VmNotFoundError: the VM has ended.
            UnfitHostError: the operation failed.
            UnreachableHostError: no answer in time.
        """
        with self._lock:
            number = next(self._numbers)
            line = json.dumps({"id": number, "op": operation, **arguments})
            if not self.login.call("ask", requests=self._requests, line=line):
                raise VmNotFoundError(f"{self.host.place}: its folder is gone")
        end_s, known = time.monotonic() + timeout_s, 0
        while not self._is_over and time.monotonic() < end_s:
            lines = self.login.call("answers", path=self._answers, known=known, wait_s=_WAIT_S)
            known += len(lines)
            for answer in map(json.loads, lines):
                if answer["id"] != number:
                    continue
                if "error" in answer:
                    raise refusal(self.host.place, answer["error"])
                return answer["ok"]
        raise UnreachableHostError(
            f"{self.host.place}: no answer to {operation} in {timeout_s:g} s"
        )

    def unpack(
        self, vm_id: str, name: str, archive: bytes, timeout_s: float, keep: str = ""
    ) -> None:
        """Have an archive unpacked into ``name`` on the node; see ``Session.unpack``."""
        digest = keep or hashlib.sha256(archive).hexdigest()
        path = f"{self.folder}/{digest}.tar.gz"
        if not self.login.call("has", path=path):
            self.login.call("put", archive, path=path, unpacks=False)
        url = PurePosixPath(path).as_uri()
        arguments = {"vm_id": vm_id, "name": name, "url": url, "digest": digest}
        if wrong := self.call("receive", timeout_s, **arguments):
            raise UnreachableHostError(f"{self.host.place}: {name}: {wrong}")
