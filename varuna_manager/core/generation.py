"""A generation: opened, handed over to, trained, stopped or broken (``GENERATION`` of
docs/state-machines.md).

A new generation is opened only when the one before has ended: there is never more than
one. Ranks that hang after a break are told to give up, then fenced with their VM.
"""

from __future__ import annotations

from typing import assert_never

from spottrain.eventlog.changed import replace
from spottrain.morphing.adapt.checkpointing import state_losses_per_s
from spottrain.morphing.adapt.traffic import sent_bytes
from spottrain.morphing.simulate.reducing import NCCL_FAILED
from spottrain.pricing.billing import egress
from spottrain.pricing.prices.place import place_of
from spottrain.units import counted
from spottrain.varuna_manager.core.model import counters
from spottrain.varuna_manager.core.model.commands import AskProvider, Outcome
from spottrain.varuna_manager.core.model.records import (
    KEPT,
    Generation,
    GenerationPhase,
    RankPhase,
    VmPhase,
    VmRecord,
)
from spottrain.varuna_manager.core.model.state import JobPhase, State, settled_numerics, summary_of
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.wire import messages
from spottrain.wire.numerics import Numerics, numerics_of
from spottrain.wire.patience import LEAVE_S, MARGIN_S, NCCL_LEAVE_S, evacuation_s
from spottrain.wire.plan import Plan, Slot

ABANDON_AFTER_S = LEAVE_S + MARGIN_S
"""Survivors that have not noticed a break by then are told to give up, and"""
ABANDON_NCCL_AFTER_S = NCCL_LEAVE_S + MARGIN_S
"""where NCCL may sum gradients."""
ABANDON_FORMING_S = 0.3
"""The same for a generation that a participant has left before it ran: gloo's connect
waits on when a third rank is gone, and a kill loses nothing that is not committed."""
FENCE_AFTER_S = 20.0
"""A VM whose ranks are not out by then is suspected to hang; where they may have to bring
state from GPUs to its memory, when they must have done so."""
OPEN_BOUND_S = 60.0
SILENCE_BOUND_S = 600.0
"""How long VMs that prepare, or ranks that start, may show no sign of progress, and"""
SLOWEST_BYTES_PER_S = 1e7
"""as long as the largest section takes to read or to write at this rate."""
STOP_BOUND_S = 900.0
"""Bound on one mini-batch and a checkpoint."""
STOP_SHARE = 0.5
"""Of the time until a VM is taken away, for the mini-batch to end: what it waits for, such
as an example, may take longer. The rest is for handing over what is committed."""
MAX_FRUITLESS = 8
"""Generations in a row that may break before a commit. Those that broke because a VM was
lost do not count: preemptions are no fault of the job. Nor do those that ran out of
memory: each lets the next plan take less, until there is none."""
MAX_NCCL_FAILURES = 2
"""Generations in which NCCL failed before gloo sums gradients."""

_UNNOTICED = ("kill", "silence", "sick_gpu")

_FINISHED = (RankPhase.STOPPED, RankPhase.OUT, RankPhase.GONE)


def open_generation(
    transition: Transition,
    plan: Plan,
    inputs_hash: str,
    checkpoint: str,
    *,
    save_only: bool,
) -> None:
    """Open the next generation with ``plan``: its store first.

    With ``save_only`` it writes a checkpoint and trains nothing.
    """
    state = transition.state
    sites = {vm_id: place_of(vm.offer).site for vm_id, vm in state.fleet.vms.items()}
    spec = state.job.spec
    sent = sent_bytes(plan, state.job.facts, sites, spec.reduction, spec.wire)
    generation = Generation(
        number=state.training.next_generation,
        plan=plan,
        reason=state.training.plan_reason,
        phase=GenerationPhase.OPENING,
        since_s=transition.now_s,
        opened_at_s=transition.now_s,
        checkpoint=checkpoint,
        participants=plan.slots,
        ranks=dict.fromkeys(plan.slots, RankPhase.INVITED),
        checkpoint_asked=save_only,
        save_only=save_only,
        egress=egress.sent(sent, state.job.budget.zone_usd_per_gb),
        inputs_hash=inputs_hash,
        decision_hash=inputs_hash,
        candidates=state.training.answer.candidates if state.training.answer else (),
        devices=tuple(state.fleet.vms[slot.vm_id].device for slot in plan.slots),
    )
    transition.put_generation(generation)
    transition.put(replace(transition.state.training, next_generation=generation.number + 1))
    number, reason = generation.number, generation.reason
    alone = "; one VM holds all replicas of a stage" if plan.rests_on_one_vm else ""
    sharers = "replicas" if plan.devices_per_stage_replica == 1 else "slots"
    shared = f"; {sharers} in one VM share their state" if plan.shared_state else ""
    transition.log(f"generation {number} starts with {plan.shape}: {reason}{alone}{shared}")
    open_store(transition, generation)


