"""The memory of a worker of a stage: what it holds throughout, and what micro-batches add."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from spottrain.morphing.memory.chunks import Chunk
from spottrain.morphing.memory.loads import StageLoad
from spottrain.morphing.memory.memory import (
    CPU_TERMS,
    PAGE_BYTES,
    HostMemory,
    StageMemory,
    WorkerTerms,
)
from spottrain.morphing.simulate.compute import trained_bytes
from spottrain.wire.model import ModelFacts, SectionFacts, SectionProfile
from spottrain.wire.plan import segments_of

PENDING_SENDS = 8
"""Tensors sent to neighbours that are kept until they are surely there; as
``pipeline.links``."""
HELDOUT_INPUTS, HELDOUT_SENDS = 3, 2
"""Activations that a stage holds during an evaluation; as ``pipeline.executor``."""
INT64_BYTES = 8
QUANTISED_ELEMENTS = {False: 1 << 18, True: 1 << 24}
"""Of a gradient that are converted at once, by whether on a GPU; as
``pipeline.base.fixed_point``."""
CONVERSION = 2
"""Bytes of the float64 and the int64 on the way, over those of an exact sum, int64."""

# Of workers on GPUs; none of these was measured yet (docs/memory.md).
CONTEXT_BYTES = 500_000_000
"""A CUDA context, where calibration has not measured it: 120 to 550 MB by the GPU
(llama.cpp, pull request 20595)."""
LIBRARY_BYTES = 64 << 20
"""Workspaces of cuBLAS: 32 MiB for each of two streams on Hopper, less elsewhere (torch
documentation, CUBLAS_WORKSPACE_CONFIG)."""
NCCL_BYTES = 1 << 30
"""Buffers of the one communicator of a stage's replicas: 544 to 688 MB on four A100 (nccl,
issue 964), 1.6 GB elsewhere (issue 864)."""
FRAGMENTATION = 0.05
"""Assumed: what torch's allocator keeps beyond the tensors that come and go, as a share
of them at their peak."""
PROCESS_BYTES = 3_000_000_000
"""Assumed: a worker's process itself in its VM's memory, CUDA's libraries included."""


class Share(NamedTuple):
    """What a worker has where ranks of a VM share their stage's state."""

    held: tuple[int, ...]
    """Sections of which it has the committed state."""
    sharers: int
    """Ranks of its stage in its VM."""
    size: int
    """Ranks that divide matrices: of more than one, each computes with copies of its parts of
    all sections; else, with copies of those that it does not hold."""
    communicators: int
    """Groups of ranks that it sums with."""


