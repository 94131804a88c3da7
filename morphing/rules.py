"""The rule of ``policy`` and those that it is measured against."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spottrain.morphing import policy
from spottrain.morphing.replay import View
from spottrain.morphing.shapes import Shape, Shapes


class WhenItPays:
    """What spottrain does: ``policy``."""

    name = "when it pays"
    restarts = False

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._bandwidth = shapes.workload.profile.link_bandwidth_bytes_per_s

    def mend(self, view: View) -> Shape | None:
        return self._shapes.best(view.usable)

    def leave_for(self, view: View) -> Shape | None:
        best = self._shapes.best(view.usable)
        assert view.shape is not None
        if best is None:
            return None
        examples = self._shapes.workload.minibatch_size
        at_s = policy.morph_at_s(
            policy.Way(examples_per_s=examples / view.shape.step_s),
            policy.Way(
                examples_per_s=examples / best.step_s,
                cost_s=view.room.pause_s(best, self._bandwidth, True),
            ),
            policy.Outlook(
                since_s=0.0,
                losses=view.losses,
                changed_at_s=view.changed_at_s,
                debounce_s=view.room.debounce_s,
            ),
            left_s=math.inf,
        )
        return best if at_s <= view.now_s else None


class AtEveryChange:
    """Varuna as published: always the best plan for the VMs that are there.

    It leaves a plan whenever another number of VMs can be used.
    """

    name = "at every change"
    restarts = False

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes

    def mend(self, view: View) -> Shape | None:
        return self._shapes.best(view.usable)

    def leave_for(self, view: View) -> Shape | None:
        best = self._shapes.best(view.usable)
        return best if best != view.shape else None


class FixedDepth:
    """Changes the number of replicas only; the depth is that of the first plan."""

    name = "width only"
    restarts = False

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes
        self._depth: int | None = None

    def mend(self, view: View) -> Shape | None:
        if self._depth is None:
            first = self._shapes.best(view.usable)
            self._depth = None if first is None else first.depth
            return first
        return self._shapes.at_depth(self._depth, view.usable)

    def leave_for(self, view: View) -> Shape | None:
        assert self._depth is not None
        widest = self._shapes.at_depth(self._depth, view.usable)
        return widest if widest != view.shape else None


class Restart:
    """Managed-job tools: everything again from the newest checkpoint."""

    name = "restart"
    restarts = True

    def __init__(self, shapes: Shapes) -> None:
        self._shapes = shapes

    def mend(self, view: View) -> Shape | None:
        return self._shapes.best(view.usable)

    def leave_for(self, view: View) -> Shape | None:
        return None
