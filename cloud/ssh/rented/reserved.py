"""VMs that a job reserves for others, and who took them: files of the job that reserves them.

``<folder>/reserved/<vm_id>.json``. Tags cannot be changed on a condition, so a lock of the same
name makes those who move a VM and those who end it wait for each other: whoever dies lets go
of it. Tags say whose a VM is. The file says since when, before they do: what is asked again
finds the same moment, at which the one's bill ends and the other's begins.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from spottrain.cloud.port.errors import CloudError
from spottrain.cloud.port.provider import Vm, VmState
from spottrain.codec import decode, encode
from spottrain.errors import WireError
from spottrain.files import PRIVATE, locked, write_whole

_FILES = 1000
"""VMs that are remembered; the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedVm:
    """A VM with nothing of its job on it."""

    vm: Vm
    """As the job that reserves it has it."""
    order: str = ""
    """To which it goes: the name of the other job, and of its order."""
    moves_at_s: float = 0.0
    """When it does, for the bills of both. Seconds since the epoch."""
    has_moved: bool = False
    """Its tags say so, too. Else they may."""
    is_returned: bool = False
    """It was, or is about to be: nobody may have it any more."""


class ReservedVms:
    """The VMs that a job reserves, or once reserved; several processes may share them.

    Args:
        folder: The job's cloud folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "reserved"
        self._known: dict[str, tuple[tuple[int, int], ReservedVm]] = {}

    def find(self, vm_id: str) -> ReservedVm | None:
        """Return what is known of a VM, None if it was never reserved.

        Raises:
            CloudError: its file is damaged.
        """
        path = self._folder / f"{vm_id}.json"
        try:
            status = path.stat()
            version = status.st_ino, status.st_mtime_ns
            known = self._known.get(vm_id)
            if known is None or known[0] != version:
                known = version, cast(ReservedVm, decode(ReservedVm, path.read_text()))
                self._known[vm_id] = known
        except FileNotFoundError:
            return None
        except (UnicodeError, WireError) as error:
            raise CloudError(f"{path} is damaged ({error}); remove it") from error
        return known[1]

    def put(self, reserved: ReservedVm) -> None:
        """Write down what is known of a VM."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = self._folder / f"{reserved.vm.vm_id}.json"
        write_whole(path, encode(reserved), mode=PRIVATE)

    def all(self) -> list[ReservedVm]:
        """Return all of them; forget the oldest of too many."""
        if not self._folder.is_dir():
            return []
        paths = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in paths[:-_FILES]:
            old.unlink(missing_ok=True)
            old.with_suffix(".lock").unlink(missing_ok=True)
        found = (self.find(path.stem) for path in paths[-_FILES:])
        return [reserved for reserved in found if reserved is not None]

    @contextlib.contextmanager
    def locked(self, vm_id: str) -> Iterator[ReservedVm | None]:
        """Keep all others from moving or ending a VM; yield what is known of it."""
        if self.find(vm_id) is None:
            yield None
            return
        with locked(self._folder / f"{vm_id}.lock"):
            yield self.find(vm_id)

    def corrected(self, listed: Collection[Vm]) -> Sequence[Vm]:
        """Return the cloud's list with the VMs that have gone to others, as terminated."""
        vms = {vm.vm_id: vm for vm in listed}
        for reserved in self.all():
            vm = reserved.vm
            went = reserved.order and not reserved.is_returned and vm.vm_id not in vms
            if reserved.has_moved or went:
                vms[vm.vm_id] = replace(
                    vm, state=VmState.TERMINATED, ended_at_s=reserved.moves_at_s
                )
        return tuple(vms.values())
