"""Requests to a host agent by way of a folder that its host and another machine share."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from spottrain.cloud.port.errors import VmNotFoundError
from spottrain.cloud.ssh.transport.conversation import CALL_S, refusal
from spottrain.cloud.ssh.transport.hosts import Host, UnreachableHostError

_WAIT_S = 1.0
"""How long one look for answers may last."""


@dataclass
class MailboxSession:
    """What one process of the manager asks of a host agent, which serves the newest
    ``*.requests`` of a folder (``on_vm.tail``).

    Args:
        host: The host, for messages.
        call_there: Calls an operation on a machine that has the shared folder: ``ask``, ``answers``,
            ``has`` and ``put`` of ``slurm.on_login.OnLogin``.
        folder: In which what is sent to all hosts lies once.
        shared: For requests and answers.
        private_address: Of the host.
    """

    host: Host
    call_there: Callable[..., Any]
    folder: str
    shared: str
    private_address: str

    def __post_init__(self) -> None:
        # Names are ordered: the newest is served.
        name = f"{self.shared}/{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
        self._requests, self._answers = f"{name}.requests", f"{name}.answers"
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._is_over = False

    def session(self) -> MailboxSession:
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
            if not self.call_there("ask", requests=self._requests, line=line):
                raise VmNotFoundError(f"{self.host.place}: its folder is gone")
        end_s, known = time.monotonic() + timeout_s, 0
        while not self._is_over and time.monotonic() < end_s:
            lines = self.call_there("answers", path=self._answers, known=known, wait_s=_WAIT_S)
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
        if not self.call_there("has", path=path):
            self.call_there("put", archive, path=path, unpacks=False)
        url = PurePosixPath(path).as_uri()
        arguments = {"vm_id": vm_id, "name": name, "url": url, "digest": digest}
        if wrong := self.call("receive", timeout_s, **arguments):
            raise UnreachableHostError(f"{self.host.place}: {name}: {wrong}")
