"""Cuts of a model into stages by depth and execution mode: time bounds, memory."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from spottrain.morphing.memory.chunks import Chunk
from spottrain.morphing.memory.loads import StageLoad, stage_load, stage_loads
from spottrain.morphing.memory.memory import WorkerTerms, loader_bytes
from spottrain.morphing.memory.room import WorkerBytes, largest, megabytes, times
from spottrain.morphing.memory.stage import MemoryModel, Share
from spottrain.morphing.plan import modes
from spottrain.morphing.plan.bounds import (
    NANOSECOND,
    Array,
    Counts,
    Pipe,
    SectionTimes,
    fastest_link,
    fastest_pipe,
    make_pipe,
    min_finish_s,
    min_steps_s,
    min_sums_s,
    replica_counts,
)
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.partition import join, partition, spread
from spottrain.morphing.plan.placement import Device, DeviceKind, kind_of
from spottrain.morphing.simulate.compute import min_update_s, trained_bytes
from spottrain.morphing.simulate.reducing import (
    Hop,
    fastest_hop,
    hop_of,
    sections_at,
    tied_bytes,
    tied_hops,
)
from spottrain.units import counted
from spottrain.wire.model import Profile, StateHome
from spottrain.wire.plan import ScheduleKind, deal, segments_of

SHORT_LISTS = 8
"""Micro-batches per stage of a schedule long enough to show what its stages hold; no stage
has more in flight, GPipe's aside."""
FEW = 2
"""Micro-batches in flight for each stage of the pipeline that are tried besides as many as
fit."""
DEEPENED: tuple[ScheduleKind, ...] = ("varuna", "1f1b")
"""Schedules whose stages may begin more forwards than their lists have in flight. Others
begin all at once, or are followed in order."""
NEVER = WorkerBytes(1 << 62)
"""More than any device has."""
MAX_UNEVEN = 1.25
"""Factor by which a stage may be slower than in an even cut to save memory, at
first."""


