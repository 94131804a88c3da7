"""Tries ranks that divide the matrices of a model, before anything is rented."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch.utils import checkpoint

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.checks.rehearsal import rehearse
from spottrain.pipeline.model.checks.repetition import first_tensors, is_small, trial_batch
from spottrain.pipeline.model.job import Batch, TrainingJob
from spottrain.pipeline.model.loss import LossSums
from spottrain.pipeline.model.sections import ModelLayout
from spottrain.pipeline.model.sequence_parallel import UnevenSequenceError
from spottrain.pipeline.model.skeleton import build_skeleton, compiled_in, replaced, run_eagerly
from spottrain.pipeline.model.stage import StageModel
from spottrain.pipeline.model.tensor_parallel import ALONE, Shards
from spottrain.pipeline.model.tensor_ranks import Absent
from spottrain.steps import at_step

_TOLERANCE = 1e-3
"""Losses that differ by a larger share do not do so by rounding."""
_GRADIENT_TOLERANCE, _LEAST = 0.25, 1e-3
"""The same of a gradient: a share of its own norm, and one of the largest. What counts too often,
or at one rank alone, differs by half or more."""


def try_divided(
    job: TrainingJob, layout: ModelLayout, size: int, *, sequence: bool = False
) -> None:
    """Check that ``size`` ranks can divide the matrices of a model.

    One of them trains and evaluates on the meta device. Of a small model all of them compute
    the loss of an example and its gradients, which must be those of one rank alone.

    Args:
        job: The job.
        layout: Of its model.
        size: How many ranks.
        sequence: Whether they divide the sequence in blocks, too.

    Raises:
        UserCodeError: They cannot, or come to another loss.
    """
    if layout.undivided:
        raise UserCodeError(
            f"runtime.tensor_parallel must be 1 for this model: got {size}; {layout.undivided}"
        )
    if name := compiled_in(build_skeleton(job.model)):
        raise UserCodeError(
            f"runtime.tensor_parallel must be 1 for a compiled model: got {size}, and {name} is "
            "compiled; leave torch.compile out"
        )
    shards = Shards.of(layout, Absent(size), sequence=sequence)
    for name, spec in layout.specs.items():
        dimension = shards.dimension(name)
        if dimension is not None and spec.shape[dimension] % size:
            raise UserCodeError(
                f"runtime.tensor_parallel must divide the matrices of the model: got {size}, and "
                f"{name} has {spec.shape[dimension]} rows or columns to divide"
            )
    try:
        rehearse(job, layout, shards)
    except UnevenSequenceError:
        raise
    except UserCodeError as error:
        raise UserCodeError(
            f"runtime.tensor_parallel: a rank with one of {size} parts cannot run the model; {size} "
            "must divide its heads, and its code must take their number from the tensors: "
            f"{error}"
        ) from error
    if is_small(layout):
        _compare(job, layout, shards)


def can_divide(job: TrainingJob, layout: ModelLayout, size: int, *, sequence: bool = False) -> bool:
    """Return whether ``size`` ranks can divide the matrices of a model."""
    try:
        try_divided(job, layout, size, sequence=sequence)
    except UserCodeError:
        return False
    return True


class _Meeting:
    """Where threads that stand for ranks give one another tensors."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given = [torch.empty(0)] * size


