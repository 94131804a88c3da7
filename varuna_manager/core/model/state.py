"""Everything the manager knows of one job, as the steps in its journal have made it.

All of it is immutable, mappings included: they are replaced, never changed. Per-step
history stays in the journal; here are only totals and bounded recent windows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from spottrain.cloud.port.provider import Offer
from spottrain.errors import SpottrainError
from spottrain.eventlog.changed import replace
from spottrain.manifest import CheckpointEntry
from spottrain.pricing.billing import egress
from spottrain.pricing.billing.budget import Budget, reserve_s
from spottrain.pricing.billing.money import Money, Rate, total, total_rate
from spottrain.varuna_manager.core.model import records
from spottrain.varuna_manager.core.model.commands import Outcome
from spottrain.varuna_manager.core.model.deadline_state import DeadlineState
from spottrain.varuna_manager.core.model.parts import (
    FIELDS,
    FleetState,
    HistoryState,
    LaunchState,
    MarketState,
    Part,
    PreparationState,
    TrainingState,
)
from spottrain.varuna_manager.core.model.recent import RecentEvent
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.wire.numerics import Numerics
from spottrain.wire.plan import Plan

MAX_UNFIT = 3
"""VMs of a type that may be unfit in a row before no more of it are rented."""


class JobPhase(StrEnum):
    """The phase of the job."""

    NEW = "new"
    ACTIVE = "active"
    ENDING = "ending"
    """The outcome is known; a last checkpoint may be written, VMs are returned."""
    ENDED = "ended"


class NoJobError(SpottrainError):
    """A journal lacks the event that says what the job is."""

    def __init__(self) -> None:
        super().__init__(
            "the job's journal is damaged: it does not begin with the job; restore a copy "
            "of it, or end the job with 'spottrain down' (checkpoints are kept)"
        )


@dataclass(frozen=True, kw_only=True)
class State:
    """Everything the manager knows. Without slots: see ``changed.replace``."""

    phase: JobPhase = JobPhase.NEW
    settings: JobSettings | None = None
    submitted_at_s: float = 0.0
    code_sha256: str = ""
    """Of the packed workdir since the code was updated; empty: it is that of the launch."""
    now_s: float = 0.0
    """Time of the newest event."""
    activity: str = "new"
    """One line for people: what the job does or waits for, and why."""
    last_message: str = ""
    """One line for people: the newest thing that happened, with its reason."""
    recent: tuple[RecentEvent, ...] = field(default=(), compare=False)
    """The newest events, oldest first: they explain errors, and decide nothing."""
    outcome: Outcome | None = None
    ending_since_s: float | None = None
    ending_checkpoint: bool = False
    """A checkpoint is still wanted before the VMs are returned."""
    release: records.Release | None = None
    """Removing what the VMs shared in the cloud, once it has begun."""
    manager_version: str = ""
    """Version of spottrain that the newest manager runs."""
    timer_at_s: float | None = None
    # The parts; most events change one or two of them.
    market: MarketState = field(default_factory=MarketState)
    deadline: DeadlineState = field(default_factory=DeadlineState)
    """What the deadline or the minimum throughput asks for."""
    launches: LaunchState = field(default_factory=LaunchState)
    fleet: FleetState = field(default_factory=FleetState)
    preparation: PreparationState = field(default_factory=PreparationState)
    training: TrainingState = field(default_factory=TrainingState)
    history: HistoryState = field(default_factory=HistoryState)

    @property
    def job(self) -> JobSettings:
        """The settings; known from ``JobSubmitted`` on.

        Raises:
            NoJobError: The journal does not begin with it.
        """
        if self.settings is None:
            raise NoJobError
        return self.settings

    @property
    def most_vms(self) -> int:
        """The maximum number of VMs at once. It exceeds the job's while VMs that the
        deadline policy replaces train on; never a pool's grant."""
        if (grant := self.job.grant) is not None:
            return min(self.job.resources.max_vms, grant.total)
        decision = self.deadline.decision
        wanted = sum(count for _, count in decision.wanted) if decision else 0
        return max(self.job.resources.max_vms, wanted)

    @property
    def newest_checkpoint(self) -> CheckpointEntry | None:
        """The newest checkpoint that is not known to be damaged."""
        damaged = {one.name for one in self.preparation.damaged}
        known = self.preparation.checkpoints
        return next((one for one in known if one.name not in damaged), None)


def with_parts(state: State, *parts: Part) -> State:
    """Return the state with other parts: those of these kinds."""
    changes: dict[str, Any] = {FIELDS[type(one)]: one for one in parts}
    return replace(state, **changes)


def newest_plan(state: State) -> Plan | None:
    """Return the plan that runs, or ran last."""
    generation = state.training.generation
    return generation.plan if generation else state.training.previous_plan


def settled_numerics(state: State) -> Numerics:
    """Return what every plan must have; what is ``None`` it chooses.

    The newest plan settles nothing if it has trained nothing and needs too much memory.
    """
    binds = state.history.progress.highest_step or not state.fleet.shortages
    return state.job.numerics_after(newest_plan(state) if binds else None)


def is_outdated(state: State, vm: records.VmRecord) -> bool:
    """Return whether a VM's agent runs other software than the manager."""
    runs = vm.phase in (records.VmPhase.REGISTERED, records.VmPhase.READY)
    return runs and vm.agent_version != state.manager_version


def kind_of(offer: Offer) -> str:
    """Return the name of an offer's kind of VM: its type in its cloud."""
    return f"{offer.cloud}/{offer.instance_type}"


