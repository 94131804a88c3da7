"""Predicts a worker's peak device memory from facts and a profile.

Parameters, gradients, optimizer state and an undo slot are held throughout, at times
also a copy for a checkpoint, which is written while training goes on. On top is the
highest of three peaks: a mini-batch, the optimizer's first step, an evaluation.
docs/memory.md has the rules and how well they agree with what workers measure.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from spottrain.morphing.memory.loads import StageLoad, stage_loads
from spottrain.wire.model import ModelFacts, Plan, Profile, Reduction, SectionProfile

PAGE_BYTES = 4096
"""Words about each section and about the undo slot; as ``pipeline.arena``."""
PENDING_SENDS = 8
"""Tensors sent to neighbours that are kept until they are surely there; as
``pipeline.links``."""
HELDOUT_FACTOR = 4
"""Examples of an evaluation's micro-batch over those of training; as ``pipeline.data``."""
HELDOUT_INPUTS, HELDOUT_SENDS = 3, 2
"""Activations that a stage holds during an evaluation; as ``pipeline.executor``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Peak bytes of one worker of a stage, by purpose."""

    parameters_bytes: int
    gradients_bytes: int
    """The mini-batch's sum, later the prepared gradients."""
    optimizer_bytes: int
    undo_bytes: int
    """Copy of the largest section's parameters, gradients and optimizer state, from
    which an update that was cut short is undone; and all sections' pages of words."""
    snapshot_bytes: int
    """Copy of the worker's share of a periodic checkpoint, until it is written."""
    stash_bytes: int
    """At the peak of a mini-batch, as all below up to ``buffers_bytes``: inputs of
    micro-batches in flight, those that wait for their forward included."""
    batches_bytes: int
    """The user's data of micro-batches in flight."""
    activations_bytes: int
    """Tensors saved for the backward, of one micro-batch if the stage recomputes, else of
    all in flight; and what the task under way takes for itself."""
    virtual_node_gradients_bytes: int
    """In exact mode: gradients kept apart until the running sum arrives."""
    buffers_bytes: int
    """Activations and gradients on their way to neighbours, and gradients that wait."""
    update_bytes: int
    """Extra bytes of the optimizer's first step beyond what is held throughout."""
    evaluation_bytes: int
    """Extra bytes of an evaluation beyond that."""

    @property
    def static_bytes(self) -> int:
        """Bytes that are held throughout."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.undo_bytes
        )

    @property
    def training_bytes(self) -> int:
        """Extra bytes of a mini-batch beyond that."""
        return (
            self.stash_bytes
            + self.batches_bytes
            + self.activations_bytes
            + self.virtual_node_gradients_bytes
            + self.buffers_bytes
        )

    @property
    def total_bytes(self) -> int:
        """Bytes that the device must have."""
        working = max(self.training_bytes, self.update_bytes)
        working += self.snapshot_bytes
        return self.static_bytes + max(working, self.evaluation_bytes)


def stage_bytes(
    facts: ModelFacts,
    measured: Sequence[SectionProfile],
    runs: Sequence[range],
    load: StageLoad,
    *,
    virtual_nodes_apart: int = 0,
    width: int = 1,
    replica: int | None = None,
) -> StageMemory:
    """Return the peak memory of a worker of a stage.

    Args:
        facts: Bytes of parameters, gradients and optimizer state.
        measured: Bytes of activations of all sections for one micro-batch.
        runs: The stage's runs of consecutive sections, one per chunk.
        load: Micro-batches at once.
        virtual_nodes_apart: Virtual nodes whose gradients are kept apart.
        width: Replicas, which share the writing of checkpoints.
        replica: Whose worker; ``None``: the one with the largest share.
    """
    own = [facts.sections[k] for run in runs for k in run]
    chunks = [_Chunk.of(facts, measured, run, virtual_nodes_apart > 0) for run in runs]
    parameters = sum(s.param_bytes for s in own)
    gradients = sum(chunk.gradients for chunk in chunks)
    optimizer = sum(s.optimizer_bytes for s in own)
    undo = max(
        s.param_bytes + s.optimizer_bytes + gradient_bytes(facts, s.index) for s in own
    )
    waiting = load.gradients_waiting * max(chunk.output for chunk in chunks)
    buffers = _pending(chunks, load)
    training = _training(chunks, load, virtual_nodes_apart, gradients)
    update = max(measured[s.index].update_bytes for s in own)
    return StageMemory(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        undo_bytes=undo + PAGE_BYTES * (len(own) + 1),
        snapshot_bytes=_snapshot(facts, runs, width, replica),
        stash_bytes=training.stash,
        batches_bytes=training.batches,
        activations_bytes=training.activations,
        virtual_node_gradients_bytes=training.apart,
        buffers_bytes=buffers + waiting,
        update_bytes=buffers + update,
        evaluation_bytes=_evaluation(chunks) if facts.heldout_len else 0,
    )


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One run of sections, by bytes of one micro-batch."""

    input: int
    output: int
    batch: int
    gradients: int
    """Of its parameters."""
    held: int
    """Tensors that a forward leaves for the backward, the output included."""
    forward: int
    """Peak of a forward that leaves nothing."""
    recompute: int
    """Peak of a forward that leaves ``held``."""
    backward: int
    """Peak of the backward, with the gradient of the output, and in exact mode those of
    the parameters."""

    @classmethod
    def of(
        cls,
        facts: ModelFacts,
        measured: Sequence[SectionProfile],
        run: range,
        exact: bool,
    ) -> _Chunk:
        """Follow one micro-batch through the sections, and back."""
        gradients = [gradient_bytes(facts, k) for k in run]
        entry, end = _ends(facts, measured, run)
        came, held, later = 0, 0, sum(gradients) if exact else 0
        forward = recompute = backward = 0
        trained = run.start > 0  # a graph begins at what is received, or is trained
        for k, own in zip(run, gradients, strict=True):
            section = measured[k]
            out = end if k == run[-1] else section.output_bytes
            forward = max(forward, came + section.forward_bytes, came + out)
            trained = trained or own > 0
            if not trained:
                came = out
                continue
            recompute = max(recompute, held + section.recompute_bytes)
            # The gradients of this section's parameters are the last to be complete.
            done = held + later + (came or entry)
            held += section.saved_bytes + out
            later -= own if exact else 0
            passed = 0 if k == run[-1] else out
            here = held + later + passed + section.backward_bytes
            backward = max(backward, done, here)
            came = out
        return cls(
            input=entry,
            output=end,
            batch=max(measured[k].batch_bytes for k in run),
            gradients=sum(gradients),
            held=held,
            forward=forward,
            recompute=max(recompute, forward, held),
            backward=end + backward,
        )