@dataclass(frozen=True, slots=True)
class ThreadRank:
    """A thread that stands for a rank, see ``TensorRanks``."""

    meeting: _Meeting
    index: int

    @classmethod
    def make(cls, size: int) -> list[Self]:
        """Return as many as divide matrices."""
        meeting = _Meeting(size)
        return [cls(meeting, index) for index in range(size)]

    @property
    def size(self) -> int:
        """How many there are."""
        return self.meeting.barrier.parties

    def leave(self) -> None:
        """Let the others wait no more."""
        self.meeting.barrier.abort()

    def sum(self, tensor: torch.Tensor) -> None:
        """See ``TensorRanks``."""
        tensor.copy_(self._sum(tensor))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See ``TensorRanks``."""
        return torch.cat(self._exchanged(part))

    def sum_parts(self, whole: torch.Tensor) -> torch.Tensor:
        """See ``TensorRanks``."""
        return self._sum(whole).chunk(self.size)[self.index]

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchanged(tensor)).sum(0)

    def _exchanged(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.meeting.given[self.index] = tensor.clone()
        self.meeting.barrier.wait()
        found = list(self.meeting.given)
        self.meeting.barrier.wait()
        return found


@contextmanager
def threads_beside(size: int) -> Iterator[ThreadPoolExecutor]:
    """Return what runs stages as ranks do: ``size`` at a time."""
    kept = checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator
    with (
        torch.random.fork_rng(devices=[]),
        # Forwards replace these, in threads not one within the other.
        replaced(checkpoint, "CheckpointFunction", kept[0]),
        replaced(checkpoint, "_checkpoint_without_reentrant_generator", kept[1]),
        ThreadPoolExecutor(size) as pool,
    ):
        yield pool


def _compare(job: TrainingJob, layout: ModelLayout, shards: Shards) -> None:
    """Check that ranks with parts, a thread each, come to the loss of one alone, and together to
    its gradients."""
    tensors = first_tensors(job, layout)

    def model(own: Shards) -> StageModel:
        parts = {k: own.own_parts(whole) for k, whole in tensors.items()}
        stage = StageModel(job, layout, range(layout.num_sections), parts, shards=own)
        stage.eval()
        return stage

    def trained(own: Shards, stage: StageModel, batch: Batch) -> tuple[float, Gradients]:
        sums = stage.forward(batch, [], int)
        assert isinstance(sums, LossSums)
        torch.autograd.backward(sums.loss)
        return float(sums.loss.detach()), _gradients_of(stage, layout, own)

    def beside(rank: ThreadRank, stage: StageModel, batch: Batch) -> tuple[float, Gradients]:
        try:
            return trained(replace(shards, ranks=rank), stage, batch)
        except BaseException:
            rank.leave()
            raise

    ranks = ThreadRank.make(shards.size)
    stages = [model(replace(shards, ranks=rank)) for rank in ranks]
    batches = [trial_batch(job, 0) for _ in ranks]
    with threads_beside(shards.size) as pool, run_eagerly(), at_step(0):
        alone, whole = trained(ALONE, model(ALONE), trial_batch(job, 0))
        divided = list(pool.map(beside, ranks, stages, batches))
    for one, _ in divided:
        if abs(one - alone) > _TOLERANCE * abs(alone):
            raise UserCodeError(
                f"tensor_plan: {shards.size} ranks come to a loss of {one:g}, one alone to {alone:g}; "
                "divide queries, keys and values as three modules, and all that lies between a "
                "colwise and a rowwise one by heads or features alone"
            )
    least = _LEAST * max((float(gradient.norm()) for gradient in whole.values()), default=0.0)
    for name, gradient in whole.items():
        total = torch.stack([own[name] for _, own in divided if name in own]).sum(0)
        if (total - gradient).norm() > _GRADIENT_TOLERANCE * gradient.norm() + least:
            raise UserCodeError(
                f"tensor_plan: {shards.size} ranks come to a gradient of {name} of norm "
                f"{float(total.norm()):g}, one alone to {float(gradient.norm()):g}; name its module "
                "as replicated_with_grad_allreduce if it gets a part as its input, and let what a "
                "block is given beside its activation come from its inputs alone"
            )


Gradients = dict[str, torch.Tensor]


def _gradients_of(stage: StageModel, layout: ModelLayout, shards: Shards) -> Gradients:
    """Return what a rank adds to the gradients of the whole model."""
    found: Gradients = {}
    for section in stage.sections:
        for name, parameter in stage.parameters_of(section):
            if parameter.grad is None or not shards.is_counted(name):
                continue
            whole = torch.zeros(layout.specs[name].shape)
            shards.part_of(name, whole).copy_(parameter.grad)
            found[name] = found.get(name, 0.0) + whole
    return found
