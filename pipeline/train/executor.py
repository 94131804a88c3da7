"""Runs one stage's list of tasks: the forwards and backwards of a mini-batch.

The order is that of ``morphing.schedules``, lists and ``next_task``, so that what is
simulated is what runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import record_function
from torch.utils._pytree import tree_flatten, tree_unflatten

from spottrain.activity import Activity
from spottrain.morphing.schedules.schedule import (
    OrderPolicy,
    StageProgress,
    StageSchedule,
    Task,
    Unit,
    Work,
    arrivals,
)
from spottrain.pipeline.base.blank import BlankBatch, signature_of
from spottrain.pipeline.base.faults import FaultScript, Hook
from spottrain.pipeline.base.tracking import TensorTracker
from spottrain.pipeline.comm.p2p import Arrival, Direction, PipelineLinks
from spottrain.pipeline.devices.port import Device
from spottrain.pipeline.model.data import MicrobatchSource
from spottrain.pipeline.model.entrypoint import user_code
from spottrain.pipeline.model.job import Batch, Real
from spottrain.pipeline.model.loss import LossSums, check_leads_back
from spottrain.pipeline.model.order import random_seed
from spottrain.pipeline.model.stage import (
    Activations,
    Gradients,
    StageModel,
    StageOutput,
    go_backward,
)
from spottrain.pipeline.train.recording import Recording
from spottrain.steps import at_step

_AHEAD = 2
"""Tasks that the host may have queued on the device."""
_LEAD = 2
"""Activations that may have arrived ahead of an evaluation."""


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Place of an executor in the plan."""

    stage: int
    lists: tuple[StageSchedule, ...]
    """Of all stages of its replica: the neighbours' lists determine the order of
    arrivals."""
    microbatches: tuple[range, ...]
    """Virtual nodes of each micro-batch of its replica, in order."""
    num_virtual_nodes: int
    """Of a mini-batch, those of all replicas."""
    in_flight_bound: int | None = None
    """As in the plan."""
    order_policy: OrderPolicy = OrderPolicy.OPPORTUNISTIC
    """How strictly it follows its list."""
    pair_bound: int = 0
    """Maximum micro-batches in flight of a mini-batch and the one after it together."""

    @property
    def is_first(self) -> bool:
        """True if its first chunk reads examples."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if its last chunk computes the loss."""
        return self.stage == len(self.lists) - 1


