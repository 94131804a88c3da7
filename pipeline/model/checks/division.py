"""Tries ranks that divide the matrices of a model, before anything is rented."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch.utils import checkpoint

from spottrain.errors import UserCodeError
from spottrain.pipeline.model.checks.rehearsal import rehearse
from spottrain.pipeline.model.checks.repetition import first_tensors, is_small, trial_batch
from spottrain.pipeline.model.job import Batch, TrainingJob
from spottrain.pipeline.model.loss import LossSums
from spottrain.pipeline.model.sections import ModelLayout
from spottrain.pipeline.model.skeleton import build_skeleton, compiled_in, replaced, run_eagerly
from spottrain.pipeline.model.stage import StageModel
from spottrain.pipeline.model.tensor_parallel import ALONE, Shards
from spottrain.steps import at_step

_TOLERANCE = 1e-3
"""Losses that differ by a larger share do not do so by rounding."""


def try_divided(job: TrainingJob, layout: ModelLayout, size: int) -> None:
    """Check that ``size`` ranks can divide the matrices of a model.

    One of them trains and evaluates on the meta device. Of a small model all of them compute
    the loss of an example, which must be that of one rank alone.

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
    shards = Shards(layout.tensor_styles, size)
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


def can_divide(job: TrainingJob, layout: ModelLayout, size: int) -> bool:
    """Return whether ``size`` ranks can divide the matrices of a model."""
    try:
        try_divided(job, layout, size)
    except UserCodeError:
        return False
    return True


def _compare(job: TrainingJob, layout: ModelLayout, shards: Shards) -> None:
    """Check that ranks with parts, a thread each, come to the loss of one alone."""
    tensors = first_tensors(job, layout)
    barrier = threading.Barrier(shards.size)
    parts: list[torch.Tensor] = [torch.empty(0)] * shards.size

    def sum_at(index: int) -> Callable[[torch.Tensor], None]:
        def total(tensor: torch.Tensor) -> None:
            parts[index] = tensor.clone()
            barrier.wait()
            tensor.copy_(torch.stack(parts).sum(0))
            barrier.wait()

        return total

    def model(own: Shards) -> StageModel:
        parts = {
            k: {name: own.part_of(name, tensor) for name, tensor in whole.items()}
            for k, whole in tensors.items()
        }
        stage = StageModel(job, layout, range(layout.num_sections), parts, shards=own)
        stage.eval()
        return stage

    def loss(stage: StageModel, batch: Batch) -> float:
        try:
            with torch.no_grad():
                sums = stage.forward(batch, [], int)
            assert isinstance(sums, LossSums)
            return float(sums.loss)
        except BaseException:
            barrier.abort()
            raise

    ranks = [replace(shards, index=index, sum=sum_at(index)) for index in range(shards.size)]
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
