"""What the job does or waits for, and why: one line for people."""

from __future__ import annotations

from spottrain.varuna_manager.core.allocation import affordable, room
from spottrain.varuna_manager.core.model.records import Generation, GenerationPhase
from spottrain.varuna_manager.core.model.state import JobPhase, State


def activity_of(state: State) -> str:
    """Return what the job does now."""
    outcome = state.outcome
    match state.phase:
        case JobPhase.NEW:
            return "new"
        case JobPhase.ENDED:
            return f"over: {outcome.reason}" if outcome else "over"
        case JobPhase.ENDING if not state.ending_checkpoint:
            return f"returning VMs: {outcome.reason}" if outcome else "returning VMs"
        case JobPhase.ENDING:
            return "writing a last checkpoint"
        case _:
            generation = state.generation
            return _training(state, generation) if generation else _waiting(state)


def _training(state: State, generation: Generation) -> str:
    number, shape = generation.number, generation.plan.shape
    match generation.phase:
        case GenerationPhase.OPENING | GenerationPhase.STARTING:
            return f"starting generation {number} ({shape}): {generation.reason}"
        case GenerationPhase.STOPPING:
            return f"leaving generation {number} ({shape}): {state.plan_reason}"
        case GenerationPhase.BREAKING:
            return f"recovering: {generation.break_reason}"
        case _:
            return f"training at {shape}"


def _waiting(state: State) -> str:
    """Why nothing trains."""
    coming = sum(vm.is_coming for vm in state.vms.values())
    asked = sum(intent.count - intent.arrived for intent in state.intents.values())
    usable = sum(vm.is_usable for vm in state.vms.values())
    if usable and state.initialiser is not None:
        return "writing the first weights"
    if usable and (calibration := state.calibration) is not None:
        how_far = f" ({calibration.done} of {calibration.total})" * (
            calibration.done > 0
        )
        return f"measuring the model's sections{how_far}"
    if usable and state.plan_asked is not None:
        return "choosing a plan"
    waiting_for = []
    if coming:
        waiting_for.append(f"{coming} VMs to boot")
    if asked:
        waiting_for.append(f"{asked} VMs to be rented")
    if not waiting_for:
        waiting_for.append(_capacity(state))
    answer = state.answer
    why = f" ({answer.why_not})" if usable and answer and answer.why_not else ""
    return f"waiting for {' and '.join(waiting_for)}{why}"


def _capacity(state: State) -> str:
    """What keeps the job from renting."""
    if not state.reconciled:
        return "the provider's list of VMs"
    if room(state) <= 0:
        return "a plan that fits: the fleet is as large as it may be"
    wanted = [o for o in state.offers if o.spot or state.job.allow_on_demand]
    if not wanted:
        return "offers"
    borne = affordable(state)
    if all(borne(offer) == 0 for offer in wanted):
        return "a price within the caps"
    return "capacity"
