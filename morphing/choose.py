"""The plan for the devices at hand, and whether going over to it pays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from spottrain.morphing.errors import PlanError
from spottrain.morphing.memory import (
    StageLoad,
    stage_bytes,
    stage_loads,
    virtual_nodes_apart,
)
from spottrain.morphing.partition import Fits, partition, spread
from spottrain.morphing.placement import Device, place, take
from spottrain.morphing.policy import break_even_s, handicap
from spottrain.morphing.simulator import least_step_s, simulate_step
from spottrain.wire import (
    SCHEMA_VERSION,
    ModelFacts,
    Plan,
    Profile,
    Reduction,
    ScheduleKind,
)

__all__ = [
    "Candidate",
    "Choice",
    "Device",
    "PlanInputs",
    "break_even_s",
    "choose_plan",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """All that a choice depends on; the same inputs give the same choice."""

    facts: ModelFacts
    profile: Profile
    slots: tuple[Device, ...]
    minibatch_size: int
    microbatch_size: int
    reduction: Reduction
    previous: Plan | None = None
    """The plan that runs now: of equal placements the one nearest to it is taken."""
    schedule: ScheduleKind = "varuna"
    recompute: bool = True
    lag_share: float = 0.0
    """What losses put at stake, see ``policy.lag_share``: of plans nearly as fast the one
    that survives them is taken."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One depth that was weighed."""

    pipeline_depth: int
    data_parallel_width: int
    unused_slots: int
    stage_bytes: tuple[int, ...]
    """Memory of each stage's busiest worker."""
    step_s: float | None
    """Predicted, or where ``why_not`` says "at least" a bound that was enough to rule
    it out; ``None`` if the candidate cannot run."""
    examples_per_s: float | None
    why_not: str
    """Empty for the one that was chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The best plan and what it was weighed against."""

    plan: Plan | None
    """``None`` if no candidate can run."""
    candidates: tuple[Candidate, ...]
    """By ascending depth."""


def choose_plan(inputs: PlanInputs) -> Choice:
    """Weigh every depth and return the plan with the most examples per second.

    For each depth the sections are cut evenly by measured time, there are as many
    replicas as the devices and the mini-batch allow, and one mini-batch is simulated
    (Varuna, section 4.3), unless a bound shows that it cannot be the best. Fewer
    replicas are taken where a VM would hold all replicas of a stage or a device is too
    small. Of equally fast depths the least is chosen.

    Raises:
        PlanError: The mini-batch is no multiple of the micro-batch, or the profile does
            not fit the model or the micro-batch.
    """
    _check(inputs)
    depths = range(1, min(len(inputs.facts.sections), len(inputs.slots)) + 1)
    layouts = [_widest_layout(inputs, depth) for depth in depths]
    simulated: dict[int, Plan] = {}
    best: Plan | None = None
    for plan in sorted(
        (layout.plan for layout in layouts if layout.plan is not None),
        key=lambda plan: (_cost_s(inputs, plan), plan.pipeline_depth),
    ):
        if best is not None and _cost_s(inputs, plan) > _cost_s(inputs, best):
            break
        depth = plan.pipeline_depth
        simulated[depth] = _simulate(inputs, plan)
        best = min(
            simulated.values(), key=lambda p: (_cost_s(inputs, p), p.pipeline_depth)
        )
    return Choice(
        plan=best,
        candidates=tuple(
            _candidate(inputs, layout, simulated.get(layout.depth), best)
            for layout in layouts
        ),
    )


