"""What happened: the facts that the manager's core folds into its state.

Every event is journalled before the commands that follow from it run, and carries
``at_s``, the time at which the daemon learned it (seconds since the epoch): the core
itself has no clock. A journal entry is the class name and the fields as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from spottrain.cloud.port.provider import Offer, StartStep, Vm, VmState
from spottrain.manifest import CheckpointEntry
from spottrain.morphing.plan.candidates import Candidate
from spottrain.morphing.plan.inputs import PlanQuestion
from spottrain.pricing.ranking.cooldowns import Refusal
from spottrain.pricing.ranking.order import OfferWorth
from spottrain.varuna_manager.core.model.deadline_state import FleetTerms
from spottrain.varuna_manager.core.model.settings import JobSettings, Limit, PoolGrant
from spottrain.wire import messages
from spottrain.wire.model import ModelFacts, Profile
from spottrain.wire.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """The base of all events."""

    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VmEvent(JobEvent):
    """The base of events of one VM."""

    vm_id: str


# --- The job --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSubmitted(JobEvent):
    """The user wants this job; always the first event of a journal."""

    settings: JobSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ManagerStarted(JobEvent):
    """A manager process took the job over, for the first time or by ``resume``.

    The daemon feeds ``CheckpointsListed`` and ``VmsListed`` right after it.
    """

    software_version: str
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMoved(JobEvent):
    """The job was taken over from its checkpoint store, on a machine without its keys.

    VMs rented before cannot be reached any more, and the last events may be missing.
    """

    epoch: int
    """Of the claim (``stored_job.Claim``); above that of any earlier move."""
    host: str
    """The machine it is on now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(JobEvent):
    """A person wants the job to stop; it can be resumed."""

    by: str
    checkpoint: bool = True
    """Write a checkpoint first."""
    now: bool = False
    """Return the VMs at once, without a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsChanged(JobEvent):
    """A person wants other limits from now on; those not named stay as they are."""

    by: str
    limits: tuple[Limit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantReceived(JobEvent):
    """The job's pool tells what the job may hold and spend from now on."""

    grant: PoolGrant


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsChanged(JobEvent):
    """A person wants another number of mini-batches; no VM runs that knows the old one."""

    by: str
    steps: int
    """Of the whole job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeUpdated(JobEvent):
    """The job goes on with other code; no VM runs that has the old one."""

    by: str
    sha256: str
    """Of the packed workdir."""
    facts: ModelFacts
    """Of the same model: newest weights fit it."""
    changes: tuple[str, ...] = ()
    """What the user was told, in lines."""
    profile: Profile | None = None
    """A profile given by the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockSet(JobEvent):
    """The wall clock of the manager's machine was set; times of events do not jump."""

    by_s: float
    """Seconds forward; below 0: back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderSeen(JobEvent):
    """The state of the job's folder has changed."""

    trouble: str
    """Why it cannot be used, as half a sentence; empty: it can."""
    is_gone: bool = False
    """Whether that is for good: no command reaches the manager any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired(JobEvent):
    """The time of the newest ``SetTimer`` has come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromScratchRequested(JobEvent):
    """A person wants the job to begin again if no checkpoint of it can be used."""

    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointsListed(JobEvent):
    """The complete checkpoints that the store holds, newest first."""

    checkpoints: tuple[CheckpointEntry, ...]
    damaged: tuple[messages.CheckpointDamaged, ...] = ()
    """Those that cannot be used: what was in doubt has been read again."""
    asked_at_s: float = 0.0
    """When the store was asked; what is in doubt since then is not answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreUnreachable(JobEvent):
    """The store cannot be asked which checkpoints it holds; it is asked again."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownProfile:
    """A profile that was measured for an earlier job."""

    profile: Profile
    measured_at_s: float
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilesListed(JobEvent):
    """The profiles of the job's model that this machine keeps, newest first.

    The daemon feeds it right after ``ManagerStarted``.
    """

    profiles: tuple[KnownProfile, ...]


