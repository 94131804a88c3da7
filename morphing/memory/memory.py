"""Predicts a worker's peak memory from facts and a profile.

Parameters, gradients, optimizer state and an undo slot are held throughout, at times
also a copy for a checkpoint, which is written while training goes on. On top is the
highest of three peaks: a mini-batch, the optimizer's first step, an evaluation. A worker
on a GPU divides that between the device and its VM's memory, by the home of committed
state. docs/memory.md has the rules and how well they agree with what workers measure.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, fields

from spottrain.morphing.memory.room import WorkerBytes
from spottrain.morphing.simulate.compute import CPU, Compute
from spottrain.wire.model import (
    Profile,
    Reduction,
    StateHome,
)

PAGE_BYTES = 4096
"""Words about each section and about the undo slot; as ``pipeline.arena``."""
HELDOUT_FACTOR = 4
"""Examples of an evaluation's micro-batch over those of training; as ``pipeline.data``."""
LOADER_BYTES = 16 << 20
"""Memory of its own of a loader process, forked from a supervisor that has loaded the job:
4 MB after 200 batches (measured); the rest is for what the data set opens."""
LOADER_COPIES = 2
"""Of the micro-batch that it makes: its examples, and what ``collate`` makes of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTerms:
    """What the memory of a job's workers depends on, besides their stages."""

    reduction: Reduction = "fast"
    compute: Compute = CPU
    state: StateHome = "host"
    """Of no meaning on a CPU."""
    context_bytes: int = 0
    """As in ``Profile``."""
    loader_bytes: int = 0
    """Micro-batches that loader processes have ready, and these processes, in training."""
    heldout_loader_bytes: int = 0
    """The same in an evaluation."""
    heldout_factor: float = HELDOUT_FACTOR
    """Examples of a micro-batch in an evaluation, over those in training."""

    @staticmethod
    def of(
        profile: Profile,
        microbatch_size: int,
        *,
        reduction: Reduction,
        compute: Compute,
        state: StateHome,
        nodes: int = 1,
    ) -> WorkerTerms:
        """Return the terms of workers that ``profile`` is about.

        Their micro-batches have so many virtual nodes, in evaluations as if it were one.
        """
        factor = HELDOUT_FACTOR / nodes
        return WorkerTerms(
            reduction=reduction,
            compute=compute,
            state=state,
            context_bytes=profile.context_bytes,
            loader_bytes=loader_bytes(profile, microbatch_size),
            heldout_loader_bytes=loader_bytes(profile, microbatch_size, factor),
            heldout_factor=factor,
        )


CPU_TERMS = WorkerTerms()
"""Of workers on CPUs, in fast mode and without loaders."""


def loader_bytes(profile: Profile, microbatch_size: int, factor: float = 1) -> int:
    """Return what the loader processes of a worker take of its VM's memory.

    That is, as many micro-batches as they may be ahead, and what each takes itself.

    Args:
        profile: Says how many there are, and the bytes of a micro-batch.
        microbatch_size: Examples of a micro-batch in training.
        factor: As many times as large are those that they make.
    """
    loaders = profile.loaders_at(microbatch_size)
    if not loaders:
        return 0
    sections = profile.sections_at(microbatch_size)
    batch = int(factor * max(section.batch_bytes for section in sections))
    own = LOADER_BYTES + LOADER_COPIES * batch
    return loaders * own + profile.loader.ahead * batch


@dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Peak bytes of one worker on a GPU in its VM's memory, by purpose."""

    parameters_bytes: int = 0
    """The master copy; this and the next four are there with state on the host."""
    gradients_bytes: int = 0
    """The mini-batch's prepared sums."""
    optimizer_bytes: int = 0
    update_bytes: int = 0
    undo_bytes: int = 0
    """As in ``StageMemory``; with state on the device, only the pages of words."""
    snapshot_bytes: int = 0
    """The copy of one section for a periodic checkpoint: where memory is short, the copy of the
    next one waits until that is written."""
    staging_bytes: int = 0
    """Page-locked copies of what is sent, and as much of what arrives; of sums over
    replicas where the host adds them up (gloo); of matrices converted on their way."""
    loader_bytes: int = 0
    """As in ``StageMemory``, also of evaluations."""
    process_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Bytes that its VM must have for it."""
        return sum(_HOST_BYTES(self))

    @property
    def locked_bytes(self) -> int:
        """Bytes of these that it page-locks, as ``SlotMemory`` does.

        What the driver allocates itself, such as staging, counts against no limit.
        """
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes


_HOST_BYTES = operator.attrgetter(*(field.name for field in fields(HostMemory)))
NO_HOST = HostMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak bytes of one worker of a stage where it computes, by purpose."""

    parameters_bytes: int
    """With state in another memory: working copies."""
    gradients_bytes: int
    """The mini-batch's sum, later the prepared gradients; of two where gradients are stale by
    one mini-batch, as the next."""
    accumulators_bytes: int
    """In exact mode: the mini-batch's sum as whole numbers."""
    optimizer_bytes: int
    undo_bytes: int
    """Copy of the largest section's parameters, gradients and optimizer state, from
    which an update that was cut short is undone; and all sections' pages of words."""
    snapshot_bytes: int
    """Copy of the worker's share of a periodic checkpoint, until it is written."""
    stash_bytes: int
    """At the peak of a mini-batch, as all below up to ``buffers_bytes``: inputs of
    micro-batches in flight, those that wait for their forward included; of the others
    but the one under way also the inputs of segments."""
    batches_bytes: int
    """The user's data of micro-batches in flight."""
    activations_bytes: int
    """Tensors saved for the backward, of one micro-batch if the stage recomputes, else of
    all in flight; and what the task under way takes for itself. With segments, those of
    the last one only, and what the segment under way takes."""
    buffers_bytes: int
    """Activations and gradients on their way to neighbours, and gradients that wait."""
    update_bytes: int
    """Extra bytes of the optimizer's first step beyond what is held throughout."""
    evaluation_bytes: int
    """Extra bytes of an evaluation beyond that."""
    loader_bytes: int = 0
    """On a CPU: micro-batches that loader processes have ready, and these processes, while
    the worker trains."""
    library_bytes: int = 0
    """On a GPU: its context, and buffers of libraries."""
    fragmentation: float = 0.0
    """On a GPU: what the allocator keeps beyond tensors that come and go, as a share."""
    host: HostMemory = NO_HOST
    """On a GPU: what it needs beside the device."""

    @property
    def static_bytes(self) -> int:
        """Bytes that are held throughout."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.accumulators_bytes
            + self.optimizer_bytes
            + self.undo_bytes
            + self.library_bytes
        )

    @property
    def training_bytes(self) -> int:
        """Extra bytes of a mini-batch beyond that."""
        return self.stash_bytes + self.batches_bytes + self.activations_bytes + self.buffers_bytes

    @property
    def total_bytes(self) -> int:
        """Bytes that the device must have."""
        working = max(self.training_bytes, self.update_bytes)
        training = working + self.snapshot_bytes + self.loader_bytes
        moving = max(training, self.evaluation_bytes)
        return self.static_bytes + moving + math.ceil(self.fragmentation * moving)

    @property
    def needed(self) -> WorkerBytes:
        """What both memories must have."""
        host = self.host
        return WorkerBytes(self.total_bytes, host.total_bytes, host.locked_bytes)