def _check(inputs: PlanInputs) -> None:
    facts, profile = inputs.facts, inputs.profile
    sizes = inputs.minibatch_size, inputs.microbatch_size
    if min(sizes) < 1 or sizes[0] % sizes[1]:
        raise PlanError(
            "minibatch_size must be a multiple of microbatch_size: got "
            f"{sizes[0]} and {sizes[1]}; change one of them"
        )
    if inputs.microbatch_size not in profile.microbatch_sizes:
        raise PlanError(
            f"the profile knows micro-batches of {profile.microbatch_sizes}: got "
            f"microbatch_size {inputs.microbatch_size}; calibrate again"
        )
    measured = profile.sections_at(inputs.microbatch_size)
    if profile.fingerprint != facts.fingerprint or len(measured) != len(facts.sections):
        raise PlanError(
            f"the profile is of another model: got {profile.fingerprint} with "
            f"{len(measured)} sections for {facts.fingerprint} with "
            f"{len(facts.sections)}; calibrate again"
        )
    for link in (profile.within_vm, profile.between_vms):
        if not link.bandwidth_bytes_per_s > 0 <= link.latency_s:
            raise PlanError(
                "a link needs a bandwidth above 0 and a latency of 0 or more: got "
                f"{link.bandwidth_bytes_per_s} bytes/s and {link.latency_s} s; "
                "calibrate again"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """What came of one depth and width: a plan or why there is none."""

    depth: int
    width: int
    stage_bytes: tuple[int, ...] = ()
    plan: Plan | None = None
    """``predicted_step_s`` is a lower bound."""
    why_not: str = ""


def _widest_layout(inputs: PlanInputs, depth: int) -> _Layout:
    """Return the plan of ``depth`` with the most replicas.

    Where none is possible, tell what stands against the most replicas.
    """
    most = min(len(inputs.slots) // depth, _virtual_nodes(inputs))
    alike = len({device.memory_bytes for device in inputs.slots}) == 1
    layouts: list[_Layout] = []
    for width in range(most, 0, -1):
        # Fewer replicas have more micro-batches each and need no less memory; but one
        # alone keeps no gradients apart.
        if width > 1 and alike and layouts and layouts[-1].stage_bytes:
            continue
        layouts.append(_lay_out(inputs, depth, width))
        if layouts[-1].plan is not None:
            return layouts[-1]
    return layouts[0]


def _lay_out(inputs: PlanInputs, depth: int, width: int) -> _Layout:
    """Choose devices and cut stages that fit into each of them."""
    kept = set() if inputs.previous is None else set(inputs.previous.slots)
    fastest = sorted(inputs.slots, key=lambda d: (-d.speed, d.slot not in kept, d.slot))
    roomiest = sorted(fastest, key=lambda device: -device.memory_bytes)
    measure = _StageBytes(inputs, depth, width)
    even = _cut(inputs, depth)
    assert even is not None
    needed, room = measure.of(even), 0
    for order in (fastest, roomiest):
        devices = take(order, depth, width)
        if devices is None:
            why_not = f"one VM would hold all {width} replicas of a stage"
            return _Layout(depth=depth, width=width, why_not=why_not)
        smallest = min(device.memory_bytes for device in devices)
        if smallest <= room:
            break
        room = smallest
        bounds: tuple[int, ...] | None = even
        if max(needed) > room:
            bounds = _cut(inputs, depth, partial(measure.fits, room))
        if bounds is not None:
            return _Layout(
                depth=depth,
                width=width,
                stage_bytes=measure.of(bounds),
                plan=_bounded_plan(inputs, bounds, devices, measure.loads),
            )
    why_not = f"a stage needs {max(needed)} bytes, a device has {room}"
    return _Layout(depth=depth, width=width, stage_bytes=needed, why_not=why_not)


class _StageBytes:
    """Memory of the stages of one depth and width, wherever they are cut."""

    def __init__(self, inputs: PlanInputs, depth: int, width: int) -> None:
        replica_bounds = spread(_virtual_nodes(inputs), width)
        self._inputs = inputs
        self._measured = inputs.profile.sections_at(inputs.microbatch_size)
        self._apart = virtual_nodes_apart(replica_bounds, inputs.reduction)
        self._width = width
        self.loads = stage_loads(
            inputs.schedule, depth, replica_bounds[1], inputs.recompute
        )

    def __call__(self, stage: int, start: int, end: int) -> int:
        """Return the bytes of ``stage`` if it has the sections [start, end)."""
        return stage_bytes(
            self._inputs.facts,
            self._measured,
            (range(start, end),),
            self.loads[stage],
            virtual_nodes_apart=self._apart,
            width=self._width,
        ).total_bytes

    def fits(self, room_bytes: int, stage: int, start: int, end: int) -> bool:
        """Return whether ``room_bytes`` are enough for that."""
        return self(stage, start, end) <= room_bytes

    def of(self, bounds: tuple[int, ...]) -> tuple[int, ...]:
        """Return the bytes of every stage."""
        return tuple(self(p, *run) for p, run in enumerate(itertools.pairwise(bounds)))


def _cut(
    inputs: PlanInputs, depth: int, fits: Fits | None = None
) -> tuple[int, ...] | None:
    """Cut the sections into stages that ``fits``, as evenly as that permits."""
    sections = inputs.profile.sections_at(inputs.microbatch_size)
    last_costs_s = [s.forward_s + s.backward_s for s in sections]
    costs_s = last_costs_s
    if inputs.recompute:
        costs_s = [s.forward_s + s.recompute_s + s.backward_s for s in sections]
    return partition(costs_s, depth, fits, last_costs_s=last_costs_s)


def _bounded_plan(
    inputs: PlanInputs,
    stage_bounds: tuple[int, ...],
    devices: Sequence[Device],
    loads: Sequence[StageLoad],
) -> Plan:
    """Return the plan on ``devices``, predicted to take the least that it can."""
    depth = len(stage_bounds) - 1
    width = len(devices) // depth
    placed = place(devices, stage_bounds, width, inputs.facts, inputs.previous)
    plan = Plan(
        pipeline_depth=depth,
        data_parallel_width=width,
        microbatch_size=inputs.microbatch_size,
        minibatch_size=inputs.minibatch_size,
        schedule=inputs.schedule,
        recompute=inputs.recompute,
        stage_bounds=stage_bounds,
        replica_bounds=spread(_virtual_nodes(inputs), width),
        slots=tuple(device.slot for device in placed),
        predicted_step_s=0.0,
    )
    least_s = least_step_s(
        plan,
        inputs.profile,
        recomputes=[load.recomputes for load in loads],
        speeds=[device.speed for device in placed],
    )
    return replace(plan, predicted_step_s=least_s)


def _simulate(inputs: PlanInputs, plan: Plan) -> Plan:
    """Return ``plan`` with the simulated time of a mini-batch."""
    speed = {device.slot: device.speed for device in inputs.slots}
    step = simulate_step(
        plan,
        inputs.profile,
        inputs.facts,
        reduction=inputs.reduction,
        speeds=[speed[slot] for slot in plan.slots],
    )
    return replace(plan, predicted_step_s=step.step_s)


def _candidate(
    inputs: PlanInputs, layout: _Layout, simulated: Plan | None, best: Plan | None
) -> Candidate:
    """Return the row of ``layout`` in the table."""
    plan = simulated or layout.plan
    why_not = layout.why_not
    if plan is not None and best is not None and plan is not best:
        more = _cost_s(inputs, plan) / _cost_s(inputs, best) - 1
        bound = "" if simulated else "at least "
        why_not = f"{bound}{more:.1%} slower than {best.shape}"
    step_s = None if plan is None else plan.predicted_step_s
    return Candidate(
        pipeline_depth=layout.depth,
        data_parallel_width=layout.width,
        unused_slots=len(inputs.slots) - layout.depth * layout.width,
        stage_bytes=layout.stage_bytes,
        step_s=step_s,
        examples_per_s=None if step_s is None else inputs.minibatch_size / step_s,
        why_not=why_not,
    )


def _cost_s(inputs: PlanInputs, plan: Plan) -> float:
    """Return the time of a mini-batch, what losses put at stake counted."""
    depth, width = plan.pipeline_depth, plan.data_parallel_width
    return plan.predicted_step_s * handicap(depth, width, inputs.lag_share)


def _virtual_nodes(inputs: PlanInputs) -> int:
    return inputs.minibatch_size // inputs.microbatch_size
