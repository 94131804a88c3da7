"""The parts of the manager's state: VMs, launches, generations, and their history."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from spottrain.cloud.port.provider import Offer, StartStep
from spottrain.morphing.plan.candidates import Candidate
from spottrain.pricing.billing.money import NOTHING, Money
from spottrain.varuna_manager.core.model.settings import VmOrder
from spottrain.wire.messages import Hardware, ShareMinibatch
from spottrain.wire.model import WorkerState
from spottrain.wire.plan import Plan, Slot, shape_of

KEPT = 1000
"""Finished generations, interruptions and price changes kept; totals count all."""

COOLDOWN_S = 30.0
"""The first cooldown after a refusal; longer if it is refused again."""
FIRST_START_PAUSE_S, MOST_START_PAUSE_S = 5.0, 600.0
"""Before the next VM is rented after one that never trained; twice as long each time."""


class VmPhase(StrEnum):
    """The phase of a VM; a VM that is gone leaves the state."""

    STARTING = "starting"
    """Rented; the cloud does not call it running yet."""
    BOOTING = "booting"
    """Running; its agent is being started."""
    REGISTERED = "registered"
    """Its agent has called; its supervisor imports the user's module."""
    READY = "ready"
    """Its slots can train."""
    RETURNING = "returning"
    """The cloud was asked to take it back."""


class GenerationPhase(StrEnum):
    """The phase of a generation; there is never more than one."""

    OPENING = "opening"
    """The rendezvous store is being forked."""
    STARTING = "starting"
    """Participants hand sections over."""
    RUNNING = "running"
    STOPPING = "stopping"
    """All ranks stop after the same mini-batch."""
    BREAKING = "breaking"
    """Something died; every other rank must get out."""


