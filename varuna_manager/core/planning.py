"""When to make a plan, and when a plan is worth a new generation.

The planner's answer is kept with the hash of its inputs: it holds as long as the same
slots are usable. A broken generation is replaced at once; a notice waits a moment for
further ones; growth waits until the fleet no longer changes, and must pay.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence

from spottrain.eventlog.changed import replace
from spottrain.morphing.adapt import checkpointing, policy
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.simulate.reducing import NCCL_FAILED
from spottrain.varuna_manager.core import allocation, fleet, memory, rounds
from spottrain.varuna_manager.core import generation as generations
from spottrain.varuna_manager.core import preparation as preparations
from spottrain.varuna_manager.core.model import records
from spottrain.varuna_manager.core.model.commands import ComputePlan, Outcome
from spottrain.varuna_manager.core.model.events import CommandFailed, PlanComputed
from spottrain.varuna_manager.core.model.settings import JobSettings
from spottrain.varuna_manager.core.model.state import (
    JobPhase,
    State,
    is_expecting,
    is_outdated,
    newest_plan,
    settled_numerics,
)
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.wire.model import Profile
from spottrain.wire.numerics import Numerics
from spottrain.wire.plan import Plan

MORPH_COST_S = 5.0
"""Assumed cost of a planned morph until one was measured."""
STORE_WAIT_S = 300.0
"""How long nothing may begin, as no checkpoint can be read, before the job ends."""
MAX_BLIND = 2
"""Times in a row that a VM may fail to read a checkpoint that the manager can read."""
UNUSED_S = 60.0
"""How long VMs stay that the plan does not use: clouds charge for the first minute anyway,
and a fleet that changes may need them."""


def wants_training(state: State) -> bool:
    """Return whether a generation should run: for the job, or only to write a checkpoint."""
    return state.phase is JobPhase.ACTIVE or (
        state.phase is JobPhase.ENDING and state.ending_checkpoint
    )


def usable_vms(state: State) -> tuple[records.VmRecord, ...]:
    """Return the VMs whose slots a plan may use.

    While a move waits for new VMs, the old ones; new ones near by take the places of old
    ones that are lost.
    """
    usable = tuple(vm for vm in allocation.at_home(state) if vm.is_usable)
    move = state.fleet.move
    if move is None or move.is_cut_over:
        return usable
    old = tuple(vm for vm in state.fleet.vms.values() if vm.successor and vm.is_usable)
    new = () if move.is_far else tuple(vm for vm in usable if not vm.successor)
    return old + new[: max(0, len(move.vm_ids) - len(old))]


def advance(transition: Transition) -> None:
    """Prepare, plan, and open a generation or leave the one that runs."""
    state = transition.state
    if not wants_training(state):
        return
    _replace_outdated(transition)
    state, generation = transition.state, transition.state.training.generation
    if generation is None:
        if _is_blocked(transition):
            return
        preparations.prepare(transition, usable_vms(transition.state))
        _start(transition)
    elif generation.phase is records.GenerationPhase.RUNNING and not generation.done:
        if generation.save_only:
            return
        if state.phase is JobPhase.ENDING:
            generations.stop_generation(transition, checkpoint=True)
        else:
            _reconsider(transition, generation)


# --- Agents of another version ------------------------------------------------------------


def _replace_outdated(transition: Transition) -> None:
    """Start agents of the manager's version where the old ones hold nothing of worth."""
    state = transition.state
    if state.phase is JobPhase.ENDING:
        return
    old = [vm for vm in state.fleet.vms.values() if is_outdated(state, vm)]
    holds = bool(old) and _holds_unsaved(state)
    going = tuple(
        vm
        for vm in old
        if vm.silent_since_s is None and vm.leaves_at_s is None and not (holds and vm.used_slots)
    )
    if not going:
        return
    ids = {vm.vm_id for vm in going}
    rounds.lose_vms(transition, ids)
    fleet.replace_agents(transition, going)