def open_store(transition: Transition, generation: Generation) -> None:
    """Have the VM of rank 0 fork the rendezvous store."""
    vm_id = generation.plan.slots[0].vm_id
    transition.send((vm_id,), messages.OpenStore(generation=generation.number))


def run_generation(transition: Transition, generation: Generation, host: str, port: int) -> None:
    """Invite the ranks of the plan and all slots that may hold newer sections."""
    slots = generation.plan.slots
    donors = _donors(transition.state, slots)
    generation = replace(
        generation,
        phase=GenerationPhase.STARTING,
        since_s=transition.now_s,
        participants=slots + donors,
        store_host=host,
        store_port=port,
    )
    transition.put_generation(generation)
    for vm_id in dict.fromkeys(slot.vm_id for slot in slots):
        vm = transition.state.fleet.vms[vm_id]
        mine = {slot.index for slot in slots if slot.vm_id == vm_id}
        used = tuple(sorted({*vm.used_slots, *mine}))
        transition.put_vm(replace(vm, used_slots=used))
    invite(transition, generation)


def invite(transition: Transition, generation: Generation) -> None:
    """Send ``RunGeneration`` to all participants that have not started.

    A VM may receive it twice if the manager restarts in between.
    """
    ranks = generation.ranks
    heldout_missing = transition.state.history.progress.heldout_first is None
    command = messages.RunGeneration(
        generation=generation.number,
        plan=generation.plan,
        participants=generation.participants,
        store_host=generation.store_host,
        store_port=generation.store_port,
        checkpoint=generation.checkpoint,
        evaluate_first=heldout_missing and transition.state.history.progress.step == 0,
        checkpoint_losses_per_s=_state_losses_per_s(transition.state, generation.plan),
        copy_losses_per_s=_state_losses_per_s(
            transition.state, replace(generation.plan, peer_copies=0)
        ),
        checkpoint_cost_s=transition.state.history.progress.checkpoint_cost_s,
        save_only=generation.save_only,
        known_models=transition.state.preparation.known_models,
        code=transition.state.code_sha256,
        numerics=_numerics_to_save(transition.state, generation.plan),
    )
    invited = RankPhase.INVITED
    slots = (s for s in generation.participants if ranks.get(s, invited) is invited)
    transition.send((slot.vm_id for slot in slots), command)


def _state_losses_per_s(state: State, plan: Plan) -> float:
    """Return the rate of losses that would undo all since a plan's newest checkpoint.

    Interruptions with a notice undo nothing: what VMs hold is handed over in time.
    """
    depth = plan.pipeline_depth
    stages = [{slot.vm_id for slot in plan.slots[k::depth]} for k in range(depth)]
    for stage, holder in zip(stages, plan.copy_holders, strict=False):
        stage.add(plan.slots[holder].vm_id)
    lost = [hit for hit in state.history.interruptions if hit.interruption in _UNNOTICED]
    forgotten = len(state.history.interruptions) == KEPT
    since_s = state.history.interruptions[0].at_s if forgotten else state.submitted_at_s
    return state_losses_per_s(
        stages,
        [hit.at_s for hit in lost],
        state.now_s - since_s,
        spot=any(
            state.fleet.vms[vm].offer.spot for vm in set().union(*stages) & set(state.fleet.vms)
        ),
    )