# --- The cloud ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class OffersSeen(JobEvent):
    """All offers that can be rented now, or what has changed among them."""

    offers: tuple[Offer, ...]
    only_changes: bool = False
    """True: others that were seen are still there, but for ``gone``."""
    gone: tuple[str, ...] = ()
    """By ``offer_key``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OffersRanked(JobEvent):
    """The worth of the offers to the job; fed before the offers themselves."""

    worths: tuple[OfferWorth, ...]
    only_changes: bool = False
    """True: others have the worth that they had, but for ``gone``."""
    gone: tuple[str, ...] = ()
    """By ``offer_key``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetRated(JobEvent):
    """What fleets do for the job; fed if it has a deadline or a minimum throughput."""

    terms: FleetTerms
    elsewhere: FleetTerms | None = None
    """Of the best other kind of machine, where the job may move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmsLaunched(JobEvent):
    """The cloud gave these VMs for an intent, perhaps fewer than asked for."""

    intent: str
    vms: tuple[Vm, ...]


RefusalKind = Refusal | Literal["queued", "throttled", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRefused(JobEvent):
    """No VM came for an intent.

    After ``throttled`` and ``unknown`` VMs may have been rented all the same: the core
    tries again with the same token. The others close the intent.
    """

    intent: str
    reason: str
    refusal: RefusalKind
    retry_after_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VmsListed(JobEvent):
    """The provider's list of VMs; fed after ``ManagerStarted`` and when it has changed."""

    asked_at_s: float
    """When the call began: a VM that became known later may be missing."""
    vms: tuple[Vm, ...]
    cloud: str = ""
    """The cloud that was asked; empty: all that the job rents from."""
    last_words: Mapping[str, str] = field(default_factory=dict)
    """Of VMs that are gone and never trained: the last line of their agents' logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProviderAnswered(VmEvent):
    """The provider's answer to ``AskProvider``."""

    state: VmState | None
    """None: the provider does not know the VM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmReserved(VmEvent):
    """Nothing of the job is left on a VM: another job of the pool may have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderAnswered(JobEvent):
    """A VM that another job kept is this one's from its launch as listed, or never will be."""

    order: str
    vm: Vm | None = None
    """None: it is not, and will not be."""
    reason: str = ""
    """Why not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmsReturned(JobEvent):
    """The call behind ``TerminateVms`` succeeded for these VMs."""

    vm_ids: tuple[str, ...]
    vms: tuple[Vm, ...] = ()
    """VMs of this job, as the cloud lists them afterwards, if it could be asked."""
    last_words: Mapping[str, str] = field(default_factory=dict)
    """As in ``VmsListed``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmLost(VmEvent):
    """A VM is gone for good, as learned from something other than ``VmsListed``."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReleased(JobEvent):
    """Nothing that the job's VMs shared is left in the cloud."""