def _holds_unsaved(state: State) -> bool:
    """Return whether outdated VMs train, or may hold mini-batches that no checkpoint has.

    These are saved once: if that breaks, training goes on from the newest checkpoint.
    """
    if (generation := state.training.generation) is not None:
        ids = {slot.vm_id for slot in generation.participants}
        return any(is_outdated(state, vm) for vm in state.fleet.vms.values() if vm.vm_id in ids)
    saved = state.newest_checkpoint
    if saved is None or state.preparation.profile is None or state.training.fruitless:
        return False
    # After a break, more may be committed than is known.
    broke = bool(state.history.generations) and state.history.generations[-1].broke
    return broke or state.history.progress.step > saved.step


def _save_outdated(
    transition: Transition,
    profile: Profile,
    checkpoint: str,
    vms: Sequence[records.VmRecord],
) -> None:
    """Open a generation of outdated VMs alone that only saves what they hold."""
    answer = _answer(transition, vms, profile)
    if answer is None:
        return
    if answer.plan is None:
        fleet.replace_agents(transition, vms)
        return
    plan, inputs_hash = answer.plan, answer.inputs_hash
    generations.open_generation(transition, plan, inputs_hash, checkpoint, save_only=True)


# --- Checkpoints that cannot be read -------------------------------------------------------


def blocked_by(state: State) -> str | None:
    """Return why nothing can begin until checkpoints can be read; ``None``: it can."""
    preparation = state.preparation
    if preparation.doubted:
        one = preparation.doubted[-1]
        return f"looking at checkpoint {one.name}, which {one.vm_id} cannot read"
    if preparation.unread and state.now_s < preparation.read_after_s:
        one = preparation.unread[-1]
        return f"waiting for {one.vm_id} to reach the checkpoints: {one.reason}"
    error = preparation.store_error
    unlisted = state.newest_checkpoint is None and not preparation.listed
    if unlisted or (error and not state.fleet.vms):  # no VM is rented meanwhile
        return f"waiting for the list of checkpoints{error and ': '}{error}"
    return None


def _is_blocked(transition: Transition) -> bool:
    """Return whether nothing can begin; end the job if that lasts, as absence is no reason
    to begin again."""
    _return_blind(transition)
    state = transition.state
    if state.job.measures_only or (why := blocked_by(state)) is None:
        return False
    preparation = state.preparation
    if preparation.blocked_since_s is None:
        preparation = replace(preparation, blocked_since_s=state.now_s)
        transition.put(preparation)
    since_s = preparation.blocked_since_s
    assert since_s is not None
    if state.now_s < preparation.read_after_s:
        transition.wake(preparation.read_after_s)
    if state.phase is JobPhase.ACTIVE and transition.waited_until(since_s + STORE_WAIT_S):
        reasons = (*preparation.doubted, *preparation.unread)
        reason = preparation.store_error or (reasons[-1].reason if reasons else why)
        transition.fail(
            f"no checkpoint could be read for {STORE_WAIT_S:g} s: {reason}; make "
            f"{state.job.spec.checkpoint_path} reachable, then resume the job",
            checkpoint=False,
        )
    return True


def _return_blind(transition: Transition) -> None:
    """Return VMs that cannot read checkpoints, again and again, where others might."""
    preparation = transition.state.preparation
    blind = {one.vm_id: one for one in preparation.unread if one.times >= MAX_BLIND}
    others = {vm.vm_id for vm in usable_vms(transition.state)}
    others -= {one.vm_id for one in preparation.unread}
    if not blind or not others:
        return
    left = tuple(one for one in preparation.unread if one.vm_id not in blind)
    transition.put(replace(preparation, unread=left))
    for vm_id, one in blind.items():
        if vm_id in transition.state.fleet.vms:
            fleet.vm_unfit(transition, vm_id, f"cannot read checkpoints: {one.reason}")


