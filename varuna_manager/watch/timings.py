"""How fast the ranks of a generation are: who is slow, and who should do less.

Every rank reports with each mini-batch how long its tasks took. A mini-batch is looked at
once all ranks have reported it.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from spottrain.morphing.adapt import balance
from spottrain.morphing.adapt.stragglers import (
    MARGIN,
    RankSample,
    Straggler,
    StragglerWatch,
    expected_busy_s,
)
from spottrain.morphing.memory.ranks import rank_bytes
from spottrain.varuna_manager.core import memory as slots
from spottrain.varuna_manager.core.model.records import Generation, GenerationPhase
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.core.stragglers import bounds_of, speed_of
from spottrain.wire.messages import MinibatchCommitted
from spottrain.wire.model import Profile
from spottrain.wire.plan import Plan, Slot

HOT_WINDOW = 5
"""Newest mini-batches that show whether a VM with throttled GPUs lags behind."""
_AHEAD = 4
"""Newest mini-batches whose reports are waited for; reports may be late."""


class RankTimings:
    """The timings of one generation's ranks.

    Args:
        state: With that generation.
        profile: What times are compared with.
    """

    def __init__(self, state: State, generation: Generation, profile: Profile) -> None:
        self.watch = StragglerWatch(pipeline_depth=generation.plan.pipeline_depth)
        self.balancer = _balancer(state, generation, profile)
        """Balances the mini-batch; None if there is nothing to balance."""
        self.pending: dict[int, dict[Slot, MinibatchCommitted]] = {}
        """Reports of mini-batches that some ranks have yet to report, by step."""
        self._profile = profile
        self._profiles = slots.rank_profiles(state, generation.plan, profile)
        self._expected_s: dict[tuple[int, int, int], float] = {}
        """By rank, micro-batches and recomputes."""

    def observe(
        self,
        state: State,
        generation: Generation,
        slot: Slot,
        report: MinibatchCommitted,
    ) -> bool:
        """Take a rank's report; return whether it was the last one of its mini-batch."""
        if not (report.microbatches > 0 and report.busy_s > 0):
            return False
        ranks = self.pending.setdefault(report.step, {})
        ranks[slot] = report
        if len(ranks) < len(generation.plan.slots):
            for step in sorted(self.pending)[:-_AHEAD]:
                del self.pending[step]
            return False
        for step in [step for step in self.pending if step <= report.step]:
            del self.pending[step]
        return self._evaluate(state, generation, ranks)

    def _evaluate(
        self,
        state: State,
        generation: Generation,
        ranks: Mapping[Slot, MinibatchCommitted],
    ) -> bool:
        plan = generation.plan
        samples = [
            self._sample(state, plan, rank, ranks[slot]) for rank, slot in enumerate(plan.slots)
        ]
        if not all(sample.expected_s > 0 for sample in samples):
            return False
        self.watch = self.watch.observe(samples)
        if generation.phase is not GenerationPhase.RUNNING or generation.done:
            return False
        if self.balancer is not None:
            self._balance(generation, self.balancer, [ranks[slot] for slot in plan.slots])
        return True

    def _sample(
        self, state: State, plan: Plan, rank: int, report: MinibatchCommitted
    ) -> RankSample:
        vm = state.fleet.vms.get(plan.slots[rank].vm_id)
        own = self._profiles[rank]
        is_scaled = vm is not None and own is self._profile
        speed = speed_of(state, vm.offer, own) if vm is not None and is_scaled else 1.0
        key = rank, report.microbatches, report.recomputes
        if key not in self._expected_s:
            self._expected_s[key] = expected_busy_s(plan, own, *key)
        return RankSample(
            busy_s=report.busy_s,
            expected_s=self._expected_s[key] / speed,
            microbatches=report.microbatches,
        )

    def _balance(
        self,
        generation: Generation,
        balancer: balance.ShareBalancer,
        reports: list[MinibatchCommitted],
    ) -> None:
        """Let the balancer observe a mini-batch that was shared as it asked."""
        depth = self.watch.pipeline_depth
        replicas = [reports[i : i + depth] for i in range(0, len(reports), depth)]
        # Else its newest shares are not in force yet.
        wanted = replace(generation.plan, replica_bounds=balancer.replica_bounds)
        counts = [len(wanted.microbatches_of(d)) for d in range(wanted.data_parallel_width)]
        if [r[0].microbatches for r in replicas] == counts:
            times_s = [max(one.tasks_s for one in r) for r in replicas]
            self.balancer = balancer.observe(times_s)

    def stragglers(self, state: State, plan: Plan) -> Iterator[Straggler]:
        """Yield the ranks that are slower than they should be."""
        crowding = _crowding(state, plan)
        found = [
            one for one in self.watch.stragglers() if one.slowness > crowding[one.rank] + MARGIN
        ]
        yield from found
        yield from self._hot(state, plan, {one.rank for one in found})

    def _hot(self, state: State, plan: Plan, found: Collection[int]) -> Iterator[Straggler]:
        """Yield further ranks that lag behind and whose GPU says that it is slowed down.

        With the driver's word for it, a few mini-batches are evidence enough.
        """
        newest = self.watch.slowness[-HOT_WINDOW:]
        if len(newest) < HOT_WINDOW:
            return
        for rank, slot in enumerate(plan.slots):
            vm = state.fleet.vms.get(slot.vm_id)
            if vm is None or not vm.throttled or rank in found:
                continue
            slowness = statistics.median(row[rank] for row in newest)
            if slowness > 1 + MARGIN:
                outlying = sum(row[rank] > 1 + MARGIN for row in newest)
                yield Straggler(rank=rank, slowness=slowness, outlying=outlying)