@dataclass(slots=True)
class StageExecutor:
    """Computes one stage of one replica."""

    chunks: Sequence[Sequence[StageModel]]
    """The user's model, cut: the segments of each of the stage's runs of sections."""
    place: StagePlace
    source: MicrobatchSource
    links: PipelineLinks
    """To the neighbouring stages."""
    seed: int
    """The job's."""
    faults: FaultScript
    """Faults to inject, in tests."""
    tracker: TensorTracker
    """Counts tensor bytes."""
    device: Device
    """What computes."""
    steps: int = 0
    """Of the whole job; no examples are fetched for later ones."""
    metrics: tuple[str, ...] = ()
    """What the loss measures besides the loss in training."""
    blank: BlankBatch | None = None
    """What it does with instead of examples, where they have the shapes for it."""
    heldout_blank: BlankBatch | None = None
    """The same in evaluations."""
    activity: Activity = field(default_factory=Activity)
    """Where it tells what it does."""
    recording: Recording | None = None
    """Where tasks and messages are taken down, when somebody has asked for that."""
    busy_s: float = 0.0
    """Time inside the tasks of the newest mini-batch."""
    recomputes: int = 0
    """Recomputes among the tasks of the newest mini-batch."""
    task: Task | None = None
    """The one under way, or that an error ended; ``None`` in an evaluation."""
    model: StageModel | None = None
    """The segment that runs, or ran last."""
    segments: list[list[_Segment]] = field(init=False)
    """Of each chunk."""
    expected: tuple[tuple[Unit, ...], tuple[Unit, ...]] = field(init=False)
    """Arrivals of a mini-batch by direction, in order."""

    def __post_init__(self) -> None:
        self.expected = arrivals(self.place.lists, self.place.stage)
        numbers = itertools.count()
        self.segments = [
            list(_segments(chunk, numbers, self.reads_examples(index)))
            for index, chunk in enumerate(self.chunks)
        ]

    @property
    def microbatches(self) -> int:
        """Micro-batches of every mini-batch."""
        return len(self.place.microbatches)

    def train(self, step: int) -> list[list[float]]:
        """Run forwards and backwards of mini-batch ``step``; returns as ``finish``."""
        return self.finish(self.open(step))

    def open(self, step: int, scale_exponent: int = 0) -> Minibatch:
        """Let what belongs to mini-batch ``step`` come in, after what came before.

        Args:
            step: Mini-batches applied before it.
            scale_exponent: Losses are multiplied by two to it before they go backward.
        """
        return Minibatch(self, step, scale_exponent)

    def finish(
        self,
        minibatch: Minibatch,
        follow: Callable[[], Minibatch | None] = lambda: None,
    ) -> list[list[float]]:
        """Run what is left of a mini-batch, and forwards of the one after it meanwhile.

        Args:
            minibatch: It.
            follow: Returns the one after it, on another copy of the parameters, once that
                may begin; asked whenever there is nothing else to do.

        Returns:
            ``LossSums.values`` of every micro-batch, in order; empty on every stage
            but the last.
        """
        losses = minibatch.run(follow)
        self.recomputes = minibatch.recomputes
        self.busy_s = self.device.elapsed_s(minibatch.tasks)
        return losses

    def evaluate(self, name: str, microbatches: range) -> list[LossSums]:
        """Run the forward over micro-batches of a held-out set, in evaluation mode.

        Returns:
            What the loss has returned for each; empty but on the last stage.
        """
        links, place, self.task = self.links, self.place, None
        units = _evaluation_units(microbatches, len(place.lists), len(self.chunks))
        awaited = sum(not self.reads_examples(chunk) for _, chunk in units)
        # No backward holds the senders back here: arrivals must not pile up.
        links.expect(Direction.ACTIVATION, min(_LEAD, awaited))
        losses = []
        batches: dict[int, Batch] = {}
        note = 0
        models = list(itertools.chain(*self.chunks))
        for model in models:
            model.eval()
        try:
            for microbatch, chunk in units:
                self.activity.note("evaluate")
                received: Activations = []
                if not self.reads_examples(chunk):
                    with self.activity.waiting(links.source(Direction.ACTIVATION)):
                        while (arrival := links.arrival(wait=True)) is None:
                            pass  # woken for a mini-batch that has been over for long
                    received = arrival.activations_on(self.device)
                    awaited -= 1
                    if awaited >= _LEAD:
                        links.expect(Direction.ACTIVATION, 1)
                    self.tracker.adopt_all(received)
                    note = arrival.note
                if chunk == 0:
                    rest = range(microbatch, microbatches.stop)
                    with self.activity.during("data"):
                        batches[microbatch], note = self._heldout_batch(name, rest, note)
                    self.tracker.adopt_all(batches[microbatch])
                batch = batches[microbatch]
                if chunk == len(self.chunks) - 1:
                    del batches[microbatch]
                with user_code("evaluation"), torch.no_grad():
                    out = self._evaluate((microbatch, chunk), batch, received)
                if isinstance(out, LossSums):
                    losses.append(out)
                else:
                    # One message is in flight at a time: they are large.
                    links.flush()
                    links.send(Direction.ACTIVATION, out, note)
        finally:
            for model in models:
                model.train()
        return losses

    def _heldout_batch(self, name: str, rest: range, note: int) -> tuple[Batch, int]:
        """Get a micro-batch of a held-out set, or what stands in for it.

        Args:
            name: The set.
            rest: The micro-batch, and those after it.
            note: Signature that has come with its activation.

        Returns:
            The micro-batch and its signature.
        """
        if self.heldout_blank is not None and not self.place.is_first:
            examples = self.source.heldout_examples(name, rest.start)
            blank = self.heldout_blank.make(examples, self.device.torch_device)
            if signature_of(blank) == note:
                return blank, note
        batch = self.source.heldout(name, rest.start, rest[1:])
        if self.place.is_first:
            note = signature_of(batch)
        return on_device(batch, self.device), note

    def _evaluate(self, unit: Unit, batch: Batch, received: Activations) -> StageOutput:
        microbatch, chunk = unit
        out: StageOutput = received
        for segment in self.segments[chunk]:
            assert not isinstance(out, LossSums)
            self.model = segment.model
            out = self.tracker.forward(
                "evaluation",
                (microbatch, segment.number),
                False,
                partial(segment.model.forward, batch, out, _no_seeds),
            )
        return out

    def reads_examples(self, chunk: int) -> bool:
        """Return whether a chunk begins the model, so that no activation comes for it."""
        return self.place.is_first and chunk == 0

    def seeds(self, step: int, virtual_node: int) -> Callable[[int], int]:
        """Return the seed of each section in one micro-batch."""
        return lambda section: random_seed(self.seed, step, virtual_node, section)