def _donors(state: State, slots: tuple[Slot, ...]) -> tuple[Slot, ...]:
    """Return slots outside the plan whose memory may hold a section's newest copy.

    VMs that a job has left for another region are out of reach.
    """
    far = state.fleet.move is not None and state.fleet.move.is_far
    return tuple(
        slot
        for vm in state.fleet.vms.values()
        if not (far and vm.successor)
        if vm.phase is VmPhase.READY and vm.silent_since_s is None
        for slot in (Slot(vm_id=vm.vm_id, index=i) for i in vm.used_slots)
        if slot not in slots
    )


def started(transition: Transition, slot: Slot, report: messages.GenerationStarted) -> None:
    """A rank has its sections; the first report says from which step training continues."""
    generation = transition.generation
    if generation.ranks[slot] is RankPhase.INVITED:
        generation = transition.put_rank(slot, RankPhase.STARTED)
    if generation.from_step is None:
        step = min(report.step, transition.state.job.spec.steps)
        generation = replace(generation, from_step=step)
        _continue_from(transition, step)
    transition.put_generation(generation)


def _continue_from(transition: Transition, step: int) -> None:
    """Set progress to ``step``: back after a restore, ahead after an adoption."""
    progress = transition.state.history.progress
    again = max(0, progress.step - step)
    progress = replace(
        progress,
        step=step,
        highest_step=max(progress.highest_step, step),
        minibatches_recomputed=progress.minibatches_recomputed + again,
    )
    interruptions = list(transition.state.history.interruptions)
    if again and interruptions and interruptions[-1].cost_s is None:
        interruptions[-1] = replace(interruptions[-1], minibatches_recomputed=again)
    transition.put(
        replace(
            transition.state.history,
            progress=progress,
            interruptions=tuple(interruptions),
        )
    )


def stop_generation(transition: Transition, *, checkpoint: bool) -> None:
    """Stop all ranks after the same mini-batch."""
    generation = transition.generation
    generation = replace(
        generation,
        phase=GenerationPhase.STOPPING,
        since_s=transition.now_s,
        checkpoint_asked=checkpoint,
    )
    transition.put_generation(generation)
    send_stop(transition, generation)


def send_stop(transition: Transition, generation: Generation) -> None:
    """Send the stop to every VM of the plan."""
    number, checkpoint = generation.number, generation.checkpoint_asked
    stop = messages.StopGeneration(generation=number, checkpoint=checkpoint)
    transition.send((slot.vm_id for slot in generation.plan.slots), stop)


def break_generation(transition: Transition, reason: str) -> None:
    """Break the generation as something died: all other ranks must leave it."""
    generation = transition.state.training.generation
    if generation is None or generation.phase is GenerationPhase.BREAKING:
        return
    broken = replace(
        generation,
        phase=GenerationPhase.BREAKING,
        since_s=transition.now_s,
        break_reason=reason,
    )
    transition.put_generation(broken)
    transition.put(replace(transition.state.training, plan_reason=reason))
    transition.log(f"generation {generation.number} broke: {reason}")
    if generation.phase is GenerationPhase.OPENING:
        close(transition, f"broke: {reason}")


def leave(transition: Transition, slot: Slot, rank: RankPhase, reason: str) -> None:
    """Fold that a rank is out or gone; if it had not stopped, the generation breaks."""
    generation = transition.state.training.generation
    if generation is None:
        return
    before = generation.ranks.get(slot)
    if before is None:
        handing_over = generation.phase is GenerationPhase.STARTING
        if handing_over and slot in generation.participants:
            break_generation(transition, reason)
        return
    if before is RankPhase.GONE or (rank is RankPhase.OUT and before in _FINISHED):
        return
    transition.put_rank(slot, rank)
    if generation.phase is GenerationPhase.BREAKING and rank is RankPhase.GONE:
        _name_cause(transition, reason)
    elif before in (RankPhase.INVITED, RankPhase.STARTED):
        break_generation(transition, reason)


