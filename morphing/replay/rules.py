"""The rule of ``policy`` on a trace, and what it is measured against."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spottrain.morphing.adapt import policy
from spottrain.morphing.errors import PlanError
from spottrain.morphing.replay.clairvoyant import most_minibatches
from spottrain.morphing.replay.replay import CostModel, FleetView, ReplayResult, replay
from spottrain.morphing.replay.shapes import Shape, Shapes
from spottrain.morphing.replay.traces import Trace


class AtEveryChange:
    """Varuna's rule as published: always the best plan for the VMs that are there.

    It is as quick as the machine room here; the published program sleeps for 60 to 120 s
    and then restarts everything.
    """

    name = "at every change"
    restarts = False

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

    def mend(self, view: FleetView) -> Shape | None:
        """Return the best plan."""
        return self.shapes.best(view.usable)

    def leave_for(self, view: FleetView) -> Shape | None:
        """Return the best plan if it is another one."""
        best = self.shapes.best(view.usable)
        return None if best == view.shape else best


class WhenItPays(AtEveryChange):
    """What spottrain does: ``policy``."""

    name = "when it pays"

    def mend(self, view: FleetView) -> Shape | None:
        """Return the best plan, what losses put at stake counted."""
        return self.shapes.best(view.usable, _lag_share(view))

    def leave_for(self, view: FleetView) -> Shape | None:
        """Return the best plan once it pays."""
        best, present = self.mend(view), view.shape
        if best is None or present is None:
            return None
        profile = self.shapes.workload.profile
        at_s = policy.morph_at_s(
            policy.MorphOption(examples_per_s=self._examples_per_s(present, view)),
            policy.MorphOption(
                examples_per_s=self._examples_per_s(best, view),
                cost_s=view.room.pause_s(best, profile, moves=True),
            ),
            _outlook(view),
            left_s=math.inf,
        )
        return best if at_s <= view.now_s else None

    def _examples_per_s(self, shape: Shape, view: FleetView) -> float:
        slower = policy.slowdown(shape.depth, shape.width, _lag_share(view))
        return self.shapes.workload.minibatch_size / shape.step_s / slower


def _outlook(view: FleetView) -> policy.FleetOutlook:
    return policy.FleetOutlook(
        since_s=0.0,
        losses_at_s=view.losses_at_s,
        changed_at_s=view.changed_at_s,
        debounce_s=view.room.debounce_s,
    )


def _lag_share(view: FleetView) -> float:
    lag_s = view.room.checkpoint_every_s / 2
    return policy.lag_share(_outlook(view), lag_s, view.now_s)


class WidthOnly(AtEveryChange):
    """Changes the number of replicas only, at every change; the first plan sets the depth."""

    name = "width only"

    def __init__(self, shapes: Shapes) -> None:
        super().__init__(shapes)
        self.depth: int | None = None

    def mend(self, view: FleetView) -> Shape | None:
        """Return the widest plan."""
        if self.depth is None:
            first = self.shapes.best(view.usable)
            self.depth = None if first is None else first.depth
            return first
        return self.shapes.at_depth(self.depth, view.usable)

    def leave_for(self, view: FleetView) -> Shape | None:
        """Return the widest plan if it is another one."""
        widest = self.mend(view)
        return None if widest == view.shape else widest


class RestartAll(AtEveryChange):
    """Managed-job tools: at every change all starts again from the newest checkpoint."""

    name = "restart all"
    restarts = True

    def leave_for(self, view: FleetView) -> Shape | None:
        """Return nothing: every change has restarted it already."""
        return None


RULES: tuple[type[AtEveryChange], ...] = (
    WhenItPays,
    AtEveryChange,
    WidthOnly,
    RestartAll,
)
"""Ours first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came of every rule, and what could have come of the trace."""

    outcomes: tuple[ReplayResult, ...]
    """In the order of ``RULES``."""
    most_examples: int
    """What one who knew all of the trace could have trained at most."""


def compare(trace: Trace, shapes: Shapes, room: CostModel) -> Comparison:
    """Play ``trace`` under every rule, and with all knowledge.

    Raises:
        PlanError: There are never enough VMs for the model.
    """
    most_vms = trace.most_vms()
    if shapes.best(most_vms) is None:
        memory_bytes, fewest = shapes.workload.gpu_memory_bytes, shapes.fewest()
        needs = "more memory for a single section" if fewest is None else f"{fewest}"
        raise PlanError(
            f"the model does not fit: got at most {most_vms} GPUs of {memory_bytes} "
            f"bytes, it needs {needs}; take larger or more GPUs"
        )
    outcomes = tuple(replay(trace, shapes, rule(shapes), room) for rule in RULES)
    usable = [(vm.from_s + room.join_s, vm.until_s) for vm in trace.lives]
    best = {n: shapes.best(n) for n in range(1, most_vms + 1)}
    minibatches = most_minibatches(
        usable,
        {n: shape.step_s for n, shape in best.items() if shape is not None},
        min(room.morph_s, room.restart_s),
        trace.end_s,
    )
    return Comparison(
        outcomes=outcomes,
        most_examples=minibatches * shapes.workload.minibatch_size,
    )