def _ends(
    facts: ModelFacts, measured: Sequence[SectionProfile], run: range
) -> tuple[int, int]:
    """Return the bytes of what comes in and of what goes out.

    The first section reads examples; a loss is not worth counting.
    """
    is_last = run.stop == len(facts.sections)
    return (
        measured[run.start - 1].output_bytes if run.start else 0,
        0 if is_last else measured[run[-1]].output_bytes,
    )


@dataclass(frozen=True, slots=True)
class _TrainingPeak:
    """The peak of a mini-batch."""

    stash: int
    batches: int
    activations: int
    apart: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.stash + self.batches + self.activations + self.apart


def _training(
    chunks: Sequence[_Chunk], load: StageLoad, apart: int, gradients: int
) -> _TrainingPeak:
    """Return the highest of three peaks.

    Where gradients are kept apart they pile up while fewer and fewer micro-batches are
    in flight: so the peak is where the pipeline begins to drain, in the last backward,
    or after it.
    """
    last = StageLoad(
        in_flight=1, inputs_held=1, recomputes=load.recomputes, keeps=load.keeps
    )
    whole = max(0, apart - load.in_flight) * gradients
    moments = [_peak(chunks, load, whole)]
    if apart > 1:
        moments.append(_peak(chunks, last, (apart - 1) * gradients))
        moments.append(_TrainingPeak(0, 0, 0, apart * gradients))
    return max(moments, key=lambda moment: moment.total)


def _peak(chunks: Sequence[_Chunk], load: StageLoad, apart: int) -> _TrainingPeak:
    kept = work = stash = 0
    spare = load.inputs_held - load.in_flight
    for chunk, count, keeps in zip(chunks, load.counts, load.keeping, strict=False):
        stash += count * chunk.input
        graphs = count if keeps else 0
        kept += graphs * chunk.held
        task = max(chunk.recompute, chunk.backward)
        if not keeps:
            # A forward may come between a recompute and its backward.
            task = max(task, chunk.held + chunk.forward)
        work = max(work, task - min(graphs, 1) * chunk.held)
    return _TrainingPeak(
        stash=stash + spare * max(chunk.input for chunk in chunks),
        # Examples stay from the first chunk's forward to its backward.
        batches=load.counts[0] * max(chunk.batch for chunk in chunks),
        activations=kept + work,
        apart=apart,
    )


