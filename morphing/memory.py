"""What a stage holds in device memory at its peak, from facts and a profile."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from spottrain.morphing.schedule import (
    StageSchedule,
    Task,
    Work,
    make_schedule,
    max_in_flight,
)
from spottrain.wire import (
    ModelFacts,
    Plan,
    Profile,
    Reduction,
    ScheduleKind,
    SectionProfile,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes that one worker of a stage holds at most, by what they are for."""

    parameters_bytes: int
    gradients_bytes: int
    """The mini-batch's sum, later the prepared gradients."""
    optimizer_bytes: int
    undo_bytes: int
    """Copy of the largest section's parameters, gradients and optimizer state, from
    which an update that was cut short is undone."""
    stash_bytes: int
    """Inputs of micro-batches in flight, those that wait for their forward included."""
    activations_bytes: int
    """Tensors saved for the backward: of one micro-batch if the stage recomputes, else
    of all in flight."""
    virtual_node_gradients_bytes: int
    """In exact mode: gradients kept apart until the running sum arrives."""
    buffers_bytes: int
    """An activation and a gradient on their way in each direction."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return (
            self.parameters_bytes
            + self.gradients_bytes
            + self.optimizer_bytes
            + self.undo_bytes
            + self.stash_bytes
            + self.activations_bytes
            + self.virtual_node_gradients_bytes
            + self.buffers_bytes
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLoad:
    """How many micro-batches a stage deals with at once."""

    in_flight: int
    """Forwarded and not yet through the backward."""
    inputs_held: int
    """Arrived and not yet through the backward: never more than are in flight in the
    stage before."""
    recomputes: int
    """Recomputes that its list cannot do without (see ``Progress.keeps_graph``); with
    none of them, the stage keeps every graph."""


def stage_loads(
    schedule: ScheduleKind, pipeline_depth: int, num_microbatches: int, recompute: bool
) -> tuple[StageLoad, ...]:
    """Return the load of every stage of a replica that follows ``schedule``."""
    lists = make_schedule(
        schedule, pipeline_depth, num_microbatches, recompute=recompute
    )
    in_flight = [max_in_flight(tasks) for tasks in lists]
    return tuple(
        StageLoad(
            in_flight=in_flight[p],
            inputs_held=in_flight[max(p - 1, 0)],
            recomputes=_recomputes(lists[p]),
        )
        for p in range(pipeline_depth)
    )


def _recomputes(tasks: StageSchedule) -> int:
    return sum(
        task.work is Work.RECOMPUTE and before != Task(Work.FORWARD, task.microbatch)
        for before, task in itertools.pairwise(tasks)
    )


def stage_bytes(
    facts: ModelFacts,
    measured: Sequence[SectionProfile],
    sections: range,
    load: StageLoad,
    *,
    virtual_nodes_apart: int = 0,
) -> StageMemory:
    """Return what a stage of ``sections`` holds at most.

    Args:
        facts: Bytes of parameters (gradients have as many) and optimizer state.
        measured: Bytes of activations of all sections for one micro-batch.
        sections: The stage's sections, in order.
        load: Micro-batches at once.
        virtual_nodes_apart: Virtual nodes whose gradients are kept apart.
    """
    own = facts.sections[sections.start : sections.stop]
    mine = measured[sections.start : sections.stop]
    parameters = sum(section.param_bytes for section in own)
    optimizer = sum(section.optimizer_bytes for section in own)
    # What a section hands on within the stage is saved by the next one, whose profile
    # leaves its input out.
    handed_on = sum(section.output_bytes for section in mine[:-1])
    saved = handed_on + sum(section.saved_bytes for section in mine)
    # The first section reads examples, the last one sends nothing.
    start, end = sections.start, sections.stop
    input_bytes = measured[start - 1].output_bytes if start > 0 else 0
    is_last = end == len(facts.sections)
    output_bytes = 0 if is_last else mine[-1].output_bytes
    return StageMemory(
        parameters_bytes=parameters,
        gradients_bytes=parameters,
        optimizer_bytes=optimizer,
        undo_bytes=max(2 * s.param_bytes + s.optimizer_bytes for s in own),
        stash_bytes=load.inputs_held * input_bytes,
        activations_bytes=saved * (1 if load.recomputes else load.in_flight),
        virtual_node_gradients_bytes=virtual_nodes_apart * parameters,
        buffers_bytes=2 * (input_bytes + output_bytes),
    )


def virtual_nodes_apart(replica_bounds: Sequence[int], reduction: Reduction) -> int:
    """Return the most virtual nodes whose gradients one replica keeps apart.

    In exact mode gradients are added in the order of the virtual nodes, so every
    replica but the first keeps its own apart until the sum of those before arrives;
    the first adds each one's as they come.
    """
    if reduction == "fast":
        return 0
    shares = [b - a for a, b in itertools.pairwise(replica_bounds)]
    return max([1, *shares[1:]])


def plan_bytes(
    facts: ModelFacts, profile: Profile, plan: Plan, reduction: Reduction
) -> tuple[StageMemory, ...]:
    """Return what the busiest worker of each stage of ``plan`` holds at most."""
    most = max(len(plan.virtual_nodes_of(d)) for d in range(plan.data_parallel_width))
    loads = stage_loads(plan.schedule, plan.pipeline_depth, most, plan.recompute)
    apart = virtual_nodes_apart(plan.replica_bounds, reduction)
    measured = profile.sections_at(plan.microbatch_size)
    return tuple(
        stage_bytes(
            facts, measured, plan.runs_of(p)[0], load, virtual_nodes_apart=apart
        )
        for p, load in enumerate(loads)
    )
