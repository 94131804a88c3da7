"""The commands that the core emits; the daemon performs them and feeds outcomes back.

Every command is safe to perform twice: after a restart the core emits again what its
state still needs. A command that fails comes back as an event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from spottrain.cloud.port.provider import Offer
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.varuna_manager.core.model.settings import VmOrder
from spottrain.wire import messages
from spottrain.wire.model import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchVms:
    """Rent VMs; answered by ``VmsLaunched`` or ``LaunchRefused``."""

    intent: str
    token: str
    offer: Offer
    count: int
    image: str = ""
    """That of the job's VMs in this cloud; empty: the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartAgent:
    """Start a VM's agent.

    Answered by ``AgentRegistered`` in the end; by ``VmLost`` when the VM is gone, by
    ``CommandFailed`` on any other error.
    """

    vm_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TerminateVms:
    """Revoke the VMs' tokens and return them; answered by ``VmsReturned``."""

    vm_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveVm:
    """Revoke a VM's token and remove all of the job from it; answered by ``VmReserved``, or by
    ``VmsReturned`` where a cloud cannot do that."""

    vm_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AcquireVm:
    """Ask the cloud for a VM that another job keeps; answered by ``OrderAnswered``."""

    order: VmOrder


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseJob:
    """Remove what the job's VMs shared in the cloud; answered by ``JobReleased``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskProvider:
    """Ask the provider for a VM's state; answered by ``ProviderAnswered``."""

    vm_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Put a command into a VM's outbox."""

    vm_id: str
    command: messages.Command


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputePlan:
    """Choose a plan; answered by ``PlanComputed``, or by ``CommandFailed``.

    A plan can take a second to compute: a newer ``ComputePlan`` supersedes an older one,
    whose answer has another hash and is ignored.
    """

    inputs_hash: str
    inputs: PlanInputs


@dataclass(frozen=True, slots=True, kw_only=True)
class ListCheckpoints:
    """List the store's checkpoints, and read again what is in doubt; answered by
    ``CheckpointsListed``, and by ``StoreUnreachable`` until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepProfile:
    """Keep a measured profile for later jobs on this machine; not answered."""

    profile: Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Feed ``TimerFired`` at this time; replaces every earlier timer.

    A time in the past fires at once; ``None`` cancels.
    """

    at_s: float | None


OutcomeKind = Literal["succeeded", "failed", "stopped", "budget", "deadline", "capacity", "queued"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How the job ended."""

    kind: OutcomeKind
    exit_code: int
    """As documented for the command line."""
    reason: str
    traceback: str = ""
    """The user's own, if their code raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """All VMs are returned and the job is over: the manager process ends."""

    outcome: Outcome


Command = (
    LaunchVms
    | StartAgent
    | TerminateVms
    | ReserveVm
    | AcquireVm
    | ReleaseJob
    | AskProvider
    | Send
    | ComputePlan
    | ListCheckpoints
    | KeepProfile
    | SetTimer
    | Finish
)
