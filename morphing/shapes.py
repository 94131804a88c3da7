"""What fleets of like GPUs do: the step time of every shape, worked out once each."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from spottrain.morphing.errors import PlanError
from spottrain.morphing.memory import StageLoad, stage_bytes, stage_loads
from spottrain.morphing.partition import partition, spread
from spottrain.morphing.policy import CAUTION, handicap
from spottrain.morphing.simulator import least_step_s, simulate_step
from spottrain.wire import (
    SCHEMA_VERSION,
    ModelFacts,
    Plan,
    Profile,
    SectionProfile,
    Slot,
)

SHORT = 8
"""Micro-batches a stage of a schedule long enough to tell what its stages hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its profile and the machines it is to run on: VMs of one GPU, all alike."""

    sources: tuple[str, ...]
    """Where the numbers are from."""
    facts: ModelFacts
    profile: Profile
    minibatch_size: int
    gpu_memory_bytes: int
    usd_per_hour: float
    """Of one VM."""
    schema_version: int = SCHEMA_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One pipeline depth and data-parallel width."""

    depth: int
    width: int
    step_s: float
    """Predicted time of a mini-batch."""
    move_bytes: int
    """Parameters and optimizer state of its largest stage: what a worker new to a stage
    has to fetch."""

    @property
    def slots(self) -> int:
        """GPUs that it takes."""
        return self.depth * self.width


def _cost(share: float, shape: Shape) -> tuple[float, int]:
    """Return what a shape is judged by, least first: as in ``choose``."""
    return shape.step_s * handicap(shape.depth, shape.width, share), shape.depth


