"""The cloud port: what every provider can do (design: section 5).

Every method is safe to retry. Optional abilities are Protocols of their own, asked for
with ``isinstance``, never by a provider's name.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from spottrain.errors import SpottrainError


class VmState(StrEnum):
    """What a cloud says of a VM."""

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
    """One kind of machine that can be rented in one place at one price."""

    cloud: str
    region: str
    zone: str
    instance_type: str
    spot: bool
    usd_per_hour: float
    observed_at_s: float
    """Seconds since the epoch."""
    gpus: int
    """GPUs, or CPU slots on the local provider."""
    gpu_memory_bytes: int
    gpu_speed: float = 1.0
    """Speed relative to the device that the profile was measured on."""
    available: int | None = None
    """Machines left, where the cloud says so."""
    family: str = ""
    """What one quota bounds in a region, as the cloud names it; empty: the type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vm:
    """One rented machine."""

    vm_id: str
    job: str
    intent: str
    """The launch intent that it answers to."""
    state: VmState
    offer: Offer
    private_address: str
    launched_at_s: float
    """Seconds since the epoch; billing starts here."""
    ended_at_s: float | None = None
    """When billing ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """A wish for ``count`` machines of one offer."""

    token: str
    """Idempotency: the same token never launches twice."""
    job: str
    intent: str
    offer: Offer
    count: int
    lease_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """The machines that came; fewer than asked for is normal."""

    vms: tuple[Vm, ...]
    refusal: str = ""
    """Why machines are missing, if any are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentBootstrap:
    """What an agent must be given to find its manager."""

    manager_url: str
    ca_pem: str
    token: str


@runtime_checkable
class CloudProvider(Protocol):
    """One cloud account."""

    name: str

    def offers(self) -> Sequence[Offer]:
        """Return what can be rented now."""

    def launch(self, request: LaunchRequest) -> LaunchResult:
        """Ask for machines; may give fewer. The same token never launches twice.

        Raises:
            NoCapacityError: not a single machine of this offer is left.
        """

    def list_vms(self, job: str) -> Sequence[Vm]:
        """Return the truth, VMs that another manager process launched included.

        A terminated VM is listed for a while, with ``ended_at_s``.
        """

    def terminate(self, vm_ids: Collection[str]) -> None:
        """Return once asked. An unknown or already gone VM is not an error."""


@runtime_checkable
class HasParts(Protocol):
    """Several clouds as one: each can be asked by itself, and fails by itself.

    As a whole ``list_vms`` fails where one cloud does not answer: nobody shall take its
    VMs for gone. Who can do with less asks the parts.
    """

    def parts(self) -> Mapping[str, CloudProvider]:
        """Return the clouds by ``Offer.cloud``; VMs have the same ids there."""


@runtime_checkable
class StartsAgents(Protocol):
    """Can bring our agent to life on a running VM."""

    def start_agent(self, vm_id: str, bootstrap: AgentBootstrap) -> None:
        """Start the agent, detached. A second call while it runs does nothing.

        Raises:
            VmNotFoundError: the VM is gone.
            UserCodeError: the user's own setup failed on it: the job cannot run.
        """


@runtime_checkable
class ForwardsCalls(Protocol):
    """Keeps connections to its VMs, over which their agents call the manager."""

    def serve(self, manager_url: str) -> None:
        """Carry calls to this manager from now on, also of VMs that ran before."""

    def close(self) -> None:
        """Hang up everywhere; VMs go on."""


@runtime_checkable
class ReportsUnreachableVms(Protocol):
    """Knows when it is not a VM that is silent but the way from it that is broken."""

    def unreachable_vms(self) -> Collection[str]:
        """Return the ids of VMs that cannot call now for no fault of theirs.

        Asked often; must not block.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """How much of one family the account may rent in one region."""

    region: str
    family: str
    """As the cloud names it."""
    spot: bool
    limit: float
    unit: str
    """What ``limit`` counts: ``vcpu``, ``gpu`` or ``vm``."""
    used: float | None = None
    """How much of it is in use, where the cloud says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was found out about one thing that a job needs of an account."""

    what: str
    """Such as ``quota us-east-1 G and VT spot``."""
    ok: bool
    told: str
    """One line: what there is, or what is wrong and what to do."""
    one_of: str = ""
    """Of all with the same name here, such as ``quota``, a job needs but one: what is
    wrong in one region, or of one family, leaves the others. Empty: it is needed."""


def run_check(what: str, ask: Callable[[], str], one_of: str = "") -> Finding:
    """Return what ``ask`` tells, or the error that it raises; see ``Finding``."""
    try:
        return Finding(what=what, ok=True, told=ask(), one_of=one_of)
    except SpottrainError as error:
        return Finding(what=what, ok=False, told=str(error), one_of=one_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementScore:
    """How likely a spot request is to be met."""

    region: str
    zone: str
    """Empty: the region as a whole."""
    score: float
    """From 0, hopeless, to 1, likely."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SshTarget:
    """Where and as whom a VM is entered."""

    host: str
    user: str
    host_keys: tuple[str, ...]
    """``type base64`` as in known_hosts; the only keys to accept."""
    port: int = 22


@runtime_checkable
class SimulatesInterruption(Protocol):
    """Can have the cloud itself take a spot VM back, its notice included."""

    def interrupt(self, vm_id: str) -> None:
        """Ask for the interruption; it comes when the cloud likes.

        Raises:
            VmNotFoundError: the VM is gone.
        """


@runtime_checkable
class ReportsQuota(Protocol):
    """Knows what the account may rent."""

    def quotas(self) -> Sequence[Quota]:
        """Return the quotas that bound this account's offers."""


@runtime_checkable
class ChecksAccount(Protocol):
    """Can find out whether jobs could rent here, without renting."""

    def check(self) -> Sequence[Finding]:
        """Try credentials, permissions, images, types and quotas.

        What is wrong is a finding, never an error.
        """


@runtime_checkable
class ReportsPlacementScore(Protocol):
    """Knows where a spot request is likely to be met."""

    def placement_scores(
        self, instance_type: str, count: int
    ) -> Sequence[PlacementScore]:
        """Return a score for each place where ``count`` machines could be asked for."""


@runtime_checkable
class ReportsPriceHistory(Protocol):
    """Remembers what machines cost before."""

    def price_history(self, since_s: float) -> Sequence[Offer]:
        """Return past spot offers, each ``observed_at_s`` the moment it began to hold.

        Args:
            since_s: Seconds since the epoch.
        """


@runtime_checkable
class ReleasesJob(Protocol):
    """Keeps things in the cloud that a job's VMs share: a network, keys, rules."""

    def release(self, job: str) -> None:
        """Remove what ``job`` shared; nothing left to remove is not an error.

        Raises:
            CloudError: VMs of the job still use it: terminate them first.
        """


@runtime_checkable
class FindsOrphans(Protocol):
    """Can look for VMs that nobody remembers."""

    def list_all(self) -> Sequence[Vm]:
        """Return the VMs of all jobs wherever the account may rent."""


@runtime_checkable
class ReachedBySsh(Protocol):
    """Rents VMs that are entered by SSH."""

    def ssh_target(self, vm_id: str) -> SshTarget | None:
        """Return how to enter a VM, None while it boots.

        Raises:
            VmNotFoundError: the VM is gone.
        """