def _name_cause(transition: Transition, reason: str) -> None:
    """Name a lost VM as the cause of a break that its peers reported first."""
    generation = transition.generation
    transition.put_generation(replace(generation, break_reason=reason))
    transition.put(replace(transition.state.training, plan_reason=reason))


def lose_vm(transition: Transition, vm_id: str, reason: str) -> None:
    """Fold that a VM is gone, with the memory of all its slots."""
    if generation := transition.state.training.generation:
        for slot in generation.participants:
            if slot.vm_id == vm_id:
                leave(transition, slot, RankPhase.GONE, reason)


def stopped(transition: Transition, slot: Slot, report: messages.GenerationStopped) -> None:
    """A rank stopped after the mini-batch that all stop after."""
    generation = transition.generation
    if generation.ranks[slot] in (RankPhase.INVITED, RankPhase.STARTED):
        generation = transition.put_rank(slot, RankPhase.STOPPED)
        done, early = generation.done or report.done, generation.early or report.early
        step = min(report.step, transition.state.job.spec.steps)
        generation = replace(generation, done=done, early=early, stopped_at=step)
        transition.put_generation(generation)


def gets_on(transition: Transition) -> None:
    """A rank has come on with its start."""
    generation = transition.generation
    if generation.phase is GenerationPhase.STARTING:
        transition.put_generation(replace(generation, heard_at_s=transition.now_s))


def silence_bound_s(state: State) -> float:
    """Return how long nothing may be heard of a round, or of a generation that starts."""
    sections = state.job.facts.sections
    largest = max(one.param_bytes + one.optimizer_bytes for one in sections)
    return SILENCE_BOUND_S + largest / SLOWEST_BYTES_PER_S


def advance(transition: Transition) -> None:
    """Advance the generation where nothing is missing, or a timeout has passed."""
    generation = transition.state.training.generation
    if generation is None:
        return
    finished = all(rank in _FINISHED for rank in generation.ranks.values())
    since_s, bound_s = generation.since_s, silence_bound_s(transition.state)
    match generation.phase:
        case GenerationPhase.OPENING:
            if transition.waited_until(since_s + OPEN_BOUND_S):
                reason = f"its store did not open in {OPEN_BOUND_S:g} s"
                break_generation(transition, reason)
        case GenerationPhase.STARTING:
            if RankPhase.INVITED not in generation.ranks.values():
                _run(transition, generation)
            elif transition.waited_until(max(since_s, generation.heard_at_s) + bound_s):
                reason = f"its start showed no sign of progress in {bound_s:.0f} s"
                break_generation(transition, reason)
        case GenerationPhase.RUNNING:
            if finished:
                close(transition, "all ranks stopped")
        case GenerationPhase.STOPPING:
            if finished:
                close(transition, transition.state.training.plan_reason)
            elif transition.waited_until(since_s + STOP_BOUND_S):
                break_generation(transition, f"it did not stop in {STOP_BOUND_S:g} s")
            elif (vm := _next_to_leave(transition.state, generation)) is not None:
                assert vm.leaves_at_s is not None
                left_s = max(0.0, vm.leaves_at_s - since_s)
                if transition.waited_until(since_s + STOP_SHARE * left_s):
                    reason = f"it did not stop in time for the notice of {vm.vm_id}"
                    break_generation(transition, reason)
        case GenerationPhase.BREAKING:
            if finished:
                close(transition, f"broke: {generation.break_reason}")
            else:
                _enforce_break(transition, generation)
        case _:
            assert_never(generation.phase)


def _next_to_leave(state: State, generation: Generation) -> VmRecord | None:
    """Return the VM of a generation that a notice takes first.

    ``None``: none is taken, or only the checkpoint that is being saved is left to do.
    """
    if generation.checkpoint_asked:
        return None
    held = {slot.vm_id for slot in generation.plan.slots}
    going = [
        vm for vm in state.fleet.vms.values() if vm.vm_id in held and vm.leaves_at_s is not None
    ]
    return min(going, key=lambda vm: vm.leaves_at_s or 0.0, default=None)


