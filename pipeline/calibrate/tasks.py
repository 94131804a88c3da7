"""Measures the overhead of tasks: the executor's own time beyond the sections'.

The product's own executor trains mini-batches over the sections at hand, with the
product's links to the neighbours. Every moment of a task that is not inside the user's
forward or backward counts: fetching examples, counting bytes, bookkeeping, posting
messages, being held up by receivers. Waiting for what has not arrived does not, nor for the
device, of which the host runs ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import TypeVar

import torch

from spottrain.morphing.schedules.schedule import Unit, make_schedule
from spottrain.pipeline.base.faults import FaultScript, Hook
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.calibrate.sections import SectionBench
from spottrain.pipeline.calibrate.statistics import sigma
from spottrain.pipeline.comm.p2p import Arrival, Direction, PipelineLinks
from spottrain.pipeline.devices.port import Device
from spottrain.pipeline.loader.prefetch import loaders_for
from spottrain.pipeline.model.data import Microbatch, MicrobatchSource, make_batch
from spottrain.pipeline.model.job import Batch
from spottrain.pipeline.model.loaded import LoadedJob
from spottrain.pipeline.model.stage import StageModel
from spottrain.pipeline.state.slot import SlotMemory
from spottrain.pipeline.train.executor import StageExecutor, StagePlace
from spottrain.pipeline.train.reduction import REDUCTIONS
from spottrain.pipeline.train.sums import Replicas
from spottrain.pipeline.train.working import WorkingSection
from spottrain.wire.model import LoaderSpec, TaskOverheads

T = TypeVar("T")

BUDGET_S = 1.0
"""About how long the mini-batches of a micro-batch size may take."""
MAX_S = 5.0
"""Longer measurements are left out: such tasks dwarf their overhead."""
_MIN_MICROBATCHES, _MAX_MICROBATCHES = 2, 24
_MINIBATCHES = 2
"""The first one is a warm-up: it watches every operation."""
_KINDS = (Hook.FORWARD, Hook.RECOMPUTE, Hook.BACKWARD)
_POSTING, _FETCHING = "posting", "fetching"

Samples = dict[str, list[float]]
"""Overheads by kind of task; and the times of posting and of making micro-batches."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The ranks that compute, each a stage of one pipeline."""

    ranks: tuple[int, ...]
    place: int
    """Of this rank among them."""

    @property
    def neighbours(self) -> tuple[int | None, int | None]:
        """The ranks before and after this one."""
        first, last = self.place == 0, self.place + 1 == len(self.ranks)
        before = None if first else self.ranks[self.place - 1]
        return before, None if last else self.ranks[self.place + 1]


def microbatches_for(depth: int, slowest_s: float) -> int:
    """Return the number of micro-batches of a mini-batch; 0: leave it out.

    Args:
        depth: Stages of the pipeline.
        slowest_s: A forward, recompute and backward of the slowest stage.
    """
    fill = depth - 1
    if _MINIBATCHES * (_MIN_MICROBATCHES + fill) * slowest_s > MAX_S:
        return 0
    if _MINIBATCHES * (_MAX_MICROBATCHES + fill) * slowest_s <= BUDGET_S:
        return _MAX_MICROBATCHES
    return max(_MIN_MICROBATCHES, int(BUDGET_S / _MINIBATCHES / slowest_s) - fill)


def time_tasks(
    loaded: LoadedJob,
    bench: SectionBench,
    memory: SlotMemory,
    chain: Chain,
    links: TimedLinks,
    microbatch_size: int,
    num_microbatches: int,
) -> Samples:
    """Train mini-batches as one stage of ``chain``; all its ranks do so together.

    Args:
        loaded: The job.
        bench: Knows this rank's sections.
        memory: Holds them; their gradients are overwritten.
        chain: The ranks that take part.
        links: To the neighbours; the caller closes them.
        microbatch_size: Examples of a micro-batch.
        num_microbatches: Of a mini-batch.

    Raises:
        UserCodeError: The user's code raised.
        GenerationBrokenError, RuntimeError: A neighbour is gone.
    """
    spec, clock = loaded.spec, links.clock
    tracker = _TimedTracker(memory.num_bytes, clock)
    sections = [
        WorkingSection(memory.arenas[k], bench.device, sums_gradients=True) for k in bench.sections
    ]
    for section in sections:
        section.refresh()
        section.wait()
    stage = StageModel(
        loaded.job,
        loaded.layout,
        range(bench.sections[0], bench.sections[-1] + 1),
        {s.arena.section: s.parameters for s in sections},
        bench.device.torch_device,
        spec.precision,
        selective=spec.selective_recompute,
    )
    alone = Replicas(
        microbatches=_one_each(num_microbatches),
        num_virtual_nodes=num_microbatches,
        has_loss=chain.neighbours[1] is None,
        num_metrics=len(loaded.layout.metrics),
    )
    named = {k: stage.parameters_of(k) for k in bench.sections}
    sums = REDUCTIONS["fast"](named, sections, alone, bench.device, tracker)
    executor = StageExecutor(
        [[stage]],
        _place(chain, num_microbatches),
        _timed_source(loaded, microbatch_size, clock),
        links,
        spec.seed,
        _TaskMarks(clock),
        tracker,
        bench.device,
        metrics=loaded.layout.metrics,
    )
    for step in range(_MINIBATCHES):
        clock.clear()
        sums.begin(0, 0, 0)
        executor.train(step)
        clock.end_task()
        sums.reduce()
        tracker.settle()
    links.flush()
    return clock.samples


