"""The morph policy on a trace, and the rules it is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spottrain.morphing.adapt import policy
from spottrain.morphing.errors import PlanError
from spottrain_lab.traces.clairvoyant import max_minibatches
from spottrain_lab.traces.look_ahead import LookAhead
from spottrain_lab.traces.redundancy import Redundancy
from spottrain_lab.traces.replay import CostModel, FleetView, ReplayResult, replay
from spottrain_lab.traces.shapes import Shape, Shapes
from spottrain_lab.traces.traces import Trace


class AtEveryChange:
    """Varuna's rule as published: always the best plan for the VMs that are there.

    Here it is as quick as the cost model; the published program sleeps for 60 to 120 s
    and then restarts everything.
    """

    name = "at every change"
    restarts = False

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

    def recover(self, view: FleetView) -> Shape | None:
        """Return the best plan."""
        return self.shapes.best(view.usable)

    def leave_for(self, view: FleetView) -> Shape | None:
        """Return the best plan if it is another one."""
        best = self.shapes.best(view.usable)
        return None if best == view.shape else best


class WhenItPays(AtEveryChange):
    """spottrain's own rule: ``policy``."""

    name = "when it pays"

    def recover(self, view: FleetView) -> Shape | None:
        """Return the best plan, training at stake with a loss included."""
        return self.shapes.best(view.usable, _lag_share(view))

    def leave_for(self, view: FleetView) -> Shape | None:
        """Return the best plan once it pays."""
        best, present = self.recover(view), view.shape
        if best is None or present is None:
            return None
        profile = self.shapes.workload.profile
        at_s = policy.morph_at_s(
            policy.MorphOption(examples_per_s=self._examples_per_s(present, view)),
            policy.MorphOption(
                examples_per_s=self._examples_per_s(best, view),
                cost_s=view.costs.pause_s(best, profile, moves=True),
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
        debounce_s=view.costs.debounce_s,
    )


def _lag_share(view: FleetView) -> float:
    lag_s = view.costs.checkpoint_every_s / 2
    return policy.lag_share(_outlook(view), lag_s, view.now_s)


class WidthOnly(AtEveryChange):
    """Changes the number of replicas only, at every change; the first plan sets the depth."""

    name = "width only"

    def __init__(self, shapes: Shapes) -> None:
        super().__init__(shapes)
        self.depth: int | None = None

    def recover(self, view: FleetView) -> Shape | None:
        """Return the widest plan."""
        if self.depth is None:
            first = self.shapes.best(view.usable)
            self.depth = None if first is None else first.depth
            return first
        return self.shapes.at_depth(self.depth, view.usable)

    def leave_for(self, view: FleetView) -> Shape | None:
        """Return the widest plan if it is another one."""
        widest = self.recover(view)
        return None if widest == view.shape else widest


class RestartAll(AtEveryChange):
    """Managed-job tools: every change restarts all from the newest checkpoint."""

    name = "restart all"
    restarts = True

    def leave_for(self, view: FleetView) -> Shape | None:
        """Return none: every change has restarted it already."""
        return None


RULES: tuple[type[AtEveryChange | LookAhead | Redundancy], ...] = (
    WhenItPays,
    AtEveryChange,
    WidthOnly,
    LookAhead,
    Redundancy,
    RestartAll,
)
"""Ours first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Outcome of every rule, and the upper bound of the trace."""

    outcomes: tuple[ReplayResult, ...]
    """In the order of ``RULES``."""
    max_examples: int
    """Upper bound: what a policy that knows the whole trace could train."""


def compare(trace: Trace, shapes: Shapes, costs: CostModel) -> Comparison:
    """Replay ``trace`` under every rule, and compute the upper bound.

    Raises:
        PlanError: There are never enough VMs for the model.
    """
    max_vms = trace.max_vms()
    if shapes.best(max_vms) is None:
        memory_bytes, fewest = shapes.workload.gpu_memory_bytes, shapes.fewest()
        needs = "more memory for a single section" if fewest is None else f"{fewest}"
        raise PlanError(
            f"the model does not fit: got at most {max_vms} GPUs of {memory_bytes} "
            f"bytes, it needs {needs}; take larger or more GPUs"
        )
    outcomes = tuple(replay(trace, shapes, rule(shapes), costs) for rule in RULES)
    usable = [(vm.from_s + costs.join_s, vm.until_s) for vm in trace.lives]
    best = {n: shapes.best(n) for n in range(1, max_vms + 1)}
    minibatches = max_minibatches(
        usable,
        {n: shape.step_s for n, shape in best.items() if shape is not None},
        min(costs.morph_s, costs.restart_s),
        trace.end_s,
    )
    max_examples = minibatches * shapes.workload.minibatch_size
    return Comparison(outcomes=outcomes, max_examples=max_examples)
