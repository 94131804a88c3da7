"""Reports of workers, supervisors and agents, folded into the state."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal, assert_never

from spottrain.errors import shortened
from spottrain.eventlog.changed import replace
from spottrain.machine import cpu_name
from spottrain.manifest import CheckpointEntry, generation_of, parse_name
from spottrain.units import counted
from spottrain.varuna_manager.core import (
    allocation,
    fleet,
    hangs,
    memory,
    preparation,
    rounds,
    stragglers,
)
from spottrain.varuna_manager.core import generation as generations
from spottrain.varuna_manager.core.limits import REPLACED
from spottrain.varuna_manager.core.model import counters, starts
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.commands import ListCheckpoints
from spottrain.varuna_manager.core.model.records import (
    Doubt,
    GenerationPhase,
    RankPhase,
    VmPhase,
)
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.wire import messages
from spottrain.wire.plan import Slot

READ_PAUSE_S = 5.0
"""Until VMs try again to read a checkpoint that is whole, as far as the manager sees."""

Death = Literal["worker_death", "hang"]
"""How a worker ends: by itself, or by its agent, which found that it hung."""


def report_received(transition: Transition, event: e.ReportReceived) -> None:
    """Fold a report into the state, once."""
    vm_id, state = event.vm_id, transition.state
    vm = state.fleet.vms.get(vm_id)
    if vm is None or vm.phase is VmPhase.RETURNING:
        return
    if event.number < vm.reports_received:
        return
    transition.put_vm(replace(vm, reports_received=event.number + 1))
    match report := event.report:
        case messages.SupervisorReady():
            _supervisor_ready(transition, vm_id, report)
        case messages.SectionPrepared(generation=number) if number > 0:
            if state.training.generation and state.training.generation.number == number:
                generations.gets_on(transition)
        case messages.SectionPrepared() | messages.CalibrationProgress() | messages.Calibrated():
            rounds.report_received(transition, report)
        case messages.StoreOpened():
            _store_opened(transition, report)
        case messages.GenerationStarted(generation=number, slot=index):
            if slot := _rank_of(state, number, vm_id, index):
                generations.started(transition, slot, report)
        case messages.GenerationStopped(generation=number, slot=index):
            if slot := _rank_of(state, number, vm_id, index):
                generations.stopped(transition, slot, report)
        case messages.GenerationBroken(generation=number, slot=index, reason=reason):
            _out(transition, number, Slot(vm_id=vm_id, index=index), reason)
        case messages.WorkerDied(generation=number, slot=index, reason=reason):
            death: Death = "hang" if report.hung else "worker_death"
            _out(transition, number, Slot(vm_id=vm_id, index=index), reason, death)
        case messages.WorkersInspected():
            hangs.inspected(transition, vm_id, report)
        case messages.OutOfMemory(generation=number, slot=index):
            if slot := _rank_of(state, number, vm_id, index):
                memory.out_of_memory(transition, slot, report)
        case messages.NcclFailed(generation=number, slot=index, reason=reason):
            if slot := _rank_of(state, number, vm_id, index):
                failed = {**transition.generation.nccl_failed, slot: reason}
                transition.put_generation(replace(transition.generation, nccl_failed=failed))
        case messages.MinibatchCommitted() | messages.MinibatchAdopted():
            pass  # measurements: the watches look at them
        case messages.Evaluated():
            counters.evaluated(transition, report)
        case messages.UserCodeFailed(message=message, traceback=traceback):
            _user_code_failed(transition, message, traceback)
        case messages.CheckpointSaved():
            _checkpoint_saved(transition, vm_id, report)
        case messages.CheckpointFailed():
            _checkpoint_failed(transition, report)
        case messages.CheckpointDamaged() | messages.CheckpointUnreachable():
            _checkpoint_unread(transition, vm_id, report)
        case messages.InterruptionNoticed(lead_s=lead_s):
            _interruption_noticed(transition, vm_id, lead_s)
        case messages.InterruptionCancelled():
            _interruption_cancelled(transition, vm_id)
        case messages.InterruptionLikely():
            transition.log(f"{vm_id}: more likely than other VMs to be preempted soon")
        case messages.VmUnfit(reason=reason):
            fleet.vm_unfit(transition, vm_id, reason)
        case messages.VmFailed(reason=reason):
            fleet.vm_failed(transition, vm_id, reason)
        case messages.GpuSick(reason=reason):
            fleet.gpu_sick(transition, vm_id, reason)
        case messages.GpuThrottled(reason=reason):
            _gpu_throttled(transition, vm_id, reason)
        case _:
            assert_never(report)


def _user_code_failed(transition: Transition, message: str, traceback: str) -> None:
    """End the job; those who hold newer weights than the newest checkpoint save them.

    Where that runs into the user's code too, as an update that was interrupted by the
    error cannot be completed, the newest checkpoint remains.
    """
    transition.fail(message, exit_code=3, traceback=traceback)
    generation = transition.state.training.generation
    if generation is not None and generation.save_only:
        transition.state = replace(transition.state, ending_checkpoint=False)


def _supervisor_ready(transition: Transition, vm_id: str, report: messages.SupervisorReady) -> None:
    vm = transition.state.fleet.vms[vm_id]
    if vm.phase is VmPhase.READY or _rounds_differently(transition, vm_id, report):
        return
    vm = replace(
        vm,
        phase=VmPhase.READY,
        num_slots=report.num_slots,
        ready_at_s=transition.now_s,
        **{one.name: getattr(report, one.name) for one in fields(messages.Hardware)},
    )
    transition.put_vm(vm)
    ledger = transition.state.history.ledger.ready(vm_id, transition.now_s)
    transition.put(replace(transition.state.history, ledger=ledger))
    transition.note_fleet_change()
    fleet.vm_fit(transition, vm)
    starts.ready(transition, vm)
    what = f"{counted(report.num_slots, 'slot')} on {report.device}"
    transition.log("; ".join((f"{vm_id}: ready with {what}", *report.warnings)))


def _rounds_differently(
    transition: Transition, vm_id: str, report: messages.SupervisorReady
) -> bool:
    """Return a VM whose GPU, CPU or torch would change the bits of a job in exact mode.

    Kernels differ between models of GPUs and of CPUs, and between builds of torch.
    """
    state = transition.state
    if state.job.spec.reduction == "fast":
        return False
    names = " and ".join(sorted({gpu.name for gpu in report.gpus})) or cpu_name(report.device)
    kernels, settled = f"{names} with torch {report.torch_version}", state.launches.kernels
    if settled is None:
        transition.put(replace(state.launches, kernels=kernels))
    elif settled != kernels:
        reason = (
            f"computes on {kernels}, which rounds differently from {settled} that the job began "
            "on: name one type of GPU or CPU and one build of torch, or launch with reduction: fast"
        )
        fleet.vm_unfit(transition, vm_id, reason)
        return True
    return False


def _gpu_throttled(transition: Transition, vm_id: str, reason: str) -> None:
    """Fold that a VM's GPUs have slowed down, or are as fast as before."""
    vm = transition.state.fleet.vms[vm_id]
    transition.put_vm(replace(vm, throttled=reason))
    transition.log(f"{vm_id}: {reason or 'its GPUs are no longer slowed down'}")


