"""Requests to the program of a batch job, by way of the folder that it and we share."""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spottrain.cloud.port.errors import VmNotFoundError
from spottrain.cloud.ssh.transport.conversation import CALL_S, refusal
from spottrain.cloud.ssh.transport.hosts import Host, UnreachableHostError
from spottrain.files import write_whole

_LOOK_S = 0.05


@dataclass
class NodeSession:
    """What one process of the manager asks of a batch job; see ``on_node``.

    Args:
        host: The node, for messages.
        shared: Folder of the batch job.
        archives: Folder in which what is sent to all nodes lies once.
        private_address: Of the node.
    """

    host: Host
    shared: Path
    archives: Path
    private_address: str

    def __post_init__(self) -> None:
        # Names are ordered: the node serves the newest.
        self._name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}"
        self._requests = self.shared / f"{self._name}.requests"
        self._answers = self.shared / f"{self._name}.answers"
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._is_over = False

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
            try:
                with self._requests.open("a") as file:
                    file.write(f"{line}\n")
            except FileNotFoundError as error:
                raise VmNotFoundError(f"{self.host.place}: its folder is gone") from error
        end_s = time.monotonic() + timeout_s
        while not self._is_over and time.monotonic() < end_s:
            for answer in self._answered():
                if answer["id"] != number:
                    continue
                if "error" in answer:
                    raise refusal(self.host.place, answer["error"])
                return answer["ok"]
            time.sleep(_LOOK_S)
        raise UnreachableHostError(
            f"{self.host.place}: no answer to {operation} in {timeout_s:g} s"
        )

    def _answered(self) -> list[dict[str, Any]]:
        """Return all answers so far; the last line may not be whole yet."""
        try:
            text = self._answers.read_text()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def unpack(
        self, vm_id: str, name: str, archive: bytes, timeout_s: float, keep: str = ""
    ) -> None:
        """Have an archive unpacked into ``name`` on the node; see ``Session.unpack``."""
        digest = keep or hashlib.sha256(archive).hexdigest()
        shared = self.archives / f"{digest}.tar.gz"
        if not shared.exists():
            write_whole(shared, archive, mode=0o600)
        url = shared.absolute().as_uri()
        arguments = {"vm_id": vm_id, "name": name, "url": url, "digest": digest}
        if wrong := self.call("receive", timeout_s, **arguments):
            raise UnreachableHostError(f"{self.host.place}: {name}: {wrong}")