@dataclass(frozen=True, slots=True)
class _Segment:
    """Sections of a chunk whose graph exists as a whole, or not at all."""

    number: int
    """Among all of the stage."""
    model: StageModel
    goes_back: bool
    """False if nothing is trained from the beginning of the model to its end."""

    def of(self, microbatch: int) -> Unit:
        """Return the name of one micro-batch in it."""
        return microbatch, self.number


def _segments(
    chunk: Sequence[StageModel], numbers: Iterator[int], reads_examples: bool
) -> Iterator[_Segment]:
    """Yield the segments of a chunk.

    Args:
        chunk: Models, one for each segment.
        numbers: Of the stage's segments, from here on.
        reads_examples: Whether it begins the model; else gradients are sent on from it.
    """
    goes_back = not reads_examples
    for model in chunk:
        goes_back = goes_back or any(
            parameter.requires_grad
            for section in model.sections
            for _, parameter in model.parameters_of(section)
        )
        yield _Segment(next(numbers), model, goes_back)


def _no_seeds(section: int) -> int:
    """Return the seed of every section in an evaluation."""
    return 0


def _evaluation_units(microbatches: range, depth: int, chunks: int) -> list[Unit]:
    """Return in which order every stage evaluates: as an interleaved list forwards.

    Groups of ``depth`` micro-batches go through one chunk after the other, so that no
    stage waits for itself.
    """
    starts = range(0, len(microbatches), depth)
    groups = (microbatches[start : start + depth] for start in starts)
    return [(j, chunk) for group in groups for chunk in range(chunks) for j in group]


def saving_nothing() -> AbstractContextManager[None]:
    """Let autograd save no tensors: computations inside cannot go backward.

    Without gradients some operations, such as an LSTM, would take another kernel and
    round differently than in the recompute, hence differently for every schedule.
    """
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing)


def on_device(batch: Batch, device: Device) -> Batch:
    """Return a micro-batch whose tensors are on ``device``."""
    if device.is_host:
        return batch
    leaves, structure = tree_flatten(batch)
    uploads = {
        number: device.upload(device.allocate_host(leaf.shape, leaf.dtype).copy_(leaf))
        for number, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor)
    }
    for number, upload in uploads.items():
        leaves[number] = device.wait(upload)
    return tree_unflatten(leaves, structure)


def read_reals(rows: Sequence[Sequence[Real]], device: Device) -> list[list[float]]:
    """Bring rows of the same length to the host at once: each number would hold it."""
    if not rows:
        return []
    where = device.torch_device

    def real(value: Real) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.double().to(where)
        return torch.full((), value, dtype=torch.float64, device=where)

    table = torch.stack([torch.stack([real(x) for x in row]) for row in rows])
    values: list[list[float]] = device.finish(device.download(table)).tolist()
    return values


