"""Documents about a job for people and programs: plain data, made from its state."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from spottrain.morphing.plan.candidates import Candidate
from spottrain.morphing.plan.flops import ComputeUse
from spottrain.varuna_manager.core.hangs import quiet_line
from spottrain.varuna_manager.core.model import records
from spottrain.varuna_manager.core.model import state as states
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.varuna_manager.reporting.devices import computes_on
from spottrain.varuna_manager.reporting.utilisation import (
    plan_use,
    total_use,
    use_view,
)
from spottrain.varuna_manager.watch.starts import start_view, steps_view
from spottrain.wire.plan import Plan

if TYPE_CHECKING:
    from spottrain.varuna_manager.reporting.history import JobHistory, MoveMade

SCHEMA_VERSION = 1
"""Version of the documents that ``status`` and ``report`` return."""


_COUNTS = (
    "preemptions_noticed",
    "preemptions_unnoticed",
    "silent_losses",
    "worker_deaths",
    "sick_gpus",
    "hangs",
    "slow_vms_replaced",
    "price_changes",
    "vms_launched",
)
"""Counters of the tally that the report has."""


def job_state(state: states.State, managed: bool) -> str:
    """Return a job's state in one word.

    ``running``, ``waiting`` (no generation trains), ``ending``, ``unmanaged`` (its
    manager is gone: resume or down), or how it ended: ``succeeded``, ``failed``,
    ``stopped``, ``budget``, ``deadline``, ``capacity``.
    """
    if state.phase is states.JobPhase.ENDED and state.outcome is not None:
        return state.outcome.kind
    if not managed:
        return "unmanaged"
    if state.phase is states.JobPhase.ENDING:
        return "ending"
    return "running" if state.training.generation is not None else "waiting"


def plans(state: states.State) -> list[records.GenerationSummary]:
    """Return every plan that trained, oldest first, including the present one."""
    ran = list(state.history.generations)
    if (now := state.training.generation) is not None:
        ran.append(states.summary_of(now, state.history.progress.step, None))
    return [plan for plan in ran if plan.from_step is not None]


def status(state: states.State, managed: bool, at_s: float) -> dict[str, Any]:
    """Return the status of a job at ``at_s`` (seconds since the epoch).

    Money in dollars, times in seconds; ``None`` where nothing is known.
    """
    job, progress = state.job, state.history.progress
    at_s = clock_of(state, at_s)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": job.spec.name,
        "computes_on": computes_on(state),
        "state": job_state(state, managed),
        "activity": quiet_line(state, at_s) or state.activity,
        "last_event": state.last_message,
        "step": progress.step,
        "steps": job.spec.steps,
        "loss": progress.loss_last,
        "nonfinite": _nonfinite(progress),
        "examples_per_s": _recent_examples_per_s(state),
        **use_view(_recent_use(state)),
        "time_left_s": _time_left_s(state),
        "deadline_s": job.deadline_s,
        "forecast": _deadline(state, at_s),
        "usd_spent": states.spent_usd(state, at_s),
        "usd_budget": job.budget.max_usd,
        "usd_reserved": states.budget(state).reserve.usd,
        **gpu_hours(state, at_s),
        "budget_alerts": _alerts(state),
        "usd_per_hour": states.rate_usd_per_hour(state),
        "wall_s": at_s - state.submitted_at_s,
        "plan": _present_plan(state),
        "move": None if state.fleet.move is None else move_view(state, state.fleet.move),
        "fleet": [_vm(state, vm) for vm in state.fleet.vms.values()],
        "queued": states.queued(state),
        "safety": _safety(state),
        "exit_code": state.outcome.exit_code if state.outcome else None,
        "reason": state.outcome.reason if state.outcome else "",
    }


def _deadline(state: states.State, at_s: float) -> dict[str, Any] | None:
    """Return ``deadline_view``, without its imports for a job that has no deadline."""
    if state.deadline.decision is None:
        return None
    from spottrain.varuna_manager.reporting.deadline import deadline_view

    return deadline_view(state, at_s)


def report(state: states.State, history: JobHistory, managed: bool, at_s: float) -> dict[str, Any]:
    """Return what a job did and cost until ``at_s`` (seconds since the epoch).

    Args:
        history: The job's history, see ``history.read_history``.
        managed: Whether a manager runs.
        at_s: Reports on a job that is over stop at its end.
    """
    # Not above: ``status`` must answer at once.
    from spottrain.varuna_manager.reporting import costs, timeline

    job, past, progress = state.job, state.history, state.history.progress
    at_s = clock_of(state, at_s)
    ran = _measured_plans(state, history)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": job.spec.name,
        "computes_on": computes_on(state),
        "state": job_state(state, managed),
        "reason": state.outcome.reason if state.outcome else state.activity,
        "exit_code": state.outcome.exit_code if state.outcome else None,
        "reduction": job.spec.reduction,
        "submitted_at_s": state.submitted_at_s,
        "minibatch_size": job.spec.minibatch_size,
        "steps": job.spec.steps,
        "steps_done": progress.step,
        "examples_done": progress.step * job.spec.minibatch_size,
        "loss_first": progress.loss_first,
        "loss_last": progress.loss_last,
        "heldout_loss_first": progress.heldout_first,
        "heldout_loss": progress.heldout_last,
        "heldout_set": progress.heldout_set,
        "best_step": progress.best_step,
        "nonfinite": _nonfinite(progress),
        **{name: getattr(past.tally, name) for name in _COUNTS},
        "plans": [_plan_run(job, plan, at_s) for plan in ran],
        "interruptions": [_interruption(state, hit) for hit in past.interruptions],
        "slow_vms": [_slow_vm(state, slow) for slow in past.slow_vms],
        "moves": [_move_made(state, made) for made in history.moves],
        "minibatches_lost": progress.minibatches_lost,
        "minibatches_recomputed": progress.minibatches_recomputed,
        "checkpoints": [one.name for one in state.preparation.checkpoints],
        "checkpoint_error": state.preparation.checkpoint_error,
        "peak_bytes": progress.peak_bytes,
        "usd_spent": states.spent_usd(state, at_s),
        "usd_on_demand": states.on_demand_usd(state, at_s),
        "usd_budget": job.budget.max_usd,
        **gpu_hours(state, at_s),
        "budget_alerts": _alerts(state),
        "examples_per_s": _examples_per_s(state),
        **use_view(total_use(job, ran)),
        "wall_s": at_s - state.submitted_at_s,
        "cost": costs.cost(state, history, at_s),
        "starts": [start_view(one) for one in history.starts.by_vm.values()],
        "timeline": timeline.timeline(state, history, ran),
    }


def _measured_plans(state: states.State, history: JobHistory) -> list[records.GenerationSummary]:
    """Return the job's plans with the median of what their mini-batches took."""
    return [
        replace(
            plan,
            measured_step_s=history.step_s.get(plan.generation, plan.measured_step_s),
        )
        for plan in plans(state)
    ]


