"""Calibration rounds over the VMs of the job, and the reuse of kept profiles.

    begin --StoreOpened--> measuring --Calibrated--> done
       --a participant dies or leaves--> abandoned; the next round takes those left

A round has a negative number, see ``messages.Calibrate``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from spottrain.eventlog.changed import replace
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan import profiles
from spottrain.morphing.simulate.reducing import NCCL_FAILED
from spottrain.varuna_manager.core.model.commands import KeepProfile, Outcome
from spottrain.varuna_manager.core.model.events import KnownProfile
from spottrain.varuna_manager.core.model.records import Calibration, VmRecord
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.varuna_manager.format import duration
from spottrain.wire import messages
from spottrain.wire.messages import AbandonGeneration, Calibrate, OpenStore
from spottrain.wire.model import Profile, Slot

RETRY_PAUSE_S = 2.0
"""Between a failed round and the next: lost VMs are known by then."""
MAX_PARTICIPANTS = 128
"""More would only measure the same again."""


def get_profile(transition: Transition, vms: Sequence[VmRecord]) -> None:
    """Reuse a kept profile, or begin to measure on ``vms``."""
    same = [vm for vm in vms if _kind_of(vm) == _kind_of(vms[0])]
    known = _reusable(transition.state, same)
    if known is None:
        if transition.waited_until(transition.state.preparation.measure_after_s):
            _begin(transition, same)
        return
    age = duration(max(0.0, transition.now_s - known.measured_at_s))
    transition.put(replace(transition.state.preparation, profile=known.profile))
    transition.log(
        f"profile of {known.profile.device} reused, measured {age} ago"
        + profiles.remark(known.profile)
    )


def _kind_of(vm: VmRecord) -> tuple[str, str]:
    return vm.device, vm.software


def _reusable(state: State, vms: Sequence[VmRecord]) -> KnownProfile | None:
    """Return the newest kept profile that is valid for these VMs."""
    if state.job.measures_only:
        return None
    return next(
        (
            known
            for known in state.preparation.known_profiles
            if (known.profile.device, known.profile.software) == _kind_of(vms[0])
            and profiles.knows_sizes(known.profile, sizes_of(state))
            and (len(vms) == 1 or not profiles.assumes_links(known.profile))
            and _fits(state, known.profile)
        ),
        None,
    )


def _fits(state: State, profile: Profile) -> bool:
    try:
        profiles.check_profile(profile, state.job.facts)
    except PlanError:
        return False
    return True


def sizes_of(state: State) -> tuple[int, ...]:
    """Return the micro-batch sizes that a profile of the job must know."""
    return state.job.microbatch_sizes or (state.job.spec.microbatch_size,)


def participants_of(vms: Sequence[VmRecord]) -> tuple[Slot, ...]:
    """Return the slots that measure: all, but no more per computer than it has cores.

    A single slot is listed twice, so that there is a link to measure.
    """
    taken: Counter[str] = Counter()
    slots: list[Slot] = []
    for index in range(max(vm.num_slots for vm in vms)):
        for vm in vms:
            full = vm.machine and vm.cores and taken[vm.machine] >= vm.cores
            if index < vm.num_slots and not full and len(slots) < MAX_PARTICIPANTS:
                taken[vm.machine] += 1
                slots.append(Slot(vm_id=vm.vm_id, index=index))
    return tuple(sorted(slots)) if len(slots) > 1 else (slots[0], slots[0])


def _begin(transition: Transition, vms: Sequence[VmRecord]) -> None:
    """Open the store of the next round."""
    state = transition.state
    number = state.preparation.next_round
    calibration = Calibration(number=number, participants=participants_of(vms))
    transition.put(
        replace(
            state.preparation,
            calibration=calibration,
            next_round=number - 1,
            prepare_since_s=state.now_s,
        )
    )
    send(transition, calibration)


def send(transition: Transition, calibration: Calibration) -> None:
    """Send the VMs the round's next command; supervisors ignore duplicates."""
    slots = calibration.participants
    if not calibration.store_host:
        transition.send((slots[0].vm_id,), OpenStore(generation=calibration.number))
        return
    checkpoint = transition.state.newest_checkpoint
    command = Calibrate(
        generation=calibration.number,
        participants=slots,
        store_host=calibration.store_host,
        store_port=calibration.store_port,
        microbatch_sizes=sizes_of(transition.state),
        checkpoint=checkpoint.name if checkpoint else "",
    )
    transition.send((slot.vm_id for slot in slots), command)


def store_opened(transition: Transition, report: messages.StoreOpened) -> None:
    """The store of the round is open: let the participants measure."""
    calibration = transition.state.preparation.calibration
    if calibration is None or calibration.number != report.generation:
        return
    if calibration.store_host:
        return
    calibration = replace(calibration, store_host=report.host, store_port=report.port)
    transition.put(replace(transition.state.preparation, calibration=calibration))
    send(transition, calibration)


def report_received(
    transition: Transition, report: messages.CalibrationProgress | messages.Calibrated
) -> None:
    """Fold the round's progress, or its profile, which is kept for later jobs."""
    calibration = transition.state.preparation.calibration
    if calibration is None or calibration.number != report.generation:
        return
    if isinstance(report, messages.CalibrationProgress):
        calibration = replace(calibration, done=report.done, total=report.total)
        transition.put(replace(transition.state.preparation, calibration=calibration))
        transition.log(f"measured {report.done} of {report.total}: {report.what}")
        return
    profile = report.profile
    transition.put(replace(transition.state.preparation, profile=profile, calibration=None))
    failed = [s for s in profile.sources if s.startswith(NCCL_FAILED)]
    if not failed:
        transition.emit(KeepProfile(profile=profile))
    transition.log("; ".join((describe(profile), *failed)))
    if transition.state.job.measures_only:
        reason = f"measured on {profile.device}"
        transition.end(Outcome(kind="succeeded", exit_code=0, reason=reason))


def describe(profile: Profile) -> str:
    """Return the measured times, in one line for people."""
    one = profile.microbatches[0]
    forward_s = sum(section.forward_s for section in one.sections)
    backward_s = sum(section.backward_s for section in one.sections)
    return (
        f"measured: forward {forward_s * 1e3:.1f} ms, backward {backward_s * 1e3:.1f} "
        f"ms for a micro-batch of {one.microbatch_size}" + profiles.remark(profile)
    )


def give_up(transition: Transition) -> None:
    """Abandon the round that runs."""
    calibration = transition.state.preparation.calibration
    if calibration is not None:
        before, after_s = transition.state.preparation, transition.now_s + RETRY_PAUSE_S
        transition.put(replace(before, calibration=None, measure_after_s=after_s))
        vm_ids = (slot.vm_id for slot in calibration.participants)
        transition.send(vm_ids, AbandonGeneration(generation=calibration.number))


def lose_vm(transition: Transition, vm_id: str) -> None:
    """A VM is gone: abandon a round that it takes part in; this is no failure."""
    calibration = transition.state.preparation.calibration
    if calibration and any(slot.vm_id == vm_id for slot in calibration.participants):
        give_up(transition)
