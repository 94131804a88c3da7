"""What comes before training: the first weights and the profile; and when that is measured again.

``rounds`` has the rounds in which VMs do it. A profile that a busy machine measured is measured
again once a generation trains so much faster that this pays (``is_to_measure_again``); that of a
further type of device, once VMs of it are there (``measure_others``).
"""

from __future__ import annotations

from collections.abc import Sequence

from spottrain.eventlog.changed import replace
from spottrain.morphing.plan.profiles import is_noisy
from spottrain.varuna_manager.core import generation as generations
from spottrain.varuna_manager.core import rounds
from spottrain.varuna_manager.core.model import records
from spottrain.varuna_manager.core.model.state import (
    JobPhase,
    State,
    is_expecting,
    is_outdated,
    only_queues,
)
from spottrain.varuna_manager.core.model.transition import Transition

AT_ONCE_BYTES = 1 << 30
"""First weights up to here are written by the VMs that are there."""
MAX_FAILED_PREPARATIONS = 3
BOOT_WAIT_S = 60.0
"""How long the first plan waits for VMs that are still booting."""
CALM, CALM_STEPS = 1.25, 20
"""How many times faster than predicted a generation must train, and for how many mini-batches,
before what a busy machine measured is measured again."""
MEASURED_AGAIN_S = 600.0
"""How old a profile must be then at least, and how long the job must still last."""


def prepare(transition: Transition, vms: Sequence[records.VmRecord]) -> None:
    """Have VMs write the first weights together, then measure the model.

    One after the other. Measuring begins once no VM boots any more, so that nothing disturbs
    it; and so does writing that would take long on a few VMs.
    """
    state = transition.state
    vms = tuple(vm for vm in vms if not is_outdated(state, vm))
    begun = state.preparation
    if _has_nothing_left(state):
        if state.phase is JobPhase.ACTIVE:
            transition.fail(_nothing_left(state), checkpoint=False)
        return
    if begun.round is not None:
        if begun.profile is not None and not begun.measures_again and not is_cold(vms):
            rounds.give_up(transition)  # what has trained goes on first
        else:
            _watch_round(transition)
    elif not vms:
        return
    elif state.newest_checkpoint is None and not state.job.measures_only:
        total_bytes = sum(section.param_bytes for section in state.job.facts.sections)
        if total_bytes <= AT_ONCE_BYTES or is_enough(transition, vms):
            rounds.write_first_weights(transition, vms)
    elif is_to_measure(state) and is_enough(transition, vms):
        rounds.get_profile(transition, vms)
    elif is_cold(vms) and is_enough(transition, vms):
        measure_others(transition, vms)


def is_cold(vms: Sequence[records.VmRecord]) -> bool:
    """Return whether no VM holds anything that was trained."""
    return not any(vm.used_slots for vm in vms)


def _watch_round(transition: Transition) -> None:
    """Let the round that runs fail if nothing is heard of it."""
    bound_s = generations.silence_bound_s(transition.state)
    if transition.waited_until(transition.state.preparation.progress_at_s + bound_s):
        fail(transition, f"no sign of progress in {bound_s:.0f} s")


def measure_others(transition: Transition, vms: Sequence[records.VmRecord]) -> bool:
    """Measure on VMs of a type whose times are only estimated so far.

    Returns:
        Whether that is under way.
    """
    if transition.state.preparation.round is None:
        if not (others := rounds.unmeasured(transition.state, vms)):
            return False
        rounds.measure(transition, others)
    else:
        _watch_round(transition)
    return True


def is_to_measure(state: State) -> bool:
    """Return whether training waits for a profile: there is none yet, or a new one is wanted."""
    again = state.preparation.measures_again and state.phase is JobPhase.ACTIVE
    return state.preparation.profile is None or again


def _has_nothing_left(state: State) -> bool:
    """Return whether a job that has trained would have to begin again, untold."""
    return (
        state.newest_checkpoint is None
        and state.history.progress.highest_step > 0
        and not state.preparation.from_scratch
    )


def _nothing_left(state: State) -> str:
    """Return why a job that has trained cannot go on."""
    spec, step = state.job.spec, state.history.progress.highest_step
    damaged = "".join(f"; {one.reason}" for one in state.preparation.damaged)
    return (
        f"the job has trained up to step {step}, but {spec.checkpoint_path} holds no "
        f"checkpoint that can be used{damaged}; bring one back and resume the job, or "
        f"begin again with 'spottrain resume {spec.name} --from-scratch'"
    )


def fail(transition: Transition, reason: str) -> None:
    """Writing the first weights or measuring failed: try again, a few times."""
    before = transition.state.preparation
    assert before.round is not None
    what = f"the {before.round.purpose}"
    if before.measures_again:  # the old profile still serves
        transition.log(f"{what} failed: {reason}")
        now_s = transition.now_s
        transition.put(replace(before, measures_again=False, profile_at_s=now_s))
        rounds.give_up(transition)
        return
    if before.profile is not None:
        _leave_unmeasured(transition, before.round, reason)
        return
    failures = before.failed_preparations + 1
    transition.put(replace(before, failed_preparations=failures))
    rounds.give_up(transition)
    transition.log(f"{what} failed: {reason}")
    if failures >= MAX_FAILED_PREPARATIONS:
        reason = f"{what} failed {failures} times: {reason}"
        transition.fail(reason)


def _leave_unmeasured(transition: Transition, round_: records.Round, reason: str) -> None:
    """Measuring on a further type of device failed: its times remain estimates."""
    rounds.give_up(transition)
    vm = transition.state.fleet.vms.get(round_.participants[0].vm_id)
    if vm is not None:
        rounds.leave_unmeasured(transition, vm)
        transition.log(f"measuring on {vm.device} failed, its times are estimates: {reason}")


def is_enough(transition: Transition, vms: Sequence[records.VmRecord]) -> bool:
    """Return whether to plan with ``vms`` now; a cold start waits for VMs that boot."""
    state = transition.state
    if not vms:
        return False
    if state.phase is JobPhase.ENDING:
        return True  # what they hold is only to be saved
    if len(vms) < state.job.resources.min_vms:
        return False
    coming = any(vm.is_coming for vm in state.fleet.vms.values())
    coming = coming or (is_expecting(state) and not only_queues(state))
    if not (is_cold(vms) and coming):
        return True
    first_s = min(vm.ready_at_s or state.now_s for vm in vms)
    return transition.waited_until(first_s + BOOT_WAIT_S)


def is_to_measure_again(state: State, generation: records.Generation) -> bool:
    """Return whether a machine that was busy when it measured the model trains so much faster
    than it said that a profile of today pays for a pause."""
    profile, measured_s = state.preparation.profile, generation.measured_step_s
    if profile is None or not is_noisy(profile) or measured_s is None:
        return False
    if generation.timed < CALM_STEPS or state.phase is not JobPhase.ACTIVE:
        return False
    left_s = (state.job.spec.steps - state.history.progress.step) * measured_s
    age_s = state.now_s - state.preparation.profile_at_s
    return (
        generation.plan.predicted_step_s > CALM * measured_s
        and min(left_s, age_s) > MEASURED_AGAIN_S
    )
