"""Runs one stage's list of tasks: the forwards and backwards of a mini-batch.

The order is that of ``morphing.schedule``, list and ``next_task`` alike, so that what is
simulated is what runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

from spottrain.morphing.schedule import Progress, StageSchedule, Task, Work, next_task
from spottrain.pipeline.data import MicrobatchSource, random_seed
from spottrain.pipeline.entrypoint import user_code
from spottrain.pipeline.faults import FaultScript, Hook
from spottrain.pipeline.job import Batch
from spottrain.pipeline.links import Direction, PipelineLinks
from spottrain.pipeline.stage import StageModel
from spottrain.pipeline.tracking import TensorTracker

_LEAD = 2
"""Activations that may have arrived ahead of an evaluation."""


class GradientSink(Protocol):
    """Takes the gradients of every virtual node as they are computed."""

    def add(self, virtual_node: int) -> None:
        """Take what a backward has left in the parameters' ``grad``."""


@dataclass(frozen=True, slots=True)
class StagePlace:
    """Where in the plan an executor stands."""

    is_first: bool
    is_last: bool
    schedule: StageSchedule
    virtual_nodes: range


class StageExecutor:
    """Computes one stage of one replica.

    Args:
        stage: The user's model, cut.
        place: Where it stands.
        source: Makes micro-batches.
        links: To the neighbouring stages.
        seed: The job's seed.
        faults: Blows to suffer, in tests.
        tracker: Counts tensor bytes.
    """

    def __init__(
        self,
        stage: StageModel,
        place: StagePlace,
        source: MicrobatchSource,
        links: PipelineLinks,
        seed: int,
        faults: FaultScript,
        tracker: TensorTracker,
    ) -> None:
        self._stage = stage
        self._place = place
        self._source = source
        self._links = links
        self._seed = seed
        self._faults = faults
        self._tracker = tracker

    def train(self, step: int, sink: GradientSink) -> list[tuple[float, float]]:
        """Run forwards and backwards of mini-batch ``step``.

        Returns:
            Loss sum and weight of every virtual node, in order; empty on every stage
            but the last.
        """
        return _Minibatch(self, step, sink).run()

    def evaluate(self, microbatches: range) -> list[tuple[float, float]]:
        """Run the forward over held-out micro-batches, in evaluation mode.

        Returns:
            Loss sum and weight of every micro-batch; empty but on the last stage.
        """
        links, place = self._links, self._place
        # Nobody waits for a backward here: arrivals must not pile up.
        links.expect(Direction.ACTIVATION, min(_LEAD, len(microbatches)))
        losses = []
        self._stage.eval()
        try:
            for microbatch in microbatches:
                activation = None
                if not place.is_first:
                    arrival = links.arrival(wait=True)
                    assert arrival is not None
                    activation = arrival.tensor
                    if microbatch + _LEAD in microbatches:
                        links.expect(Direction.ACTIVATION, 1)
                with user_code("evaluation"), torch.no_grad():
                    batch = self._source.heldout(microbatch)
                    out = self._stage.forward(batch, activation, lambda section: 0)
                if isinstance(out, torch.Tensor):
                    links.send(Direction.ACTIVATION, out)
                else:
                    losses.append((float(out[0]), float(out[1])))
        finally:
            self._stage.train()
        return losses

    def seeds(self, step: int, virtual_node: int) -> Callable[[int], int]:
        """Return the seed of each section in one micro-batch."""
        return lambda section: random_seed(self._seed, step, virtual_node, section)


def _saving_nothing() -> AbstractContextManager[None]:
    """Let autograd save no tensors: what is computed inside cannot go backward.

    Without gradients some operations, such as an LSTM, would take another kernel and
    round differently than in the recompute, hence differently for every schedule.
    """
    return torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: None, lambda nothing: nothing
    )