def held_by_kind(state: State) -> Counter[str]:
    """Return all VMs that are billed or asked for, by kind; those that leave are, too."""
    held = Counter(kind_of(vm.offer) for vm in state.fleet.vms.values())
    for intent in state.launches.intents.values():
        held[kind_of(intent.offer)] += intent.missing
    return held


def places_by_kind(state: State) -> Counter[str]:
    """Return the VMs of a grant that only VMs of other jobs may be, and that are not here."""
    grant = state.job.grant
    if grant is None:
        return Counter()
    answers = {name: one.phase for name, one in state.fleet.orders.items()}
    return Counter(
        order.kind
        for order in grant.orders
        if answers.get(order.name) is not records.OrderPhase.TAKEN
    )


def is_expecting(state: State) -> bool:
    """Return whether VMs were asked for, or are kept a place for, that are not here."""
    return bool(state.launches.intents) or bool(places_by_kind(state))


def only_queues(state: State) -> bool:
    """Return whether all VMs that are expected wait in queues of clouds."""
    intents = state.launches.intents.values()
    return all(intent.is_queued for intent in intents) and not places_by_kind(state)


def queued(state: State) -> dict[str, str]:
    """Return what waits in queues of clouds to become a VM: why, by id."""
    intents = state.launches.intents.values()
    return {vm_id: why for intent in intents for vm_id, why in intent.queued.items()}


def is_unfit(state: State, offer: Offer) -> bool:
    """Return whether VMs of an offer's type were unfit too often to rent more."""
    return state.launches.unfit.get(kind_of(offer), 0) >= MAX_UNFIT


def rate_usd_per_hour(state: State) -> float:
    """Return what the fleet costs per hour now, for display."""
    return state.history.ledger.rate.usd_per_hour


def spent_usd(state: State, at_s: float) -> float:
    """Return the money spent until ``at_s``, for display.

    A wall clock that was set back does not make it less.
    """
    return state.history.ledger.spent(max(at_s, state.now_s)).usd


def on_demand_usd(state: State, at_s: float) -> float:
    """Return what the same VM seconds would have cost on demand in their zones."""
    return state.history.ledger.spending(max(at_s, state.now_s)).if_on_demand.usd


def budget(state: State) -> Budget:
    """Return the caps and the spending under them, open launches included."""
    job = state.job
    coming = total_rate(
        Rate.of(intent.offer.usd_per_hour) * intent.missing
        for intent in state.launches.intents.values()
    )
    hourly = job.budget.max_usd_per_hour
    caps = [] if job.budget.max_usd is None else [Money.allowed(job.budget.max_usd)]
    if job.grant is not None:
        caps.append(Money.of_microusd(job.grant.max_microusd))
    return Budget(
        cap=min(caps, default=None),
        hourly_cap=None if hourly is None else Rate.allowed(hourly),
        spent=state.history.ledger.spent(state.now_s),
        rate=state.history.ledger.rate + coming,
        reserve_s=reserve_s(job.spec.lease_s),
        side_rate=_side(state),
        pending=_coming(state),
    )


def budgets(state: State) -> tuple[Budget, ...]:
    """Return the job's budget in dollars, and that in GPU-hours if there is one."""
    max_gpu_hours, ledger = state.job.budget.max_gpu_hours, state.history.ledger
    if max_gpu_hours is None:
        return (budget(state),)
    coming = sum(one.offer.gpus * one.missing for one in state.launches.intents.values())
    hours = Budget(
        key="max_gpu_hours",
        cap=Money.allowed(max_gpu_hours),
        spent=ledger.gpu_hours(state.now_s),
        rate=ledger.gpus + Rate.of(coming),
        reserve_s=reserve_s(state.job.spec.lease_s),
    )
    return budget(state), hours


def _side(state: State) -> Rate:
    """Return the cost rate of storage and of the running plan's egress."""
    generation = state.training.generation
    if generation is None:
        return state.history.ledger.storage_rate
    step_s = generation.measured_step_s or generation.plan.predicted_step_s
    return state.history.ledger.storage_rate + Rate.every(generation.egress, step_s)


def _coming(state: State) -> Money:
    """Return the cost of what VMs that have yet to boot will fetch from other clouds."""
    early = (records.VmPhase.STARTING, records.VmPhase.BOOTING)
    booting = Counter(vm.offer.cloud for vm in state.fleet.vms.values() if vm.phase in early)
    for intent in state.launches.intents.values():
        booting[intent.offer.cloud] += intent.missing
    data_bytes = state.job.data_bytes
    return total(egress.fetched(data_bytes, k) * n for k, n in booting.items())


def summary_of(
    generation: records.Generation,
    step: int,
    ended_at_s: float | None,
    ended_by: str = "",
) -> records.GenerationSummary:
    """Return the report's entry for ``generation``, which has reached ``step``."""
    plan = generation.plan
    return records.GenerationSummary(
        generation=generation.number,
        pipeline_depth=plan.pipeline_depth,
        data_parallel_width=plan.data_parallel_width,
        num_slots=len(plan.slots),
        from_step=generation.from_step,
        to_step=step,
        reason=generation.reason,
        predicted_step_s=plan.predicted_step_s,
        predicted_max_s=plan.predicted_max_s,
        measured_step_s=generation.measured_step_s,
        started_at_s=generation.started_at_s or generation.opened_at_s,
        ended_at_s=ended_at_s,
        ended_by=ended_by,
        inputs_hash=generation.decision_hash,
        candidates=generation.candidates,
        devices=generation.devices,
        tensor_parallel=plan.devices_per_stage_replica,
    )
