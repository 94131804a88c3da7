"""The folder of one local cloud: paths, locks and persistent state."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from spottrain.cloud.local.state import LocalSettings
from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import Vm, VmState
from spottrain.cloud.process.tree import clear_folder, kill_all
from spottrain.codec import decode, encode
from spottrain.errors import WireError
from spottrain.files import PRIVATE, locked, write_whole


@dataclass(frozen=True, slots=True)
class LocalRecord:
    """State that a cloud process leaves to the next one and to clients."""

    vms: tuple[Vm, ...]
    tokens: dict[str, tuple[str, ...]]


class FolderGoneError(CloudError):
    """The folder in which a local cloud's folder is does not exist any more."""


class LocalFolder:
    """Files of one local cloud.

    ``cloud.lock`` is held by the cloud process for its whole life; whoever else holds
    it knows that no cloud process runs. A client that starts one holds ``start.lock``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.socket = self.path / "cloud.sock"
        self.log = self.path / "cloud.log"
        self._record = self.path / "cloud.json"
        self._settings = self.path / "settings.json"

    def vm(self, vm_id: str) -> Path:
        """Return the work folder of a VM."""
        return self.path / "vms" / vm_id

    @contextlib.contextmanager
    def lock(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold ``name.lock``; yields True if it is held (always, if ``wait``)."""
        with locked(self._lock(name), wait=wait) as held:
            yield held

    def lock_for_life(self) -> None:
        """Hold ``cloud.lock`` for the life of this process."""
        fcntl.flock(os.open(self._lock("cloud"), os.O_RDWR | os.O_CREAT, 0o600), fcntl.LOCK_EX)

    def _lock(self, name: str) -> Path:
        try:
            self.path.mkdir(mode=0o700, exist_ok=True)
        except FileNotFoundError as error:
            # Were it made anew, what runs would be forgotten, and rented again.
            raise FolderGoneError(f"the folder of the local cloud, {self.path}, is gone") from error
        return self.path / f"{name}.lock"

    def save_settings(self, settings: LocalSettings) -> None:
        """Write the settings of the next cloud process."""
        write_whole(self._settings, encode(settings), mode=PRIVATE)

    def load_settings(self) -> LocalSettings:
        """Return the settings that ``save_settings`` wrote."""
        return cast(LocalSettings, decode(LocalSettings, self._settings.read_text()))

    def save(self, record: LocalRecord) -> None:
        """Write the record atomically."""
        write_whole(self._record, encode(record), mode=PRIVATE)

    def load(self) -> LocalRecord:
        """Return the record that ``save`` wrote last.

        Raises:
            CloudError: the file is damaged.
        """
        if not self._record.exists():
            return LocalRecord((), {})
        try:
            return cast(LocalRecord, decode(LocalRecord, self._record.read_text()))
        except (UnicodeError, WireError) as error:
            raise CloudError(
                f"{self._record} is damaged ({error}); kill all processes with "
                "SPOTTRAIN_VM in their environment, then remove the file"
            ) from error

    def recover(self) -> LocalRecord:
        """End the VMs of a dead cloud process; the caller holds ``cloud.lock``.

        Its agents died with it, so its VMs are useless. They are billed until now,
        since their end was not observed.
        """
        self.socket.unlink(missing_ok=True)
        record = self.load()
        left = [vm for vm in record.vms if vm.state != VmState.TERMINATED]
        if not left:
            return record
        kill_all([marker(vm.job, vm.vm_id) for vm in left])
        for vm in left:
            clear_folder(self.vm(vm.vm_id))
        now_s = time.time()
        vms = tuple(
            replace(
                vm,
                state=VmState.TERMINATED,
                ended_at_s=max(now_s, vm.launched_at_s),
            )
            if vm in left
            else vm
            for vm in record.vms
        )
        record = LocalRecord(vms, record.tokens)
        # On a full disk the next call recovers again.
        with contextlib.suppress(OSError):
            self.save(record)
        return record


def marker(job: str, vm_id: str) -> str:
    """Return the value of SPOTTRAIN_VM in the environment of a VM's processes."""
    return f"{job}/{vm_id}"
