"""Tries ranks that divide the matrices of a model, before anything is rented."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
from torch.utils import checkpoint

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.checks.rehearsal import rehearse
from spottrain.pipeline.model.checks.repetition import first_tensors, is_small, trial_batch
from spottrain.pipeline.model.job import Batch, TrainingJob
from spottrain.pipeline.model.loss import LossSums
from spottrain.pipeline.model.sections import ModelLayout
from spottrain.pipeline.model.sequence_parallel import UNSPLIT, split_blocks
from spottrain.pipeline.model.skeleton import build_skeleton, compiled_in, replaced, run_eagerly
from spottrain.pipeline.model.stage import StageModel
from spottrain.pipeline.model.tensor_parallel import ALONE, Absent, Shards
from spottrain.steps import at_step

_TOLERANCE = 1e-3
"""Losses that differ by a larger share do not do so by rounding."""


def try_divided(
    job: TrainingJob, layout: ModelLayout, size: int, *, sequence: bool = False
) -> None:
    """Check that ``size`` ranks can divide the matrices of a model.

    One of them trains and evaluates on the meta device. Of a small model all of them compute
    the loss of an example, which must be that of one rank alone.

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
    split = split_blocks(layout) if sequence else UNSPLIT
    shards = Shards(layout.tensor_styles, Absent(size), split)
    for name, spec in layout.specs.items():
        dimension = shards.dimension(name)
        if dimension is not None and spec.shape[dimension] % size:
            raise UserCodeError(
                f"runtime.tensor_parallel must divide the matrices of the model: got {size}, and "
                f"{name} has {spec.shape[dimension]} rows or columns to divide"
            )
    try:
        rehearse(job, layout, shards)
    except UserCodeError as error:
        raise UserCodeError(
            f"runtime.tensor_parallel: a rank with one of {size} parts cannot run the model; {size} "
            "must divide its heads, and its code must take their number from the tensors: "
            f"{error}",
            traceback=error.traceback,
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


class _Threads:
    """Threads that stand for the ranks of a group."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.given = [torch.empty(0)] * size


@dataclass(frozen=True, slots=True)
class _ThreadRank:
    """One of them."""

    threads: _Threads
    index: int

    @property
    def size(self) -> int:
        """See ``TensorRanks``."""
        return self.threads.barrier.parties

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return what all threads have given."""
        self.threads.given[self.index] = tensor.clone()
        self.threads.barrier.wait()
        found = list(self.threads.given)
        self.threads.barrier.wait()
        return found

    def sum(self, tensor: torch.Tensor) -> None:
        """See ``TensorRanks``."""
        tensor.copy_(torch.stack(self._exchange(tensor)).sum(0))

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """See ``Ranks``."""
        return torch.cat(self._exchange(part))

    def sum_parts(self, whole: torch.Tensor) -> torch.Tensor:
        """See ``Ranks``."""
        return torch.stack(self._exchange(whole)).sum(0).chunk(self.size)[self.index]


def _compare(job: TrainingJob, layout: ModelLayout, shards: Shards) -> None:
    """Check that ranks with parts, a thread each, come to the loss of one alone."""
    tensors = first_tensors(job, layout)
    threads = _Threads(shards.size)

    def model(own: Shards) -> StageModel:
        stage = StageModel(job, layout, range(layout.num_sections), tensors, shards=own)
        stage.eval()
        return stage

    def loss(stage: StageModel, batch: Batch) -> float:
        try:
            with torch.no_grad():
                sums = stage.forward(batch, [], int)
            assert isinstance(sums, LossSums)
            return float(sums.loss)
        except BaseException:
            threads.barrier.abort()
            raise

    ranks = [replace(shards, ranks=_ThreadRank(threads, index)) for index in range(shards.size)]
    stages, batches = list(map(model, ranks)), [trial_batch(job, 0) for _ in ranks]
    kept = checkpoint.CheckpointFunction, checkpoint._checkpoint_without_reentrant_generator
    with (
        torch.random.fork_rng(devices=[]),
        run_eagerly(),
        at_step(0),
        # Forwards replace these, in threads not one within the other.
        replaced(checkpoint, "CheckpointFunction", kept[0]),
        replaced(checkpoint, "_checkpoint_without_reentrant_generator", kept[1]),
        ThreadPoolExecutor(shards.size) as pool,
    ):
        alone = loss(model(ALONE), trial_batch(job, 0))
        divided = list(pool.map(loss, stages, batches))
    for one in divided:
        if abs(one - alone) > _TOLERANCE * abs(alone):
            raise UserCodeError(
                f"tensor_plan: {shards.size} ranks come to a loss of {one:g}, one alone to {alone:g}; "
                "divide queries, keys and values as three modules, and all that lies between a "
                "colwise and a rowwise one by heads or features alone"
            )