# --- From no generation to one --------------------------------------------------------------


def _start(transition: Transition) -> None:
    state = transition.state
    checkpoint, vms = state.newest_checkpoint, usable_vms(state)
    if checkpoint is None or state.preparation.profile is None:
        return
    # No generation mixes versions.
    outdated = tuple(vm for vm in vms if is_outdated(state, vm))
    if outdated and state.phase is JobPhase.ACTIVE:
        _save_outdated(transition, state.preparation.profile, checkpoint.name, outdated)
        return
    begun = transition.state.preparation.round is not None
    if begun or preparations.is_to_measure(state) or not preparations.is_enough(transition, vms):
        return
    answer = _answer(transition, outdated or vms, state.preparation.profile)
    if answer is None:
        return
    if answer.plan is not None:
        plan, inputs_hash = answer.plan, answer.inputs_hash
        # The code of a job that has failed must not run.
        save_only = state.phase is JobPhase.ENDING
        generations.open_generation(
            transition, plan, inputs_hash, checkpoint.name, save_only=save_only
        )
    elif state.phase is JobPhase.ENDING:
        transition.state = replace(state, ending_checkpoint=False)
    elif _is_complete(transition.state, vms) and transition.state.fleet.size_limit is not None:
        transition.put(replace(transition.state.fleet, size_limit=None))
    elif _is_complete(transition.state, vms):
        outcome = Outcome(kind="capacity", exit_code=5, reason=answer.why_not)
        transition.end(outcome)


def _is_complete(state: State, vms: Sequence[records.VmRecord]) -> bool:
    """Return whether the fleet is as large as it may become."""
    all_usable = len(vms) == len(state.fleet.vms)
    return all_usable and not is_expecting(state) and allocation.room(state) <= 0


# --- From one generation to the next --------------------------------------------------------


def _reconsider(transition: Transition, generation: records.Generation) -> None:
    """Leave the generation if a VM of its plan leaves, or if a better plan pays."""
    state = transition.state
    assert state.preparation.profile is not None
    vms = usable_vms(state)
    if any(is_outdated(state, vm) and generation.trains_on(vm.vm_id) for vm in vms):
        reason = f"the manager is of version {state.manager_version} now"
        _leave(transition, reason, checkpoint=True)
        return
    if preparations.is_to_measure_again(state, generation):
        transition.put(replace(state.preparation, measures_again=True))
        _leave(transition, "what a busy machine measured is measured again", checkpoint=False)
        return
    if _hash(state, vms, state.preparation.profile) == generation.inputs_hash:
        _return_unused(transition, generation, vms)
        return
    ids = {slot.vm_id for slot in generation.plan.slots}
    in_plan = [vm for vm in state.fleet.vms.values() if vm.vm_id in ids]
    leaving = [vm for vm in in_plan if vm.leaves_at_s is not None]
    slow = [vm.slow for vm in in_plan if vm.slow is not None and vm.is_replaced]
    at_s = _reconsider_at_s(state, leaving, in_plan)
    if at_s is None or not transition.waited_until(at_s):
        return
    spare = [vm for vm in vms if vm.vm_id not in ids]
    if not (leaving or slow) and preparations.measure_others(transition, spare):
        return
    answer = _answer(transition, vms, state.preparation.profile)
    if answer is None:
        return
    if leaving:
        names = ", ".join(vm.vm_id for vm in leaving)
        _leave(transition, f"notice: {names}", checkpoint=answer.plan is None)
        return
    plan = answer.plan
    move = state.fleet.move
    if move is not None and move.is_cut_over and plan is not None:
        _leave(transition, f"moving to {move.to}", checkpoint=move.is_far)
        return
    if slow and plan is not None:
        names = ", ".join(f"{one.vm_id} by {one.replaced_by}" for one in slow)
        _leave(transition, f"slow: {names}", checkpoint=False)
        return
    choice = None if plan is None else _choice(state, generation, plan, answer.inputs_hash)
    _note_choice(transition, choice)
    if plan is None or choice is None or choice.at_s is None:
        generation = replace(generation, inputs_hash=answer.inputs_hash)
        transition.put_generation(generation)
    elif transition.waited_until(choice.at_s):
        grown = len(plan.slots) - len(generation.plan.slots)
        for_money = state.job.plan_objective == "examples_per_dollar"
        why = "cheaper per example" if for_money else "growth"
        _leave(
            transition,
            f"{why}: {grown:+d} {'slot' if abs(grown) == 1 else 'slots'}",
            checkpoint=False,
        )


