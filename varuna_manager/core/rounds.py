"""Rounds in which VMs prepare training together, and the reuse of kept profiles.

    begin --StoreOpened--> writing first weights --CheckpointSaved--> done
    begin --StoreOpened--> measuring --Calibrated--> done
       --a participant dies or leaves--> abandoned; the next round takes those left

A round has a negative number, see ``messages.Initialise``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from spottrain.eventlog.changed import replace
from spottrain.morphing.errors import PlanError
from spottrain.morphing.plan import profiles
from spottrain.morphing.simulate.reducing import NCCL_FAILED
from spottrain.varuna_manager.core.model.commands import KeepProfile, Outcome
from spottrain.varuna_manager.core.model.events import KnownProfile
from spottrain.varuna_manager.core.model.records import Purpose, Round, VmRecord
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.varuna_manager.format import duration
from spottrain.wire import messages
from spottrain.wire.messages import AbandonGeneration, Calibrate, Initialise, OpenStore
from spottrain.wire.model import MicrobatchProfile, Profile
from spottrain.wire.plan import Slot

RETRY_PAUSE_S = 2.0
"""Between a failed round and the next: lost VMs are known by then."""
MAX_PARTICIPANTS = 128
"""More would only measure the same again."""


def write_first_weights(transition: Transition, vms: Sequence[VmRecord]) -> None:
    """Have ``vms`` write the checkpoint of step 0."""
    slots = tuple(dict.fromkeys(participants_of(vms)))
    _begin(transition, "first weights", slots)


def get_profile(transition: Transition, vms: Sequence[VmRecord]) -> None:
    """Reuse a kept profile, or begin to measure on ``vms``."""
    before = transition.state.preparation
    old = before.profile if before.measures_again else None
    first = next((vm for vm in vms if old is not None and _is_of(old, vm)), vms[0])
    same = [vm for vm in vms if _kind_of(vm) == _kind_of(first)]
    known = None if before.measures_again else _reusable(transition.state, same)
    if known is None:
        measure(transition, same)
        return
    age = duration(max(0.0, transition.now_s - known.measured_at_s))
    preparation = transition.state.preparation
    transition.put(replace(preparation, profile=known.profile, profile_at_s=known.measured_at_s))
    transition.log(
        f"profile of {known.profile.device} reused, measured {age} ago"
        + profiles.remark(known.profile)
    )


def measured_on(state: State, vm: VmRecord) -> Profile | None:
    """Return the newest profile that was measured on a VM's type of device, if one was."""
    fingerprint = state.job.facts.fingerprint
    known = (one.profile for one in state.preparation.known_profiles)
    return next((p for p in known if _is_of(p, vm) and p.fingerprint == fingerprint), None)


def unmeasured(state: State, vms: Sequence[VmRecord]) -> tuple[VmRecord, ...]:
    """Return the VMs of one type of device on which the model is yet to be measured.

    None where the user has given a profile, or the job's is no measured one.
    """
    preparation, profile = state.preparation, state.preparation.profile
    if state.job.profile is not None or profile is None or profile.origin != "measured":
        return ()
    known = {"", profile.device, *preparation.unmeasured}
    lacking = [vm for vm in vms if vm.device not in known and measured_on(state, vm) is None]
    return tuple(vm for vm in lacking if _kind_of(vm) == _kind_of(lacking[0]))


def leave_unmeasured(transition: Transition, vm: VmRecord) -> None:
    """Do not measure on a VM's type of device any more."""
    before = transition.state.preparation
    transition.put(replace(before, unmeasured=(*before.unmeasured, vm.device)))


def measure(transition: Transition, vms: Sequence[VmRecord]) -> None:
    """Begin to measure on VMs of one type of device."""
    _begin(transition, "measurement", participants_of(vms))


def _is_of(profile: Profile, vm: VmRecord) -> bool:
    return (profile.device, profile.software) == _kind_of(vm)


def _kind_of(vm: VmRecord) -> tuple[str, str]:
    return vm.device, vm.software


