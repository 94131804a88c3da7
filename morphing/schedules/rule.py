"""The rule by which a stage takes its next task, as functions of whole numbers.

``stage.Stage`` asks it for the executor and for the simulator, so that what is simulated
is what runs.
"""

from __future__ import annotations

FORWARD, RECOMPUTE, BACKWARD = range(3)
"""Works, as the schedule's codes name them: a code is 3 times the chunk plus the work."""
NOTHING = -1
"""There is nothing to run before something arrives."""
OPPORTUNISTIC, STRICT = range(2)
"""Order policies: see ``schedule.OrderPolicy``."""


def decide(
    order_policy: int,
    listed: int,
    forwards: int,
    backwards: int,
    activations: int,
    gradients: int,
    bound: int,
    recomputes: bool,
    graph_kept: bool,
) -> int:
    """Return the work to run now, or ``NOTHING``; see ``StageProgress.next_task``.

    Args:
        order_policy: How strictly the stage follows its list.
        listed: Work of the list's next task.
        forwards: Done so far; this and the next three of the listed task's chunk.
        backwards: Done so far.
        activations: Arrived so far.
        gradients: Arrived so far.
        bound: Maximum micro-batches in flight; only an opportunistic stage heeds it.
        recomputes: Whether the stage recomputes at all.
        graph_kept: Whether its one set of activations is held.
    """
    can_forward = forwards < activations
    can_backward = backwards < forwards and backwards < gradients
    if order_policy != OPPORTUNISTIC:
        if listed == FORWARD:
            return listed if can_forward else NOTHING
        return listed if can_backward or listed == RECOMPUTE else NOTHING
    can_forward = can_forward and forwards - backwards < bound
    if can_forward and (listed == FORWARD or not can_backward):
        return FORWARD
    if recomputes and not graph_kept:
        full = forwards - backwards == bound
        return RECOMPUTE if can_backward or full or listed == RECOMPUTE else NOTHING
    return BACKWARD if can_backward else NOTHING


def keeps_graph(listed: int, following: int, forwards: int, backwards: int, passed: int) -> bool:
    """Return whether the forward that the list has next is to keep its tensors.

    Args:
        order_policy: How strictly the stage follows its list.
        listed: Work of the list's next task.
        following: Work of the task after it.
        forwards: Done so far.
        backwards: Done so far.
        passed: Recomputes in the list before ``listed``.
    """
    due = forwards == backwards == passed
    return due and listed == FORWARD and following == RECOMPUTE