# --- Agents ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStarted(VmEvent):
    """A VM has all that it needs, and its agent was started; it has yet to call."""

    steps: tuple[StartStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRegistered(VmEvent):
    """The agent of a VM has called for the first time, or again after a while."""

    num_slots: int
    private_address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRefused(VmEvent):
    """An agent that this manager has started runs other software than the manager."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportReceived(VmEvent):
    """Report ``number`` of a VM's agent (counted from 0 over the agent's life)."""

    number: int
    report: messages.Report


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressMade(JobEvent):
    """The running generation has committed mini-batches.

    What ranks report of each mini-batch is a measurement and no event. The watches beside
    the core (``varuna_manager.watch``) say from time to time what decisions depend on.
    """

    generation: int
    step: int
    """Mini-batches that every section has committed: a lower bound, as later ones may have
    been reported to a manager that died."""
    committed_at_s: float
    """When the last of them was reported."""
    loss: float
    """Of the last of them."""
    step_s: float
    """Median time of the generation's newest mini-batches."""
    peak_bytes: int
    """Highest tracked tensor bytes of any slot in this generation."""
    nonfinite: int = 0
    """Mini-batches since the last such event that changed nothing, as their loss or
    gradients were not finite."""
    nonfinite_in_row: int = 0
    """Those up to ``step``, one after the other."""
    nonfinite_last: int | None = None
    """The newest of ``nonfinite``."""
    skipped: messages.SkipReason = ""
    """Why that one changed nothing."""
    replica_bounds: tuple[int, ...] = ()
    """The share of each replica that its times ask for, as in ``Plan``; empty: no other
    than it has."""
    checkpoint_every_steps: int = 0
    """As in ``MinibatchCommitted``."""
    checkpoint_cost_s: float = 0.0
    """As in ``MinibatchCommitted``."""
    copied_step: int | None = None
    """As in ``MinibatchCommitted``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressStalled(JobEvent):
    """The running generation has committed nothing for much longer than usual."""

    generation: int
    step: int
    """The last mini-batch that it committed."""
    since_s: float
    """When that was reported, or when the generation began to train."""
    step_s: float
    """Median time of a mini-batch, or as predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerFound(VmEvent):
    """A VM of the running generation takes longer than its peers, time and again."""

    generation: int
    slowness: float
    """Its time relative to that of its peers: 2 means twice as long."""
    outlying: int
    """Mini-batches in which it was an outlier."""
    observed: int
    """Mini-batches that were looked at."""
    step_s: float
    """Median time of a mini-batch."""
    saved_s: float
    """What a mini-batch would save if it were as fast as its peers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmSilent(VmEvent):
    """No heartbeat came from a registered agent for ``suspect_s``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VmHeard(VmEvent):
    """A VM that was reported silent has called again."""


# --- Outcomes of commands ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanComputed(JobEvent):
    """The planner's answer to the ``ComputePlan`` of ``inputs_hash``."""

    inputs_hash: str
    plan: Plan | None
    candidates: tuple[Candidate, ...] = ()
    """The chosen one and the two best rejected ones; without a plan, the nearest misses."""
    why_not: str = ""
    """One line: why there is no plan; empty if there is one."""
    question: PlanQuestion | None = None
    """The planner's inputs, without facts (in the journal's first event) and profile (in
    its newest ``Calibrated``)."""


FailedCommand = Literal[
    "compute_plan",
    "start_agent",
    "terminate_vms",
    "reserve_vm",
    "take_vm",
    "ask_provider",
    "release_job",
    "callback",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandFailed(JobEvent):
    """A command could not be performed, retries within its deadline included."""

    command: FailedCommand
    vm_ids: tuple[str, ...]
    """The VMs that it was for, or the order; empty for ``compute_plan``,
    ``release_job`` and ``callback``."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupFailed(VmEvent):
    """The user's setup failed on a VM: the job cannot run."""

    reason: str
    output: str
    """The end of what it printed."""


Event = (
    JobSubmitted
    | ManagerStarted
    | JobMoved
    | StopRequested
    | LimitsChanged
    | GrantReceived
    | StepsChanged
    | CodeUpdated
    | ClockSet
    | FolderSeen
    | TimerFired
    | FromScratchRequested
    | CheckpointsListed
    | StoreUnreachable
    | ProfilesListed
    | OffersSeen
    | OffersRanked
    | FleetRated
    | VmsLaunched
    | LaunchRefused
    | VmsListed
    | ProviderAnswered
    | VmsReturned
    | VmReserved
    | OrderAnswered
    | VmLost
    | JobReleased
    | AgentStarted
    | AgentRegistered
    | AgentRefused
    | ReportReceived
    | ProgressMade
    | ProgressStalled
    | StragglerFound
    | VmSilent
    | VmHeard
    | PlanComputed
    | CommandFailed
    | SetupFailed
)

EVENT_TYPES: dict[str, type[Event]] = {cls.__name__: cls for cls in get_args(Event)}
"""Every event class by the name under which a journal keeps it."""