def _run(transition: Transition, generation: Generation) -> None:
    now_s = transition.now_s
    generation = replace(
        generation, phase=GenerationPhase.RUNNING, since_s=now_s, started_at_s=now_s
    )
    transition.put_generation(generation)
    preparation = transition.state.preparation
    if preparation.unread or preparation.blocked_since_s is not None:
        transition.put(replace(preparation, unread=(), blocked_since_s=None))
    # Copies of the plan before lack what was lost since, and are on other VMs.
    progress = replace(transition.state.history.progress, copied_step=None)
    transition.put(replace(transition.state.history, progress=progress))
    number, step = generation.number, generation.from_step
    shape = generation.plan.shape
    does = "saves step" if generation.save_only else f"trains {shape} from step"
    transition.log(f"generation {number} {does} {step}")


def _enforce_break(transition: Transition, generation: Generation) -> None:
    """Tell ranks that hang after a break to give up; suspect VMs that do not."""
    late = [
        slot.vm_id
        for slot, rank in generation.ranks.items()
        if rank in (RankPhase.INVITED, RankPhase.STARTED)
    ]
    if not generation.abandoned:
        patience_s = _patience_s(transition.state, generation)
        if transition.waited_until(generation.since_s + patience_s):
            donors = [slot.vm_id for slot in generation.participants]
            transition.put_generation(replace(generation, abandoned=True))
            to = late + donors[len(generation.plan.slots) :]
            number = generation.number
            transition.send(to, messages.AbandonGeneration(generation=number))
    elif transition.waited_until(generation.since_s + _fence_after_s(transition.state, generation)):
        for vm_id in dict.fromkeys(late):
            suspect(transition, vm_id)


def _patience_s(state: State, generation: Generation) -> float:
    """Return how long after a break ranks may take to leave by themselves.

    State that is on a GPU takes a while to be brought to its VM's memory, and would be
    lost with a worker that is killed.
    """
    on_gpu = _on_gpu(state)
    ranks = generation.ranks.values()
    lost = any(slot.vm_id not in state.fleet.vms for slot in generation.participants)
    left = lost or RankPhase.OUT in ranks or RankPhase.GONE in ranks
    keeps_on_gpu = on_gpu and settled_numerics(state).state != "host"
    if generation.started_at_s is None and left and not keeps_on_gpu:
        return ABANDON_FORMING_S
    sums = on_gpu and generation.plan.num_pipelines > 1 and state.job.spec.network != "gloo"
    return ABANDON_NCCL_AFTER_S if sums else ABANDON_AFTER_S


def _numerics_to_save(state: State, plan: Plan) -> Numerics | None:
    if state.job.spec.reduction == "fast":
        return None
    numerics = numerics_of(plan, state.launches.kernels)
    return numerics if _on_gpu(state) else replace(numerics, state=None)


def _on_gpu(state: State) -> bool:
    return any(vm.gpus for vm in state.fleet.vms.values())


def _fence_after_s(state: State, generation: Generation) -> float:
    """Return how long after a break a VM's ranks may be out of reach."""
    if settled_numerics(state).state == "host" or not _on_gpu(state):
        return FENCE_AFTER_S
    sizes = [2 * one.param_bytes + one.optimizer_bytes for one in state.job.facts.sections]
    plan, before = generation.plan, state.training.previous_plan
    largest = (
        max(sum(sizes[k] for k in one.sections_of(stage)) for stage in range(one.pipeline_depth))
        for one in (plan, before or plan)  # a worker holds sections of both for a while
    )
    return FENCE_AFTER_S + NCCL_LEAVE_S + evacuation_s(sum(largest))


def suspect(transition: Transition, vm_id: str) -> None:
    """Ask the provider about a VM that does not answer, unless already asked.

    One whose agent has yet to register, also in place of another, cannot answer.
    """
    vm = transition.state.fleet.vms[vm_id]
    registered = vm.phase in (VmPhase.REGISTERED, VmPhase.READY)
    if vm.silent_since_s is None and registered:
        transition.put_vm(replace(vm, silent_since_s=transition.now_s))
        transition.emit(AskProvider(vm_id=vm_id))