def _store_opened(transition: Transition, report: messages.StoreOpened) -> None:
    generation = transition.state.training.generation
    if report.generation < 0:
        rounds.store_opened(transition, report)
    elif (
        generation is not None
        and generation.number == report.generation
        and generation.phase is GenerationPhase.OPENING
    ):
        generations.run_generation(transition, generation, report.host, report.port)


def _rank_of(state: State, number: int, vm_id: str, index: int) -> Slot | None:
    """Return the slot that reports, if it is a rank of the generation that runs now."""
    generation, slot = state.training.generation, Slot(vm_id=vm_id, index=index)
    if generation is None or generation.number != number:
        return None
    live = generation.ranks.get(slot, RankPhase.GONE) is not RankPhase.GONE
    return slot if live and generation.phase is not GenerationPhase.OPENING else None


def _out(
    transition: Transition, number: int, slot: Slot, reason: str, death: Death | None = None
) -> None:
    """A slot has left a generation or preparation; reports of an earlier one are stale.

    A worker that died is an interruption, unless it was told to give up, or killed by us
    because it hangs, which is one already.
    """
    state, generation = transition.state, transition.state.training.generation
    if generation is None or generation.number != number:
        round_ = state.preparation.round
        if round_ is None or round_.number != number:
            return
        if state.preparation.doubted:
            rounds.give_up(transition)  # its checkpoint is looked at first
        else:
            preparation.fail(transition, f"{slot.vm_id}: {reason}")
        return
    lives = generation.ranks.get(slot) in (RankPhase.INVITED, RankPhase.STARTED)
    if death and lives and not generation.abandoned and slot not in generation.hung:
        if death == "hang":
            hangs.hung_on(transition, slot.vm_id, reason)
        else:
            counters.interrupted(transition, death, slot.vm_id, reason)
    generations.leave(transition, slot, RankPhase.OUT, f"{slot.vm_id}: {reason}")