def _reconsider_at_s(
    state: State,
    leaving: Sequence[records.VmRecord],
    in_plan: Sequence[records.VmRecord],
) -> float | None:
    """Return when a generation is to be reconsidered, if that is known."""
    if leaving:
        return min(_handover_at_s(state, vm) for vm in leaving)
    if any(vm.silent_since_s is not None for vm in in_plan):
        return None  # the provider's answer decides
    if any(vm.slow is not None and vm.is_replaced for vm in in_plan):
        return state.now_s
    return state.fleet.fleet_changed_at_s + state.job.morphing.debounce_s


def _return_unused(
    transition: Transition,
    generation: records.Generation,
    vms: Sequence[records.VmRecord],
) -> None:
    """Return VMs that the cost-optimal plan does not use, the most expensive first.

    Only once no VM comes or goes, and after a while; no more are rented from then on.
    """
    state = transition.state
    planned = {slot.vm_id for slot in generation.plan.slots}
    unused = [vm for vm in vms if vm.vm_id not in planned]
    unused.sort(key=lambda vm: (-vm.offer.usd_per_hour, vm.vm_id))
    going = unused[: max(0, len(vms) - state.job.resources.min_vms)]
    settled = not state.launches.intents and all(
        vm.slow is None and (vm.is_usable or vm.phase is records.VmPhase.RETURNING)
        for vm in state.fleet.vms.values()
    )
    settled = settled and state.fleet.move is None
    if state.job.plan_objective != "examples_per_dollar" or not going or not settled:
        return
    if transition.waited_until(max(generation.since_s, state.fleet.fleet_changed_at_s) + UNUSED_S):
        cheapest = allocation.cheapest_usd_per_hour(state)
        limit = records.FleetSizeLimit(vms=len(vms) - len(going), usd_per_hour=cheapest)
        transition.put(replace(state.fleet, size_limit=limit))
        names = ", ".join(vm.vm_id for vm in going)
        transition.log(f"returning VMs that the cost-optimal plan leaves out: {names}")
        fleet.return_vms(transition, going, "not in the cost-optimal plan")


def _leave(transition: Transition, reason: str, *, checkpoint: bool) -> None:
    transition.put(replace(transition.state.training, plan_reason=reason))
    transition.log(f"morph: {reason}")
    generations.stop_generation(transition, checkpoint=checkpoint)


def _handover_at_s(state: State, vm: records.VmRecord) -> float:
    """Return when to leave a generation because ``vm`` is taken away."""
    assert vm.noticed_at_s is not None
    assert vm.leaves_at_s is not None
    return policy.handover_at_s(vm.noticed_at_s, vm.leaves_at_s, state.job.morphing.debounce_s)