def close(transition: Transition, ended_by: str) -> None:
    """Close the generation: add it to the report, and end the job if it was the last."""
    generation = transition.generation
    if set(generation.ranks.values()) == {RankPhase.STOPPED}:
        # All of them stopped after the same mini-batch: progress is exact.
        counters.reached(transition, generation.stopped_at or 0, transition.now_s)
    state, generation = transition.state, transition.generation
    broke = generation.phase is GenerationPhase.BREAKING
    progress = state.history.progress
    summary = summary_of(generation, progress.step, transition.now_s, ended_by)
    summary = replace(summary, broke=broke)
    if progress.paused_since_s is None:
        progress = replace(progress, paused_since_s=progress.last_commit_at_s)
    fruitless = 0 if generation.committed else state.training.fruitless
    gone = {slot for slot, rank in generation.ranks.items() if rank is RankPhase.GONE}
    # A worker may have to end itself because NCCL failed: that is no loss by itself.
    lost = not gone <= generation.nccl_failed.keys()
    excused = lost or generation.out_of_memory or state.preparation.doubted
    if broke and not excused:
        fruitless += not generation.committed
    saved = generation.checkpoint_asked and not broke
    tally = state.history.tally
    if broke:
        tally = replace(tally, recoveries=tally.recoveries + 1)
    elif generation.phase is GenerationPhase.STOPPING and state.phase is JobPhase.ACTIVE:
        tally = replace(tally, morphs=tally.morphs + 1)
    transition.state = replace(state, ending_checkpoint=state.ending_checkpoint and not saved)
    transition.put(
        replace(
            state.history,
            tally=tally,
            generations=counters.keep(state.history.generations, summary),
            progress=progress,
        ),
        replace(
            state.training,
            generation=None,
            previous_plan=generation.plan,
            fruitless=fruitless,
        ),
    )
    transition.note_phase(generation.phase, None)
    if broke and not lost and not generation.committed and generation.nccl_failed:
        slot, reason = next(iter(generation.nccl_failed.items()))
        _nccl_failed(transition, f"{slot.vm_id}[{slot.index}]: {reason}")
    finished = all(rank in _FINISHED for rank in generation.ranks.values())
    if generation.done and finished and not broke:
        # To save was tried for long already.
        transition.end(_outcome_of_done(state, generation.early), checkpoint=False)
    elif fruitless >= MAX_FRUITLESS:
        reason = f"{fruitless} generations in a row broke before a commit: {ended_by}"
        transition.fail(reason)


def _nccl_failed(transition: Transition, reason: str) -> None:
    """Have gloo sum gradients once NCCL has failed twice; the first time may have been an
    accident. A profile measured anew says anew which of them can be had."""
    preparation = transition.state.preparation
    failures, profile = preparation.nccl_failures + 1, preparation.profile
    if failures >= MAX_NCCL_FAILURES and profile is not None:
        rings = tuple(ring for ring in profile.rings if not ring.on_device)
        sources = (*profile.sources, f"{NCCL_FAILED}{reason}")
        profile, failures = replace(profile, rings=rings, sources=sources), 0
        transition.log(f"{sources[-1]} ({MAX_NCCL_FAILURES} times)")
    transition.put(replace(preparation, nccl_failures=failures, profile=profile))


def _outcome_of_done(state: State, early: str) -> Outcome:
    """Return the outcome once training is over: a success if the weights are stored."""
    steps, newest = state.job.spec.steps, state.newest_checkpoint
    if early:
        steps = state.history.progress.step
    what = f"{counted(steps, 'step')} done" + (f", stopped early: {early}" if early else "")
    if newest is not None and newest.step >= steps:
        return Outcome(kind="succeeded", exit_code=0, reason=what)
    trouble = state.preparation.checkpoint_error or "the last checkpoint was not written"
    reason = f"{what}, but {trouble}; fix that, then resume the job"
    return Outcome(kind="failed", exit_code=1, reason=reason)