def progress_made(transition: Transition, event: e.ProgressMade) -> None:
    """Fold progress, and the shares that the times of replicas ask for."""
    generation = transition.state.training.generation
    if generation is None or generation.number != event.generation:
        return
    if generation.from_step is not None:
        counters.progress_made(transition, event)
        stragglers.share(transition, event.replica_bounds)


def progress_stalled(transition: Transition, event: e.ProgressStalled) -> None:
    """Tell people; what is lost or hangs is found by heartbeats and timeouts."""
    generation = transition.state.training.generation
    if generation is not None and generation.number == event.generation:
        transition.log(
            f"generation {event.generation} has committed nothing for "
            f"{event.at_s - event.since_s:.0f} s after step {event.step}; a mini-batch "
            f"takes {event.step_s:.3g} s"
        )


def checkpoints_listed(transition: Transition, event: e.CheckpointsListed) -> None:
    """Take over the store's list, but keep what was saved while it was being listed.

    A newer checkpoint that was known and is missing shows when it is read, rather than
    be forgotten silently; one that could not be read then is gone.
    """
    before = transition.state.preparation
    answered = [one for one in before.doubted if one.at_s <= event.asked_at_s]
    newest = max((one.step for one in event.checkpoints), default=-1)
    bad = {one.name for one in event.damaged}
    gone = bad.union(one.name for one in answered)
    newer = tuple(one for one in before.checkpoints if one.step > newest and one.name not in gone)
    whole = {one.name for one in event.checkpoints} - bad
    unread = before.unread
    if answered:
        unread = tuple(one for one in answered if one.name in whole)
    now_s = transition.now_s
    transition.put(
        replace(
            before,
            checkpoints=newer + event.checkpoints,
            damaged=event.damaged,
            listed=True,
            store_error="",
            doubted=tuple(one for one in before.doubted if one not in answered),
            unread=unread,
            read_after_s=now_s + READ_PAUSE_S if answered else before.read_after_s,
            blocked_since_s=before.blocked_since_s if unread else None,
        )
    )
    known = {one.name for one in before.damaged}
    news = [one for one in event.damaged if one.name not in known]
    if news:
        lines = (f"checkpoint {one.name} is damaged: {one.reason}" for one in news)
        transition.log("; ".join(lines))


def store_unreachable(transition: Transition, reason: str) -> None:
    """The store cannot be asked: what it holds is as unknown as before."""
    before = transition.state.preparation
    if reason != before.store_error:
        transition.put(replace(before, store_error=reason))
        transition.log(f"checkpoints cannot be listed: {reason}; it is tried again")


def _checkpoint_saved(transition: Transition, vm_id: str, report: messages.CheckpointSaved) -> None:
    """Keep the checkpoints that the store still holds: older ones are deleted by now.

    One that cannot be is no reason to save nothing else, or to return the VMs.
    """
    state = transition.state
    if not _can_be(state, report):
        transition.log(
            f"{vm_id} reports a checkpoint that cannot be, {shortened(report.name)} after "
            f"{counted(report.step, 'step')}: it does not count"
        )
        return
    checkpoint = CheckpointEntry(name=report.name, step=report.step)
    known = {c.name: c for c in (checkpoint, *state.preparation.checkpoints)}
    bad = {one.name for one in state.preparation.damaged}
    good = [c for c in known.values() if c.name not in bad]
    newest_first = sorted(good, key=lambda c: c.step, reverse=True)
    round_ = state.preparation.round
    if round_ is not None and round_.purpose == "first weights":
        round_ = None
    transition.put(
        replace(
            state.preparation,
            round=round_,
            checkpoints=tuple(newest_first[: state.job.spec.checkpoint_keep]),
            checkpoint_saved_at_s=transition.now_s,
            checkpoint_error="",
            from_scratch=False,
        )
    )
    transition.log(f"checkpoint {checkpoint.name} saved")
    generation = state.training.generation
    if generation is None or generation.from_step is None:
        return
    # A late report may be of an earlier generation, from which this one went back.
    if generation_of(checkpoint.name) == generation.number:
        counters.reached(transition, checkpoint.step, transition.now_s)


