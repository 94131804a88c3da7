"""Measures what it costs that more slots of a computer train than it has cores.

All of them train mini-batches, each a stage of one pipeline, with the product's own
executor, reduction, gather and update. What counts first is the time that a process has on a
core (``time.process_time``): waiting for a core is what the simulator works out. Caches
that another process has used meanwhile, switching between processes, and the threads
that receive messages are in that time. The simulator takes cores as busy whenever a
process has work, and shared evenly at any moment; how much longer mini-batches take than
it says is measured as well.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spottrain.morphing.simulate import reducing
from spottrain.morphing.simulate.sharing import SharedCores
from spottrain.morphing.simulate.simulator import expect_step, stage_times
from spottrain.pipeline.base.faults import FaultScript
from spottrain.pipeline.base.fixed_point import MAX_ATTEMPTS
from spottrain.pipeline.base.heap import tune_for_activations
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.calibrate.sections import SectionBench
from spottrain.pipeline.calibrate.tasks import Chain, make_stage
from spottrain.pipeline.comm.p2p import PipelineLinks
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.model.loaded import LoadedJob
from spottrain.pipeline.state.agreement import fold
from spottrain.pipeline.state.update import Gatherer, contribution
from spottrain.wire.model import ModelFacts, Plan, Profile, Reduction, Slot

BUDGET_S = 1.2
"""About how long all mini-batches of a plan may take."""
MAX_S = 10.0
"""With fewer mini-batches than ``_MIN_MINIBATCHES`` nothing is measured: beyond that."""
_MIN_MINIBATCHES, _MAX_MINIBATCHES = 4, 30
MAX_MICROBATCHES = 24
"""Of a mini-batch; more would only measure the same again."""
_WARM_UPS = 2
"""The first mini-batch watches every operation; then memory is allocated anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdTimes:
    """What one rank took on a core for a mini-batch: medians."""

    stage: int
    tasks_s: float
    recomputes: int
    sections_s: float
    """From the backwards to updated parameters, without the next one."""
    exchange_s: float
    """The gather, the decision, bookkeeping."""
    step_s: float
    """The whole mini-batch, by the clock."""


def minibatches_for(work_s: float, cores: int) -> int:
    """Return how many mini-batches are trained; 0: it would take too long.

    Args:
        work_s: Of all ranks, in a mini-batch.
        cores: That they share.
    """
    each_s = work_s / cores
    if (_WARM_UPS + _MIN_MINIBATCHES) * each_s > MAX_S:
        return 0
    if (_WARM_UPS + _MAX_MINIBATCHES) * each_s <= BUDGET_S:
        return _MAX_MINIBATCHES
    return max(_MIN_MINIBATCHES, int(BUDGET_S / each_s) - _WARM_UPS)


