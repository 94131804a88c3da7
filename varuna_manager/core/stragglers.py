"""Stragglers: detected from their ranks' timings, given less work, replaced.

Every rank reports with each mini-batch how long its tasks took. From that the mini-batch
is rebalanced over the replicas where that saves time, and a VM that stays slower than its
peers is replaced when that pays: by a warm spare, or by a VM that is rented for it. It is
returned once a generation without it trains.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from spottrain.cloud.port.provider import Offer
from spottrain.morphing.adapt import balance, policy
from spottrain.morphing.adapt.stragglers import (
    MARGIN,
    WINDOW,
    RankSample,
    Straggler,
    StragglerWatch,
    expected_busy_s,
)
from spottrain.morphing.memory import memory
from spottrain.pricing.ranking.gpu_speed import gpu_speed
from spottrain.units import HOUR_S
from spottrain.varuna_manager.core import memory as slots
from spottrain.varuna_manager.core.allocation import next_launch
from spottrain.varuna_manager.core.model.records import (
    Generation,
    GenerationPhase,
    RankTimings,
    SlowVm,
    VmPhase,
    VmRecord,
)
from spottrain.varuna_manager.core.model.state import JobPhase, State, rate_usd_per_hour
from spottrain.varuna_manager.core.model.transition import Transition
from spottrain.varuna_manager.core.planning import MORPH_COST_S, outlook
from spottrain.wire.messages import MinibatchCommitted, ShareMinibatch
from spottrain.wire.model import Plan, Profile, Slot

MAX_REPLACED_PER_HOUR = 3
"""VMs replaced for being slow within an hour; if more are slow, machines are not why."""
HOT_WINDOW = 5
"""Newest mini-batches that show whether a VM with throttled GPUs lags behind."""
_AHEAD = 4
"""Newest mini-batches whose reports are waited for; reports may be late."""


# --- Timings --------------------------------------------------------------------------------


def committed(transition: Transition, slot: Slot, report: MinibatchCommitted) -> None:
    """Fold a rank's timing of a mini-batch; evaluate it once all ranks have reported."""
    state, generation = transition.state, transition.state.generation
    has_timing = report.microbatches > 0 and report.busy_s > 0
    if generation is None or state.profile is None or not has_timing:
        return
    timings = generation.timings or _begin(state, generation, state.profile)
    ranks = {**timings.pending.get(report.step, {}), slot: report}
    pending = {**timings.pending, report.step: ranks}
    if len(ranks) < len(generation.plan.slots):
        newest = sorted(pending)[-_AHEAD:]
        timings = replace(timings, pending={step: pending[step] for step in newest})
        transition.put_generation(replace(generation, timings=timings))
        return
    later = {step: some for step, some in pending.items() if step > report.step}
    timings = replace(timings, pending=later)
    transition.put_generation(replace(generation, timings=timings))
    _minibatch(transition, ranks, state.profile)


def _begin(state: State, generation: Generation, profile: Profile) -> RankTimings:
    return RankTimings(
        watch=StragglerWatch(pipeline_depth=generation.plan.pipeline_depth),
        balancer=_controller(state, generation.plan, profile),
        pending={},
    )


def _controller(
    state: State, plan: Plan, profile: Profile
) -> balance.ShareBalancer | None:
    """Return the balancer of the mini-batch; None if there is nothing to balance."""
    if plan.data_parallel_width == 1 or plan.chunks > 1:
        return None
    shares = [len(plan.virtual_nodes_of(d)) for d in range(plan.data_parallel_width)]
    bound = _max_share(state, plan, profile)
    if bound < max(shares):
        return None
    return balance.start(shares, limits=[bound] * len(shares))


def _max_share(state: State, plan: Plan, profile: Profile) -> int:
    """Return how many virtual nodes a replica can have within its devices' memory."""
    vms = state.vms
    own = (vms[slot.vm_id] for slot in plan.slots if slot.vm_id in vms)
    have = min((slots.room_bytes(state, vm) for vm in own), default=0)
    low, high = 0, plan.replica_bounds[-1] - plan.data_parallel_width + 1
    while low < high:
        share = (low + high + 1) // 2
        if _bytes_with(state, plan, profile, share) <= have:
            low = share
        else:
            high = share - 1
    return low


