"""What must hold of the core's state after every step."""

from __future__ import annotations

from enum import StrEnum
from typing import get_args

from tests.unit.varuna_manager.machines import DECISION, entry_of
from tests.view import View

from spottrain.varuna_manager.core.model.errors import InternalError
from spottrain.varuna_manager.core.model.events import EVENT_TYPES
from spottrain.varuna_manager.core.model.records import GenerationPhase, RankPhase
from spottrain.varuna_manager.core.model.state import JobPhase, State
from spottrain.wire.messages import Report

Change = tuple[StrEnum | None, StrEnum | None, type | str]
KINDS: dict[str, type] = {**EVENT_TYPES, **{r.__name__: r for r in get_args(Report)}}


def newest_changes(state: State) -> list[Change]:
    """Return the phases that the newest event has changed, and by what.

    None of a state that was read from a journal: it keeps what was decided alone.
    """
    if not state.recent:
        return []
    newest = state.recent[-1]
    return [
        (one.before, one.after, DECISION if one.decided else KINDS[newest.kind])
        for one in newest.changes
    ]


def check_invariants(state: State) -> None:
    """Check what must hold after every step; tell how it came about if it does not."""
    try:
        _check(state)
    except AssertionError as error:
        raise InternalError(state, error) from error


def _check(state: State) -> None:
    if state.phase is JobPhase.NEW:
        return
    for before, after, cause in newest_changes(state):
        assert cause in entry_of(before, after).causes, (before, after, cause)
    assert state.settings is not None
    view = View(state)
    _check_fleet(view)
    if view.current_generation is not None:
        _check_generation(view)
    ending = state.phase in (JobPhase.ENDING, JobPhase.ENDED)
    assert (state.outcome is not None) == ending, "an end has a reason"
    if state.phase is JobPhase.ENDED:
        assert not view.vms, "a job that is over rents nothing"
        assert not view.intents, "a job that is over wants nothing"
        assert view.current_generation is None, "a job that is over does not train"
    assert 0 <= view.step <= view.highest_step <= state.job.spec.steps


def _check_fleet(view: View) -> None:
    staying = sum(vm.counts for vm in view.vms.values())
    wanted = sum(intent.count - intent.arrived for intent in view.intents.values())
    max_vms, swaps = view.state.job.resources.max_vms, view.decision is not None
    most = 2 * max_vms if swaps else max_vms
    assert staying + wanted <= most, "never more VMs than allowed"
    for vm_id, vm in view.vms.items():
        assert vm.vm_id == vm_id
        assert all(0 <= slot < vm.num_slots for slot in vm.used_slots)


def _check_generation(view: View) -> None:
    generation, plan = view.generation, view.generation.plan
    assert generation.number < view.next_generation, "generations only grow"
    assert generation.participants[: len(plan.slots)] == plan.slots
    assert len(set(generation.participants)) == len(generation.participants)
    assert set(generation.ranks) == set(plan.slots)
    vms = view.vms
    for slot, rank in generation.ranks.items():
        here = slot.vm_id in vms
        assert here or rank is RankPhase.GONE, "a rank lives on a VM"
    if generation.phase is GenerationPhase.RUNNING:
        dead = (RankPhase.INVITED, RankPhase.OUT)
        assert not any(rank in dead for rank in generation.ranks.values())