def _pending(chunks: Sequence[_Chunk], load: StageLoad) -> int:
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


def _evaluation(chunks: Sequence[_Chunk]) -> int:
    one = max(
        HELDOUT_INPUTS * chunk.input
        + HELDOUT_SENDS * chunk.output
        + chunk.batch
        + chunk.forward
        for chunk in chunks
    )
    return HELDOUT_FACTOR * one


def _snapshot(
    facts: ModelFacts, runs: Iterable[range], width: int, replica: int | None
) -> int:
    """Return a worker's share of a checkpoint: replicas take turns at the sections."""
    shares: dict[int, int] = {}
    for run in runs:
        for k in run:
            section = facts.sections[k]
            mine = section.param_bytes + section.optimizer_bytes
            shares[k % width] = shares.get(k % width, 0) + mine
    return max(shares.values()) if replica is None else shares.get(replica, 0)


def gradient_bytes(facts: ModelFacts, section: int) -> int:
    """Return the bytes of the gradients of a section's parameters."""
    own = facts.sections[section]
    return own.param_bytes if own.gradient_bytes is None else own.gradient_bytes


def megabytes(num_bytes: int) -> str:
    """Return bytes as text in megabytes, rounded up."""
    return f"{math.ceil(num_bytes / 100_000) / 10:,.1f} MB"


def virtual_nodes_apart(replica_bounds: Sequence[int], reduction: Reduction) -> int:
    """Return the maximum virtual nodes whose gradients a replica keeps apart.

    In exact mode gradients are added in the order of the virtual nodes, so every
    replica but the first keeps its own apart until the sum of those before arrives;
    the first adds each one's as they come.
    """
    if reduction == "fast":
        return 0
    shares = [b - a for a, b in itertools.pairwise(replica_bounds)]
    return max([1, *shares[1:]])


def rank_bytes(
    facts: ModelFacts, profile: Profile, plan: Plan, reduction: Reduction
) -> tuple[StageMemory, ...]:
    """Return the peak memory of every worker of ``plan``, by rank."""
    measured = profile.sections_at(plan.microbatch_size)
    width = plan.data_parallel_width
    loads: dict[int, tuple[StageLoad, ...]] = {}
    ranks = []
    for replica in range(width):
        count = len(plan.virtual_nodes_of(replica))
        if count not in loads:
            loads[count] = stage_loads(
                plan.schedule,
                plan.pipeline_depth,
                count,
                plan.recompute,
                chunks=plan.chunks,
                in_flight_bound=plan.in_flight_bound,
            )
        apart = 0 if reduction == "fast" else count if replica else 1
        ranks += [
            stage_bytes(
                facts,
                measured,
                plan.runs_of(p),
                load,
                virtual_nodes_apart=apart,
                width=width,
                replica=replica,
            )
            for p, load in enumerate(loads[count])
        ]
    return tuple(ranks)


def plan_bytes(
    facts: ModelFacts, profile: Profile, plan: Plan, reduction: Reduction
) -> tuple[StageMemory, ...]:
    """Return the peak memory of the largest worker of each stage of ``plan``."""
    ranks = rank_bytes(facts, profile, plan, reduction)
    return tuple(
        max(ranks[p :: plan.pipeline_depth], key=lambda memory: memory.total_bytes)
        for p in range(plan.pipeline_depth)
    )


def handover_bytes(facts: ModelFacts, plan: Plan, previous: Plan) -> tuple[int, ...]:
    """Return the bytes that every worker of ``plan`` holds during the handover.

    While sections change their owners, a worker keeps those it had under ``previous``
    beside those it is to have, and an undo slot for the largest of both.
    """
    old_depth = previous.pipeline_depth
    had = {slot: rank % old_depth for rank, slot in enumerate(previous.slots)}
    sizes = [
        section.param_bytes
        + gradient_bytes(facts, section.index)
        + section.optimizer_bytes
        + PAGE_BYTES
        for section in facts.sections
    ]

    @cache
    def held(before: int | None, stage: int) -> int:
        sections = set(plan.sections_of(stage))
        if before is not None:
            sections.update(previous.sections_of(before))
        own = [sizes[k] for k in sections]
        return sum(own) + max(own)

    return tuple(
        held(had.get(slot), rank % plan.pipeline_depth)
        for rank, slot in enumerate(plan.slots)
    )
