"""Ranks that hang rather than die: found, broken off, and their VM replaced in the end.

Where no mini-batch is committed for long, also as a generation does not come to train, agents
are asked what the workers do; the arithmetic is in ``morphing.adapt.hangs``. A worker that hangs is killed: its memory stays,
and the survivors agree as after any death of a worker. A VM on which that happens again
is drained.
"""

from __future__ import annotations

from collections.abc import Sequence

from spottrain.eventlog.changed import replace
from spottrain.morphing.adapt import hangs as rules
from spottrain.varuna_manager.core import generation as generations
from spottrain.varuna_manager.core import limits
from spottrain.varuna_manager.core.model import counters
from spottrain.varuna_manager.core.model.records import (
    Generation,
    GenerationPhase,
    Inspection,
)
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.wire import messages
from spottrain.wire.model import WorkerState
from spottrain.wire.plan import Slot

ANSWER_S = 10.0
"""How long agents may take to answer before they are asked again."""
AGAIN_S = 3600.0
"""A VM that hangs twice within this time is replaced."""
_PROGRESSING = (
    GenerationPhase.STARTING,
    GenerationPhase.RUNNING,
    GenerationPhase.STOPPING,
)
_DOES = {
    "start": "has been starting",
    "compute": "has been at one task",
    "data": "has been making or fetching examples",
    "evaluate": "has been at one task of an evaluation",
    "update": "has been updating parameters",
    "save": "has been writing a checkpoint",
    "wait": "has been waiting",
}


def advance(transition: Transition) -> None:
    """Ask the agents of a generation that has not committed for long."""
    generation = transition.state.training.generation
    if generation is None or generation.phase not in _PROGRESSING:
        return
    last_s = _last_progress_s(transition.state, generation)
    patience_s = _patience_s(transition.state, generation)
    asked = generation.inspection
    if asked is None or asked.asked_at_s <= last_s:
        at_s = last_s + patience_s
    elif set(asked.answers) >= _vm_ids(generation):
        at_s = asked.asked_at_s + patience_s / 2
    else:
        at_s = asked.asked_at_s + max(ANSWER_S, patience_s / 2)
    if not transition.waited_until(at_s):
        return
    if asked is not None and asked.asked_at_s > last_s and asked.answers:
        _judge(transition, generation)  # some have not answered
        if transition.generation.phase is GenerationPhase.BREAKING:
            return
    number = asked.number + 1 if asked else 1
    inspection = Inspection(number=number, asked_at_s=transition.now_s, answers={})
    transition.put_generation(replace(generation, inspection=inspection))
    ask = messages.InspectWorkers(generation=generation.number, number=number)
    transition.send(_vm_ids(generation), ask)
    transition.wake(transition.now_s + max(ANSWER_S, patience_s / 2))


def inspected(transition: Transition, vm_id: str, report: messages.WorkersInspected) -> None:
    """Fold what an agent has seen; break off what hangs once all have answered."""
    generation = transition.state.training.generation
    if generation is None or generation.phase not in _PROGRESSING:
        return
    asked = generation.inspection
    if (
        asked is None
        or (report.generation, report.number) != (generation.number, asked.number)
        or asked.asked_at_s <= _last_progress_s(transition.state, generation)
    ):
        return
    asked = replace(asked, answers={**asked.answers, vm_id: report.workers})
    generation = replace(generation, inspection=asked)
    transition.put_generation(generation)
    if set(asked.answers) >= _vm_ids(generation):
        _judge(transition, generation)


def quiet_line(state: State, at_s: float) -> str:
    """Return whom a job waits for at ``at_s`` if it has not committed for long, in a line."""
    generation = state.training.generation
    if generation is None or generation.phase not in _PROGRESSING:
        return ""
    last_s = _last_progress_s(state, generation)
    if at_s - last_s < _patience_s(state, generation):
        return ""
    asked, quiet = generation.inspection, f"no mini-batch for {at_s - last_s:.0f} s"
    if asked is None or asked.asked_at_s <= last_s or not asked.answers:
        return f"{quiet}: asking what its workers do"
    verdict, ranks = _verdict(state, generation)
    if not verdict.awaited:
        return f"{quiet}: its workers wait for each other"
    slots = _slots(generation)
    first, names = verdict.awaited[0], [slots[one].vm_id for one in verdict.awaited]
    activity = _activity(slots[first], ranks[first])
    others = len(set(names) - {names[0]})
    more = f", and for {others} more" if others else ""
    return f"{quiet}: waiting for {names[0]}{more}: {activity}"