class _Minibatch:
    """One mini-batch in the air: what has arrived, what is kept for the backward."""

    def __init__(self, owner: StageExecutor, step: int, sink: GradientSink) -> None:
        self._owner = owner
        self._place = owner._place
        self._links = owner._links
        self._step = step
        self._sink = sink
        self._progress = Progress(
            self._place.schedule,
            first=self._place.is_first,
            last=self._place.is_last,
        )
        self._arrived = 0
        self._batches: dict[int, Batch] = {}
        self._stash: dict[int, torch.Tensor] = {}
        """Inputs of micro-batches in flight."""
        self._graphs: dict[int, torch.Tensor] = {}
        """Outputs whose graph is kept."""
        self._gradients: deque[torch.Tensor] = deque()
        self._losses: list[tuple[float, float]] = []

    def run(self) -> list[tuple[float, float]]:
        count = len(self._place.virtual_nodes)
        self._links.expect(Direction.ACTIVATION, count)
        self._links.expect(Direction.GRADIENT, count)
        run = {
            Work.FORWARD: self._forward,
            Work.RECOMPUTE: self._recompute,
            Work.BACKWARD: self._backward,
        }
        while not self._progress.done:
            while self._take_arrival(wait=False):
                pass
            task = next_task(self._progress)
            if task is None:
                self._take_arrival(wait=True)
                continue
            run[task.work](task)
            self._progress.completed(task)
        return self._losses

    def _take_arrival(self, *, wait: bool) -> bool:
        arrival = self._links.arrival(wait=wait)
        if arrival is None:
            return False
        assert arrival.tensor is not None
        if arrival.direction is Direction.ACTIVATION:
            self._stash[self._arrived] = arrival.tensor
            self._owner._tracker.hold(arrival.tensor)
            self._arrived += 1
            self._progress.activation_arrived()
        else:
            self._gradients.append(arrival.tensor)
            self._progress.gradient_arrived()
        return True

    def _forward(self, task: Task) -> None:
        j = task.microbatch
        self._owner._faults.at(Hook.FORWARD)
        with user_code(f"dataset in mini-batch {self._step}"):
            self._batches[j] = self._owner._source.training(
                self._step, self._place.virtual_nodes[j]
            )
        keep = self._progress.keeps_graph(task)
        out = self._compute(j, keep)
        if not isinstance(out, torch.Tensor):
            loss_sum, weight = out
            self._losses.append((float(loss_sum.detach()), float(weight)))
            self._graphs[j] = loss_sum
            return
        self._links.send(Direction.ACTIVATION, out.detach())
        if keep:
            self._graphs[j] = out

    def _recompute(self, task: Task) -> None:
        self._owner._faults.at(Hook.RECOMPUTE)
        out = self._compute(task.microbatch, keep=True)
        assert isinstance(out, torch.Tensor)
        self._graphs[task.microbatch] = out

    def _compute(self, j: int, keep: bool) -> torch.Tensor | tuple[torch.Tensor, float]:
        activation = self._stash.get(j)
        if activation is not None:
            activation.requires_grad_()
        seeds = self._owner.seeds(self._step, self._place.virtual_nodes[j])
        with (
            user_code(f"model in mini-batch {self._step}"),
            nullcontext() if keep else _saving_nothing(),
            self._owner._tracker.graph(j, activation, keep),
        ):
            return self._owner._stage.forward(self._batches[j], activation, seeds)

    def _backward(self, task: Task) -> None:
        j = task.microbatch
        self._owner._faults.at(Hook.BACKWARD)
        out = self._graphs.pop(j)
        gradient = None if self._place.is_last else self._gradients.popleft()
        if out.requires_grad or self._place.is_last:  # else all so far is frozen
            with user_code(f"backward in mini-batch {self._step}"):
                torch.autograd.backward(out, gradient)
        del out, self._batches[j]
        self._owner._tracker.release_graph(j)
        if not self._place.is_first:
            activation = self._stash.pop(j)
            self._owner._tracker.release(activation)
            gradient = activation.grad
            if gradient is None:  # nothing that the loss depends on has used it
                gradient = torch.zeros_like(activation)
            self._links.send(Direction.GRADIENT, gradient)
        self._sink.add(self._place.virtual_nodes[j])
