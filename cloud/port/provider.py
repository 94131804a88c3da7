"""The cloud port: ``CloudProvider`` and its values (design: section 5)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from spottrain.cloud.port.errors import CloudError, VmNotFoundError
from spottrain.errors import SpottrainError
from spottrain.units import counted


class VmState(StrEnum):
    """State of a VM, as its cloud reports it."""

    QUEUED = "queued"
    """Asked for, and no VM yet: it waits in its cloud's queue, and costs nothing."""
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    TERMINATED = "terminated"

    @property
    def is_alive(self) -> bool:
        """True until the VM begins to end."""
        return self in (VmState.QUEUED, VmState.STARTING, VmState.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An instance type that can be rented in a zone at a price."""

    cloud: str
    region: str
    zone: str
    instance_type: str
    spot: bool
    usd_per_hour: float
    """Of the machine with its disk and public address."""
    observed_at_s: float
    """Seconds since the epoch."""
    gpus: int
    """Slots: GPUs, or shares of its CPU."""
    gpu_memory_bytes: int
    """Memory of a slot."""
    gpu_speed: float = 1.0
    """Speed relative to the device that the profile was measured on."""
    available: int | None = None
    """Machines left, if the cloud reports it."""
    quota_vms: float | None = None
    """Machines that the account's quotas allow, if only these are rented; None: unknown."""
    family: str = ""
    """Family whose quota applies, as the cloud names it; empty: the type itself."""
    device: Literal["", "gpu", "cpu"] = ""
    """What it is rented for; empty: a machine of the user's, of which nothing is known."""
    gpu: str = ""
    """Name of the GPUs of a machine of the user's; empty: there are none, or unknown."""
    attached_usd_per_hour: float = 0.0
    """The part of ``usd_per_hour`` for its disk and public address."""
    shared_cores: int = 0
    """Cores of the one computer that all VMs of its cloud are on; 0: each has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vm:
    """One rented machine."""

    vm_id: str
    """Made by its provider, and the same in every job. That of a rented VM is its cloud's
    name, a dot, and what the cloud finds it by."""
    job: str
    intent: str
    """The launch intent that it fulfils."""
    state: VmState
    offer: Offer
    private_address: str
    uid: str = ""
    """The job's unique id; empty: of a provider that serves one job only."""
    owner: str = ""
    """Who rented it; empty: unknown."""
    image: str = ""
    """What a launch answers, and a list may leave out: the image it was made from, by a
    name that holds in all regions of its cloud; empty: unknown, or named by the job file."""
    launched_at_s: float
    """Seconds since the epoch; billing starts here."""
    ended_at_s: float | None = None
    """When billing ended."""
    why: str = ""
    """What its cloud says of a VM that waits, is ending or has ended: why; empty: nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """A request for ``count`` machines of one offer."""

    token: str
    """Idempotency: the same token never launches twice."""
    job: str
    intent: str
    offer: Offer
    count: int
    lease_s: float
    image: str = ""
    """That of the job's VMs in this cloud (``Vm.image``), if it is still there; empty:
    the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """The machines that were launched; fewer than requested is normal."""

    vms: tuple[Vm, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentBootstrap:
    """What an agent needs to reach its manager."""

    manager_url: str
    ca_pem: str
    token: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartStep:
    """One step of a VM's start, from its launch until its agent runs."""

    name: str
    """Such as ``boot``, ``software`` or ``setup``."""
    seconds: float
    num_bytes: int = 0
    """That the VM received meanwhile, over all its networks."""
    source: str = ""
    """Where it took what it needed from, if there is a choice; empty otherwise."""


ANY_FAMILY = "*"
"""Family of quotas that all machines count against, such as disks and addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """Quota of the account for one family in one region."""

    region: str
    """Empty: all together."""
    family: str
    """As the cloud names it, or ``ANY_FAMILY``."""
    spot: bool
    limit: float
    unit: str
    """Unit of ``limit``: ``vcpu``, ``gpu`` or ``vm``."""
    used: float | None = None
    """Amount in use, if the cloud reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Result of one check of what a job needs from an account."""

    what: str
    """The checked item, such as ``quota us-east-1 G and VT spot``."""
    ok: bool
    message: str
    """One line: what was found, or what is wrong and what to do."""
    one_of: str = ""
    """Group of alternatives, such as ``quota``, of which a job needs only one to be ok.
    Empty: this item is required."""


def run_check(what: str, ask: Callable[[], str], one_of: str = "") -> Finding:
    """Return the finding with the text that ``ask`` returns, or the error it raises."""
    try:
        return Finding(what=what, ok=True, message=ask(), one_of=one_of)
    except SpottrainError as error:
        return Finding(what=what, ok=False, message=str(error), one_of=one_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpotPool:
    """What a cloud says of its spot VMs of one instance type in one zone or region."""

    cloud: str
    region: str
    zone: str
    """Equal to the region: the region as a whole."""
    instance_type: str
    losses_per_hour: float | None = None
    """Interruptions of one VM to expect; None: the cloud does not say."""
    obtainability: float | None = None
    """Likelihood that a request is fulfilled now, from 0 to 1; None: it does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """Address, user and host keys for logging in to a VM."""

    host: str
    user: str
    host_keys: tuple[str, ...]
    """``type base64`` as in known_hosts; the only keys to accept."""
    port: int = 22


RECEIVE_S = 30.0
"""How long after its time a VM that was given in time may still come."""


class CloudProvider(ABC):
    """One cloud account, or several as one; thread-safe.

    Every method is safe to retry. The abstract ones are required. Each of the others is an
    optional ability: a provider has it if it overrides the method. Otherwise the method
    answers that there is nothing, or raises. Callers test with ``can`` where they must know
    beforehand, never by a provider's name.
    """

    name: str

    # --- Required ---------------------------------------------------------------------

    @abstractmethod
    def offers(self) -> Sequence[Offer]:
        """Return the offers that can be rented now."""

    @abstractmethod
    def launch(self, request: LaunchRequest) -> LaunchResult:
        """Launch machines, possibly fewer. The same token never launches twice.

        Raises:
            NoCapacityError: no machine of this offer is left.
        """

    @abstractmethod
    def list_vms(self, job: str) -> Sequence[Vm]:
        """Return all VMs of a job, also those that another manager process launched.

        A terminated VM is listed for a while, with ``ended_at_s``.
        """

    @abstractmethod
    def terminate(self, vm_ids: Collection[str]) -> None:
        """Request termination. An unknown or ended VM is not an error."""

    # --- What it can do, and what belongs to it -----------------------------------------

    def can(self, ability: Callable[..., object]) -> bool:
        """Return whether this provider has an ability, given as ``CloudProvider.move``."""
        return getattr(type(self), ability.__name__) is not ability

    def parts(self) -> Mapping[str, CloudProvider]:
        """Return the clouds of this provider by ``Offer.cloud``; one may have the empty name.

        Each can be used, and fails, by itself. ``list_vms`` of the whole fails if one cloud
        does not answer, so that its VMs are not taken for ended. A caller that can use
        partial lists asks the parts.
        """
        return {"": self}

    def close(self) -> None:  # noqa: B027  most have none
        """Close connections and processes of this provider; VMs keep running."""

    # --- Agents on VMs ------------------------------------------------------------------

    def start_agent(self, vm_id: str, bootstrap: AgentBootstrap) -> Sequence[StartStep]:
        """Start the agent on a running VM, detached. A second call while it runs does nothing.

        An agent of other software than the caller's is replaced: its processes are
        ended first, and the VM's memory is lost.

        Returns:
            The steps that it took, in order; none if the agent runs already.

        Raises:
            VmNotFoundError: the VM has ended.
            UserCodeError: the user's setup failed on it: the job cannot run.
            CloudError: agents cannot be started here.
        """
        raise CloudError(f"{self.name} cannot start agents")

    def serve(self, manager_url: str) -> None:  # noqa: B027  see below
        """Forward agents' calls to this manager from now on, also of VMs that already run.

        Without it agents reach the manager by themselves.
        """

    def unreachable_vms(self) -> Collection[str]:
        """Return the ids of VMs whose calls cannot arrive now; they are not just silent.

        Called often; must not block.
        """
        return ()

    def ssh_target(self, vm_id: str) -> SshTarget | None:
        """Return how to log in to a VM, None while it boots.

        Raises:
            VmNotFoundError: the VM has ended.
            CloudError: VMs are not reached by SSH.
        """
        raise CloudError(f"{self.name}: its VMs are not reached by SSH")

    def admit(self, job: str, networks: Sequence[str]) -> None:
        """Let SSH in to the job's VMs from these networks from now on, and from no others.

        Rules of the user's own are left alone.

        Raises:
            CloudError: the cloud does not answer, or no rules of ours guard its VMs.
        """
        raise CloudError(f"{self.name}: who may connect to its VMs cannot be changed")

    # --- VMs from one job to another of the same owner, without a reboot ----------------

    def clear(self, vm_id: str, lease_s: float) -> None:
        """End all processes of a VM and remove all that the job has on it. It stays the
        job's; ``start_agent`` is not called for it any more.

        Args:
            vm_id: The VM. One that is cleared already is not an error.
            lease_s: It ends by itself if nobody returns or takes it for so long.

        Raises:
            VmNotFoundError: It has ended.
            CloudError: Something is left on it: terminate it.
        """
        raise CloudError(f"{self.name} gives no VMs to other jobs")

    def take(self, vm_id: str, giver: Path, order: str, until_s: float, image: str = "") -> Vm:
        """Take a cleared VM over from another job; the same order takes it only once.

        At one moment it is terminated in the other job's list and launched in this one's,
        with an id of its own, the intent ``tags.ordered(order)`` and its former price. If
        the call is broken off between the two, the machine has ended then, unless it is
        repeated within ``RECEIVE_S`` after ``until_s``.

        Args:
            vm_id: As the other job calls it.
            giver: The other job's cloud folder, on this machine.
            order: Unique for this job.
            until_s: No VM is given that is asked for later. Seconds since the epoch.
            image: That of this job's VMs (``Vm.image``); empty: any that it would rent.

        Raises:
            VmNotFoundError: It never comes by this order.
            CloudError: Whether it came is not known.
        """
        raise VmNotFoundError(f"{self.name} gives no VMs to other jobs")

    def move(
        self,
        vm_id: str,
        giver: str,
        job: str,
        intent: str,
        since_s: float,
        image: str = "",
    ) -> Vm:
        """Write this job's name on a running VM, if it is the other one's or already this one's.

        Whose it is changes with one request for one resource; what comes before can be
        repeated. Callers see to it that nobody else moves or ends it meanwhile.

        Args:
            vm_id: As the other job calls it.
            giver: Unique id of the other job.
            intent: That the VM has from now on.
            since_s: Since when it is this job's. Seconds since the epoch.
            image: As of ``take``.

        Returns:
            The VM, with an id of its own, launched at ``since_s``.

        Raises:
            VmNotFoundError: It stays whose it is: it has ended, is a third one's, or has
                another image or network than this job's VMs.
            CloudError: Whose it is is not known; a retry is safe.
        """
        raise VmNotFoundError(f"{self.name} gives no VMs to other jobs")

    # --- The account --------------------------------------------------------------------

    def quotas(self) -> Sequence[Quota]:
        """Return the quotas that apply to this account's offers, as far as they are known."""
        return ()

    def spot_pools(self, count: int) -> Sequence[SpotPool]:
        """Return how often spot VMs are interrupted, and where a request will succeed, as
        far as the cloud says.

        Args:
            count: VMs that a request is to be for.
        """
        return ()

    def check(self) -> Sequence[Finding]:
        """Check credentials, permissions, images, types and quotas, without renting.

        Problems are findings, never errors.
        """
        return (run_check("offers", lambda: counted(len(self.offers()), "offer")),)

    def principal(self) -> str:
        """Return the cloud's name of whose credentials these are; empty if it is unknown.

        Raises:
            CloudError: the cloud does not answer.
        """
        return ""

    def list_all(self) -> Sequence[Vm]:
        """Return the VMs of all jobs in every region of the account: no manager may know them.

        Raises:
            CloudError: the cloud does not answer, or cannot be searched.
        """
        raise CloudError(f"{self.name}: cannot search for orphans; check the cloud's console")

    def release(self, job: str) -> None:  # noqa: B027  some share nothing
        """Remove what a job's VMs share, such as a network; none left is not an error.

        Raises:
            CloudError: VMs of the job still use it: terminate them first.
        """

    def time_s(self) -> float | None:
        """Return the time where bills are written; None: it cannot be known now.
        Seconds since the epoch.

        Raises:
            CloudError: the cloud does not answer.
        """
        return None


def cloud_of(vm_id: str) -> str:
    """Return the cloud that a rented VM's id names; see ``Vm.vm_id``."""
    return vm_id.partition(".")[0]