def _choice(
    state: State, generation: records.Generation, plan: Plan, inputs_hash: str
) -> records.MorphChoice:
    """Return when ``plan`` becomes worth a morph, with the numbers that decide.

    The prediction of the new plan is corrected by the error of the present one's.
    """
    step_s = _step_s(generation)
    new_step_s = plan.predicted_step_s * step_s / generation.plan.predicted_step_s
    share = _lag_share(state)
    present = policy.MorphOption(examples_per_s=_worth(state, generation.plan, step_s, share))
    new = policy.MorphOption(
        examples_per_s=_worth(state, plan, new_step_s, share),
        cost_s=state.history.progress.morph_cost_s or MORPH_COST_S,
    )
    seen, left_s = (
        outlook(state),
        (state.job.spec.steps - state.history.progress.step) * step_s,
    )
    at_s = policy.morph_at_s(present, new, seen, left_s)
    needed_s = policy.break_even_s(present.examples_per_s, new.examples_per_s, new.cost_s)
    return records.MorphChoice(
        inputs_hash=inputs_hash,
        shape=plan.shape,
        present_examples_per_s=present.examples_per_s,
        new_examples_per_s=new.examples_per_s,
        cost_s=new.cost_s,
        needed_s=needed_s if math.isfinite(needed_s) else None,
        quiet_s=seen.quiet_s(state.now_s),
        left_s=left_s,
        at_s=at_s if math.isfinite(at_s) else None,
    )


def _note_choice(transition: Transition, choice: records.MorphChoice | None) -> None:
    """Keep the numbers where the verdict is a new one: they change all the time."""
    state = transition.state
    due = choice is not None and choice.at_s is not None and choice.at_s <= state.now_s
    if due or _verdict(choice) != _verdict(state.training.morph):
        transition.put(replace(state.training, morph=choice))


def _verdict(choice: records.MorphChoice | None) -> tuple[str, bool] | None:
    """Return of which plan it is said whether it ever pays."""
    if choice is None:
        return None
    return choice.inputs_hash, choice.at_s is None


def _step_s(generation: records.Generation) -> float:
    return generation.measured_step_s or generation.plan.predicted_step_s


def _worth(state: State, plan: Plan, step_s: float, share: float) -> float:
    """Return examples/s under ``plan``, fallbacks to checkpoints counted.

    Divided by the hourly rent of its VMs, where cost is the objective: both plans are paid
    for by the hour, so the same time makes up for a morph.
    """
    slower = policy.slowdown(plan.pipeline_depth, plan.copies, share)
    each_s = plan.minibatch_size / step_s / slower
    if state.job.plan_objective != "examples_per_dollar":
        return each_s
    vms = {slot.vm_id for slot in plan.slots}.intersection(state.fleet.vms)
    return each_s / math.fsum(state.fleet.vms[vm].offer.usd_per_hour for vm in vms)


def _lag_share(state: State) -> float:
    """Return the share of throughput that interruptions put at stake."""
    generation, previous = state.training.generation, state.training.previous_plan
    step_s = previous.predicted_step_s if previous else 0.0
    if generation is not None:
        step_s = _step_s(generation)
    every = state.job.spec.checkpoint_every_steps
    every = every or state.history.progress.checkpoint_every_steps
    lag_s = every * step_s / 2 if every else checkpointing.expected_lag_s(len(state.fleet.vms))
    return policy.lag_share(outlook(state), lag_s, state.now_s)


def outlook(state: State) -> policy.FleetOutlook:
    """Return how often the fleet has lost VMs so far."""
    losses_at_s = tuple(loss.at_s for loss in state.history.interruptions)
    forgotten = len(losses_at_s) == records.KEPT
    return policy.FleetOutlook(
        since_s=losses_at_s[0] if forgotten else state.submitted_at_s,
        losses_at_s=losses_at_s,
        changed_at_s=state.fleet.fleet_changed_at_s,
        debounce_s=state.job.morphing.debounce_s,
    )


# --- The planner ------------------------------------------------------------------------------


