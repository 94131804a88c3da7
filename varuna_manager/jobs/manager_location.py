"""Where the manager of a job is, if it is not on the machine that launched the job.

<job>/away.json   on the machine that launched the job: the VM of its manager
<job>/vm.json     on that VM: which one it is
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from spottrain.cloud.port.provider import LaunchRequest, SshTarget
from spottrain.cloud.port.stored import with_current_names
from spottrain.varuna_manager.jobs.folder import JobDir


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteManager:
    """The VM of a job's manager, as far as it has come; written before each step."""

    requests: tuple[LaunchRequest, ...]
    """What is rented, the first one that has not been refused; repeated with its token it
    rents nothing twice."""
    networks: tuple[str, ...]
    """From which SSH is let in."""
    vm_id: str = ""
    """Empty until it is known that the VM was rented."""
    target: SshTarget | None = None
    """How it is entered."""
    started: bool = False
    """Whether the manager has been started there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnVm:
    """The VM that a manager runs on, as it knows itself."""

    vm_id: str
    private_address: str
    """Where the job's other VMs reach it."""


_REMOTE, _OWN = TypeAdapter(RemoteManager), TypeAdapter(OwnVm)


def read(job: JobDir) -> RemoteManager | None:
    """Return where the manager of a job is, None if it is here."""
    try:
        data = with_current_names(json.loads(job.remote_manager_file.read_bytes()))
        return _REMOTE.validate_python(data)
    except FileNotFoundError:
        return None


def write(job: JobDir, manager: RemoteManager) -> None:
    """Remember where the manager of a job is, whole or not at all."""
    draft = job.remote_manager_file.with_suffix(".tmp")
    draft.write_text(json.dumps(asdict(manager)))
    draft.replace(job.remote_manager_file)


def forget(job: JobDir) -> None:
    """The manager of a job is on this machine again."""
    job.remote_manager_file.unlink(missing_ok=True)


def own_vm(job: JobDir) -> OwnVm | None:
    """Return the VM that this process runs on, None on a machine of the user's."""
    try:
        return _OWN.validate_json((job.path / "vm.json").read_bytes())
    except FileNotFoundError:
        return None


def own_vm_file(own: OwnVm) -> bytes:
    """Return what ``own_vm`` reads."""
    return json.dumps(asdict(own)).encode()