class RankPhase(StrEnum):
    """The phase of one slot of a generation's plan."""

    INVITED = "invited"
    STARTED = "started"
    STOPPED = "stopped"
    OUT = "out"
    """Its worker left or died; its memory stays."""
    GONE = "gone"
    """Its VM is gone, memory and all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """A checkpoint that a VM could not read."""

    vm_id: str
    name: str
    """Of the checkpoint."""
    reason: str
    at_s: float
    file: str = ""
    """That is damaged, as the VM says; empty: it could not be reached."""
    times: int = 1
    """How often this VM could read none, in a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """An offer that was not rented, and why."""

    instance_type: str
    zone: str
    spot: bool
    usd_per_hour: float
    examples_per_usd: float | None
    """None: not ranked."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchChoice:
    """What a launch was chosen from."""

    examples_per_usd: float | None
    """Of the offer that is rented; None: not ranked."""
    is_ranked: bool
    """False: nothing was known of what offers are worth."""
    passed_over: tuple[PassedOver, ...]
    """The best others."""
    others: int
    """Number of all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """A launch that is not answered yet."""

    intent: str
    offer: Offer
    count: int
    arrived: int = 0
    """VMs that the provider listed before it answered."""
    asked_at_s: float = 0.0
    """When the manager that runs now asked for it first."""
    retry_at_s: float | None = None
    """When to ask again, after an answer that did not say whether VMs were rented."""
    image: str = ""
    """That its VMs are to have; empty: the newest."""
    is_abandoned: bool = False
    """It is not asked for again: ``retry_at_s`` is when no VM of it comes any more."""
    queued: Mapping[str, str] = field(default_factory=dict)
    """What waits in the cloud's queue to become its VMs: why, by id."""
    choice: LaunchChoice

    @property
    def missing(self) -> int:
        """VMs that have not arrived yet."""
        return self.count - self.arrived

    @property
    def is_queued(self) -> bool:
        """Whether all that it misses waits in a queue: nobody knows for how long."""
        return self.missing <= len(self.queued)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedStarts:
    """VMs that came up and never trained, since one last trained for the first time."""

    times: int
    """In a row: each was rented after the one before had failed."""
    at_s: float
    """When the newest of them failed."""
    vm_id: str
    reason: str
    """Why, if possible in the VM's own words."""
    is_probing: bool = True
    """Until a VM that was rented since is ready: one at a time is, after a pause."""

    @property
    def opens_at_s(self) -> float:
        """When the next VM may be rented."""
        pause_s = FIRST_START_PAUSE_S * 2.0 ** (self.times - 1)
        return self.at_s + min(pause_s, MOST_START_PAUSE_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The removal of what a job's VMs shared in the cloud."""

    tries: int
    done: bool = False
    """Whether nothing is left, or the manager has given up."""
    retry_at_s: float | None = None
    """When to ask again, after a try that failed; None: one is under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowVm:
    """A VM that was found slow, and its replacement."""

    vm_id: str
    found_at_s: float
    slowness: float
    """Its time relative to that of its peers: 2 means twice as long."""
    evidence: str
    """One line for people."""
    replaced_by: str = ""
    """The VM that takes its place; empty as long as there is none."""


@dataclass(frozen=True, kw_only=True)
class VmRecord(Hardware):
    """A VM that is billed; its hardware is known once its supervisor has reported."""

    vm_id: str
    intent: str
    offer: Offer
    """As it was at launch, with the price that is billed."""
    on_demand_usd_per_hour: float
    """On-demand price of the same machine in its zone at launch."""
    launched_at_s: float
    known_at_s: float
    phase: VmPhase
    private_address: str
    start: tuple[StartStep, ...] = ()
    """What it took from its launch until its agent was started."""
    agent_version: str = ""
    """Version of spottrain that its agent runs, once it has registered."""
    num_slots: int = 0
    throttled: str = ""
    """Why its GPUs are slower than they could be; empty: they are not."""
    used_slots: tuple[int, ...] = ()
    """Slots that were ever part of a generation: their memory may hold sections."""
    reports_received: int = 0
    ready_at_s: float | None = None
    has_trained: bool = False
    """Whether a generation that it is part of has committed a mini-batch."""
    trouble: str = ""
    """Why the newest command for it failed."""
    silent_since_s: float | None = None
    noticed_at_s: float | None = None
    leaves_at_s: float | None = None
    """When the cloud takes it, as announced, or when it is returned if it is drained."""
    slow: SlowVm | None = None
    """Set once it was found so slow that replacing it pays."""
    successor: Literal["", "expected", "arrived"] = ""
    """Whether other VMs are to take its place because they train more per dollar, and
    whether they are all there (``Move``)."""
    return_reason: str = ""
    """Why it was returned."""
    hung_at_s: float | None = None
    """When a worker of it was last found to hang."""
    drain_reason: str = ""
    """Why it is being drained; empty: it is not."""
    is_clearing: bool = False
    """Whether all of the job is being removed from it, so that another one may have it."""
    reserved_at_s: float | None = None
    """Since when it is kept for other jobs of the pool, with nothing of this one on it."""
    retry_at_s: float | None = None
    """When to repeat a command for this VM that failed."""

    @property
    def slot_memory_bytes(self) -> int:
        """Memory of a slot: as its driver says, else as its offer does."""
        return self.gpu_memory_bytes or self.offer.gpu_memory_bytes

    @property
    def is_usable(self) -> bool:
        """True if a new plan may use its slots."""
        staying = self.leaves_at_s is None and self.silent_since_s is None
        needed = not self.is_replaced and self.successor != "arrived"
        return self.phase is VmPhase.READY and staying and needed

    @property
    def is_replaced(self) -> bool:
        """True if another VM replaces it because it is slow."""
        return self.slow is not None and bool(self.slow.replaced_by)

    @property
    def counts(self) -> bool:
        """True if it counts towards the VMs that the job may have: one that leaves or is to
        be replaced makes room for another before it is gone."""
        going = self.phase is VmPhase.RETURNING or self.leaves_at_s is not None
        return not going and self.slow is None and not self.successor

    @property
    def is_coming(self) -> bool:
        """True if it is expected to become usable."""
        return self.phase in (VmPhase.STARTING, VmPhase.BOOTING, VmPhase.REGISTERED)


class OrderPhase(StrEnum):
    """What came of a VM that another job of the pool keeps."""

    ASKED = "asked"
    TAKEN = "taken"
    """It came. It may have gone since."""
    FAILED = "failed"
    """It never comes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderRecord:
    """A VM of another job that this one has asked for."""

    order: VmOrder
    phase: OrderPhase = OrderPhase.ASKED
    retry_at_s: float | None = None
    """When to ask again, after no answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """A move to VMs that train more per dollar, see ``core.moves``."""

    vm_ids: tuple[str, ...]
    """The VMs that are left; as many new ones are rented."""
    new_vms: int
    """So many of these are to be ready before training leaves the old ones."""
    room_made: int = 0
    """So many of the old ones were given up first, to make room within a pool's grant."""
    offer: str
    """What is rented, see ``offer_key``."""
    to: str
    """The same for people."""
    source: str = ""
    """Where most of the VMs that are left are, for people."""
    why: str = ""
    saves_usd: float = 0.0
    """What it was expected to save over the horizon, its own cost subtracted."""
    since_s: float
    is_far: bool
    """True if new and old VMs do not reach each other."""
    is_cut_over: bool = False
    """True once the new ones are all there."""

    @property
    def is_standstill(self) -> bool:
        """True if nothing trains until the new ones are ready: all old ones were given up."""
        return self.room_made == len(self.vm_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Memory of slots of one kind of machine that was less than a plan needed."""

    machine: str
    """As ``kind_of`` names it."""
    room_bytes: int
    """What plans may take of a slot's device from then on."""
    times: int
    """Generations that it has ended."""
    generation: int
    """The last of these."""
    reason: str
    """One line for people, of the newest time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSizeLimit:
    """The number of VMs that is best for the money; more would stand idle."""

    vms: int
    usd_per_hour: float
    """Of the cheapest offer when that was found."""


Purpose = Literal["first weights", "measurement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """A round in which all participants prepare training together."""

    number: int
    """Negative, see ``messages.Initialise``."""
    purpose: Purpose
    participants: tuple[Slot, ...]
    store_host: str = ""
    """Empty: the store is being opened."""
    store_port: int = 0
    done: int = 0
    total: int = 0
    """Of sections to write, or of measurements."""

    def includes(self, vm_ids: Collection[str]) -> bool:
        """Return whether one of some VMs takes part."""
        return not {slot.vm_id for slot in self.participants}.isdisjoint(vm_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A question to all agents of a generation: what do its workers do?"""

    number: int
    asked_at_s: float
    answers: Mapping[str, tuple[WorkerState, ...]]
    """By VM."""


@dataclass(frozen=True, kw_only=True)
class Generation:
    """The generation that runs now."""

    number: int
    plan: Plan
    reason: str
    phase: GenerationPhase
    since_s: float
    """When ``phase`` began."""
    heard_at_s: float = 0.0
    """When a rank last said that it gets on with its start."""
    opened_at_s: float
    checkpoint: str
    participants: tuple[Slot, ...]
    """Ranks of the plan, then donors."""
    ranks: Mapping[Slot, RankPhase]
    """Slots of the plan alone."""
    egress: Money = NOTHING
    """Egress cost of a mini-batch between zones, regions and clouds, by the plan."""
    inputs_hash: str = ""
    """The planner's inputs that ``plan`` answers."""
    decision_hash: str = ""
    """The planner's inputs when ``plan`` was chosen; later ones may have changed nothing."""
    candidates: tuple[Candidate, ...] = ()
    """The plan as it was predicted, and the two best rejected ones."""
    devices: tuple[str, ...] = ()
    """Of the plan's slots, as in ``VmRecord``."""
    from_step: int | None = None
    store_host: str = ""
    store_port: int = 0
    started_at_s: float | None = None
    committed: bool = False
    """Whether it has committed a mini-batch."""
    done: bool = False
    """Whether a rank has reported that all steps are done, or training stopped early."""
    early: str = ""
    """Why training stopped before the last step."""
    checkpoint_asked: bool = False
    """Whether its stop includes a checkpoint."""
    save_only: bool = False
    """Whether it trains nothing: it writes a checkpoint and stops by itself."""
    break_reason: str = ""
    out_of_memory: bool = False
    """Whether it broke because a device had no memory left."""
    nccl_failed: Mapping[Slot, str] = field(default_factory=dict)
    """Why NCCL failed, in ranks where it did."""
    abandoned: bool = False
    """Whether its last ranks were told to give up."""
    measured_step_s: float | None = None
    """Median of the recent mini-batches."""
    timed: int = 0
    """Mini-batches that were measured."""
    stopped_at: int | None = None
    """Mini-batches committed when its ranks stopped, as they say."""
    reported_slow: frozenset[str] = frozenset()
    """VMs that were reported to people as slow."""
    inspection: Inspection | None = None
    """The newest one, since it has once not committed for long."""
    hung: tuple[Slot, ...] = ()
    """Ranks that were broken off because they hang."""
    share: ShareMinibatch | None = None
    """The newest share of the mini-batch that its ranks were sent, if any."""

    def trains_on(self, vm_id: str) -> bool:
        """Return whether a rank is on a VM."""
        return any(slot.vm_id == vm_id for slot in self.ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationSummary:
    """A plan that has run."""

    generation: int
    pipeline_depth: int
    data_parallel_width: int
    num_slots: int
    from_step: int | None
    """None: it broke before it trained."""
    to_step: int
    reason: str
    predicted_step_s: float
    predicted_max_s: float | None = None
    """As in ``Plan``, like the one before."""
    measured_step_s: float | None
    started_at_s: float
    ended_at_s: float | None
    """None: it still runs."""
    ended_by: str = ""
    broke: bool = False
    """Whether it ended by a break, and not by a stop of all ranks."""
    inputs_hash: str = ""
    """The planner's inputs: the journal's ``PlanComputed`` of that hash has them."""
    candidates: tuple[Candidate, ...] = ()
    """The plan as it was predicted, and the two best that were rejected for it."""
    devices: tuple[str, ...] = ()
    """Of its slots, as in ``VmRecord``."""
    tensor_parallel: int = 1
    """Slots that divided the matrices of each stage."""

    @property
    def shape(self) -> str:
        """For people, as ``Plan.shape``."""
        return shape_of(self.pipeline_depth, self.data_parallel_width, self.tensor_parallel)


InterruptionKind = Literal["notice", "kill", "silence", "worker_death", "sick_gpu", "hang"]
COUNTERS: Mapping[InterruptionKind, str] = {
    "notice": "preemptions_noticed",
    "kill": "preemptions_unnoticed",
    "silence": "silent_losses",
    "worker_death": "worker_deaths",
    "sick_gpu": "sick_gpus",
    "hang": "hangs",
}
"""The field of ``Tally`` that counts each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interruption:
    """A preemption, a silent VM, or a worker that died or hangs."""

    interruption: InterruptionKind
    vm_id: str
    at_s: float
    reason: str
    generation: int | None
    """The generation it hit; None: it hit no training."""
    cost_s: float | None = None
    """Training time lost: from the last commit before to the first one after, less
    one normal step; 0 if it hit no training; None while training has not gone on."""
    minibatches_recomputed: int = 0
    cancelled_at_s: float | None = None
    """When its notice was cancelled: the VM stays."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceChange:
    """An offer whose price has moved."""

    at_s: float
    zone: str
    instance_type: str
    spot: bool
    old_usd_per_hour: float
    new_usd_per_hour: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetAlert:
    """A share of the budget that was spent and alerted to."""

    share: float
    at_s: float
    spent: float
    cap: float
    unit: str = "USD"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The planner's newest answer."""

    inputs_hash: str
    plan: Plan | None
    why_not: str = ""
    """Why there is no plan; empty if there is one."""
    candidates: tuple[Candidate, ...] = ()
    """The chosen one, and the two best that were rejected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MorphChoice:
    """The numbers by which a plan is worth a morph, or is not (``policy.morph_at_s``).

    Examples per second have fallbacks to checkpoints counted; where cost is the objective,
    they are divided by the rent of an hour.
    """

    inputs_hash: str
    """The planner's inputs that the plan answers."""
    shape: str
    present_examples_per_s: float
    new_examples_per_s: float
    cost_s: float
    """Training time that the morph costs."""
    needed_s: float | None
    """How long the plan must last to make up for it; None: it is no faster."""
    quiet_s: float
    """Time to expect until the next loss, when this was decided."""
    left_s: float
    """Training time that the job still needed under the present plan."""
    at_s: float | None
    """When it pays; None: never."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The progress of training."""

    step: int = 0
    """Mini-batches committed, in the history that continues: exact when a generation has
    ended and when a checkpoint was saved, in between a lower bound (``ProgressMade``)."""
    highest_step: int = 0
    """Mini-batches ever committed; above ``step`` after a restore."""
    loss_first: float | None = None
    loss_last: float | None = None
    heldout_first: float | None = None
    heldout_last: float | None = None
    heldout_set: str = ""
    """Which held-out set these losses are of: the first one."""
    best_step: int | None = None
    """Step of the best weights, by the job's decisive metric."""
    nonfinite_steps: int = 0
    """Mini-batches whose loss or gradients were not finite: they changed nothing."""
    nonfinite_in_row: int = 0
    """Those since the last finite one."""
    nonfinite_last: int | None = None
    """The newest of them."""
    minibatches_recomputed: int = 0
    """Committed mini-batches that were computed again after a restore."""
    first_commit_at_s: float | None = None
    last_commit_at_s: float | None = None
    paused_since_s: float | None = None
    """Last commit before training was interrupted or morphed; None while it runs."""
    morph_cost_s: float | None = None
    """Training time that the newest planned morph cost."""
    peak_bytes: int = 0
    """Highest tracked tensor bytes of any slot."""
    checkpoint_every_steps: int = 0
    """Mini-batches between checkpoints, as chosen last; 0: none was chosen."""
    checkpoint_cost_s: float = 0.0
    """Training time that a checkpoint costs; 0: none was measured."""
    copied_step: int | None = None
    """The newest mini-batch of which other VMs have copies; None: the plan that runs, or ran
    last, has made none."""

    @property
    def minibatches_lost(self) -> int:
        """Committed mini-batches that are missing from the history that continues."""
        return max(0, self.highest_step - self.step)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counters over the whole life of the job."""

    preemptions_noticed: int = 0
    preemptions_unnoticed: int = 0
    silent_losses: int = 0
    worker_deaths: int = 0
    sick_gpus: int = 0
    """VMs that were returned because a GPU had failed."""
    hangs: int = 0
    morphs: int = 0
    """Generations that were left as planned, for another one."""
    recoveries: int = 0
    """Generations that broke."""
    price_changes: int = 0
    slow_vms_replaced: int = 0
    vms_launched: int = 0
    egress: Money = NOTHING
    """Egress cost of the mini-batches so far, by their plans."""