def _last_progress_s(state: State, generation: Generation) -> float:
    return max(generation.since_s, state.history.progress.last_commit_at_s or 0.0)


def _patience_s(state: State, generation: Generation) -> float:
    step_s = generation.measured_step_s or generation.plan.predicted_step_s
    return rules.patience_s(state.job.manager.hang_s, step_s)


def _slots(generation: Generation) -> Sequence[Slot]:
    """Return the slots of all ranks: donors have one as long as state moves."""
    forms = generation.phase is GenerationPhase.STARTING
    return generation.participants if forms else generation.plan.slots


def _vm_ids(generation: Generation) -> set[str]:
    return {slot.vm_id for slot in _slots(generation)}


def _verdict(
    state: State, generation: Generation
) -> tuple[rules.HangDiagnosis, dict[int, WorkerState]]:
    assert generation.inspection is not None
    seen = {
        Slot(vm_id=vm_id, index=worker.slot): worker
        for vm_id, workers in generation.inspection.answers.items()
        for worker in workers
    }
    slots = _slots(generation)
    ranks = {number: seen[slot] for number, slot in enumerate(slots) if slot in seen}
    patience_s = _patience_s(state, generation)
    verdict = rules.judge(
        ranks,
        len(slots),
        patience_s,
        is_first=not generation.committed,
        is_forming=generation.phase is GenerationPhase.STARTING,
    )
    return verdict, ranks


def _judge(transition: Transition, generation: Generation) -> None:
    verdict, ranks = _verdict(transition.state, generation)
    slots = _slots(generation)
    if verdict.hung:
        first = verdict.hung[0]
        hung = [slots[number] for number in verdict.hung]
        _break_off(transition, generation, hung, _activity(slots[first], ranks[first]))
    elif verdict.is_deadlock:
        still_s = min(rank.still_s for rank in ranks.values())
        generations.break_generation(
            transition, f"its ranks have waited for each other for {still_s:.0f} s"
        )


def _activity(slot: Slot, rank: WorkerState) -> str:
    """Return what a rank does, as the end of a sentence about its VM."""
    worker = f"its worker of slot {slot.index}"
    if rank.process == "stopped":
        return f"{worker} has been stopped for {rank.still_s:.0f} s"
    return f"{worker} {_DOES[rank.doing]} for {rank.still_s:.0f} s ({rank.process})"


def _break_off(
    transition: Transition, generation: Generation, hung: Sequence[Slot], activity: str
) -> None:
    """Kill the workers that hang; drain their VM if it is not the first time.

    Where several VMs hang at once the cause is elsewhere, such as a store of data: to
    replace them would help nothing.
    """
    vm_ids = tuple(dict.fromkeys(slot.vm_id for slot in hung))
    reason = f"hangs: {activity}"
    transition.put_generation(replace(generation, hung=tuple(hung)))
    for vm_id in vm_ids:
        hung_on(transition, vm_id, reason, alone=len(vm_ids) == 1)
        slots = tuple(slot.index for slot in hung if slot.vm_id == vm_id)
        end = messages.EndWorkers(slots=slots, reason=activity, hang=True)
        transition.send((vm_id,), end)
    generations.break_generation(transition, f"{vm_ids[0]} {reason}")


def hung_on(transition: Transition, vm_id: str, reason: str, *, alone: bool = True) -> None:
    """Count a hang; drain the VM if it is not the first time there.

    Args:
        transition: What is decided.
        vm_id: Where.
        reason: For people.
        alone: Nothing hangs elsewhere.
    """
    counters.interrupted(transition, "hang", vm_id, reason)
    vm = transition.state.fleet.vms[vm_id]
    before_s = vm.hung_at_s
    again = before_s is not None and transition.now_s - before_s < AGAIN_S
    transition.put_vm(replace(vm, hung_at_s=transition.now_s))
    if again and alone and vm.leaves_at_s is None:
        limits.drain(transition, transition.state.fleet.vms[vm_id], "has hung twice")