def _bytes_with(state: State, plan: Plan, profile: Profile, share: int) -> int:
    """Return the peak memory of a worker if a replica has ``share`` virtual nodes."""
    width, total = plan.data_parallel_width, plan.replica_bounds[-1]
    left = total - share
    bounds = (*(left * d // (width - 1) for d in range(width)), total)
    skewed = replace(plan, replica_bounds=bounds)
    job = state.job
    own = [state.vms[slot.vm_id] for slot in plan.slots if slot.vm_id in state.vms]
    compute = slots.compute_of(state, own)
    stages = memory.plan_bytes(job.facts, profile, skewed, job.spec.reduction, compute)
    return max(stage.total_bytes for stage in stages)


def _minibatch(
    transition: Transition, ranks: Mapping[Slot, MinibatchCommitted], profile: Profile
) -> None:
    """Evaluate a mini-batch that all ranks have reported."""
    state, generation = transition.state, transition.generation
    timings = generation.timings
    assert timings is not None
    plan = generation.plan
    samples = [
        _sample(state, plan, profile, rank, ranks[slot])
        for rank, slot in enumerate(plan.slots)
    ]
    if not all(sample.expected_s > 0 for sample in samples):
        return
    watch = timings.watch.observe(samples)
    timings = replace(timings, watch=watch)
    transition.put_generation(replace(generation, timings=timings))
    if generation.phase is not GenerationPhase.RUNNING or generation.done:
        return
    if timings.balancer is not None:
        _share(transition, timings.balancer, [ranks[slot] for slot in plan.slots])
    crowding = _crowding(transition.state, plan)
    found = [
        one for one in watch.stragglers() if one.slowness > crowding[one.rank] + MARGIN
    ]
    hot = _hot_ranks(transition.state, plan, watch, {one.rank for one in found})
    for straggler in (*found, *hot):
        _consider(transition, watch, straggler)


def _crowding(state: State, plan: Plan) -> list[float]:
    """Return by what factor each rank may be slower than its peers for lack of cores.

    Slots of one computer take turns where they are more than its cores: at worst all the
    time, while a peer has a core of its own. On the same computer all are equally slow.
    """
    machines = [
        ("", 0) if vm is None or vm.gpus else (vm.machine, vm.cores)
        for vm in (state.vms.get(slot.vm_id) for slot in plan.slots)
    ]
    slots = Counter(machines)
    each = [max(1.0, slots[at] / at[1]) if at[1] else 1.0 for at in machines]
    least = min(each)
    return [factor / least for factor in each]


def _hot_ranks(
    state: State, plan: Plan, watch: StragglerWatch, found: Collection[int]
) -> Iterator[Straggler]:
    """Yield further ranks that lag behind and whose GPU says that it is slowed down.

    With the driver's word for it, a few mini-batches are evidence enough.
    """
    newest = watch.slowness[-HOT_WINDOW:]
    for rank, slot in enumerate(plan.slots):
        vm = state.vms.get(slot.vm_id)
        if vm is None or not vm.throttled or rank in found or len(newest) < HOT_WINDOW:
            continue
        slowness = statistics.median(row[rank] for row in newest)
        if slowness > 1 + MARGIN:
            outlying = sum(row[rank] > 1 + MARGIN for row in newest)
            yield Straggler(rank=rank, slowness=slowness, outlying=outlying)


def _sample(
    state: State, plan: Plan, profile: Profile, rank: int, report: MinibatchCommitted
) -> RankSample:
    vm = state.vms.get(plan.slots[rank].vm_id)
    speed = 1.0 if vm is None else _speed(state, vm.offer, profile)
    expected_s = expected_busy_s(
        plan,
        profile,
        rank % plan.pipeline_depth,
        report.microbatches,
        report.recomputes,
    )
    return RankSample(
        busy_s=report.busy_s,
        expected_s=expected_s / speed,
        microbatches=report.microbatches,
    )


# --- Rebalancing the mini-batch ---------------------------------------------------------------


def _share(
    transition: Transition,
    balancer: balance.ShareBalancer,
    reports: list[MinibatchCommitted],
) -> None:
    """Let the balancer observe a mini-batch that was shared as it asked."""
    generation = transition.generation
    assert generation.timings is not None
    depth = generation.plan.pipeline_depth
    replicas = [reports[i : i + depth] for i in range(0, len(reports), depth)]
    if tuple(r[0].microbatches for r in replicas) != balancer.shares:
        return  # its newest shares are not in force yet
    seen = balancer.observe([max(one.tasks_s for one in r) for r in replicas])
    generation = replace(generation, timings=replace(generation.timings, balancer=seen))
    if seen.shares == balancer.shares:
        transition.put_generation(generation)
        return
    number = 1 if generation.share is None else generation.share.number + 1
    share = ShareMinibatch(
        generation=generation.number, number=number, replica_bounds=seen.replica_bounds
    )
    generation = replace(generation, share=share)
    transition.put_generation(generation)
    send_share(transition, generation)
    before, after = _shares_text(balancer.shares), _shares_text(seen.shares)
    transition.log(f"virtual nodes per replica, by speed: {after} (before: {before})")


def _shares_text(shares: tuple[int, ...]) -> str:
    """Return shares as short text."""
    if len(shares) <= 8:
        return "+".join(map(str, shares))
    return f"{min(shares)} to {max(shares)} each"


def send_share(transition: Transition, generation: Generation) -> None:
    """Send the newest share to every VM of the plan, if there is one."""
    if generation.share is not None:
        vm_ids = (slot.vm_id for slot in generation.plan.slots)
        transition.send(vm_ids, generation.share)


# --- Replacing a slow VM ------------------------------------------------------------------------


def _consider(
    transition: Transition, watch: StragglerWatch, straggler: Straggler
) -> None:
    """Mark a slow VM for replacement, if that is possible and pays."""
    state, generation = transition.state, transition.generation
    assert generation.timings is not None
    slot = generation.plan.slots[straggler.rank]
    vm = state.vms.get(slot.vm_id)
    if state.phase is not JobPhase.ACTIVE or vm is None or not vm.is_usable:
        return
    if vm.slow is not None:
        return
    evidence = _evidence(vm, straggler, len(watch.samples), generation.plan)
    if vm.throttled:
        evidence += f" ({vm.throttled})"
    if _may_replace(state) and _pays(transition, watch, straggler, vm):
        slow = SlowVm(
            vm_id=vm.vm_id,
            found_at_s=transition.now_s,
            slowness=straggler.slowness,
            evidence=evidence,
        )
        transition.put_vm(replace(vm, slow=slow))
        transition.log(f"{evidence}: looking for a replacement")
        transition.decides = True
    elif vm.vm_id not in generation.timings.reported:
        reported = generation.timings.reported | {vm.vm_id}
        timings = replace(generation.timings, reported=reported)
        transition.put_generation(replace(generation, timings=timings))
        transition.log(f"{evidence}: kept, replacing it would not pay now")


def _evidence(vm: VmRecord, straggler: Straggler, seen: int, plan: Plan) -> str:
    alone = plan.data_parallel_width == 1
    peers = "expected" if alone else "the others of its stage"
    return (
        f"{vm.vm_id} is {straggler.slowness:.1f}x slower than {peers} "
        f"in {straggler.outlying} of {seen} mini-batches"
    )


def _may_replace(state: State) -> bool:
    """Return whether to replace one now: one at a time, in a calm fleet, not too many."""
    if any(vm.slow is not None for vm in state.vms.values()):
        return False
    lately = sum(slow.found_at_s > state.now_s - HOUR_S for slow in state.slow_vms)
    vms = state.vms.values()
    calm = all(vm.leaves_at_s is None and vm.silent_since_s is None for vm in vms)
    return calm and lately < MAX_REPLACED_PER_HOUR


def _pays(
    transition: Transition, watch: StragglerWatch, straggler: Straggler, vm: VmRecord
) -> bool:
    """Return whether the gain is worth a morph, and the price of a VM to rent."""
    state, generation = transition.state, transition.generation
    spare = _spare(state, generation, vm)
    offer = None
    if spare is None:
        launch = next_launch(state, replacing=vm)
        transition.wake(launch.changes_at_s)
        offer = launch.offer
        if offer is None or not _suits(state, vm, offer):
            return False
    step_s = statistics.median(generation.step_times_s[-WINDOW:])
    saved_s = watch.saved_s((straggler,))
    new_step_s = step_s - saved_s
    if new_step_s <= 0 or saved_s <= 0:
        return False
    examples = generation.plan.minibatch_size
    left_s = (state.job.spec.steps - state.progress.step) * step_s
    if offer is not None:
        left_s -= _boot_s(state)
        now = rate_usd_per_hour(state)
        then = now - vm.offer.usd_per_hour + offer.usd_per_hour
        if then * new_step_s > now * step_s:
            return False  # every example would cost more
    at_s = policy.morph_at_s(
        policy.MorphOption(examples_per_s=examples / step_s),
        policy.MorphOption(
            examples_per_s=examples / new_step_s,
            cost_s=state.progress.morph_cost_s or MORPH_COST_S,
        ),
        outlook(state),
        left_s=left_s,
    )
    return transition.now_s >= at_s


def _suits(state: State, vm: VmRecord, offer: Offer) -> bool:
    """Return whether a VM of ``offer`` can do what ``vm`` does."""
    have, want, profile = offer, vm.offer, state.profile
    return (
        have.gpus >= want.gpus
        and have.gpu_memory_bytes >= want.gpu_memory_bytes
        and profile is not None
        and _speed(state, have, profile) >= _speed(state, want, profile)
    )


def _speed(state: State, offer: Offer, profile: Profile) -> float:
    """Return the speed of an offer's GPUs relative to the profile's device."""
    return gpu_speed(offer, profile, state.job.facts, state.job.spec.precision)


def _boot_s(state: State) -> float:
    """Return the median time from launch to ready of the VMs, 0 if unknown."""
    times_s = [
        vm.ready_at_s - vm.launched_at_s
        for vm in state.vms.values()
        if vm.ready_at_s is not None
    ]
    return statistics.median(times_s) if times_s else 0.0


def _spare(state: State, generation: Generation, vm: VmRecord) -> VmRecord | None:
    """Return a ready VM outside the plan that can replace ``vm``."""
    busy = {slot.vm_id for slot in generation.plan.slots}
    usable = [other for other in state.vms.values() if other.is_usable]
    if len(usable) <= state.job.min_vms:
        return None
    spares = (v for v in usable if v.vm_id not in busy and v.slow is None)
    return next((v for v in spares if _suits(state, vm, v.offer)), None)


def advance(transition: Transition) -> None:
    """Let a spare replace a slow VM, as soon as there is one."""
    generation = transition.state.generation
    for vm in tuple(transition.state.vms.values()):
        if vm.slow is None or vm.phase is VmPhase.RETURNING:
            continue
        if vm.is_replaced and _is_missing(transition.state, vm.slow.replaced_by):
            vm = _set_replacement(transition, vm, vm.slow, "")
        if generation is None or generation.phase is not GenerationPhase.RUNNING:
            continue
        spare = None if vm.is_replaced else _spare(transition.state, generation, vm)
        if spare is not None and vm.slow is not None:
            _set_replacement(transition, vm, vm.slow, spare.vm_id)
            transition.log(f"{vm.slow.evidence}: replaced by {spare.vm_id}")


def _set_replacement(
    transition: Transition, vm: VmRecord, slow: SlowVm, replaced_by: str
) -> VmRecord:
    vm = replace(vm, slow=replace(slow, replaced_by=replaced_by))
    transition.put_vm(vm)
    transition.note_fleet_change()
    return vm


def _is_missing(state: State, vm_id: str) -> bool:
    """Return whether a VM is gone or cannot replace another any more."""
    vm = state.vms.get(vm_id)
    return vm is None or not vm.is_usable
