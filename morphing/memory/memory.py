"""Predicts a worker's peak memory from facts and a profile.

Parameters, gradients, optimizer state and an undo slot are held throughout, at times
also a copy for a checkpoint, which is written while training goes on. On top is the
highest of three peaks: a mini-batch, the optimizer's first step, an evaluation. A worker
on a GPU divides that between the device and its VM's memory, by the home of committed
state. docs/memory.md has the rules and how well they agree with what workers measure.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import NamedTuple

from spottrain.morphing.memory.chunks import Chunk
from spottrain.morphing.memory.loads import StageLoad, stage_loads
from spottrain.morphing.memory.room import WorkerBytes
from spottrain.morphing.simulate.compute import CPU, Compute, trained_bytes
from spottrain.wire.model import (
    ModelFacts,
    Profile,
    Reduction,
    SectionFacts,
    SectionProfile,
    StateHome,
)
from spottrain.wire.plan import Plan, segments_of

PAGE_BYTES = 4096
"""Words about each section and about the undo slot; as ``pipeline.arena``."""
PENDING_SENDS = 8
"""Tensors sent to neighbours that are kept until they are surely there; as
``pipeline.links``."""
HELDOUT_FACTOR = 4
"""Examples of an evaluation's micro-batch over those of training; as ``pipeline.data``."""
HELDOUT_INPUTS, HELDOUT_SENDS = 3, 2
"""Activations that a stage holds during an evaluation; as ``pipeline.executor``."""
INT64_BYTES = 8
QUANTISED_ELEMENTS = {False: 1 << 18, True: 1 << 24}
"""Of a gradient that are converted at once, by whether on a GPU; as
``pipeline.base.fixed_point``."""
CONVERSION = 2
"""Bytes of the float64 and the int64 on the way, over those of an exact sum, int64."""
LOADER_BYTES = 16 << 20
"""Memory of its own of a loader process, forked from a supervisor that has loaded the job:
4 MB after 200 batches (measured); the rest is for what the data set opens."""
LOADER_COPIES = 2
"""Of the micro-batch that it makes: its examples, and what ``collate`` makes of them."""

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


def stage_bytes(
    facts: ModelFacts,
    measured: Sequence[SectionProfile],
    runs: Sequence[range],
    load: StageLoad,
    terms: WorkerTerms = WorkerTerms(),
    *,
    segments: int = 1,
    width: int = 1,
    replica: int | None = None,
    chunks: Sequence[Chunk] | None = None,
    share: Share | None = None,
) -> StageMemory:
    """Return the peak memory of a worker of a stage.

    Args:
        facts: Bytes of parameters, gradients and optimizer state.
        measured: Bytes of activations of all sections for one micro-batch.
        runs: The stage's runs of consecutive sections, one per chunk.
        load: Micro-batches at once.
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
    lanes = terms.compute.lanes
    gradients = lanes * sum(map(trained_bytes, holds)) + copies.gradients
    exact = terms.reduction == "exact"
    summed = lanes * sum(copies.summed)
    undo = max((_undo_bytes(section, lanes) for section in holds), default=0)
    updates = (measured[s.index].update_bytes for s in holds)
    waiting = load.gradients_waiting * max(chunk.output for chunk in chunks)
    buffers = _pending(chunks, load)
    training = _peak(chunks, load, _converted_bytes(copies.summed, terms) if exact else 0)
    evaluation, heldout_loader = 0, 0
    if facts.heldout_len:
        evaluation, heldout_loader = _evaluation(chunks, terms), terms.heldout_loader_bytes
    on_gpu = terms.compute.on_gpu
    whole = StageMemory(
        parameters_bytes=sum(s.param_bytes for s in holds) + copies.parameters,
        gradients_bytes=gradients,
        accumulators_bytes=summed if exact else 0,
        optimizer_bytes=sum(s.optimizer_bytes for s in holds),
        undo_bytes=undo + PAGE_BYTES * (len(own) + 1),
        snapshot_bytes=_snapshot(facts, runs, width, replica)
        if share is None
        else sum(s.param_bytes + s.optimizer_bytes for s in holds),
        stash_bytes=training.stash,
        batches_bytes=training.batches,
        activations_bytes=training.activations,
        buffers_bytes=buffers + waiting,
        update_bytes=buffers + max(copies.exchanged, *updates, 0),
        evaluation_bytes=evaluation + (0 if on_gpu else heldout_loader),
        loader_bytes=0 if on_gpu else terms.loader_bytes,
        library_bytes=_library_bytes(terms, _communicators(share, width)) if on_gpu else 0,
        fragmentation=FRAGMENTATION if on_gpu else 0.0,
    )
    if not on_gpu:
        return whole
    staging = 2 * (buffers + waiting)
    if width > 1 and exact:
        staging += summed + copies.exchanged
    elif width > 1:
        staging += copies.gradients + copies.exchanged
        if not copies.of_parts and terms.state == "device":
            staging += lanes * sum(map(trained_bytes, holds))
    loading = max(terms.loader_bytes, heldout_loader)
    return _on_gpu(whole, own, holds, copies, terms, buffers, staging, loading)


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


def _communicators(share: Share | None, width: int) -> int:
    """Return with how many groups of ranks a worker sums."""
    return int(width > 1) if share is None else share.communicators


def _on_gpu(
    whole: StageMemory,
    own: Sequence[SectionFacts],
    holds: Sequence[SectionFacts],
    copies: _Copies,
    terms: WorkerTerms,
    buffers: int,
    staging: int,
    loading: int,
) -> StageMemory:
    """Return the memory of a GPU's worker, divided between the device and its VM's.

    Args:
        whole: All of it, as on a CPU.
        own: The stage's sections.
        holds: Those of which it has the committed state.
        copies: What it only computes with.
        terms: What holds for all workers.
        buffers: What was sent last.
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
    whole = replace(whole, parameters_bytes=whole.parameters_bytes - copies.cast)
    if terms.state == "host":
        if copies.of_parts:
            parameters = copies.parameters - copies.cast
            whole = replace(whole, parameters_bytes=parameters, gradients_bytes=copies.gradients)
        host = replace(
            host,
            parameters_bytes=sum(s.param_bytes for s in holds),
            gradients_bytes=terms.compute.lanes * sum(map(trained_bytes, holds)),
        )
        return _on_host(whole, host, terms, casts, buffers + copies.exchanged)
    return _on_device(whole, host, casts, PAGE_BYTES * (len(own) + 1))


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
    whole: StageMemory, host: HostMemory, terms: WorkerTerms, casts: int, buffers: int
) -> StageMemory:
    """Return the memory of a GPU's worker that keeps committed state on the host.

    In exact mode the sum is made a gradient again section by section, on its way there.
    Matrices are converted on the host, into page-locked memory of their own.

    Args:
        whole: All of it, as on a CPU.
        host: What the VM's memory holds of it wherever state is.
        terms: What holds for all workers.
        casts: Bytes of converted matrices.
        buffers: What was sent last, and what puts sums together.
    """
    lanes = terms.compute.lanes
    return replace(
        whole,
        parameters_bytes=lanes * (whole.parameters_bytes - casts),
        gradients_bytes=0 if terms.reduction == "exact" else whole.gradients_bytes,
        optimizer_bytes=0,
        undo_bytes=0,
        snapshot_bytes=0,
        update_bytes=buffers,
        host=replace(
            host,
            optimizer_bytes=whole.optimizer_bytes,
            update_bytes=max(0, whole.update_bytes - buffers),
            undo_bytes=whole.undo_bytes,
            staging_bytes=host.staging_bytes + lanes * casts,
        ),
    )