def _nonfinite(progress: records.Progress) -> dict[str, int] | None:
    """Return what is known of mini-batches that were not finite, if there were any."""
    if progress.nonfinite_last is None:
        return None
    return {
        "steps": progress.nonfinite_steps,
        "in_row": progress.nonfinite_in_row,
        "last": progress.nonfinite_last,
    }


def cost(state: states.State, history: JobHistory, managed: bool, at_s: float) -> dict[str, Any]:
    """Return what a job cost until ``at_s``, as ``spottrain cost`` shows it; see
    ``report`` and ``costs.cost``."""
    from spottrain.varuna_manager.reporting import costs

    at_s = clock_of(state, at_s)
    return {
        "schema_version": SCHEMA_VERSION,
        "name": state.job.spec.name,
        "state": job_state(state, managed),
        "wall_s": at_s - state.submitted_at_s,
        **costs.cost(state, history, at_s),
    }


def copies(state: states.State) -> list[set[str]]:
    """Return the VMs whose memory holds each stage's newest state now.

    Before a generation trains, they are those of the plan before; after a loss, those
    that are left. Empty: no VM is known to hold it.
    """
    if (plan := _plan_in_memory(state)) is None:
        return []
    depth, there = plan.pipeline_depth, _ready(state)
    return [{slot.vm_id for slot in plan.slots[stage::depth]} & there for stage in range(depth)]


def _plan_in_memory(state: states.State) -> Plan | None:
    """Return the plan by which sections are in memory now, if it is known."""
    generation = state.training.generation
    begun = generation is not None and generation.started_at_s is not None
    plan = generation.plan if generation and begun else state.training.previous_plan
    newest = state.history.generations[-1] if state.history.generations else None
    if not begun and newest and newest.from_step is None:
        return None
    return plan


def _ready(state: states.State) -> set[str]:
    """Return the VMs that can give their memory; one that is silent may be gone."""
    return {
        vm.vm_id
        for vm in state.fleet.vms.values()
        if vm.phase is records.VmPhase.READY and vm.silent_since_s is None
    }


def _copied_step(state: states.State) -> int | None:
    """Return the newest mini-batch of which the loss of any one VM leaves all sections, in
    copies; None: there is none."""
    plan, there = _plan_in_memory(state), _ready(state)
    if plan is None or not plan.copy_holders:
        return None
    holders = [
        {slot.vm_id, plan.slots[holder].vm_id} & there
        for slot, holder in zip(plan.slots, plan.copy_holders, strict=True)
    ]
    return state.history.progress.copied_step if min(map(len, holders)) > 1 else None


