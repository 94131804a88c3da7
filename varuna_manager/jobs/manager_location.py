"""The location of a job's manager, if it is not the machine that launched the job.

<job>/away.json   on the machine that launched the job: the VM of its manager, or that it is
                  a batch job, whose folder this one is
<job>/vm.json     on that VM: its own id and address
"""

from __future__ import annotations

from dataclasses import dataclass

from spottrain.cloud.port.provider import LaunchRequest, SshTarget
from spottrain.codec import decode, encode
from spottrain.errors import ConfigError, WireError
from spottrain.files import write_whole
from spottrain.varuna_manager.jobs.folder import JobDir


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteManager:
    """The VM of a job's manager and the progress of its launch; saved before each step."""

    requests: tuple[LaunchRequest, ...]
    """What to rent; the first is the one to try. Repeated with the same token, it rents
    nothing twice. Empty where the manager is no VM that is rented."""
    networks: tuple[str, ...] = ()
    """Networks from which the VM accepts SSH."""
    vm_id: str = ""
    """Empty until the VM is rented."""
    owner: str = ""
    """Who rented it; the manager rents for the same."""
    target: SshTarget | None = None
    """How to log in to it."""
    started: bool = False
    """True once the manager has been started there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnVm:
    """The VM that a manager runs on, as it knows itself."""

    vm_id: str
    private_address: str
    """Its address for the job's other VMs."""


def read(job: JobDir) -> RemoteManager | None:
    """Return where the manager of a job runs; None if that is this machine.

    Raises:
        ConfigError: The file that says so is damaged.
    """
    try:
        manager: RemoteManager = decode(RemoteManager, job.remote_manager_file.read_bytes())
        return manager
    except FileNotFoundError:
        return None
    except WireError as error:
        raise ConfigError(
            f"{job.remote_manager_file} is damaged: it says on which VM the job's manager "
            f"runs; restore it, or return the VM with 'spottrain gc', then 'spottrain "
            f"resume {job.name}'"
        ) from error


def write(job: JobDir, manager: RemoteManager) -> None:
    """Save where the manager of a job runs, atomically."""
    write_whole(job.remote_manager_file, encode(manager))


def forget(job: JobDir) -> None:
    """Record that the manager of a job runs on this machine again."""
    job.remote_manager_file.unlink(missing_ok=True)


def own_vm(job: JobDir) -> OwnVm | None:
    """Return the VM that this process runs on; None on the user's machine."""
    try:
        own: OwnVm = decode(OwnVm, (job.path / "vm.json").read_bytes())
        return own
    except FileNotFoundError:
        return None


def own_vm_file(own: OwnVm) -> bytes:
    """Return the contents of the file that ``own_vm`` reads."""
    return encode(own).encode()
