"""A job's persistent record of its hosts and VMs."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import SshTarget, Vm, VmState
from spottrain.codec import decode, encode
from spottrain.errors import WireError
from spottrain.files import PRIVATE, locked, write_whole

_TARGETS = 1000
"""VMs whose addresses and host keys are kept; the newest."""


@dataclass(frozen=True, slots=True)
class HostVm:
    """A VM, its host, and its lease."""

    vm: Vm
    host: str
    lease_s: float

    @property
    def is_alive(self) -> bool:
        """True unless it is known to have ended."""
        return self.vm.state is not VmState.TERMINATED


@dataclass(slots=True)
class HostRecord:
    """The content of the record."""

    owner: str
    """Distinguishes this job from others of its name; part of every claim."""
    rented: dict[str, HostVm]
    """By VM id, in order of launch."""
    tokens: dict[str, list[str]]
    """Completed launches: token to VM ids."""
    software: dict[str, str]
    """Software versions of the fleet's first host."""
    targets: dict[str, SshTarget]
    """How VMs were entered, by id."""

    def end(self, vm_id: str) -> None:
        """Record that a VM has ended; it stays in the record."""
        if vm_id in self.rented and self.rented[vm_id].is_alive:
            known = self.rented[vm_id]
            gone = replace(known.vm, state=VmState.TERMINATED, ended_at_s=time.time())
            self.rented[vm_id] = replace(known, vm=gone)


class HostMemory:
    """The record on disk; several processes may share it.

    Args:
        folder: The job's cloud folder; created if needed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "ssh.json"
        self._last: tuple[tuple[int, ...], HostRecord] | None = None

    def read(self) -> HostRecord:
        """Return the record; it must not be changed.

        Raises:
            CloudError: the file is damaged.
        """
        last = self._last
        if last is not None and self._signature() == last[0]:
            return last[1]
        with self.edit() as record:
            pass
        return record

    def _signature(self) -> tuple[int, ...]:
        """Return the file's identity, which differs for each new version."""
        with contextlib.suppress(FileNotFoundError):
            found = self._path.stat()
            return found.st_ino, found.st_mtime_ns, found.st_size
        return ()

    @contextlib.contextmanager
    def edit(self) -> Iterator[HostRecord]:
        """Change the record; changes are saved when the block ends without error.

        Raises:
            CloudError: the file is damaged.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(self.folder / "ssh.lock"):
            before = self._path.read_text() if self._path.exists() else ""
            record = self._parse(before) if before else HostRecord(uuid.uuid4().hex, {}, {}, {}, {})
            yield record
            after = encode(record)
            if after != before:
                write_whole(self._path, after, mode=PRIVATE)
            self._last = self._signature(), record

    def same_software(self, found: dict[str, str]) -> dict[str, str]:
        """Return the fleet's software; the first host's ``found`` defines it."""
        with self.edit() as record:
            if not record.software:
                record.software.update(found)
            return record.software

    def keep_target(self, vm_id: str, target: SshTarget) -> None:
        """Save how a VM was entered; VMs enough for a job are kept."""
        if self.read().targets.get(vm_id) == target:
            return
        with self.edit() as record:
            record.targets[vm_id] = target
            for old in list(record.targets)[:-_TARGETS]:
                del record.targets[old]

    def known_software(self) -> dict[str, str]:
        """Return the software of the fleet's first host; empty before there is one."""
        return self.read().software

    def keep_logs(self, vm_id: str, logs: dict[str, str]) -> None:
        """Save a VM's logs, by name, in ``vms/VM/``."""
        folder = self.folder / "vms" / vm_id
        for name, text in logs.items():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            data = text.encode(errors="backslashreplace")
            (folder / Path(name).name).write_bytes(data)

    def _parse(self, text: str) -> HostRecord:
        try:
            return cast(HostRecord, decode(HostRecord, text))
        except WireError as error:
            raise CloudError(
                f"{self._path} is damaged ({error}); free the hosts by hand (remove "
                ".spottrain in the home folders), then remove the file"
            ) from error