def survives_any_worker(plan: Plan) -> bool:
    """Return whether a worker that is killed leaves a copy of its state.

    What is on its device ends with it; what is in its VM's memory does not.
    """
    held = (plan.holders_of(section) for section in range(plan.num_sections))
    return plan.state == "host" or all(len(ranks) > 1 for ranks in held)


def clock_of(state: states.State, at_s: float) -> float:
    """Return the time up to which a job is reported: at most its end."""
    return state.now_s if state.phase is states.JobPhase.ENDED else at_s


def _recent_examples_per_s(state: states.State) -> float | None:
    """Return the measured speed of the present plan."""
    measured_s = state.training.generation.measured_step_s if state.training.generation else None
    return state.job.spec.minibatch_size / measured_s if measured_s else None


def _recent_use(state: states.State) -> ComputeUse | None:
    """Return what the present plan makes of its devices, as measured."""
    if (now := state.training.generation) is None:
        return None
    return plan_use(state.job, states.summary_of(now, state.history.progress.step, None))


def _examples_per_s(state: states.State) -> float | None:
    """Return the speed from the first commit to the last, interruptions included."""
    progress = state.history.progress
    first_s, last_s = progress.first_commit_at_s, progress.last_commit_at_s
    if first_s is None or last_s is None or last_s <= first_s:
        return None
    return (progress.step - 1) * state.job.spec.minibatch_size / (last_s - first_s)


def _time_left_s(state: states.State) -> float | None:
    """Return the time for the remaining steps at the present plan's speed, once that is
    known: a range says too little of it."""
    generation = state.training.generation
    if generation is None or state.phase is not states.JobPhase.ACTIVE:
        return None
    step_s = generation.measured_step_s
    if step_s is None and generation.plan.predicted_max_s is None:
        step_s = generation.plan.predicted_step_s
    if step_s is None:
        return None
    return (state.job.spec.steps - state.history.progress.step) * step_s


def _present_plan(state: states.State) -> dict[str, Any] | None:
    if (generation := state.training.generation) is None:
        return None
    return {
        "generation": generation.number,
        "phase": generation.phase.value,
        "shape": generation.plan.shape,
        "pipeline_depth": generation.plan.pipeline_depth,
        "data_parallel_width": generation.plan.data_parallel_width,
        "tensor_parallel": generation.plan.devices_per_stage_replica,
        "reason": generation.reason,
        "from_step": generation.from_step,
        "predicted_step_s": generation.plan.predicted_step_s,
        "predicted_max_s": generation.plan.predicted_max_s,
        "measured_step_s": generation.measured_step_s,
        "schedule": generation.plan.schedule,
        "recompute": generation.plan.recompute,
        "segments": generation.plan.segments,
        "microbatch_size": generation.plan.microbatch_size,
        "microbatch_sizes": [
            generation.plan.microbatch_size_of(replica)
            for replica in range(generation.plan.data_parallel_width)
        ],
        "decision": decision(generation.decision_hash, generation.candidates),
    }


def _safety(state: states.State) -> dict[str, Any]:
    """Return which losses the job could survive now, and what others would cost.

    A VM can be lost without losing progress if every stage has a copy elsewhere.
    """
    newest, held = state.newest_checkpoint, copies(state)
    copied = _copied_step(state)
    every = state.job.spec.checkpoint_every_steps
    fewest = min(map(len, held), default=0)
    return {
        "survives_any_vm": fewest > 1,
        "vms_at_once": max(0, fewest - 1),
        "vms_spared": [
            vm.vm_id
            for vm in state.fleet.vms.values()
            if fewest and all(holders - {vm.vm_id} for holders in held)
        ],
        "survives_any_worker": (
            survives_any_worker(state.training.generation.plan)
            if state.training.generation
            else False
        ),
        "copied_step": copied,
        "copy_lag_steps": None if copied is None else state.history.progress.step - copied,
        "checkpoint_step": newest.step if newest else None,
        "lag_steps": state.history.progress.step - newest.step if newest else None,
        "checkpoint_every_steps": every or state.history.progress.checkpoint_every_steps or None,
        "checkpoint_cost_s": state.history.progress.checkpoint_cost_s or None,
    }


def _vm(state: states.State, vm: records.VmRecord) -> dict[str, Any]:
    generation = state.training.generation
    trains = generation is None or generation.trains_on(vm.vm_id)
    return {
        "vm_id": vm.vm_id,
        "phase": vm.phase.value,
        "spare": vm.phase is records.VmPhase.READY and not trains,
        "zone": vm.offer.zone,
        "instance_type": vm.offer.instance_type,
        "spot": vm.offer.spot,
        "slots": vm.offer.gpus,
        "usd_per_hour": vm.offer.usd_per_hour,
        "launched_at_s": vm.launched_at_s,
        "silent_since_s": vm.silent_since_s,
        "leaves_at_s": vm.leaves_at_s,
        "slowness": vm.slow.slowness if vm.slow else None,
        "device": vm.device,
        "gpus": [asdict(gpu) for gpu in vm.gpus],
        "throttled": vm.throttled,
        "start": steps_view(vm.start),
    }