def _reusable(state: State, vms: Sequence[VmRecord]) -> KnownProfile | None:
    """Return the newest kept profile that is valid for these VMs."""
    if state.job.measures_only:
        return None
    together = Counter(slot.vm_id for slot in set(participants_of(vms)))
    groups = [size for size in tensor_sizes_of(state) if size <= max(together.values())]
    return next(
        (
            known
            for known in state.preparation.known_profiles
            if _is_of(known.profile, vms[0])
            and profiles.knows_sizes(known.profile, sizes_of(state))
            and profiles.knows_groups(known.profile, groups)
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


def tensor_sizes_of(state: State) -> tuple[int, ...]:
    """Return how many slots of a VM may divide matrices, beside one alone."""
    asked = state.job.numerics.tensor_parallel
    if asked is None:
        return state.job.facts.tensor_sizes
    return (asked,) if asked > 1 else ()


def sizes_of(state: State) -> tuple[int, ...]:
    """Return the micro-batch sizes that a profile of the job must know."""
    if size := state.job.numerics.microbatch_size:
        return (size,)
    return state.job.microbatch_sizes or (state.job.spec.microbatch_size,)


def participants_of(vms: Sequence[VmRecord]) -> tuple[Slot, ...]:
    """Return the slots that take part: all, but no more per computer than it has cores.

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


def _begin(transition: Transition, purpose: Purpose, participants: tuple[Slot, ...]) -> None:
    """Open the store of the next round, if it needs one."""
    preparation = transition.state.preparation
    if not transition.waited_until(preparation.next_round_after_s):
        return
    number = preparation.next_round
    round_ = Round(number=number, purpose=purpose, participants=participants)
    transition.put(
        replace(
            preparation,
            round=round_,
            next_round=number - 1,
            progress_at_s=transition.now_s,
        )
    )
    send(transition, round_)


def send(transition: Transition, round_: Round) -> None:
    """Send the VMs the round's next command; supervisors ignore duplicates."""
    slots = round_.participants
    if not round_.store_host and len(slots) > 1:
        transition.send((slots[0].vm_id,), OpenStore(generation=round_.number))
        return
    command: Initialise | Calibrate
    if round_.purpose == "first weights":
        command = Initialise(
            generation=round_.number,
            participants=slots,
            store_host=round_.store_host,
            store_port=round_.store_port,
        )
    else:
        checkpoint = transition.state.newest_checkpoint
        command = Calibrate(
            generation=round_.number,
            participants=slots,
            store_host=round_.store_host,
            store_port=round_.store_port,
            microbatch_sizes=sizes_of(transition.state),
            tensor_sizes=tensor_sizes_of(transition.state),
            checkpoint=checkpoint.name if checkpoint else "",
        )
    transition.send((slot.vm_id for slot in slots), command)


def store_opened(transition: Transition, report: messages.StoreOpened) -> None:
    """The store of the round is open: let the participants begin."""
    round_ = _running(transition.state, report.generation)
    if round_ is None or round_.store_host:
        return
    round_ = replace(round_, store_host=report.host, store_port=report.port)
    transition.put(replace(transition.state.preparation, round=round_))
    send(transition, round_)


def _running(state: State, number: int) -> Round | None:
    """Return the round that runs, if it is this one."""
    round_ = state.preparation.round
    return round_ if round_ is not None and round_.number == number else None


def report_received(
    transition: Transition,
    report: messages.SectionPrepared | messages.CalibrationProgress | messages.Calibrated,
) -> None:
    """Fold the round's progress, or its profile, which is kept for later jobs, too."""
    round_ = _running(transition.state, report.generation)
    if round_ is None:
        return
    if isinstance(report, messages.Calibrated):
        _calibrated(transition, round_, report.profile)
        return
    if isinstance(report, messages.CalibrationProgress):
        round_ = replace(round_, done=report.done, total=report.total)
        transition.log(f"measured {report.done} of {report.total}: {report.what}")
    elif round_.purpose == "first weights":
        total = len(transition.state.job.facts.sections)
        round_ = replace(round_, done=round_.done + 1, total=total)
    now_s = transition.now_s
    transition.put(replace(transition.state.preparation, round=round_, progress_at_s=now_s))


def _calibrated(transition: Transition, round_: Round, profile: Profile) -> None:
    before = transition.state.preparation
    kind = profile.device, profile.software
    others = (k for k in before.known_profiles if (k.profile.device, k.profile.software) != kind)
    known = KnownProfile(profile=profile, measured_at_s=transition.now_s)
    after = replace(before, known_profiles=(known, *others), round=None)
    if before.profile is None or before.measures_again:
        now_s = transition.now_s
        after = replace(after, profile=profile, profile_at_s=now_s, measures_again=False)
    transition.put(after)
    vm = transition.state.fleet.vms.get(round_.participants[0].vm_id)
    if vm is not None and not _is_of(profile, vm):
        leave_unmeasured(transition, vm)
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
    divided = (
        f", {_times(group.microbatches[0])} in groups of {group.size} slots"
        for group in profile.groups
        if group.microbatches
    )
    return (
        f"measured: {_times(one)} for a micro-batch of {one.microbatch_size}"
        + "".join(divided)
        + profiles.remark(profile)
    )


def _times(one: MicrobatchProfile) -> str:
    forward_s = sum(section.forward_s for section in one.sections)
    backward_s = sum(section.backward_s for section in one.sections)
    return f"forward {forward_s * 1e3:.1f} ms, backward {backward_s * 1e3:.1f} ms"


def give_up(transition: Transition) -> None:
    """Abandon the round that runs."""
    before = transition.state.preparation
    if (round_ := before.round) is not None:
        after_s = transition.now_s + RETRY_PAUSE_S
        transition.put(replace(before, round=None, next_round_after_s=after_s))
        vm_ids = (slot.vm_id for slot in round_.participants)
        transition.send(vm_ids, AbandonGeneration(generation=round_.number))


def lose_vms(transition: Transition, vm_ids: Collection[str]) -> None:
    """VMs are gone: abandon a round that they take part in; this is no failure."""
    round_ = transition.state.preparation.round
    if round_ is not None and round_.includes(vm_ids):
        give_up(transition)