class Cuts:
    """The ways to cut a model into stages: bounds on their time, and their memory.

    Drafts of one micro-batch size have most of it in common: it is worked out once.
    """

    def __init__(
        self,
        inputs: PlanInputs,
        microbatch_size: int,
        largest: Mapping[DeviceKind, int] | None = None,
    ) -> None:
        self.inputs = inputs
        self._largest = largest or {}
        self.microbatch_size = microbatch_size
        self.virtual_nodes = inputs.minibatch_size // microbatch_size
        self.fleet = modes.DeviceFleet(inputs)
        self.compute = inputs.compute
        self._profiles: dict[DeviceKind, Profile] = {}
        self.times = self._times_of(inputs.profile, 1)
        """On a device of speed 1."""
        param_bytes = [s.param_bytes for s in inputs.facts.sections]
        self.state_weights = tuple(s.param_bytes + s.optimizer_bytes for s in inputs.facts.sections)
        """Bytes of each section by which ranks share state."""
        self.param_sums = np.concatenate(([0.0], np.cumsum(param_bytes)))
        self.cut = cache(self._cut)
        self.pipe = cache(self._pipe)
        self._counts = cache(self._replica_counts)
        self._even_steps_s = cache(self._min_even_steps_s)
        self._hop = cache(self._fastest_hop)
        self._chunk = cache(self._chunk_of)
        self._terms = cache(self._worker_terms)
        self._model = cache(self._memory_model)
        self._needed = cache(self._stage_bytes)
        self._loads = cache(self._stage_loads)
        self._tight = cache(self._tight_cut)
        self._update_s = cache(self._slowest_update_s)
        self._joined = cache(self._joined_cut)
        self.times_on = cache(lambda kind, nodes: self._times_of(self._profile(kind), nodes))
        """On a kind of device, in micro-batches of so many virtual nodes."""
        self.merges_on = cache(self._merges_on)
        """How many virtual nodes a micro-batch may have on a kind of device."""
        self._fastest = cache(self._fastest_times)
        self._merges = sorted({1}.union(*map(self.merges_on, self.fleet.kinds)))
        """Virtual nodes that a micro-batch may have on some device."""

    # --- Kinds of devices ---------------------------------------------------------------

    def profile_on(self, device: Device) -> Profile:
        """Return the profile of a device: measured on its kind, else derived by its speed."""
        return self._profile(kind_of(device))

    def _profile(self, kind: DeviceKind) -> Profile:
        """Return the one profile of a kind of device."""
        if kind not in self._profiles:
            self._profiles[kind] = self.inputs.profile_on(kind, self.microbatch_size)
        return self._profiles[kind]

    def _merges_on(self, kind: DeviceKind) -> list[int]:
        size = self.microbatch_size
        known = self._profile(kind).microbatch_sizes
        most = self._largest.get(kind, size)
        return [one // size for one in known if one % size == 0 and size <= one <= most]

    def _times_of(self, profile: Profile, nodes: int) -> SectionTimes:
        size = nodes * self.microbatch_size
        return SectionTimes(
            sections_at(profile, size, self.inputs.facts, self.inputs.reduction),
            profile.overheads_at(size),
            self.compute,
        )

    def _fastest_times(self, speed: float | None, nodes: int) -> SectionTimes | None:
        """Return times that no device of a speed (of any, if None) is faster than.

        Args:
            speed: Of the devices.
            nodes: Virtual nodes of a micro-batch; None is returned where none computes so many.
        """
        kinds = {kind for kind in self.fleet.kinds if speed in (None, kind[1])}
        able = [kind for kind in sorted(kinds) if nodes == 1 or nodes in self.merges_on(kind)]
        if not kinds:
            return self.times
        return SectionTimes.fastest([self.times_on(kind, nodes) for kind in able]) if able else None

    def state_bytes(self, state: StateHome) -> WorkerBytes:
        """Return the minimum bytes of all stages together, by the home of their state.

        Parameters, gradients and optimizer state, and of these what is computed on.
        """
        inputs = self.inputs
        sections = inputs.facts.sections
        parameters = sum(s.param_bytes for s in sections)
        gradients = self.compute.lanes * sum(map(trained_bytes, sections))
        optimizer = sum(s.optimizer_bytes for s in sections)
        everything = parameters + gradients + optimizer
        if not self.compute.on_gpu or state == "device":
            return WorkerBytes(everything)
        working = self.compute.working_bytes(sections)
        return WorkerBytes(working + gradients, everything, everything)

    # --- Bounds -----------------------------------------------------------------------

    def min_steps_s(
        self, depth: int, mode: modes.ExecutionMode, widths: Sequence[int]
    ) -> list[float]:
        """Return the minimum time of a mini-batch on an even cut, for each of ``widths``."""
        # The order of a stage's tasks changes nothing.
        return self._even_steps_s(depth, replace(mode, rank=0), tuple(widths))

    def _min_even_steps_s(
        self, depth: int, mode: modes.ExecutionMode, widths: tuple[int, ...]
    ) -> list[float]:
        bounds = self.cut(mode.segments, depth * mode.chunks)
        sums_s = self._min_sums_s(depth, np.array(widths, np.int64), bounds)
        return self.min_cut_steps_s(depth, mode, widths, bounds, sums_s)

    def min_cut_steps_s(
        self,
        depth: int,
        mode: modes.ExecutionMode,
        widths: Sequence[int],
        bounds: tuple[int, ...],
        sums_s: Array,
    ) -> list[float]:
        """Return the minimum time of a mini-batch for each of ``widths``.

        Args:
            depth: Stages.
            mode: How they are run.
            widths: Numbers of replicas.
            bounds: Of the runs of sections.
            sums_s: The minimum time of summing gradients, for each width (a row) and stage.
        """
        ring = np.array(widths, np.int64)
        group = depth if mode.chunks > 1 else 1
        nodes = group * -(-(self.virtual_nodes // group) // ring)
        finish_s = self._finish_s(depth, mode, widths, bounds)
        update_s = self._update_s(bounds, depth, mode.state)
        # Whatever micro-batches the largest replica has.
        every_s = [
            min_steps_s(
                pipe,
                -(-nodes // merged),
                ring,
                in_flight_bound=mode.in_flight_bound or None,
                sums_s=sums_s,
                update_s=update_s,
                finish_s=finish_s,
                shared_s=self._shared_s(pipe, ring, merged),
            )
            for merged, pipe in self._pipes(depth, mode, bounds, None).items()
        ]
        # Of two mini-batches in a row both fill and drain a pipeline (``stale_step``).
        steps: list[float] = (np.min(every_s, axis=0) / self.compute.lanes).tolist()
        return steps

    def _pipes(
        self, depth: int, mode: modes.ExecutionMode, bounds: tuple[int, ...], speed: float | None
    ) -> dict[int, Pipe]:
        """Return pipes that no pipeline of devices of a speed (of any, if None) is faster
        than, by the virtual nodes of micro-batches."""
        pipes = {
            merged: self.pipe(bounds, depth, mode.segments, speed, merged)
            for merged in (self._merges if mode.chunks == 1 else (1,))
        }
        return {merged: pipe for merged, pipe in pipes.items() if pipe is not None}

    def _shared_s(self, pipe: Pipe, widths: NDArray[np.int64], merged: int) -> Array | None:
        """Return the time of all tasks on the cores there are, where slots share them."""
        cores = self.fleet.cores
        if cores is None or not self.inputs.counts_cores:
            return None
        work_s = self.virtual_nodes * pipe.busy_s.sum() / merged
        rounded_s = 3 * NANOSECOND * self.virtual_nodes * pipe.depth**2
        shared: Array = (work_s - widths * pipe.recompute_s.sum() - rounded_s) / cores
        return shared

    def _finish_s(
        self,
        depth: int,
        mode: modes.ExecutionMode,
        widths: Sequence[int],
        bounds: tuple[int, ...],
    ) -> Array | None:
        """Return the minimum time on devices of several speeds for each width."""
        if len(self.fleet.speeds) <= 1:
            return None
        pure, mixed = self._counts(depth, tuple(widths))
        pipes = [fastest_pipe(self._pipes(depth, mode, bounds, v)) for v in self.fleet.speeds]
        return min_finish_s(pipes, pure, mixed, self.virtual_nodes)

    def _replica_counts(self, depth: int, widths: tuple[int, ...]) -> tuple[Counts, Counts]:
        speeds = [device.speed for device in self.fleet.devices]
        return replica_counts(speeds, depth, widths)

    def _min_sums_s(self, depth: int, widths: NDArray[np.int64], bounds: tuple[int, ...]) -> Array:
        """Return the minimum time of summing gradients for each width and stage."""
        cuts, by_stage = np.array(bounds), (-1, depth)
        # Memory may want another cut, in which the stage with most has less, never than the mean.
        mean = self.param_sums[-1] / depth
        return min_sums_s(
            widths,
            [self._hop(width, self.fleet.rings(depth, width)) for width in widths.tolist()],
            np.diff(cuts).reshape(by_stage).sum(axis=0),
            np.minimum(mean, np.diff(self.param_sums[cuts]).reshape(by_stage).sum(axis=0)),
            self.inputs.reduction,
        )

    def _fastest_hop(self, width: int, rings: int) -> Hop:
        """Return a hop that none of so many rings of ``width`` replicas over the same VMs has a
        faster one than; 0: how many there are is not known."""
        profile = self.inputs.profile
        if not rings:
            return fastest_hop(profile, leaves_vms=width > self.fleet.most_slots)
        ranks = width * self.inputs.group_size
        hops = [hop_of(profile, ranks, True, rings, on_device) for on_device in (False, True)]
        return Hop(min(hop.latency_s for hop in hops), min(hop.s_per_byte for hop in hops))

    def _slowest_update_s(self, cut: tuple[int, ...], depth: int, state: StateHome) -> float:
        """Return the minimum time of the slowest stage's update on the fastest device."""
        inputs = self.inputs
        devices = [self._profile(kind) for kind in self.fleet.kinds] or [inputs.profile]
        runs = [inputs.facts.sections[a:b] for a, b in itertools.pairwise(cut)]
        stages = (list(itertools.chain(*runs[p::depth])) for p in range(depth))
        return max(
            min(min_update_s(device, own, state, self.compute) for device in devices)
            for own in stages
        )

    def _pipe(
        self,
        bounds: tuple[int, ...],
        depth: int,
        segments: int,
        speed: float | None,
        merged: int,
    ) -> Pipe | None:
        times = self._fastest(speed, merged)
        if times is None:
            return None
        return make_pipe(
            times,
            bounds,
            depth,
            segments,
            fastest_link(self.inputs.profile, self.fleet.alone),
            self.fleet.alone,
        )

    def _cut(self, segments: int, runs: int) -> tuple[int, ...]:
        """Cut the sections into runs as evenly as possible, regardless of memory."""
        costs_s, last_s = self.times.costs_s(segments)
        bounds = partition(costs_s, runs, last_costs_s=last_s)
        assert bounds is not None
        return bounds

    def even_cut(self, draft: modes.Draft) -> tuple[int, ...]:
        """Cut a draft's sections evenly, tied ones into one stage where that pays."""
        depth, mode = draft.depth, draft.mode
        even = self.cut(mode.segments, depth * mode.chunks)
        if mode.chunks > 1 or not self.inputs.facts.tied:
            return even
        joined = self._joined(mode.segments, depth)
        count = -(-self.virtual_nodes // draft.width)
        longer_s = max(self.stage_s(draft, joined)) - max(self.stage_s(draft, even))
        spared_s = self._tied_s(even) - self._tied_s(joined)
        return joined if count * longer_s < spared_s else even

    def _joined_cut(self, segments: int, stages: int) -> tuple[int, ...]:
        """Cut as evenly as possible with tied sections in one stage, where they fit."""
        spans = {(t.sections[0], t.sections[-1]) for t in self.inputs.facts.tied}
        costs_s, last_s = self.times.costs_s(segments)
        groups = join(len(costs_s), spans, stages)
        bounds = partition(
            [sum(costs_s[a:b]) for a, b in itertools.pairwise(groups)],
            stages,
            last_costs_s=[sum(last_s[a:b]) for a, b in itertools.pairwise(groups)],
        )
        assert bounds is not None
        return tuple(groups[bound] for bound in bounds)

    def _tied_s(self, bounds: Sequence[int]) -> float:
        """Return the minimum time of summing tied parameters over stages."""
        link = fastest_link(self.inputs.profile, self.fleet.alone)
        facts = self.inputs.facts
        total_s = 0.0
        for tied, num_bytes in zip(facts.tied, tied_bytes(facts), strict=True):
            stages = {bisect.bisect_right(bounds, k) for k in tied.sections}
            copy_s = num_bytes / link.bandwidth_bytes_per_s + link.latency_s
            total_s += tied_hops(tied, stages) * copy_s
        return total_s

    def stage_s(
        self, draft: modes.Draft, bounds: Sequence[int], times: SectionTimes | None = None
    ) -> list[float]:
        """Return the time of a micro-batch in the sections of each stage.

        Args:
            draft: How it is run.
            bounds: Runs of sections.
            times: On the device; at speed 1 if not given.
        """
        costs_s, last_s = (times or self.times).costs_s(draft.mode.segments)
        runs = [sum(costs_s[a:b]) for a, b in itertools.pairwise(bounds)]
        runs[-1] = sum(last_s[bounds[-2] :])
        return [sum(runs[p :: draft.depth]) for p in range(draft.depth)]

    # --- Memory -----------------------------------------------------------------------

    def _stage_loads(
        self, depth: int, mode: modes.ExecutionMode, count: int
    ) -> tuple[StageLoad, ...]:
        return stage_loads(
            mode.schedule,
            depth,
            count,
            mode.segments > 0,
            chunks=mode.chunks,
            in_flight_bound=mode.in_flight_bound or None,
        )

    def loads(self, depth: int, mode: modes.ExecutionMode, count: int) -> tuple[StageLoad, ...]:
        """Return the load of every stage of a replica of ``count`` micro-batches."""
        count = self._listed(depth, mode, count)
        # The home of state changes nothing, nor does the number of segments.
        lists = replace(mode, on_device=False, segments=min(mode.segments, 1))
        return self._loads(depth, lists, count)

    def _listed(self, depth: int, mode: modes.ExecutionMode, count: int) -> int:
        """Return of how many micro-batches the lists of a replica of ``count`` show its loads.

        A short list is enough for all schedules but GPipe. Where two mini-batches are under
        way they fill the pipeline as one of twice the length does.
        """
        count *= self.compute.lanes
        return count if mode.schedule == "gpipe" else min(count, SHORT_LISTS * depth * mode.chunks)

    def _stage_bytes(
        self,
        runs: tuple[range, ...],
        load: StageLoad,
        state: StateHome,
        segments: int,
        width: int,
        sharers: int,
    ) -> WorkerBytes:
        return self._model(runs, state, segments, width, sharers).under(load).needed

    def _memory_model(
        self,
        runs: tuple[range, ...],
        state: StateHome,
        segments: int,
        width: int,
        sharers: int,
    ) -> MemoryModel:
        share = None
        if sharers > 1:
            weights = {k: self.state_weights[k] for run in runs for k in run}
            held = deal(weights, sharers)[0]
            share = Share(held, sharers, self.inputs.group_size, int(width > 1))
        return MemoryModel.of(
            self.inputs.facts,
            self.times.sections,
            runs,
            self._terms(state),
            width=width,
            chunks=[self._chunk(run, segments) for run in runs],
            share=share,
        )

    def _chunk_of(self, run: range, segments: int) -> Chunk:
        return Chunk.of(self.inputs.facts, self.times.sections, segments_of(run, segments))

    def _worker_terms(self, state: StateHome) -> WorkerTerms:
        return WorkerTerms.of(
            self.inputs.profile,
            self.microbatch_size,
            reduction=self.inputs.reduction,
            compute=self.compute,
            state=state,
        )

    def needed_bytes(
        self,
        depth: int,
        mode: modes.ExecutionMode,
        stage_bounds: Sequence[int],
        replica_bounds: Sequence[int],
        sharers: int = 1,
    ) -> list[WorkerBytes]:
        """Return the peak memory of the largest worker of each stage, whose committed state so
        many share."""
        return list(self._each_needed(depth, mode, stage_bounds, replica_bounds, sharers))

    def _each_needed(
        self,
        depth: int,
        mode: modes.ExecutionMode,
        stage_bounds: Sequence[int],
        replica_bounds: Sequence[int],
        sharers: int = 1,
    ) -> Iterator[WorkerBytes]:
        count, width = self._replica_load(replica_bounds)
        runs = [range(a, b) for a, b in itertools.pairwise(stage_bounds)]
        loads, segments = self.loads(depth, mode, count), max(1, mode.segments)
        for p in range(depth):
            stage = tuple(runs[p::depth])
            yield self._needed(stage, loads[p], mode.state, segments, width, sharers)

    def _replica_load(self, replica_bounds: Sequence[int]) -> tuple[int, int]:
        """Return the facts about replicas that matter for memory.

        The largest share, and how many share the writing of checkpoints (more than
        there are sections make no difference, but several have a communicator).
        """
        count = max(b - a for a, b in itertools.pairwise(replica_bounds))
        rows = (len(replica_bounds) - 1) * self.inputs.group_size
        return count, min(rows, max(2, len(self.inputs.facts.sections)))

    def tight_cut(
        self,
        depth: int,
        mode: modes.ExecutionMode,
        replica_bounds: Sequence[int],
        room: WorkerBytes,
        uneven: float,
        sharers: int = 1,
    ) -> tuple[int, ...] | None:
        """Cut into stages that ``room`` is enough for, as evenly as that permits.

        No stage takes longer than ``uneven`` times the slowest one of an even cut. Of each so
        many ranks share the committed state.
        """
        replica_load = self._replica_load(replica_bounds)
        return self._tight(depth, mode, replica_load, room, uneven, sharers)

    def _tight_cut(
        self,
        depth: int,
        mode: modes.ExecutionMode,
        replica_load: tuple[int, int],
        room: WorkerBytes,
        uneven: float,
        sharers: int,
    ) -> tuple[int, ...] | None:
        count, width = replica_load
        loads, segments = self.loads(depth, mode, count), max(1, mode.segments)
        costs_s, last_s = self.times.costs_s(mode.segments)
        sums_s = [0.0, *itertools.accumulate(costs_s)]
        even = self.cut(mode.segments, depth)
        slowest_s = max(sums_s[b] - sums_s[a] for a, b in itertools.pairwise(even))
        max_s = uneven * slowest_s

        def excess(stage: int, start: int, end: int) -> int:
            run = (range(start, end),)
            needed = self._needed(run, loads[stage], mode.state, segments, width, sharers)
            return needed.beyond(room)

        def farthest(stage: int, start: int) -> int:
            if (
                sums_s[start] > stage * max_s
                or sums_s[-1] - sums_s[start] > (depth - stage) * max_s
            ):
                return start  # the other stages could not take the rest
            # Longer runs need more.
            last = bisect.bisect_right(sums_s, sums_s[start] + max_s) - 1
            last = max(start, min(last, len(costs_s) - (depth - stage - 1)))
            ends = range(start + 1, last + 1)
            key = partial(excess, stage, start)
            return start + bisect.bisect_right(ends, 0, key=key)

        reached = 0
        for stage in range(depth):
            begin, reached = reached, farthest(stage, reached)
            if begin == reached:  # however many sections the stages before it take
                return None
        if reached < len(costs_s):
            return None
        return partition(costs_s, depth, farthest, last_s, max_s)

    def heeds_bound(self, mode: modes.ExecutionMode) -> bool:
        """Return whether stages heed a bound on micro-batches in flight: those that follow
        their lists, as groups and interleaved ones do, have what these say."""
        return mode.chunks == 1 and self.compute.group_size == 1

    def largest_bound(self, draft: modes.Draft, room: WorkerBytes) -> int | None:
        """Return the largest in-flight bound with which an even cut fits, if any does."""
        least = self.state_bytes(draft.mode.state)
        if not self.heeds_bound(draft.mode) or least.beyond(times(room, draft.depth)) > 0:
            return None
        return self._search_bound(draft, room, 0, self._listed_in_flight(draft)) or None

    def deeper_bounds(self, draft: modes.Draft, room: WorkerBytes) -> set[int]:
        """Return in-flight bounds with which stages have more in flight than by their
        lists, and an even cut fits.

        A stage that would wait for a gradient then goes on with forwards, and late messages
        hold nothing up. The largest is not always the best: activations keep a slow
        network from gradients.
        """
        deepened = self.heeds_bound(draft.mode) and draft.mode.schedule in DEEPENED
        if draft.depth == 1 or not deepened:
            return set()
        listed, count = self._listed_in_flight(draft), self.even_shares(draft)[1]
        most = min(self.compute.lanes * count, SHORT_LISTS * draft.depth)
        largest_bound = self._search_bound(draft, room, listed - 1, most + 1)
        few = max(listed, min(FEW * draft.depth, largest_bound))
        return {few, largest_bound} if largest_bound >= listed else set()

    def _listed_in_flight(self, draft: modes.Draft) -> int:
        """Return the maximum micro-batches in flight by the lists of all stages."""
        count = self.even_shares(draft)[1]
        return max(load.in_flight for load in self.loads(draft.depth, draft.mode, count))

    def _search_bound(self, draft: modes.Draft, room: WorkerBytes, low: int, high: int) -> int:
        """Return the largest in-flight bound below ``high`` that fits, at least ``low``."""
        depth, segments = draft.depth, max(1, draft.mode.segments)
        count, width = self._replica_load(self.even_shares(draft))
        runs = [range(a, b) for a, b in itertools.pairwise(self.even_cut(draft))]

        mode = draft.mode
        listed = self._listed(depth, mode, count)

        def is_too_much(stage: int, bound: int) -> bool:
            load = stage_load(mode.schedule, depth, listed, mode.segments > 0, stage, bound)
            stage_runs = tuple(runs[stage::depth])
            needed = self._needed(stage_runs, load, mode.state, segments, width, 1)
            return needed.beyond(room) > 0

        for stage in range(depth):
            if high - low > 1 and is_too_much(stage, high - 1):
                bounds = range(low + 1, high)
                high = bounds[bisect.bisect_left(bounds, 1, key=partial(is_too_much, stage))]
        return high - 1

    def segmented(self, draft: modes.Draft, room: WorkerBytes) -> modes.ExecutionMode | None:
        """Return the draft's mode with as many segments as memory wants.

        The fewest with which an even cut fits, else those with which it needs least;
        ``None`` if no number needs less than the draft, or it must not recompute. On one
        stage alone nothing but segments can be recomputed.
        """
        mode, depth = draft.mode, draft.depth
        may = self.inputs.recompute is not False and (mode.segments == 1 or depth == 1)
        if not may or mode.segments > 1:
            return None
        replicas = self.even_shares(draft)

        def beyond(mode: modes.ExecutionMode) -> float:
            even = self.even_cut(replace(draft, mode=mode))
            needed = self.needed_bytes(depth, mode, even, replicas)
            return largest(needed).beyond(room)

        best, least = None, beyond(mode)
        longest = max(b - a for a, b in itertools.pairwise(self.even_cut(draft)))
        # Of all numbers whose longest segment is as long, the fewest are needed.
        for segments in sorted({-(-longest // n) for n in range(1, longest)}):
            tried = replace(mode, segments=segments)
            if (now := beyond(tried)) < least:
                best, least = tried, now
            if least <= 0:
                break
        return best

    def even_shares(self, draft: modes.Draft) -> tuple[int, ...]:
        """Return the shares of equally fast replicas."""
        group = draft.depth if draft.mode.chunks > 1 else 1
        shares = spread(self.virtual_nodes // group, draft.width)
        return tuple(group * bound for bound in shares)

    def is_no_easier(self, draft: modes.Draft, refused: modes.Draft) -> bool:
        """Return whether ``draft`` cannot fit for the same reason as ``refused``.

        With fewer replicas of the same kind, each has no fewer micro-batches and more of
        the checkpoints to write.
        """
        equal = len(self.fleet.orders) == len(self.fleet.speeds) == 1
        return equal and draft.width <= refused.width

    def fits_somehow(self) -> bool:
        """Return whether there is any plan for the available devices, however slow."""
        most = min(len(self.inputs.facts.sections), len(self.fleet.devices))
        return any(self._fits(depth) for depth in range(most, 0, -1))

    def _fits(self, depth: int) -> bool:
        """Return whether ``depth`` of the largest devices can hold the model at all."""
        room, replicas = self.fleet.max_room, (0, self.virtual_nodes)
        modes_of = [
            mode
            for mode in self._leanest_modes(depth)
            if self.state_bytes(mode.state).beyond(times(room, depth)) <= 0
        ]

        def fits(tried: Sequence[modes.ExecutionMode]) -> bool:
            return any(self._even_bytes(depth, mode).beyond(room) <= 0 for mode in tried) or any(
                self.tight_cut(depth, mode, replicas, room, math.inf) is not None
                for mode in tried
                if mode.chunks == 1
            )

        if fits(modes_of):
            return True
        drafts = (modes.Draft(depth, 1, mode) for mode in modes_of)
        segmented = (self.segmented(draft, room) for draft in drafts)
        return fits([mode for mode in segmented if mode is not None])

    def _leanest_modes(self, depth: int) -> list[modes.ExecutionMode]:
        """Return the execution modes, each with the fewest micro-batches in flight."""
        return [
            replace(mode, in_flight_bound=int(self.heeds_bound(mode)))
            for mode in modes.execution_modes(self.inputs, depth)
            if mode.chunks == 1 or self.virtual_nodes % depth == 0
        ]

    def _even_bytes(self, depth: int, mode: modes.ExecutionMode) -> WorkerBytes:
        """Return the memory of the largest workers of an even cut."""
        even, alone = self.cut(mode.segments, depth * mode.chunks), self.virtual_nodes
        return largest(self.needed_bytes(depth, mode, even, (0, alone)))

    def why_nothing_fits(self) -> str:
        """Return one line that says how many devices of which size the model needs."""
        room = self.fleet.max_room
        have = f"{len(self.fleet.devices)} of at most {_text(room)}"
        sections = len(self.inputs.facts.sections)
        for depth in range(1, sections + 1):
            if self._fits(depth):
                return f"the model needs {counted(depth, 'device')} of {_text(room)}: got {have}"
        least = min(
            (self._even_bytes(sections, m) for m in self._leanest_modes(sections)),
            key=lambda needed: needed.beyond(room),
            default=NEVER,
        )
        knobs = "take larger devices or a smaller microbatch_size"
        if least.lacks_host(room):
            knobs = "take VMs with more memory for each GPU"
            if least.lacks_lock(room):
                knobs = "raise the limit of locked memory there (ulimit -l)"
            knobs += "" if self.inputs.state is None else ", or change runtime.state"
        if loading := loader_bytes(self.inputs.profile, self.microbatch_size):
            knobs += (
                f", or lower loader.ahead and loader.workers ({megabytes(loading)} of each worker)"
            )
        if why := self.inputs.facts.uncut:
            knobs += f", or let the model be cut, which is one section: {why}"
        return f"the model needs {counted(sections, 'device')} of {_text(least)} each: got {have}; {knobs}"


def _text(memory: WorkerBytes) -> str:
    """Return both memories as text, as far as they are known."""
    text = megabytes(memory.device)
    text += f" with {megabytes(memory.host)} of a VM" if memory.host else ""
    return f"{text}, {megabytes(memory.locked)} of it locked" if memory.locked else text