def crowded_plan(
    slots: Sequence[Slot], num_sections: int, microbatch_size: int, count: int
) -> Plan:
    """Return the plan that is trained: a pipeline of one replica over all slots.

    Args:
        slots: At most as many as there are sections, of which they get even runs.
        num_sections: Of the model.
        microbatch_size: Examples of a micro-batch.
        count: Micro-batches of a mini-batch.
    """
    depth = len(slots)
    return Plan(
        pipeline_depth=depth,
        data_parallel_width=1,
        microbatch_size=microbatch_size,
        minibatch_size=microbatch_size * count,
        schedule="varuna",
        recompute=True,
        stage_bounds=tuple(num_sections * p // depth for p in range(depth + 1)),
        replica_bounds=(0, count),
        slots=tuple(slots),
        predicted_step_s=0.0,
    )


def time_minibatches(
    loaded: LoadedJob,
    bench: SectionBench,
    plan: Plan,
    rank: int,
    minibatches: int,
    *,
    commits: bool,
) -> CrowdTimes:
    """Train as one stage of ``plan``; all its ranks do so together.

    Args:
        loaded: The job.
        bench: Has this rank's sections, which are trained.
        plan: See ``crowded_plan``.
        rank: This one.
        minibatches: To measure.
        commits: Whether mini-batches are committed, for which all ranks of the default
            group must take part; else only the tasks are of use.

    Raises:
        UserCodeError: The user's code raised.
        GenerationBrokenError, RuntimeError: A neighbour is gone.
    """
    chain = Chain(tuple(range(plan.pipeline_depth)), rank)
    links = PipelineLinks(*chain.neighbours, bench.device, loaded.spec.wire)
    try:
        stage = _Stage(loaded, bench, plan, chain, links)
        steps = range(_WARM_UPS + minibatches)
        taken = [stage.minibatch(step, commits=commits) for step in steps]
        links.flush()
    finally:
        links.close()
    names = "tasks_s", "sections_s", "exchange_s", "step_s"
    medians = map(statistics.median, zip(*taken[_WARM_UPS:], strict=True))
    return CrowdTimes(
        stage=rank,
        recomputes=stage.executor.recomputes,
        **dict(zip(names, medians, strict=True)),
    )


class _Stage:
    """One rank's stage, and the end of its mini-batches."""

    def __init__(
        self,
        loaded: LoadedJob,
        bench: SectionBench,
        plan: Plan,
        chain: Chain,
        links: PipelineLinks,
    ) -> None:
        self._loaded, self._memory = loaded, bench.memory
        self._sections = list(bench.sections)
        self._tracker = TensorTracker(bench.memory.num_bytes)
        spec, count = loaded.spec, plan.replica_bounds[-1]
        sizes = plan.minibatch_size, plan.microbatch_size
        self.executor, self._sums = make_stage(
            loaded,
            bench,
            chain,
            links,
            MicrobatchSource(loaded.job, spec.seed, *sizes),
            count,
            self._tracker,
            spec.reduction,
            FaultScript(),
        )
        self._updater = bench.memory.updater(self._sections, FaultScript())
        self._gatherer = Gatherer(plan, len(loaded.layout.metrics))

    def minibatch(self, step: int, *, commits: bool) -> tuple[float, ...]:
        """Train a mini-batch; return the times of ``CrowdTimes`` in their order."""
        started_s = time.perf_counter()
        arenas, ties = self._memory.arenas, self._loaded.layout.tied
        for attempt in range(MAX_ATTEMPTS):
            began_s = time.process_time()
            self._sums.begin(0, attempt, 0)
            losses = self.executor.train(step)
            trained_s = time.process_time()
            fits, totals = self._sums.reduce(), self._sums.total_loss(losses)
            if not commits:
                self._settle()
                return trained_s - began_s, 0.0, 0.0, 0.0
            none = [0.0] * len(totals)
            last = self._loaded.layout.num_sections - 1
            mine = [
                contribution(arenas[k], ties, totals if k == last else none, fits[k])
                for k in self._sections
            ]
            summed_s = time.process_time()
            result = self._gatherer.exchange(mine, 0, 0, 0, 0, save=False)
            if result.in_range:
                break
        decision = fold(0, step, result.contributions, stop=False)
        agreed_s = time.process_time()
        with self._tracker.watch():
            self._updater.apply(decision, self._sections)
        updated_s = time.process_time()
        self._settle()
        ended_s = time.process_time()
        return (
            trained_s - began_s,
            summed_s - trained_s + updated_s - agreed_s,
            agreed_s - summed_s + ended_s - updated_s,
            time.perf_counter() - started_s,
        )

    def _settle(self) -> None:
        """Do what follows a mini-batch: memory as its tensors need it."""
        if self._tracker.settle():
            tune_for_activations(self._tracker.largest_saved_bytes)


def stage_works_s(
    plan: Plan,
    profile: Profile,
    facts: ModelFacts,
    reduction: Reduction,
    recomputes: Mapping[int, int],
) -> list[float]:
    """Return the time that a profile gives for all tasks of each stage.

    Args:
        plan: That was trained, of one replica.
        profile: Of sections and overheads.
        facts: The model.
        reduction: How gradients are summed up.
        recomputes: In a mini-batch, by stage.
    """
    measured = reducing.sections_at(profile, plan.microbatch_size, facts, reduction)
    overheads = profile.overheads_at(plan.microbatch_size)
    works_s, count = [], plan.replica_bounds[-1]
    for stage in range(plan.pipeline_depth):
        run = plan.sections_of(stage)
        is_last = run[-1] == plan.num_sections - 1
        times = stage_times(
            measured, range(run[0], run[-1] + 1), 1.0, overheads, keeps_graph=is_last
        )
        again_s = recomputes.get(stage, 0) * times.recompute_s
        works_s.append(count * (times.forward_s + times.backward_s) + again_s)
    return works_s


def growth(
    times: Sequence[CrowdTimes],
    plan: Plan,
    profile: Profile,
    facts: ModelFacts,
    reduction: Reduction,
    core_share: float,
) -> float:
    """Return by how much more time on a core tasks took than a profile says, at least 1.

    Args:
        times: Of each stage.
        plan: That was trained.
        profile: That was measured with a core for each process.
        facts: The model.
        reduction: How gradients were summed up.
        core_share: Processor time over time of what the profile has: below 1 where
            other programs took the cores meanwhile, above with several threads.
    """
    recomputes = {one.stage: one.recomputes for one in times}
    works_s = stage_works_s(plan, profile, facts, reduction, recomputes)
    return max(1.0, sum(one.tasks_s for one in times) / core_share / sum(works_s))


def commit_times(
    times: Sequence[CrowdTimes], facts: ModelFacts, core_share: float
) -> tuple[float, float]:
    """Return ``commit_s_per_byte`` and ``commit_s``; arguments as of ``growth``."""
    param_bytes = sum(section.param_bytes for section in facts.sections)
    sections_s = sum(one.sections_s for one in times) / core_share
    exchange_s = statistics.mean(one.exchange_s for one in times) / core_share
    return sections_s / max(1, param_bytes), exchange_s


def step_growth(
    times: Sequence[CrowdTimes],
    plan: Plan,
    profile: Profile,
    facts: ModelFacts,
    reduction: Reduction,
    cores: int,
) -> float:
    """Return by how much longer mini-batches took than their simulation, at least 1.

    Args:
        times: Of each stage.
        plan: That was trained, on slots of one computer.
        profile: Of sections and overheads; its ``crowding`` counts as well.
        facts: The model.
        reduction: How gradients were summed up.
        cores: That all ranks shared.
    """
    sharing = SharedCores((0,) * plan.pipeline_depth, (cores,))
    step = expect_step(plan, profile, facts, reduction=reduction, sharing=sharing)
    return max(1.0, max(one.step_s for one in times) / step.step_s)
