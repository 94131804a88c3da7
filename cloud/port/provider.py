"""The cloud port: the methods of every provider (design: section 5).

Every method is safe to retry. Optional abilities are Protocols of their own. Callers
test for them with ``isinstance``, never by a provider's name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from spottrain.errors import SpottrainError


class VmState(StrEnum):
    """State of a VM, as its cloud reports it."""

    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    TERMINATED = "terminated"

    @property
    def is_alive(self) -> bool:
        """True until the VM begins to end."""
        return self in (VmState.STARTING, VmState.RUNNING)


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
    refusal: str = ""
    """Why machines are missing, if any are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentBootstrap:
    """What an agent needs to reach its manager."""

    manager_url: str
    ca_pem: str
    token: str


@runtime_checkable
class CloudProvider(Protocol):
    """One cloud account."""

    name: str

    def offers(self) -> Sequence[Offer]:
        """Return the offers that can be rented now."""

    def launch(self, request: LaunchRequest) -> LaunchResult:
        """Launch machines, possibly fewer. The same token never launches twice.

        Raises:
            NoCapacityError: no machine of this offer is left.
        """

    def list_vms(self, job: str) -> Sequence[Vm]:
        """Return all VMs of a job, also those that another manager process launched.

        A terminated VM is listed for a while, with ``ended_at_s``.
        """

    def terminate(self, vm_ids: Collection[str]) -> None:
        """Request termination. An unknown or ended VM is not an error."""


@runtime_checkable
class HasParts(Protocol):
    """Several clouds as one provider; each can be used, and fails, by itself.

    ``list_vms`` of the whole fails if one cloud does not answer, so that its VMs are
    not taken for ended. A caller that can use partial lists asks the parts.
    """

    def parts(self) -> Mapping[str, CloudProvider]:
        """Return the clouds by ``Offer.cloud``; VM ids are the same there."""


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


@runtime_checkable
class StartsAgents(Protocol):
    """Can start our agent on a running VM."""

    def start_agent(self, vm_id: str, bootstrap: AgentBootstrap) -> Sequence[StartStep]:
        """Start the agent, detached. A second call while it runs does nothing.

        An agent of other software than the caller's is replaced: its processes are
        ended first, and the VM's memory is lost.

        Returns:
            The steps that it took, in order; none if the agent runs already.

        Raises:
            VmNotFoundError: the VM has ended.
            UserCodeError: the user's setup failed on it: the job cannot run.
        """


RECEIVE_S = 30.0
"""How long after its time a VM that was given in time may still come."""


@runtime_checkable
class HandsOverVms(Protocol):
    """Can give a running VM to another job of the same owner, without a reboot."""

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


@runtime_checkable
class MovesVms(Protocol):
    """Can write this job's name on a running VM of another job of the same owner."""

    def move(
        self,
        vm_id: str,
        giver: str,
        job: str,
        intent: str,
        since_s: float,
        image: str = "",
    ) -> Vm:
        """Make a VM this job's, if it is the other one's or already this one's.

        Whose it is changes with one request for one resource; what comes before can be
        repeated. Callers see to it that nobody else moves or ends it meanwhile.

        Args:
            vm_id: As the other job calls it.
            giver: Unique id of the other job.
            job: Name of this job.
            intent: That the VM has from now on.
            since_s: Since when it is this job's. Seconds since the epoch.
            image: As of ``HandsOverVms.take``.

        Returns:
            The VM, with an id of its own, launched at ``since_s``.

        Raises:
            VmNotFoundError: It stays whose it is: it has ended, is a third one's, or has
                another image or network than this job's VMs.
            CloudError: Whose it is is not known; a retry is safe.
        """


@runtime_checkable
class ForwardsCalls(Protocol):
    """Keeps connections to its VMs and forwards their agents' calls to the manager."""

    def serve(self, manager_url: str) -> None:
        """Forward calls to this manager from now on, also of VMs that already run."""

    def close(self) -> None:
        """Close all connections; VMs keep running."""


@runtime_checkable
class ReportsUnreachableVms(Protocol):
    """Can tell a silent VM from one whose connection to the manager is broken."""

    def unreachable_vms(self) -> Collection[str]:
        """Return the ids of VMs whose calls cannot arrive now.

        Called often; must not block.
        """


@runtime_checkable
class TellsTime(Protocol):
    """Can say what time it is where bills are written."""

    def time_s(self) -> float | None:
        """Return seconds since the epoch by the cloud's clock; None: it has none now.

        Raises:
            CloudError: the cloud does not answer.
        """


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
    told: str
    """One line: what was found, or what is wrong and what to do."""
    one_of: str = ""
    """Group of alternatives, such as ``quota``, of which a job needs only one to be ok.
    Empty: this item is required."""


def run_check(what: str, ask: Callable[[], str], one_of: str = "") -> Finding:
    """Return the finding with the text that ``ask`` returns, or the error it raises."""
    try:
        return Finding(what=what, ok=True, told=ask(), one_of=one_of)
    except SpottrainError as error:
        return Finding(what=what, ok=False, told=str(error), one_of=one_of)


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


@runtime_checkable
class ReportsQuota(Protocol):
    """Can report the account's quotas."""

    def quotas(self) -> Sequence[Quota]:
        """Return the quotas that apply to this account's offers."""


@runtime_checkable
class ChecksAccount(Protocol):
    """Can check whether jobs could rent here, without renting."""

    def check(self) -> Sequence[Finding]:
        """Check credentials, permissions, images, types and quotas.

        Problems are findings, never errors.
        """


@runtime_checkable
class ReportsSpotPools(Protocol):
    """Can report how often its spot VMs are interrupted, or where a request will succeed."""

    def spot_pools(self, count: int) -> Sequence[SpotPool]:
        """Return what is known of the account's spot offers.

        Args:
            count: VMs that a request is to be for.
        """


@runtime_checkable
class ReleasesJob(Protocol):
    """Owns cloud resources that a job's VMs share: a network, keys, firewall rules."""

    def release(self, job: str) -> None:
        """Remove the shared resources of ``job``; none left is not an error.

        Raises:
            CloudError: VMs of the job still use it: terminate them first.
        """


@runtime_checkable
class FindsOrphans(Protocol):
    """Can find VMs that no manager knows of."""

    def list_all(self) -> Sequence[Vm]:
        """Return the VMs of all jobs in every region of the account."""


@runtime_checkable
class NamesPrincipal(Protocol):
    """Can tell whose credentials it uses."""

    def principal(self) -> str:
        """Return the cloud's name of who rents here; empty if it is unknown.

        Raises:
            CloudError: the cloud does not answer.
        """


@runtime_checkable
class AdmitsNetworks(Protocol):
    """Guards its VMs' SSH ports by rules of our own."""

    def admit(self, job: str, networks: Sequence[str]) -> None:
        """Let SSH in from these networks from now on, and from no others.

        Rules of the user's own are left alone.

        Raises:
            CloudError: the cloud does not answer.
        """


@runtime_checkable
class ReachedBySsh(Protocol):
    """Rents VMs that accept SSH logins."""

    def ssh_target(self, vm_id: str) -> SshTarget | None:
        """Return how to log in to a VM, None while it boots.

        Raises:
            VmNotFoundError: the VM has ended.
        """
