"""Storage on disk of providers: VMs as JSON, private files, VM folders.

Standard library only: the keeper on a host cleans up with it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from spottrain.cloud.port.provider import Offer, Vm, VmState
from spottrain.codec import from_data


def vm_from_data(data: dict[str, Any]) -> Vm:
    """Return the VM whose ``dataclasses.asdict`` was written as JSON."""
    offer = from_data(Offer, data["offer"])
    return Vm(**{**data, "state": VmState(data["state"]), "offer": offer})


def clear_vm_folder(vm_folder: Path) -> None:
    """Remove all files of an ended VM but its logs, as far as possible."""
    for entry in vm_folder.iterdir() if vm_folder.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            # Files that user code made unremovable must not end the cloud.
            shutil.rmtree(entry, ignore_errors=True)
        elif entry.suffix != ".log":
            entry.unlink(missing_ok=True)