def _hash(state: State, vms: Sequence[records.VmRecord], profile: Profile) -> str:
    """Return a hash of what a plan depends on: slots, their memory and the profile."""
    parts = [profile.fingerprint, *(f"{vm.vm_id}:{vm.num_slots}" for vm in vms)]
    parts += sorted({vm.device for vm in vms if rounds.measured_on(state, vm) is not None})
    parts += sorted(f"{one.machine}:{one.room_bytes}" for one in state.fleet.shortages.values())
    parts += (source for source in profile.sources if source.startswith(NCCL_FAILED))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _answer(
    transition: Transition, vms: Sequence[records.VmRecord], profile: Profile
) -> records.PlanAnswer | None:
    """Return the planner's answer for ``vms``, or ask for it and return None."""
    state = transition.state
    inputs_hash = _hash(state, vms, profile)
    known = state.training.answer
    if known is not None and known.inputs_hash == inputs_hash:
        return known
    if state.training.plan_asked != inputs_hash:
        transition.put(replace(state.training, plan_asked=inputs_hash))
        inputs = plan_inputs(
            state.job,
            profile,
            memory.devices(state, vms, profile),
            measured=memory.measured(state, vms, profile),
            previous=newest_plan(state),
            numerics=settled_numerics(state),
            lag_share=_lag_share(state),
        )
        transition.emit(ComputePlan(inputs_hash=inputs_hash, inputs=inputs))
    return None


def plan_inputs(
    job: JobSettings,
    profile: Profile,
    slots: Iterable[Device] = (),
    *,
    measured: Iterable[Profile] = (),
    previous: Plan | None = None,
    numerics: Numerics | None = None,
    lag_share: float = policy.UNSEEN_SHARE,
) -> PlanInputs:
    """Return what the plans of a job are made from.

    The planner's only view of a job, whether the job runs, is to be ranked or previewed.

    Args:
        job: What it asks of its plans.
        profile: What was measured of its model.
        slots: The fleet.
        measured: What was measured on further types of its devices.
        previous: The plan that runs or ran last.
        numerics: What plans must have; ``None``: what the job asks for.
        lag_share: What interruptions put at stake; by default as before the first one.
    """
    is_free = job.spec.reduction == "fast" and job.numerics.microbatch_size is None
    numerics = job.numerics if numerics is None else numerics
    return PlanInputs(
        facts=job.facts,
        profile=profile,
        measured=tuple(measured),
        slots=tuple(slots),
        minibatch_size=job.spec.minibatch_size,
        microbatch_size=numerics.microbatch_size,
        reduction=job.spec.reduction,
        merges=is_free and not job.facts.normalises_batches,
        previous=previous,
        schedule=job.morphing.asked_schedule,
        recompute=job.morphing.asked_recompute,
        peer_copies=job.morphing.peer_copies,
        objective=job.plan_objective,
        lag_share=lag_share,
        precision=job.spec.precision,
        state=numerics.state,
        wire=job.spec.wire,
        network=job.spec.network,
        semantics=job.spec.semantics,
        tensor_parallel=numerics.tensor_parallel,
    )


def plan_computed(transition: Transition, event: PlanComputed) -> None:
    """Keep the newest answer; one to an older question is ignored."""
    if event.inputs_hash != transition.state.training.plan_asked:
        return
    why_not = "" if event.plan is not None else f"no plan fits: {event.why_not}"
    settled = settled_numerics(transition.state)
    if why_not and transition.state.job.spec.reduction == "exact" and settled.microbatch_size:
        why_not += (
            f"; reduction: exact keeps microbatch_size: {settled.microbatch_size} and "
            f"runtime.state: {settled.state}"
        )
    shortages = transition.state.fleet.shortages.values()
    if why_not and shortages:
        why_not += "; " + "; ".join(shortage.reason for shortage in shortages)
    answer = records.PlanAnswer(
        inputs_hash=event.inputs_hash,
        plan=event.plan,
        why_not=why_not,
        candidates=event.candidates,
    )
    transition.put(replace(transition.state.training, answer=answer, plan_asked=None))
    if why_not:
        transition.log(why_not)


def plan_failed(transition: Transition, event: CommandFailed) -> None:
    """The planner refuses the job itself: no fleet could run it."""
    transition.end(Outcome(kind="failed", exit_code=2, reason=event.reason))
