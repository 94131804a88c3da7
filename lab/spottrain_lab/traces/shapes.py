"""Step times of all shapes on fleets of equal GPUs, each worked out once."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial

from spottrain.morphing.adapt.policy import CAUTION, capped_slowdown
from spottrain.morphing.errors import PlanError
from spottrain.morphing.memory.room import times
from spottrain.morphing.plan.inputs import positive
from spottrain.morphing.plan.layouts import Layouts, PlanLayout, Refusal
from spottrain.morphing.plan.modes import DeviceFleet, Draft, execution_modes
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.plan.profiles import check_profile
from spottrain.morphing.plan.workload import Workload
from spottrain.wire.plan import Plan, ScheduleKind, Slot


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
    covered_step_s: float = math.inf
    """Time of a mini-batch while a VM does its successor's stage, too; infinite: it
    cannot, as it does not have that stage's state."""

    @property
    def slots(self) -> int:
        """GPUs that it takes."""
        return self.depth * self.width


def _cost(share: float, shape: Shape) -> tuple[float, int]:
    """Return the cost by which shapes are compared, as in ``choose``."""
    return shape.step_s * capped_slowdown(shape.depth, shape.width, share), shape.depth


class Shapes:
    """The shapes that a workload can take, simulated when first asked for.

    All have one execution mode, so that they differ by their shape alone.

    Args:
        workload: The model and the machines.
        schedule: Kind of the lists.
        recompute: Whether stages recompute.

    Raises:
        PlanError: See ``check_workload``.
    """

    def __init__(
        self,
        workload: Workload,
        schedule: ScheduleKind = "varuna",
        recompute: bool = True,
    ) -> None:
        check_workload(workload)
        self.workload = workload
        self._inputs = replace(
            workload.plan_inputs(),
            microbatch_size=workload.profile.microbatch_sizes[0],
            schedule=schedule,
            recompute=recompute,
            slots=(_device(workload, ""),),
        )
        self._layouts = Layouts(self._inputs, self.microbatch_size)
        self._shapes: dict[tuple[int, int], Shape | None] = {}
        self._refused: dict[int, int] = {}
        self._best: dict[int, list[Shape]] = {}

    @property
    def virtual_nodes(self) -> int:
        """Micro-batches of a mini-batch."""
        return self._layouts.cuts.virtual_nodes

    @property
    def microbatch_size(self) -> int:
        """The only one that the profile knows."""
        return self.workload.profile.microbatch_sizes[0]

    def at(self, depth: int, width: int) -> Shape | None:
        """Return the shape ``depth`` x ``width``, or ``None`` if it cannot run."""
        if (depth, width) not in self._shapes:
            self._shapes[depth, width] = self._make(depth, width)
        return self._shapes[depth, width]

    def at_depth(self, depth: int, slots: int) -> Shape | None:
        """Return the widest shape of ``depth`` on ``slots`` GPUs."""
        return self.at(depth, min(slots // depth, self.virtual_nodes))

    def best(self, slots: int, lag_share: float = 0.0) -> Shape | None:
        """Return the best shape on ``slots`` GPUs, the shallowest of equals.

        Each depth has as many replicas as there are GPUs for.

        Args:
            slots: GPUs.
            lag_share: Training time at stake with a loss, see ``policy.lag_share``; if
                0, the best is the fastest.
        """
        key = partial(_cost, lag_share)
        return min(self._near(slots), key=key, default=None)

    def fewest(self) -> int | None:
        """Return the minimum number of GPUs for the model; ``None``: there is none."""
        most = len(self.workload.facts.sections)
        for slots in range(1, most + 1):
            if any(self.at(p, slots // p) is not None for p in range(1, slots + 1)):
                return slots
        return None

    def _near(self, slots: int) -> list[Shape]:
        """Return the fastest shape, and all that could be better if losses count.

        A depth is simulated only if its lower bound is not too slow already.
        """
        if slots not in self._best:
            least: list[tuple[float, int, int]] = []
            for depth in range(1, min(len(self.workload.facts.sections), slots) + 1):
                width = min(slots // depth, self.virtual_nodes)
                # Nothing recomputed: a cut that memory makes uneven may leave more to the
                # last stage, which recomputes nothing.
                mode = replace(execution_modes(self._inputs, depth)[0], segments=0)
                (bound_s,) = self._layouts.cuts.min_steps_s(depth, mode, [width])
                least.append((bound_s, depth, width))
            shapes: list[Shape] = []
            limit_s = math.inf
            for bound_s, depth, width in sorted(least):
                if bound_s > limit_s:
                    break
                if (shape := self.at(depth, width)) is not None:
                    shapes.append(shape)
                    limit_s = min(limit_s, shape.step_s * (1 + CAUTION))
            self._best[slots] = shapes
        return self._best[slots]

    def _make(self, depth: int, width: int) -> Shape | None:
        possible = 1 <= depth <= len(self.workload.facts.sections) and width >= 1
        # A shape that does not fit does not fit with fewer replicas either.
        if not possible or width <= self._refused.get(depth, 0):
            return None
        devices = tuple(_device(self.workload, f"{i:06}") for i in range(depth * width))
        mode = execution_modes(self._inputs, depth)[0]
        least = self._layouts.cuts.state_bytes(mode.state)
        if least.beyond(times(devices[0].room, depth)) > 0:
            return None
        fleet = DeviceFleet(replace(self._inputs, slots=devices))
        plan = self._plan(depth, width, fleet)
        if plan is None:
            self._refused[depth] = width
            return None
        facts = self.workload.facts
        state = [s.param_bytes + s.optimizer_bytes for s in facts.sections]
        return Shape(
            depth=depth,
            width=width,
            step_s=plan.predicted_step_s,
            move_bytes=max(sum(state[a:b]) for a, b in itertools.pairwise(plan.stage_bounds)),
        )

    def _plan(self, depth: int, width: int, fleet: DeviceFleet) -> Plan | None:
        """Return the plan of a shape; where memory binds, the faster of two.

        One cut unevenly, and one cut evenly with fewer micro-batches in flight.
        """
        draft = Draft(depth, width, execution_modes(self._inputs, depth)[0])
        found = [self._layouts.lay_out(draft, fleet, uneven=math.inf)]
        even = self._layouts.cuts.even_cut(draft)
        if isinstance(found[0], Refusal) or found[0].plan.stage_bounds != even:
            room = fleet.devices[0].room
            bound = self._layouts.cuts.largest_bound(draft, room)
            if bound is not None:
                mode = replace(draft.mode, in_flight_bound=bound)
                tight = replace(draft, mode=mode)
                found.append(self._layouts.lay_out(tight, fleet))
        layouts = (one for one in found if isinstance(one, PlanLayout))
        plans = map(self._layouts.simulate, layouts)
        return min(plans, key=lambda plan: plan.predicted_step_s, default=None)


def _device(workload: Workload, vm_id: str) -> Device:
    """Return the GPU of one of its VMs."""
    return Device(
        slot=Slot(vm_id=vm_id, index=0),
        memory_bytes=workload.gpu_memory_bytes,
        speed=1.0,
        usd_per_hour=workload.usd_per_hour,
        is_gpu=workload.is_gpu,
        host_memory_bytes=workload.host_memory_bytes,
    )


def check_workload(workload: Workload) -> None:
    """Check that plans can be made from a workload.

    Raises:
        PlanError: Times, sizes or counts are missing, negative, zero where they must
            not be, or not finite; or facts, profile and mini-batch do not go together.
    """
    profile = workload.profile
    check_profile(profile, workload.facts)
    if len(profile.microbatches) != 1:
        raise PlanError(
            "a workload's profile must be of one micro-batch size: got "
            f"{profile.microbatch_sizes}; leave the others out"
        )
    positive("gpu_memory_bytes", workload.gpu_memory_bytes)
    positive("host_memory_bytes", workload.host_memory_bytes, or_zero=True)
    positive("usd_per_hour", workload.usd_per_hour, or_zero=True)
    sizes = workload.minibatch_size, profile.microbatch_sizes[0]
    if min(sizes) < 1 or sizes[0] % sizes[1]:
        raise PlanError(
            "minibatch_size must be a multiple of the profile's microbatch_size: got "
            f"{sizes[0]} and {sizes[1]}; change minibatch_size"
        )