def _balancer(
    state: State, generation: Generation, profile: Profile
) -> balance.ShareBalancer | None:
    """Return the balancer of the mini-batch; None if there is nothing to balance."""
    plan, bounds = generation.plan, bounds_of(generation)
    if plan.data_parallel_width == 1 or plan.chunks > 1 or plan.devices_per_stage_replica > 1:
        return None
    shares = [end - start for start, end in itertools.pairwise(bounds)]
    most = _max_share(state, plan, profile)
    if most < max(shares):
        return None
    return balance.start(shares, limits=[most] * len(shares))


def _max_share(state: State, plan: Plan, profile: Profile) -> int:
    """Return how many virtual nodes a replica can have within its devices' memory."""
    low, high = 0, plan.replica_bounds[-1] - plan.data_parallel_width + 1
    while low < high:
        share = (low + high + 1) // 2
        if _fits_with(state, plan, profile, share):
            low = share
        else:
            high = share - 1
    return low


def _fits_with(state: State, plan: Plan, profile: Profile, share: int) -> bool:
    """Return whether every replica has memory for ``share`` virtual nodes."""
    job, vms, width = state.job, state.fleet.vms, plan.data_parallel_width
    of_each = replace(
        plan,
        minibatch_size=plan.microbatch_size * share * width,
        replica_bounds=tuple(share * d for d in range(width + 1)),
    )
    compute = slots.compute_of(state, [vms[s.vm_id] for s in plan.slots if s.vm_id in vms])
    profiles = slots.rank_profiles(state, plan, profile)
    needed = rank_bytes(job.facts, profile, of_each, job.spec.reduction, compute, profiles)
    return all(
        slot.vm_id in vms and one.total_bytes <= slots.room_bytes(state, vms[slot.vm_id])
        for slot, one in zip(plan.slots, needed, strict=True)
    )


def _crowding(state: State, plan: Plan) -> list[float]:
    """Return by what factor each rank may be slower than its peers for lack of cores.

    Slots of one computer take turns where they are more than its cores: at worst all the
    time, while a peer has a core of its own. On the same computer all are equally slow.
    """
    machines = [
        ("", 0) if vm is None or vm.gpus else (vm.machine, vm.cores)
        for vm in (state.fleet.vms.get(slot.vm_id) for slot in plan.slots)
    ]
    slots = Counter(machines)
    each = [max(1.0, slots[at] / at[1]) if at[1] else 1.0 for at in machines]
    least = min(each)
    return [factor / least for factor in each]