@dataclass(frozen=True, slots=True)
class MemoryModel:
    """What a worker of a stage needs: without any micro-batch, and with some."""

    chunks: tuple[Chunk, ...]
    idle: StageMemory
    """Without any micro-batch."""
    on_gpu: bool
    converted: int
    """Bytes that a backward takes to quantise a gradient."""

    @staticmethod
    def of(
        facts: ModelFacts,
        measured: Sequence[SectionProfile],
        runs: Sequence[range],
        terms: WorkerTerms = CPU_TERMS,
        *,
        segments: int = 1,
        width: int = 1,
        replica: int | None = None,
        chunks: Sequence[Chunk] | None = None,
        share: Share | None = None,
    ) -> MemoryModel:
        """Return a stage.

        Args:
            facts: Bytes of parameters, gradients and optimizer state.
            measured: Bytes of activations of all sections for one micro-batch.
            runs: Its runs of consecutive sections, one per chunk.
            terms: What holds for all workers.
            segments: In which each run is recomputed.
            width: Ranks that run the stage, which share the writing of checkpoints.
            replica: Which of these; ``None``: the one with the largest share.
            chunks: One for each of ``runs``, where they are known already.
            share: What it has where ranks share the stage's state; ``None``: all of it.
        """
        own = [facts.sections[k] for run in runs for k in run]
        holds = own if share is None else [facts.sections[k] for k in share.held]
        copies = _Copies.of(own, share, terms)
        if chunks is None:
            chunks = [Chunk.of(facts, measured, segments_of(run, segments)) for run in runs]
        lanes, on_gpu = terms.compute.lanes, terms.compute.on_gpu
        exact = terms.reduction == "exact"
        summed = lanes * sum(copies.summed)
        undo = max((_undo_bytes(section, lanes) for section in holds), default=0)
        updates = (measured[s.index].update_bytes for s in holds)
        evaluation, heldout_loader = 0, 0
        if facts.heldout_len:
            evaluation, heldout_loader = _evaluation(chunks, terms), terms.heldout_loader_bytes
        communicators = int(width > 1) if share is None else share.communicators
        if terms.state == "device" and _ties(facts, runs):
            communicators += 1
        idle = StageMemory(
            parameters_bytes=sum(s.param_bytes for s in holds) + copies.parameters,
            gradients_bytes=lanes * sum(map(trained_bytes, holds)) + copies.gradients,
            accumulators_bytes=summed if exact else 0,
            optimizer_bytes=sum(s.optimizer_bytes for s in holds),
            undo_bytes=undo + PAGE_BYTES * (len(own) + 1),
            snapshot_bytes=_snapshot(facts, runs, width, replica)
            if share is None
            else sum(s.param_bytes + s.optimizer_bytes for s in holds),
            stash_bytes=0,
            batches_bytes=0,
            activations_bytes=0,
            buffers_bytes=0,
            update_bytes=max(copies.exchanged, *updates, 0),
            evaluation_bytes=evaluation + (0 if on_gpu else heldout_loader),
            loader_bytes=0 if on_gpu else terms.loader_bytes,
            library_bytes=_library_bytes(terms, communicators) if on_gpu else 0,
            fragmentation=FRAGMENTATION if on_gpu else 0.0,
        )
        if on_gpu:
            staging = 0
            if width > 1 and exact:
                staging = summed + copies.exchanged
            elif width > 1:
                staging = copies.gradients + copies.exchanged
                if not copies.of_parts and terms.state == "device":
                    staging += lanes * sum(map(trained_bytes, holds))
            loading = max(terms.loader_bytes, heldout_loader)
            idle = _on_gpu(idle, own, holds, copies, terms, staging, loading)
        converted = _converted_bytes(copies.summed, terms) if exact else 0
        return MemoryModel(tuple(chunks), idle, on_gpu, converted)

    def under(self, load: StageLoad) -> StageMemory:
        """Return the peak memory with as many micro-batches at once as ``load`` says."""
        peak = _peak(self.chunks, load, self.converted)
        sent = _pending(self.chunks, load)
        buffers = sent + load.gradients_waiting * max(chunk.output for chunk in self.chunks)
        host = self.idle.host
        if self.on_gpu:
            host = replace(host, staging_bytes=host.staging_bytes + 2 * buffers)
        return replace(
            self.idle,
            stash_bytes=peak.stash,
            batches_bytes=peak.batches,
            activations_bytes=peak.activations,
            buffers_bytes=buffers,
            update_bytes=self.idle.update_bytes + sent,
            host=host,
        )