def _timed_source(
    loaded: LoadedJob, microbatch_size: int, clock: _OverheadClock
) -> MicrobatchSource:
    """Return what makes micro-batches and times that separately."""
    job, spec = loaded.job, loaded.spec

    def fetch(wanted: Microbatch, following: Iterable[Microbatch]) -> Batch:
        return clock.exclude(partial(make_batch, job, spec.seed, wanted), _FETCHING)

    sizes = spec.minibatch_size, microbatch_size
    return MicrobatchSource(job, spec.seed, *sizes, fetch)


def _place(chain: Chain, num_microbatches: int) -> StagePlace:
    """Return the place in a schedule that recomputes wherever a stage can."""
    lists = make_schedule("varuna", len(chain.ranks), num_microbatches, recompute=True)
    return StagePlace(chain.place, lists, _one_each(num_microbatches), num_microbatches)


def _one_each(num_microbatches: int) -> tuple[range, ...]:
    """Return the virtual nodes of micro-batches of one each."""
    return tuple(range(node, node + 1) for node in range(num_microbatches))


def summarise_overheads(
    every: Sequence[Samples],
    reaching_s: float,
    loader: LoaderSpec,
    num_microbatches: int = 1,
) -> TaskOverheads | None:
    """Return the medians of the measurements of all stages.

    Args:
        every: Of each stage.
        reaching_s: From the call of the user's code to the stage's first section, which
            forwards and recomputes take too.
        loader: The loader processes that workers will have.
        num_microbatches: Of a whole mini-batch.

    Returns:
        ``None`` if nothing was measured. Where nobody recomputes, a recompute is taken
        for a backward: neither fetches examples.
    """
    found: dict[str, list[float]] = {}
    for one in every:
        for kind, times_s in one.items():
            found.setdefault(kind, []).extend(times_s)
    typical_s = {kind: median(times_s) for kind, times_s in found.items() if times_s}
    if not typical_s:
        return None
    backward_s = typical_s[Hook.BACKWARD]
    fetch_s = typical_s.get(_FETCHING, 0.0)
    loaders = loaders_for(loader, num_microbatches * fetch_s)
    forward_s = typical_s[Hook.FORWARD] + (0.0 if loaders else fetch_s)
    return TaskOverheads(
        forward_s=forward_s + reaching_s,
        recompute_s=typical_s.get(Hook.RECOMPUTE, backward_s) + reaching_s,
        backward_s=backward_s,
        posting_s=typical_s.get(_POSTING, 0.0),
        deviation_s=max(sigma(times_s) for times_s in found.values() if times_s),
        fetch_s=fetch_s / loaders if loaders else 0.0,
    )


@dataclass(slots=True)
class _OverheadClock:
    """Adds up the time of a task that is neither computing nor waiting."""

    device: Device
    samples: Samples = field(default_factory=dict)
    _kind: str = ""
    _began_s: float = 0.0
    _excluded_s: float = 0.0
    """Computing and waiting since then."""

    def clear(self) -> None:
        """Drop all samples."""
        self.samples, self._kind = (
            {kind: [] for kind in (*_KINDS, _POSTING, _FETCHING)},
            "",
        )

    def begin_task(self, kind: str) -> None:
        """End the task that runs, and begin another."""
        self.end_task()
        self._kind, self._began_s, self._excluded_s = kind, self._now_s(), 0.0

    def end_task(self) -> None:
        """End the task that runs, if there is one."""
        if self._kind:
            spent_s = self._now_s() - self._began_s
            self.samples[self._kind].append(spent_s - self._excluded_s)

    def exclude(self, run: Callable[[], T], kind: str = "") -> T:
        """Run something whose time does not count, or counts as another kind."""
        began_s = self._now_s()
        result = run()
        spent_s = self._now_s() - began_s
        self._excluded_s += spent_s
        if kind:
            self.samples[kind].append(spent_s)
        return result

    def _now_s(self) -> float:
        """Return the time that this thread has not been held by the device."""
        return self.device.clock() - self.device.held_s()


class _TaskMarks(FaultScript):
    """A script without faults that notes when tasks begin."""

    __slots__ = ("_clock",)

    def __init__(self, clock: _OverheadClock) -> None:
        super().__init__()
        self._clock = clock

    def at(self, hook: Hook) -> None:
        """Note it."""
        self._clock.begin_task(hook)


class _TimedTracker(TensorTracker):
    """Excludes the user's code from the clock."""

    def __init__(self, static_bytes: int, clock: _OverheadClock) -> None:
        super().__init__(static_bytes)
        self._clock = clock

    def forward(self, kind: str, unit: Unit, keep: bool, run: Callable[[], T]) -> T:
        return super().forward(kind, unit, keep, partial(self._clock.exclude, run))

    def backward(self, unit: Unit, run: Callable[[], None]) -> None:
        super().backward(unit, partial(self._clock.exclude, run))


class TimedLinks(PipelineLinks):
    """Links that exclude waiting from the clock, and time posting separately."""

    def __init__(self, previous: int | None, following: int | None, device: Device) -> None:
        super().__init__(previous, following, device)
        self.clock = _OverheadClock(device)

    def arrival(self, *, wait: bool) -> Arrival | None:
        """Return what came in, as ``PipelineLinks`` does."""
        if not wait:
            return super().arrival(wait=False)
        return self.clock.exclude(partial(super().arrival, wait=True))

    def send(
        self, direction: Direction, tensors: Iterable[torch.Tensor | None], note: int = 0
    ) -> None:
        """Send tensors, as ``PipelineLinks`` does."""
        self.clock.exclude(self.flush)  # a late neighbour makes us wait
        post = partial(super().send, direction, tensors, note)
        self.clock.exclude(post, _POSTING)