def _can_be(state: State, report: messages.CheckpointSaved) -> bool:
    """Return whether a generation of this job may have saved such a checkpoint."""
    entry, generation = parse_name(report.name), generation_of(report.name)
    first = entry is not None and entry.step == generation == 0
    return (
        entry is not None
        and entry.step == report.step <= state.job.spec.steps
        and (first or 0 < generation < state.training.next_generation)
    )


def _checkpoint_failed(transition: Transition, report: messages.CheckpointFailed) -> None:
    """The job continues with the checkpoint before; without any it fails."""
    error = f"checkpoint at step {report.step} not written: {report.reason}"
    transition.put(replace(transition.state.preparation, checkpoint_error=error))
    transition.log(error)
    if transition.state.newest_checkpoint is None:
        transition.fail(error)


def _checkpoint_unread(
    transition: Transition,
    vm_id: str,
    report: messages.CheckpointDamaged | messages.CheckpointUnreachable,
) -> None:
    """A VM could not read a checkpoint: ask the store, which may say otherwise."""
    name, preparation = report.name, transition.state.preparation
    times = 1 + sum(one.times for one in preparation.unread if one.vm_id == vm_id)
    doubt = Doubt(
        vm_id=vm_id,
        name=name,
        reason=report.reason,
        at_s=transition.now_s,
        file=report.file if isinstance(report, messages.CheckpointDamaged) else "",
        times=times,
    )
    others = [one for one in preparation.doubted if one.vm_id != vm_id]
    transition.put(replace(preparation, doubted=(*others, doubt)))
    transition.emit(ListCheckpoints())
    generation = transition.state.training.generation
    if (
        generation is not None
        and generation.phase is GenerationPhase.STARTING
        and generation.checkpoint == name
    ):
        reason = f"{vm_id} cannot read checkpoint {name}"
        generations.break_generation(transition, reason)
    transition.log(f"{vm_id} cannot read checkpoint {name}: {report.reason}")


def _interruption_noticed(transition: Transition, vm_id: str, lead_s: float) -> None:
    """Fold an interruption notice; a repeated one only changes when the VM leaves."""
    vm, leaves_at_s = transition.state.fleet.vms[vm_id], transition.now_s + lead_s
    if vm.drain_reason:
        return
    if vm.leaves_at_s is not None:
        transition.put_vm(replace(vm, leaves_at_s=leaves_at_s))
        return
    counters.interrupted(transition, "notice", vm_id, f"leaves in {lead_s:.0f} s")
    vm = replace(vm, noticed_at_s=transition.now_s, leaves_at_s=leaves_at_s)
    transition.put_vm(vm)
    transition.note_fleet_change()


def _interruption_cancelled(transition: Transition, vm_id: str) -> None:
    """Fold that a notice was cancelled; a VM that is being drained, or whose replacement
    is already rented, leaves anyway."""
    vm = transition.state.fleet.vms[vm_id]
    if vm.leaves_at_s is None or vm.drain_reason:
        return
    counters.cancelled(transition, vm_id)
    # Within a pool's grant it counts itself, and nothing was rented in its place.
    in_pool = transition.state.job.grant is not None
    if vm.slow is None and not in_pool and allocation.room(transition.state) <= 0:
        transition.put_vm(replace(vm, drain_reason=REPLACED))
        return
    transition.put_vm(replace(vm, noticed_at_s=None, leaves_at_s=None))
    transition.note_fleet_change()