class Shapes:
    """The shapes that a workload can take, simulated when first asked for."""

    def __init__(self, workload: Workload) -> None:
        check_workload(workload)
        self.workload = workload
        self._facts = workload.facts
        self._plans: dict[tuple[int, int], Plan | None] = {}
        self._shapes: dict[tuple[int, int], Shape | None] = {}
        self._best: dict[int, list[Shape]] = {}
        self._short: dict[
            tuple[int, int], tuple[tuple[StageLoad, ...], tuple[int, ...] | None]
        ] = {}

    @property
    def virtual_nodes(self) -> int:
        """Micro-batches of a mini-batch."""
        workload = self.workload
        return workload.minibatch_size // self.microbatch_size

    @property
    def microbatch_size(self) -> int:
        """The only one that the profile knows."""
        return self.workload.profile.microbatch_sizes[0]

    @property
    def _measured(self) -> tuple[SectionProfile, ...]:
        return self.workload.profile.sections_at(self.microbatch_size)

    def at(self, depth: int, width: int) -> Shape | None:
        """Return the shape ``depth`` x ``width``, or ``None`` if it cannot run."""
        if (depth, width) not in self._shapes:
            plan = self._plan(depth, width)
            self._shapes[depth, width] = None if plan is None else self._simulate(plan)
        return self._shapes[depth, width]

    def at_depth(self, depth: int, slots: int) -> Shape | None:
        """Return the widest shape of ``depth`` on ``slots`` GPUs."""
        return self.at(depth, min(slots // depth, self.virtual_nodes))

    def best(self, slots: int, lag_share: float = 0.0) -> Shape | None:
        """Return the best shape on ``slots`` GPUs, the shallowest of equals.

        Each depth has as many replicas as there are GPUs for, as in ``choose_plan``.

        Args:
            slots: GPUs.
            lag_share: What losses put at stake, see ``policy.lag_share``; if nothing, the
                best is the fastest.
        """
        key = partial(_cost, lag_share)
        return min(self._near(slots), key=key, default=None)

    def fewest(self) -> int | None:
        """Return how many GPUs the model needs at least; ``None``: no number is enough."""
        depths = range(1, len(self.workload.facts.sections) + 1)
        return next((p for p in depths if self._plan(p, 1) is not None), None)

    def _near(self, slots: int) -> list[Shape]:
        """Return the fastest shape, and all that could be better if losses count.

        A depth is simulated only if its lower bound is not too slow already.
        """
        if slots not in self._best:
            depths = range(1, min(len(self.workload.facts.sections), slots) + 1)
            widths = ((p, min(slots // p, self.virtual_nodes)) for p in depths)
            plans = [plan for p, d in widths if (plan := self._plan(p, d)) is not None]
            shapes: list[Shape] = []
            limit_s = math.inf
            for plan in sorted(plans, key=lambda plan: plan.predicted_step_s):
                if plan.predicted_step_s > limit_s:
                    break
                shape = self.at(plan.pipeline_depth, plan.data_parallel_width)
                assert shape is not None
                shapes.append(shape)
                limit_s = min(limit_s, shape.step_s * (1 + CAUTION))
            self._best[slots] = shapes
        return self._best[slots]

    def _plan(self, depth: int, width: int) -> Plan | None:
        """Return the plan whose predicted time is only a bound, kept for the next time."""
        if (depth, width) not in self._plans:
            possible = 1 <= depth <= len(self.workload.facts.sections) and width >= 1
            self._plans[depth, width] = self._cut(depth, width) if possible else None
        return self._plans[depth, width]

    def _cut(self, depth: int, width: int) -> Plan | None:
        replicas = spread(self.virtual_nodes, width)
        loads, bounds = self._stages(depth, replicas[1])
        if bounds is None:
            return None
        plan = Plan(
            pipeline_depth=depth,
            data_parallel_width=width,
            microbatch_size=self.microbatch_size,
            minibatch_size=self.workload.minibatch_size,
            schedule="varuna",
            recompute=True,
            stage_bounds=bounds,
            replica_bounds=replicas,
            slots=tuple(Slot(vm_id=str(i), index=0) for i in range(depth * width)),
            predicted_step_s=0.0,
        )
        least_s = least_step_s(
            plan,
            self.workload.profile,
            recomputes=[load.recomputes for load in loads],
            speeds=[1.0] * len(plan.slots),
        )
        return replace(plan, predicted_step_s=least_s)

    def _stages(
        self, depth: int, count: int
    ) -> tuple[tuple[StageLoad, ...], tuple[int, ...] | None]:
        """Return what the stages of a replica hold, and its sections' bounds.

        Varuna's lists repeat themselves after some 3 micro-batches a stage, and one
        recompute a stage may be spared at their end: a short list tells all.
        """
        short = min(count, SHORT * depth)
        if (depth, short) not in self._short:
            loads = stage_loads("varuna", depth, short, recompute=True)
            self._short[depth, short] = loads, self._bounds(loads)
        loads, bounds = self._short[depth, short]
        more = max(0, count - short - 1)
        return tuple(
            replace(load, recomputes=load.recomputes + more)
            if load.recomputes
            else load
            for load in loads
        ), bounds

    def _bounds(self, loads: Sequence[StageLoad]) -> tuple[int, ...] | None:
        sections = self._measured
        costs_s = [s.forward_s + s.recompute_s + s.backward_s for s in sections]
        last_s = [s.forward_s + s.backward_s for s in sections]
        cut = partial(partition, costs_s, len(loads), last_costs_s=last_s)
        fits = partial(self._fits, loads)
        bounds = cut()
        assert bounds is not None
        cuts = enumerate(itertools.pairwise(bounds))
        if all(fits(p, start, end) for p, (start, end) in cuts):
            return bounds
        state = (2 * s.param_bytes + s.optimizer_bytes for s in self._facts.sections)
        if sum(state) > len(loads) * self.workload.gpu_memory_bytes:
            return None  # spares the search
        return cut(fits)

    def _fits(self, loads: Sequence[StageLoad], stage: int, a: int, b: int) -> bool:
        """Return whether ``stage`` can hold the sections [a, b)."""
        memory = stage_bytes(self._facts, self._measured, (range(a, b),), loads[stage])
        return memory.total_bytes <= self.workload.gpu_memory_bytes

    def _simulate(self, plan: Plan) -> Shape:
        facts = self.workload.facts
        step = simulate_step(plan, self.workload.profile, facts, reduction="fast")
        state = [s.param_bytes + s.optimizer_bytes for s in facts.sections]
        return Shape(
            depth=plan.pipeline_depth,
            width=plan.data_parallel_width,
            step_s=step.step_s,
            move_bytes=max(
                sum(state[a:b]) for a, b in itertools.pairwise(plan.stage_bounds)
            ),
        )


def check_workload(workload: Workload) -> None:
    """Refuse a workload that no plan can be made from.

    Raises:
        PlanError: Times, sizes or counts are missing, negative, zero where they must
            not be, or not finite; or facts, profile and mini-batch do not go together.
    """
    facts, profile = workload.facts, workload.profile
    if len(profile.microbatches) != 1:
        raise PlanError(
            "a workload's profile must be of one micro-batch size: got "
            f"{profile.microbatch_sizes}; leave the others out"
        )
    measured = profile.microbatches[0]
    sections = measured.sections
    if profile.fingerprint != facts.fingerprint or len(sections) != len(facts.sections):
        raise PlanError(
            f"the profile is of another model: got {profile.fingerprint} with "
            f"{len(sections)} sections for {facts.fingerprint} with "
            f"{len(facts.sections)}; take facts and profile of one model"
        )
    for section in sections:
        for name in ("forward_s", "backward_s", "recompute_s"):
            _positive(f"sections[{section.index}].{name}", getattr(section, name))
    for link in ("within_vm", "between_vms"):
        numbers = getattr(profile, link)
        bandwidth = numbers.bandwidth_bytes_per_s
        _positive(f"{link}.bandwidth_bytes_per_s", bandwidth)
        _positive(f"{link}.latency_s", numbers.latency_s, or_zero=True)
    _positive("gpu_memory_bytes", workload.gpu_memory_bytes)
    _positive("optimizer_s_per_byte", profile.optimizer_s_per_byte, or_zero=True)
    _positive("usd_per_hour", workload.usd_per_hour, or_zero=True)
    sizes = workload.minibatch_size, measured.microbatch_size
    if min(sizes) < 1 or sizes[0] % sizes[1]:
        raise PlanError(
            "minibatch_size must be a multiple of the profile's microbatch_size: got "
            f"{sizes[0]} and {sizes[1]}; change minibatch_size"
        )


def _positive(name: str, value: float, *, or_zero: bool = False) -> None:
    if not (math.isfinite(value) and (value > 0 or (or_zero and value == 0))):
        least = "0 or more" if or_zero else "above 0"
        raise PlanError(f"{name} must be a number {least}: got {value}; measure again")