@dataclass(frozen=True, slots=True)
class _Copies:
    """Bytes of what a worker only computes with, where ranks share their stage's state: of
    sections that others hold, or of its parts of all."""

    of_parts: bool
    parameters: int
    cast: int
    """Of these, what is saved by the type of ``precision``, on a GPU."""
    gradients: int
    """Added up in fast mode."""
    summed: tuple[int, ...]
    """In exact mode, of each section that it runs."""
    exchanged: int
    """While the sum of a section is put together from parts, or its parameters are given."""

    @staticmethod
    def of(own: Sequence[SectionFacts], share: Share | None, terms: WorkerTerms) -> _Copies:
        """Return the copies of a worker that runs the sections ``own``."""
        if share is None:
            return _Copies(False, 0, 0, 0, tuple(s.summed_bytes for s in own), 0)
        exact, of_parts = terms.reduction == "exact", share.size > 1
        copied = [s for s in own if of_parts or s.index not in share.held]
        exchanged = 0
        if of_parts:
            sums = ((s, s.summed_bytes if exact else trained_bytes(s)) for s in own)
            groups = share.sharers // share.size
            exchanged = groups * max(
                (_divided(s, trained_bytes(s), size) for s, size in sums if s.index in share.held),
                default=0,
            )

        def part(section: SectionFacts, of_bytes: int, num_bytes: int) -> int:
            divided = _divided(section, of_bytes, num_bytes)
            return num_bytes - divided + -(-divided // share.size)

        casts = ((s, terms.compute.cast_bytes([s])) for s in copied)
        return _Copies(
            of_parts,
            sum(part(s, s.param_bytes, s.param_bytes) for s in copied),
            sum(part(s, 2 * cast, cast) for s, cast in casts),
            0 if exact else sum(part(s, trained_bytes(s), trained_bytes(s)) for s in copied),
            tuple(part(s, trained_bytes(s), s.summed_bytes) for s in own),
            exchanged,
        )


def _divided(section: SectionFacts, of_bytes: int, num_bytes: int) -> int:
    """Return the bytes that ranks surely divide.

    Args:
        section: Says how many of its parameters' bytes are divided.
        of_bytes: Of some of its parameters.
        num_bytes: That these take in some form.
    """
    divided = max(0, section.divided_bytes + of_bytes - section.param_bytes)
    return num_bytes * divided // of_bytes if of_bytes else 0


def _ties(facts: ModelFacts, runs: Sequence[range]) -> bool:
    """Return whether the stage has a parameter that another one has a copy of."""
    copies = ([any(k in run for run in runs) for k in tied.sections] for tied in facts.tied)
    return any(any(own) and not all(own) for own in copies)


def _on_gpu(
    idle: StageMemory,
    own: Sequence[SectionFacts],
    holds: Sequence[SectionFacts],
    copies: _Copies,
    terms: WorkerTerms,
    staging: int,
    loading: int,
) -> StageMemory:
    """Return the memory of a GPU's worker without micro-batches, divided between the device and
    its VM's.

    Args:
        idle: All of it, as on a CPU.
        own: The stage's sections.
        holds: Those of which it has the committed state.
        copies: What it only computes with.
        terms: What holds for all workers.
        staging: Page-locked memory that any home of state takes.
        loading: What its loaders take.
    """
    casts = 0 if copies.of_parts else terms.compute.cast_bytes(holds)
    host = HostMemory(
        snapshot_bytes=max((s.param_bytes + s.optimizer_bytes for s in holds), default=0),
        staging_bytes=staging,
        loader_bytes=loading,
        process_bytes=PROCESS_BYTES,
    )
    # Copies of what others hold, and of parts, are of the type that is computed with.
    idle = replace(idle, parameters_bytes=idle.parameters_bytes - copies.cast)
    if terms.state == "host":
        if copies.of_parts:
            parameters = copies.parameters - copies.cast
            idle = replace(idle, parameters_bytes=parameters, gradients_bytes=copies.gradients)
        host = replace(
            host,
            parameters_bytes=sum(s.param_bytes for s in holds),
            gradients_bytes=terms.compute.lanes * sum(map(trained_bytes, holds)),
        )
        return _on_host(idle, host, terms, casts, copies.exchanged)
    return _on_device(idle, host, casts, PAGE_BYTES * (len(own) + 1))


def _undo_bytes(section: SectionFacts, lanes: int) -> int:
    """Return what a section's update needs: mean gradients, and all that it changes, which is
    one version of the trained parameters; the other one counts as optimizer state."""
    trained = trained_bytes(section)
    return 2 * trained + section.optimizer_bytes - (lanes - 1) * trained


def _converted_bytes(summed: Sequence[int], terms: WorkerTerms) -> int:
    """Return the bytes that a backward takes to quantise a gradient, of no larger a tensor than
    a section's sum. They are counted at its peak, though no gradient may be ready there."""
    pieces = INT64_BYTES * QUANTISED_ELEMENTS[terms.compute.on_gpu]
    return CONVERSION * min(max(summed), pieces)


def _library_bytes(terms: WorkerTerms, communicators: int) -> int:
    """Return what libraries take on the GPU of a worker."""
    context = terms.context_bytes or CONTEXT_BYTES
    return context + LIBRARY_BYTES + communicators * NCCL_BYTES


def _on_host(
    idle: StageMemory, host: HostMemory, terms: WorkerTerms, casts: int, exchanged: int
) -> StageMemory:
    """Return the memory of a GPU's worker that keeps committed state on the host.

    In exact mode the sum is made a gradient again section by section, on its way there.
    Matrices are converted on the host, into page-locked memory of their own.

    Args:
        idle: All of it, as on a CPU.
        host: What the VM's memory holds of it wherever state is.
        terms: What holds for all workers.
        casts: Bytes of converted matrices.
        exchanged: What puts sums together.
    """
    lanes = terms.compute.lanes
    return replace(
        idle,
        parameters_bytes=lanes * (idle.parameters_bytes - casts),
        gradients_bytes=0 if terms.reduction == "exact" else idle.gradients_bytes,
        optimizer_bytes=0,
        undo_bytes=0,
        snapshot_bytes=0,
        update_bytes=exchanged,
        host=replace(
            host,
            optimizer_bytes=idle.optimizer_bytes,
            update_bytes=max(0, idle.update_bytes - exchanged),
            undo_bytes=idle.undo_bytes,
            staging_bytes=host.staging_bytes + lanes * casts,
        ),
    )


def _on_device(idle: StageMemory, host: HostMemory, casts: int, words: int) -> StageMemory:
    """Return the memory of a GPU's worker that keeps committed state on the device.

    Autocast keeps its casts of parameters for a forward and its backward. The pages of
    words of the undo slot stay on the host.
    """
    return replace(
        idle,
        parameters_bytes=idle.parameters_bytes + casts,
        undo_bytes=idle.undo_bytes - words,
        snapshot_bytes=0,
        host=replace(host, undo_bytes=words),
    )


@dataclass(frozen=True, slots=True)
class _TrainingPeak:
    """The peak of a mini-batch."""

    stash: int
    batches: int
    activations: int


def _peak(chunks: Sequence[Chunk], load: StageLoad, converted: int) -> _TrainingPeak:
    """Return the peak of a mini-batch.

    Args:
        chunks: The stage's.
        load: Micro-batches at once.
        converted: Bytes that a backward takes to quantise a gradient.
    """
    kept = work = stash = 0
    spare = load.inputs_held - load.in_flight
    for chunk, count, keeps in zip(chunks, load.counts, load.keeping, strict=False):
        stash += count * chunk.input + max(0, count - 1) * chunk.stashed
        graphs = count if keeps else 0
        kept += graphs * chunk.held
        task = max(chunk.recompute, chunk.backward + converted)
        if not keeps:
            # A forward may come between a recompute and its backward.
            task = max(task, chunk.held + chunk.forward)
        work = max(work, task - min(graphs, 1) * chunk.held)
    return _TrainingPeak(
        stash=stash + spare * max(chunk.input for chunk in chunks),
        # Examples stay from the first chunk's forward to its backward.
        batches=load.counts[0] * max(chunk.batch for chunk in chunks),
        activations=kept + work,
    )


def _pending(chunks: Sequence[Chunk], load: StageLoad) -> int:
    """Return the bytes of what was sent last, in both directions by turns.

    An activation whose graph is kept is counted there.
    """
    outputs = max(chunk.output for chunk in chunks)
    inputs = max(chunk.input for chunk in chunks)
    if not outputs:
        return PENDING_SENDS * inputs
    sent = PENDING_SENDS // 2 if inputs else PENDING_SENDS
    graphs = sum(itertools.compress(load.counts, load.keeping))
    return max(0, sent - graphs) * outputs + (PENDING_SENDS - sent) * inputs


def _evaluation(chunks: Sequence[Chunk], terms: WorkerTerms) -> int:
    one = max(
        HELDOUT_INPUTS * chunk.input + HELDOUT_SENDS * chunk.output + chunk.batch + chunk.alone
        for chunk in chunks
    )
    return int(terms.heldout_factor * one)


def _snapshot(facts: ModelFacts, runs: Iterable[range], width: int, replica: int | None) -> int:
    """Return a worker's share of a checkpoint: replicas take turns at the sections."""
    shares: dict[int, int] = {}
    for run in runs:
        for k in run:
            section = facts.sections[k]
            mine = section.param_bytes + section.optimizer_bytes
            shares[k % width] = shares.get(k % width, 0) + mine
    return max(shares.values()) if replica is None else shares.get(replica, 0)