class Minibatch:
    """One mini-batch in flight: what has arrived, what is kept for the backward."""

    def __init__(self, stage: StageExecutor, step: int, scale_exponent: int) -> None:
        self._stage = stage
        self._place = stage.place
        self._links = stage.links
        self._step = step
        self._scale = 2.0**scale_exponent
        self._device = stage.device
        self._progress = StageProgress(
            self._place.lists[self._place.stage],
            first=self._place.is_first,
            last=self._place.is_last,
            bound=self._place.in_flight_bound,
            order_policy=self._place.order_policy,
        )
        self.following: Minibatch | None = None
        """The mini-batch after it, once its forwards may run."""
        self.recomputes = 0
        self._number = stage.microbatches * (step % 2)
        """Added to numbers of micro-batches, so that those of two mini-batches differ."""
        self._to_come = dict(zip(Direction, map(len, stage.expected), strict=True))
        self._awaited = dict(zip(Direction, map(iter, stage.expected), strict=True))
        for direction, units in zip(Direction, stage.expected, strict=True):
            self._links.expect(direction, len(units))
        self._activations = 0
        """That have come in."""
        self._batches: dict[int, Batch] = {}
        """Examples of micro-batches in flight in any chunk."""
        self._notes: dict[int, int] = {}
        """Their signatures, which go along with activations."""
        self._arrived: dict[Unit, Arrival] = {}
        """What has come in, on its way to the device."""
        self._stash: dict[Unit, Activations] = {}
        """Inputs of what is in flight, by segment."""
        self._graphs: dict[Unit, Activations] = {}
        """Outputs whose graph is kept, of the last segments of chunks."""
        self._gradients: dict[Unit, Arrival] = {}
        """Of outputs, that have come in and wait for their backward."""
        self._losses: list[list[Real]] = []
        self.tasks: list[tuple[Any, Any]] = []
        """When each task began and ended, on the device."""

    def run(self, follow: Callable[[], Minibatch | None]) -> list[list[float]]:
        """Run all tasks that are left; see ``StageExecutor.finish``."""
        while not self._progress.done:
            while self._take_arrival(wait=False):
                pass
            task = self._progress.next_task()
            if task is not None:
                self._do(task)
            elif not self._let_follow(follow):
                with self._stage.activity.waiting(self._awaited_rank()):
                    self._take_arrival(wait=True)
        kept = self._arrived, self._stash, self._graphs, self._gradients, self._batches
        assert not any(kept)
        return read_reals(self._losses, self._device)

    def _do(self, task: Task) -> None:
        run = {
            Work.FORWARD: self._forward,
            Work.RECOMPUTE: self._recompute,
            Work.BACKWARD: self._backward,
        }
        self._stage.activity.note("compute")
        if any(self._stage.expected) and len(self.tasks) >= _AHEAD:
            # Else the host would choose long before it matters what has arrived.
            self._device.reach(self.tasks[-_AHEAD][1])
        self._stage.task = task
        began = self._device.mark()
        with at_step(self._step), _named(f"{task.work.name.lower()} {task.microbatch}"):
            run[task.work](task)
        self.tasks.append((began, self._device.mark()))
        if self._stage.recording is not None:
            self._stage.recording.task(task, *self.tasks[-1])
        self.recomputes += task.work is Work.RECOMPUTE
        self._progress.completed(task)

    def _let_follow(self, follow: Callable[[], Minibatch | None]) -> bool:
        """Run a forward of the mini-batch after this one, if one is ready.

        Only once all forwards of this one are done: so links stay first in, first out.
        """
        progress = self._progress
        if progress.forwards < progress.num_microbatches:
            return False
        if self.following is None:
            self.following = follow()
        if self.following is None:
            return False
        return self.following._go_ahead(self._place.pair_bound - progress.in_flight)

    def _go_ahead(self, room: int) -> bool:
        """Run a forward while the mini-batch before is under way, if one is ready.

        Args:
            room: Micro-batches of this one that may be in flight.
        """
        task = self._progress.next_task()
        if task is None or task.work is not Work.FORWARD:
            return False
        keeps_more = self._progress.recomputes and self._progress.keeps_graph(task)
        if self._progress.in_flight >= room or keeps_more:
            return False
        self._do(task)
        return True

    def _awaited_rank(self) -> int:
        """Return the rank that keeps this one waiting: the next stage if there are
        activations to go on with later, or none to come."""
        expected, _ = self._stage.expected
        waits = not self._arrived and self._activations < len(expected)
        return self._links.source(Direction.ACTIVATION if waits else Direction.GRADIENT)

    def _take_arrival(self, *, wait: bool) -> bool:
        arrival = self._links.arrival(wait=wait)
        if arrival is None:
            return False
        follower = None if self._to_come[arrival.direction] else self.following
        (follower or self)._take(arrival)
        return True

    def _take(self, arrival: Arrival) -> None:
        self._to_come[arrival.direction] -= 1
        unit = next(self._awaited[arrival.direction])
        self._activations += arrival.direction is Direction.ACTIVATION
        for one in arrival.tensors:
            if one is not None:
                self._stage.tracker.adopt(one.transfer.target)
        if self._stage.recording is not None:
            self._stage.recording.arrived(arrival)
        if arrival.direction is Direction.ACTIVATION:
            self._arrived[unit] = arrival
            self._progress.activation_arrived(unit[1])
        else:
            self._gradients[unit] = arrival
            self._progress.gradient_arrived(unit[1])

    def _forward(self, task: Task) -> None:
        self._stage.faults.at(Hook.FORWARD)
        if task.chunk == 0:
            batch = self._blank(task)
            if batch is None:
                batch = on_device(self._fetch(task.microbatch), self._device)
            self._batches[task.microbatch] = batch
            self._stage.tracker.adopt_all(batch)
        *others, last = self._stage.segments[task.chunk]
        if (arrived := self._arrived.pop(_unit(task), None)) is not None:
            first = others[0] if others else last
            received = arrived.activations_on(self._device)
            self._stage.tracker.adopt_all(received)
            self._stash[first.of(task.microbatch)] = received
        for segment in others:
            self._stash_output(segment, task.microbatch)
            self._add_changes(segment, task.microbatch)
        keep = self._progress.keeps_graph(task)
        out = self._compute(last, task.microbatch, keep)
        self._add_changes(last, task.microbatch)
        if isinstance(out, LossSums):
            self._losses.append(out.values(self._stage.metrics))
            self._graphs[_unit(task)] = [out.loss]
            return
        note = self._notes[task.microbatch]
        self._send(Direction.ACTIVATION, task, [one.detach() for one in out], note)
        if keep:
            self._graphs[_unit(task)] = out

    def _stash_output(self, segment: _Segment, microbatch: int) -> None:
        """Run a segment that is not the last of its chunk; keep but what comes out."""
        out = self._compute(segment, microbatch, keep=False)
        assert not isinstance(out, LossSums)
        self._stash[microbatch, segment.number + 1] = [one.detach() for one in out]
        if not segment.goes_back:
            self._stash.pop(segment.of(microbatch), None)

    def _add_changes(self, segment: _Segment, microbatch: int) -> None:
        """Add up what a forward, which no recompute is, has changed in buffers."""
        nodes = self._place.microbatches[microbatch]
        segment.model.add_changes(nodes, self._place.num_virtual_nodes, self._scale)

    def _blank(self, task: Task) -> Batch | None:
        """Return a stand-in for examples, if the stage can do with one."""
        stage, arrived = self._stage, self._arrived.get(_unit(task))
        if arrived is None:
            return None
        self._notes[task.microbatch] = arrived.note
        if stage.blank is None:
            return None
        examples = stage.source.num_examples(self._place.microbatches[task.microbatch])
        blank = stage.blank.make(examples, self._device.torch_device)
        if signature_of(blank) == arrived.note:
            return blank
        stage.blank = None  # shapes vary: examples are fetched ahead from now on
        return None

    def _fetch(self, microbatch: int) -> Batch:
        """Get the examples of a micro-batch."""
        with self._stage.activity.during("data"):
            batch = self._stage.source.training(
                self._step,
                self._place.microbatches[microbatch],
                self._following(microbatch),
            )
        if self._place.is_first:
            self._notes[microbatch] = signature_of(batch)
        return batch

    def _following(self, microbatch: int) -> Iterator[tuple[int, range]]:
        """Yield steps and virtual nodes of the micro-batches after one of this mini-batch."""
        each = self._place.microbatches
        yield from ((self._step, nodes) for nodes in each[microbatch + 1 :])
        for step in range(self._step + 1, self._stage.steps):
            yield from ((step, nodes) for nodes in each)

    def _recompute(self, task: Task) -> None:
        self._stage.faults.at(Hook.RECOMPUTE)
        last = self._stage.segments[task.chunk][-1]
        out = self._compute(last, task.microbatch, keep=True)
        assert not isinstance(out, LossSums)
        self._graphs[_unit(task)] = out

    def _compute(self, segment: _Segment, microbatch: int, keep: bool) -> StageOutput:
        unit = segment.of(microbatch)
        received = self._stash.get(unit, [])
        if segment.goes_back:
            segment.model.require_gradients(received)
        nodes = self._place.microbatches[microbatch]
        seeds = self._stage.seeds(self._step, nodes.start)
        model = self._stage.model = segment.model
        with (
            user_code(f"model in mini-batch {self._step}"),
            nullcontext() if keep else saving_nothing(),
        ):
            return self._stage.tracker.forward(
                "recompute" if keep else "forward",
                self._tracked(unit),
                keep,
                partial(model.forward, self._batches[microbatch], received, seeds),
            )

    def _backward(self, task: Task) -> None:
        unit = _unit(task)
        self._stage.faults.at(Hook.BACKWARD)
        *others, last = self._stage.segments[task.chunk]
        out = self._graphs.pop(unit)
        arrival = self._gradients.pop(unit, None)
        if arrival is None:
            (loss,) = out
            check_leads_back(loss)
            gradients: Gradients = [torch.full_like(loss, self._scale)]
            del loss
        else:
            gradients = arrival.on(self._device)
            self._stage.tracker.adopt_all(gradients)
        gradients = self._go_back(last, task.microbatch, out, gradients)
        del out
        for segment in reversed(others):
            if segment.goes_back:
                again = self._compute(segment, task.microbatch, keep=True)
                assert not isinstance(again, LossSums)
                gradients = self._go_back(segment, task.microbatch, again, gradients)
                del again
        if not self._stage.reads_examples(task.chunk):
            self._send(Direction.GRADIENT, task, gradients)
        if task.chunk == 0:
            del self._batches[task.microbatch], self._notes[task.microbatch]

    def _tracked(self, unit: Unit) -> Unit:
        """Return the unit's name among those of two mini-batches."""
        return self._number + unit[0], unit[1]

    def _send(
        self,
        direction: Direction,
        task: Task,
        tensors: Sequence[torch.Tensor | None],
        note: int = 0,
    ) -> None:
        if self._stage.recording is not None:
            self._stage.recording.sent(direction, task.microbatch)
        self._links.send(direction, tensors, note)

    def _go_back(
        self,
        segment: _Segment,
        microbatch: int,
        out: Activations,
        gradients: Gradients,
    ) -> Gradients:
        """Go backward through a segment.

        Args:
            segment: The segment.
            microbatch: The micro-batch.
            out: What has come out of it, with its graph.
            gradients: Of that.

        Returns:
            The gradients of its input; none where nothing goes back.
        """
        unit = segment.of(microbatch)
        self._stage.model = segment.model
        with user_code(f"backward in mini-batch {self._step}"):
            self._stage.tracker.backward(self._tracked(unit), partial(go_backward, out, gradients))
        received = self._stash.pop(unit, [])
        found = [one.grad for one in received]
        for gradient in found:
            if gradient is not None:
                self._stage.tracker.adopt(gradient)
        return found


def _named(task: str) -> AbstractContextManager[object]:
    """Name a task in what torch's profiler records; without one even that takes 0.2 ms."""
    return record_function(task) if profiler._is_profiler_enabled else nullcontext()


def _unit(task: Task) -> Unit:
    return task.microbatch, task.chunk