def _on_device(whole: StageMemory, host: HostMemory, casts: int, words: int) -> StageMemory:
    """Return the memory of a GPU's worker that keeps committed state on the device.

    Autocast keeps its casts of parameters for a forward and its backward. The pages of
    words of the undo slot stay on the host.
    """
    return replace(
        whole,
        parameters_bytes=whole.parameters_bytes + casts,
        undo_bytes=whole.undo_bytes - words,
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


def rank_bytes(
    facts: ModelFacts,
    profile: Profile,
    plan: Plan,
    reduction: Reduction,
    compute: Compute = CPU,
    profiles: Sequence[Profile] | None = None,
) -> tuple[StageMemory, ...]:
    """Return the peak memory of every worker of ``plan``, by rank.

    Args:
        facts: Of the model.
        profile: Of all devices, where ``profiles`` are not given.
        plan: Who computes what.
        reduction: How gradients are summed up.
        compute: What workers compute on.
        profiles: Of the device of each rank.
    """
    depth = plan.pipeline_depth
    profiles = [profile] * len(plan.slots) if profiles is None else profiles
    loads: dict[int, tuple[StageLoad, ...]] = {}
    ranks = []
    shares = _shares_of(plan)

    @cache
    def of(
        stage: int, load: StageLoad, profile: int, size: int, pipeline: int, share: Share | None
    ) -> StageMemory:
        device = profiles[profile]
        return stage_bytes(
            facts,
            device.sections_at(size),
            plan.runs_of(stage),
            load,
            WorkerTerms.of(
                device,
                size,
                reduction=reduction,
                compute=compute,
                state=plan.state,
                nodes=size // plan.microbatch_size,
            ),
            segments=plan.segments,
            width=plan.num_pipelines,
            replica=pipeline,
            share=share,
        )

    numbers = {id(one): number for number, one in enumerate(profiles)}
    for pipeline in range(plan.num_pipelines):
        # Two mini-batches fill a pipeline as one of twice the length does.
        replica = pipeline // plan.devices_per_stage_replica
        count = compute.lanes * len(plan.microbatches_of(replica))
        size = plan.microbatch_size_of(replica)
        if count not in loads:
            loads[count] = stage_loads(
                plan.schedule,
                plan.pipeline_depth,
                count,
                plan.recompute,
                chunks=plan.chunks,
                in_flight_bound=plan.in_flight_bound,
            )
        for p, (load, device) in enumerate(
            zip(loads[count], profiles[pipeline * depth :], strict=False)
        ):
            share = shares[pipeline * depth + p]
            writes = pipeline if share is None else 0  # else what it holds, wherever it is
            ranks.append(of(p, load, numbers[id(device)], size, writes, share))
    return tuple(ranks)


def _shares_of(plan: Plan) -> Sequence[Share | None]:
    """Return what each rank holds, and with how many groups it sums: its stage's ranks, those
    in its VM, and those that hold the same in others."""
    if not plan.shared_state:
        return [None] * len(plan.slots)
    shares: dict[int, Share] = {}
    for stage in range(plan.pipeline_depth):
        held = plan.held_on(stage)
        counts = Counter(plan.slots[rank].vm_id for rank in held)
        for rank, sections in held.items():
            # Where VMs have unequally many, each section is held by other ranks together.
            across = 1 if len(set(counts.values())) == 1 else len(sections)
            inside = int(counts[plan.slots[rank].vm_id] > 1)
            groups = int(len(held) > 1) if len(counts) == 1 else 1 + inside + across
            sharers = counts[plan.slots[rank].vm_id]
            shares[rank] = Share(sections, sharers, plan.devices_per_stage_replica, groups)
    return [shares[rank] for rank in range(len(plan.slots))]