def decision(inputs_hash: str, candidates: tuple[Candidate, ...]) -> dict[str, Any]:
    """Return how a plan was chosen: a hash of the inputs and the candidates."""
    return {
        "inputs_hash": inputs_hash,
        "candidates": [candidate_view(candidate) for candidate in candidates],
    }


def candidate_view(candidate: Candidate) -> dict[str, Any]:
    """Return a candidate plan as plain data."""
    return {"shape": candidate.shape, **asdict(candidate)}


def _plan_run(job: JobSettings, plan: records.GenerationSummary, at_s: float) -> dict[str, Any]:
    ended_at_s = at_s if plan.ended_at_s is None else plan.ended_at_s
    return {
        "generation": plan.generation,
        "shape": plan.shape,
        "pipeline_depth": plan.pipeline_depth,
        "data_parallel_width": plan.data_parallel_width,
        "tensor_parallel": plan.tensor_parallel,
        "from_step": plan.from_step,
        "to_step": plan.to_step,
        "reason": plan.reason,
        "predicted_step_s": plan.predicted_step_s,
        "predicted_max_s": plan.predicted_max_s,
        "measured_step_s": plan.measured_step_s,
        **use_view(plan_use(job, plan)),
        "started_at_s": plan.started_at_s,
        "ran_s": ended_at_s - plan.started_at_s,
        "ended_by": plan.ended_by,
        "decision": decision(plan.inputs_hash, plan.candidates),
    }


def gpu_hours(state: states.State, at_s: float) -> dict[str, float | None]:
    """Return the GPU-hours of a job until ``at_s``, what it may still use once it ends, and
    its budget of them."""
    hours = states.budgets(state)[1:]
    return {
        "gpu_hours": state.history.ledger.gpu_hours(max(at_s, state.now_s)).usd,
        "gpu_hours_reserved": hours[0].reserve.usd if hours else None,
        "gpu_hours_budget": state.job.budget.max_gpu_hours,
    }


def _alerts(state: states.State) -> list[dict[str, Any]]:
    return [
        {**asdict(alert), "at_s": alert.at_s - state.submitted_at_s}
        for alert in state.history.alerts
    ]


def move_view(state: states.State, move: records.Move) -> dict[str, Any]:
    """Return a move to other machines for money."""
    return {
        "from": move.source,
        "to": move.to,
        "why": move.why,
        "saves_usd": move.saves_usd,
        "at_s": move.since_s - state.submitted_at_s,
        "vms": len(move.vm_ids),
        "by_checkpoint": move.is_far,
    }


def _move_made(state: states.State, made: MoveMade) -> dict[str, Any]:
    took_s = None if made.ended_s is None else made.ended_s - made.move.since_s
    return move_view(state, made.move) | {"took_s": took_s, "given_up": made.given_up}


def _slow_vm(state: states.State, slow: records.SlowVm) -> dict[str, Any]:
    return {
        "vm_id": slow.vm_id,
        "at_s": slow.found_at_s - state.submitted_at_s,
        "slowness": slow.slowness,
        "replaced_by": slow.replaced_by,
        "reason": slow.evidence,
    }


def _interruption(state: states.State, hit: records.Interruption) -> dict[str, Any]:
    return {
        "kind": hit.interruption,
        "vm_id": hit.vm_id,
        "at_s": hit.at_s - state.submitted_at_s,
        "reason": hit.reason,
        "generation": hit.generation,
        "cost_s": hit.cost_s,
        "minibatches_recomputed": hit.minibatches_recomputed,
    }


def fleet_line(status: dict[str, Any]) -> str:
    """Return a fleet in a few words, such as ``4 ready, 1 spare``: the plan leaves it out."""
    words = {"starting": "booting", "registered": "booting"}
    counts: Counter[str] = Counter()
    for vm in status["fleet"]:
        if vm["silent_since_s"] is not None:
            counts["silent"] += 1
        elif vm["leaves_at_s"] is not None:
            counts["leaving"] += 1
        elif vm["spare"]:
            counts["spare"] += 1
        else:
            counts[words.get(vm["phase"], vm["phase"])] += 1
    if status["queued"]:
        why = ", ".join(sorted(set(status["queued"].values())))
        counts[f"queued ({why})"] = len(status["queued"])
    return ", ".join(f"{n} {word}" for word, n in counts.items()) or "no VMs"
