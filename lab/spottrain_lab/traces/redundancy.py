"""The rule of Bamboo (Thorpe et al., NSDI 2023): every VM can do its successor's work, too.

A VM keeps the state of the next stage of its pipeline beside its own, and computes that
stage's forward as well, in its idle time as far as that suffices. When a VM is lost its
predecessor does both stages: the mini-batch goes on, more slowly, unless the predecessor is
lost, too. Pipelines have a fixed depth, one and a half times that of the best plan of the
first fleet. To the rule's favour: twice the state needs no more memory than there is, the
work in flight is redone within the slower step, and pipelines form again as soon as that is
faster.
"""

from __future__ import annotations

import math
from dataclasses import replace

from spottrain_lab.traces.replay import FleetView
from spottrain_lab.traces.shapes import Shape, Shapes

DEEPER = 1.5
"""Depth over that of a pipeline without redundancy: room for the second copy."""


class Redundancy:
    """Pipelines of one depth in which neighbours stand in for each other."""

    name = "redundancy"
    restarts = False

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes
        self.depth: int | None = None

    def recover(self, view: FleetView) -> Shape | None:
        """Return as many pipelines as there are VMs for."""
        if self.depth is None:
            first = self.shapes.best(view.usable)
            if first is None:
                return None
            sections = len(self.shapes.workload.facts.sections)
            self.depth = min(sections, math.ceil(DEEPER * first.depth), view.usable)
        return self._redundant(self.shapes.at_depth(self.depth, view.usable))

    def leave_for(self, view: FleetView) -> Shape | None:
        """Return other pipelines if they are faster than the present ones."""
        shape, present = self.recover(view), view.shape
        if shape is None or present is None:
            return None
        present_s = present.covered_step_s if view.covered else present.step_s
        return shape if shape.step_s < present_s else None

    def _redundant(self, shape: Shape | None) -> Shape | None:
        """Return the shape with the times of its mini-batches under this rule."""
        if shape is None or shape.depth == 1:
            return shape
        sections = self.shapes.workload.profile.microbatches[0].sections
        rounds = math.ceil(self.shapes.virtual_nodes / shape.width) / shape.depth
        forward_s = rounds * sum(section.forward_s for section in sections)
        busy_s = forward_s + rounds * sum(
            section.recompute_s + section.backward_s for section in sections
        )
        idle_s = max(0.0, shape.step_s - busy_s)
        step_s = shape.step_s + max(0.0, forward_s - idle_s)
        return replace(shape, step_s=step_s, covered_step_s=shape.step_s + busy_s)
