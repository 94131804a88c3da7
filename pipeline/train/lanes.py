"""What mini-batches are computed with: parameters, models, sums, and what runs them.

Where gradients are stale by one mini-batch, even and odd ones have a lane each, over the
two versions of the parameters that are committed (PipeDream-2BW's double buffering,
Narayanan's dissertation, 3.2.1), so that two may be under way; else there is one lane.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from spottrain.morphing.schedules.schedule import OrderPolicy, make_schedule, max_in_flight
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.comm.p2p import PipelineLinks
from spottrain.pipeline.comm.tensor_group import TensorGroup
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.model.job import NamedParameters
from spottrain.pipeline.model.stage import AUTOCAST_TYPES, StageModel
from spottrain.pipeline.model.tensor_parallel import ALONE, Shards
from spottrain.pipeline.state.agreement import MinibatchDecision
from spottrain.pipeline.state.arena import SectionArena
from spottrain.pipeline.state.context import WorkerContext
from spottrain.pipeline.train.executor import Minibatch, StageExecutor, StagePlace
from spottrain.pipeline.train.recording import Recording
from spottrain.pipeline.train.reduction import REDUCTIONS, GradientReduction
from spottrain.pipeline.train.sharing import Network, StageSections
from spottrain.pipeline.train.sums import Replicas
from spottrain.pipeline.train.working import WorkingSection
from spottrain.wire.plan import Plan, segments_of


@dataclass(frozen=True, slots=True)
class Computed:
    """A mini-batch whose tasks are done at this rank."""

    step: int
    losses: list[list[float]]
    """``LossSums.values`` of every virtual node; empty but on the last stage."""
    tasks_s: float
    """Since it began, or since the one before it was done."""
    busy_s: float
    microbatches: int
    recomputes: int


@dataclass(slots=True)
class Lane:
    """What one mini-batch is computed with."""

    sections: list[WorkingSection]
    chunks: list[list[StageModel]]
    reduction: GradientReduction
    executor: StageExecutor | None = None


class Lanes:
    """The lanes of one rank in one generation.

    Args:
        context: The worker's.
        plan: Of the generation.
        rank: Of this worker.
        stage: Its sections.
        network: To its peers.
        tracker: Counts bytes.
    """

    def __init__(
        self,
        context: WorkerContext,
        plan: Plan,
        rank: int,
        stage: StageSections,
        network: Network,
        tracker: TensorTracker,
    ) -> None:
        self._context, self._plan = context, plan
        self._replica, self._stage = plan.replica_of(rank), rank % plan.pipeline_depth
        self._sections, self._arenas = stage, stage.all
        self._network, self._tracker = network, tracker
        self.tensor_group = self._group_of(plan.tensor_ranks(rank), rank)
        """Those that divide the matrices of this rank's stage, if several do."""
        self._shards = self._divide()
        self._number = 2 if context.loaded.spec.semantics == "stale_by_one" else 1
        self._source: MicrobatchSource | None = None
        self._links: PipelineLinks | None = None
        buffers: dict[str, torch.Tensor] = {}
        self._lanes = [self._make(step, buffers) for step in range(self._number)]
        self._newest = self._lanes[0]
        """That of the mini-batch whose tasks run, or ran last."""

    def connect(self, source: MicrobatchSource, links: PipelineLinks) -> None:
        """Get what micro-batches and activations come from."""
        self._source, self._links = source, links
        self._make_executors()

    def _group_of(self, ranks: tuple[int, ...], rank: int) -> TensorGroup | None:
        """Return this rank among ``ranks``, which divide the matrices of its stage."""
        if len(ranks) == 1:
            return None
        on_host, on_device = self._network.groups[ranks], self._network.device_groups.of(ranks)
        device, activity = self._context.device, self._context.activity
        return TensorGroup(ranks, rank, device, on_host, on_device, activity)

    def _divide(self) -> Shards:
        """Return what this rank has of matrices that its group divides."""
        if (group := self.tensor_group) is None:
            return ALONE
        loaded = self._context.loaded
        return Shards.of(loaded.layout, group, sequence=loaded.spec.sequence_parallel)

    @property
    def link_groups(self) -> tuple[TensorGroup | None, TensorGroup | None]:
        """The ranks that have the same tensors before the stage as this one, and behind it;
        none where they have a part of the sequence each."""
        layout, shards = self._context.loaded.layout, self._shards
        sections = self._plan.sections_of(self._stage)
        before, behind = (
            None if shards.split.is_split_before(layout, section) else self.tensor_group
            for section in (sections[0], sections[-1] + 1)
        )
        return before, behind

    def _make(self, step: int, buffers: dict[str, torch.Tensor]) -> Lane:
        """Make the lane of mini-batch ``step``, and of others."""
        spec, layout = self._context.loaded.spec, self._context.loaded.layout
        device = self._context.device
        sections = [
            WorkingSection(
                arena,
                device,
                sums_gradients=spec.reduction == "fast",
                # On a CPU autocast converts parameters itself.
                lowered=None if device.is_host else AUTOCAST_TYPES[spec.precision],
                matrices=layout.matrices,
                step=step,
                shards=self._shards,
            )
            for arena in self._arenas.values()
        ]
        for section in sections:
            for memory in section.memory:
                self._tracker.adopt(memory)
        tensors = {s.arena.section: s.parameters for s in sections}
        chunks = [
            [
                StageModel(
                    self._context.loaded.job,
                    layout,
                    run,
                    tensors,
                    device.torch_device,
                    spec.precision,
                    buffers,
                    self._shards,
                    spec.selective_recompute,
                    self._network.connections.check,
                )
                for run in segments_of(runs, self._plan.segments)
            ]
            for runs in self._plan.runs_of(self._stage)
        ]
        reduction = self._make_reduction(sections, chunks)
        for section in sections:  # not before views of its parameters were taken
            section.refresh()
        return Lane(sections, chunks, reduction)

    def _make_reduction(
        self, sections: list[WorkingSection], chunks: list[list[StageModel]]
    ) -> GradientReduction:
        plan, loaded = self._plan, self._context.loaded
        ranks = plan.stage_ranks(self._stage)
        replicas = Replicas(
            group=self._network.groups.get(ranks),
            device_group=self._network.device_groups.of(ranks),
            microbatches=plan.microbatches_of(self._replica),
            num_virtual_nodes=plan.replica_bounds[-1],
            has_loss=self._stage == plan.pipeline_depth - 1,
            num_metrics=len(loaded.layout.metrics),
            shards=self._shards,
            sharing=self._sections.sharing,
        )
        parameters = _parameters_of(chunks)
        make = REDUCTIONS[loaded.spec.reduction]
        return make(parameters, sections, replicas, self._context.device, self._tracker)

    def _make_executors(self) -> None:
        plan, loaded = self._plan, self._context.loaded
        assert self._source is not None
        assert self._links is not None
        microbatches = plan.microbatches_of(self._replica)
        lists = make_schedule(
            plan.schedule,
            plan.pipeline_depth,
            len(microbatches),
            recompute=plan.recompute,
            chunks=plan.chunks,
        )
        place = StagePlace(
            self._stage,
            lists,
            microbatches,
            plan.replica_bounds[-1],
            plan.in_flight_bound,
            # Ranks that divide matrices must come to the same sums.
            OrderPolicy.OPPORTUNISTIC if self._shards.size == 1 else OrderPolicy.STRICT,
            self._pair_bound(len(microbatches)),
        )
        for lane in self._lanes:
            lane.executor = StageExecutor(
                lane.chunks,
                place,
                self._source,
                self._links,
                loaded.spec.seed,
                self._context.faults,
                self._tracker,
                self._context.device,
                loaded.spec.steps,
                loaded.layout.metrics,
                loaded.layout.blank_for(self._arenas),
                loaded.layout.blank_for(self._arenas, heldout=True),
                self._context.activity,
            )

    def _pair_bound(self, count: int) -> int:
        """Return how many micro-batches of two mini-batches may be in flight: as many as of
        one that is twice as long, as the planner has it."""
        plan = self._plan
        if self._number == 1 or plan.chunks > 1:
            return 0
        if plan.in_flight_bound is not None:
            return plan.in_flight_bound
        lists = make_schedule(
            plan.schedule,
            plan.pipeline_depth,
            self._number * count,
            recompute=plan.recompute,
        )
        return max_in_flight(lists[self._stage])

    def of(self, step: int) -> Lane:
        """Return the lane of mini-batch ``step``."""
        return self._lanes[step % self._number]

    @property
    def executor(self) -> StageExecutor:
        """What ran last."""
        assert self._newest.executor is not None
        return self._newest.executor

    def record(self, recording: Recording | None) -> None:
        """Have tasks and messages taken down from now on, or not any more."""
        for lane in self._lanes:
            assert lane.executor is not None
            lane.executor.recording = recording

    def refresh(self, arena: SectionArena) -> None:
        """Let copies of a section follow an update, before they are computed with."""
        version = arena.version
        lane = self.of(version if self._number == 1 else version + 1)
        next(s for s in lane.sections if s.arena is arena).refresh()

    def begin(self, step: int, origin: int) -> None:
        """Get what tasks need of sections that other ranks hold, in the agreed state."""
        self._sections.begin(self._lanes[0].sections, step, origin)

    def follow(self, decision: MinibatchDecision) -> None:
        """Get the next version of sections that other ranks hold; what this one holds is
        applied."""
        self._sections.follow(self._lanes[0].sections, decision)

    def at_newest(self, version: int) -> StageExecutor:
        """Return what computes with the parameters of ``version``, the newest one."""
        lane = self._newest = self.of(version + 1)
        for section in lane.sections:
            section.wait()
        assert lane.executor is not None
        return lane.executor

    def open(self, step: int, attempt: int = 0) -> Minibatch:
        """Begin with a mini-batch whose parameters are there; no commit is under way.

        Args:
            step: The mini-batch.
            attempt: As for ``GradientReduction.begin``.
        """
        with self._context.memory.control.lock:
            for arena in self._arenas.values():
                arena.unprepare()
        lane = self.of(step)
        for section in lane.sections:
            section.wait()
        scale_exponent = 0
        if self._context.loaded.spec.precision == "fp16":
            numbers = next(iter(self._arenas.values())).numbers
            scale_exponent = numbers.loss_scale.exponent
        lane.reduction.begin(step, attempt, scale_exponent)
        assert lane.executor is not None
        return lane.executor.open(step, scale_exponent)

    def finish(
        self,
        step: int,
        minibatch: Minibatch,
        began_s: float,
        follow: Callable[[], Minibatch | None] = lambda: None,
    ) -> Computed:
        """Run all forwards and backwards that are left of a mini-batch.

        Args:
            step: The mini-batch.
            minibatch: What ``open`` has returned.
            began_s: What ``tasks_s`` counts from, monotonic.
            follow: As for ``StageExecutor.finish``.
        """
        self._newest = self.of(step)
        executor = self.executor
        losses = executor.finish(minibatch, follow)
        return Computed(
            step=step,
            losses=losses,
            tasks_s=time.monotonic() - began_s,
            busy_s=executor.busy_s,
            microbatches=executor.microbatches,
            recomputes=executor.recomputes,
        )

    def share(self, replica_bounds: tuple[int, ...]) -> None:
        """Change this replica's share of mini-batches; none is under way."""
        self._plan = replace(self._plan, replica_bounds=replica_bounds)
        for lane in self._lanes:
            lane.reduction.close()
            lane.reduction = self._make_reduction(lane.sections, lane.chunks)
        self._make_executors()

    def close(self) -> None:
        """Let go of the parameters."""
        for lane in self._lanes:
            lane.reduction.close()


def _parameters_of(chunks: list[list[StageModel]]) -> dict[int, NamedParameters]:
    """Return the (name, parameter) pairs of each section."""
    return {k: model.parameters_of(k) for model in itertools.chain(*chunks) for k in model.sections}
