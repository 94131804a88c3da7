"""Shares of virtual nodes per replica, in proportion to the replicas' speeds.

VirtualFlow, section 5.1.2: faster replicas get more, so that the slowest finishes
earliest. Here for replicas that may all differ, and exactly: no other shares finish
earlier.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from spottrain.morphing.errors import PlanError

SAFETY = 1e-9
"""Share by which the water level is lowered, so that rounding cannot lift it too
far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSpeed:
    """A replica that takes ``fixed_s + virtual_nodes * per_virtual_node_s``."""

    fixed_s: float
    """Filling and draining its pipeline, independent of its share."""
    per_virtual_node_s: float


def replica_speed(stage_s: Sequence[float]) -> ReplicaSpeed:
    """Return the speed of a pipeline whose stages wait for the slowest only.

    The first micro-batch passes all stages, every further one follows after
    what the slowest stage takes (GPipe, section 2: ``(M + P - 1) t`` of even stages).

    Args:
        stage_s: What a micro-batch takes on each stage, forward to backward.
    """
    slowest_s = max(stage_s)
    return ReplicaSpeed(fixed_s=math.fsum(stage_s) - slowest_s, per_virtual_node_s=slowest_s)


def share_virtual_nodes(
    virtual_nodes: int,
    seconds_per_virtual_node: Sequence[float],
    limits: Sequence[int] | None = None,
    *,
    fixed_s: Sequence[float] | None = None,
    sizes: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Share virtual nodes out so that the slowest replica finishes earliest.

    A replica of ``n`` micro-batches takes ``fixed_s + n * seconds_per_virtual_node *
    size``; each has at least a virtual node. Of all such shares those are taken in which
    every micro-batch went to the replica that finishes it earliest, the first one of
    equals: equally fast replicas get what ``partition.spread`` gives them. One micro-batch
    of a replica may be no whole one and takes as long as if it were.

    Args:
        virtual_nodes: Of the mini-batch.
        seconds_per_virtual_node: Of each replica.
        limits: Maximum that each can hold; any number if not given.
        fixed_s: What each takes besides; 0 if not given.
        sizes: Virtual nodes of each replica's micro-batches; 1 if not given.

    Returns:
        Bounds of the replicas' runs of virtual nodes, as in ``Plan.replica_bounds``.

    Raises:
        PlanError: There are fewer virtual nodes than replicas or more than they can
            hold, or a time is not finite, not above 0 or (a fixed one) negative.
    """
    paces = list(seconds_per_virtual_node)
    fixed = [0.0] * len(paces) if fixed_s is None else list(fixed_s)
    limits = [virtual_nodes] * len(paces) if limits is None else list(limits)
    sizes = [1] * len(paces) if sizes is None else sizes
    _check(virtual_nodes, paces, limits, fixed)
    level_s = _level_s(virtual_nodes, paces, limits, fixed)
    # Micro-batches from here on, the last one of a limit perhaps no whole one.
    each_s = [pace * size for pace, size in zip(paces, sizes, strict=True)]
    most = [-(-limit // size) for limit, size in zip(limits, sizes, strict=True)]
    counts = [
        min(max(int((level_s - f) / one_s), 1), top)
        for one_s, top, f in zip(each_s, most, fixed, strict=True)
    ]
    shares = [min(n * size, limit) for n, size, limit in zip(counts, sizes, limits, strict=True)]
    # Few are left (with sizes of 1, but for SAFETY, fewer than replicas): earliest finish first.
    ends = [
        (fixed[i] + (counts[i] + 1) * each_s[i], i)
        for i in range(len(paces))
        if counts[i] < most[i]
    ]
    heapq.heapify(ends)
    left = virtual_nodes - sum(shares)
    while left > 0:
        _, i = ends[0]
        counts[i] += 1
        more = min(sizes[i], limits[i] - shares[i])
        shares[i], left = shares[i] + more, left - more
        if counts[i] < most[i]:
            heapq.heapreplace(ends, (fixed[i] + (counts[i] + 1) * each_s[i], i))
        else:
            heapq.heappop(ends)
    # What is too much is taken from the micro-batches that are finished last.
    for i in sorted(range(len(paces)), key=lambda i: -(fixed[i] + counts[i] * each_s[i])):
        less = min(-left, (shares[i] - 1) % sizes[i])
        shares[i], left = shares[i] - less, left + less
    return tuple(itertools.accumulate(shares, initial=0))


def _check(
    virtual_nodes: int,
    paces: Sequence[float],
    limits: Sequence[int],
    fixed: Sequence[float],
) -> None:
    replicas = len(paces)
    if not 1 <= replicas <= virtual_nodes:
        raise PlanError(
            f"every replica needs a virtual node: got {replicas} replicas for "
            f"{virtual_nodes}; ask for 1 to {virtual_nodes} replicas"
        )
    if len(limits) != replicas or len(fixed) != replicas:
        raise PlanError(
            f"{replicas} replicas need as many limits and fixed times: got "
            f"{len(limits)} and {len(fixed)}"
        )
    if not all(0 < pace < math.inf for pace in paces):
        raise PlanError(
            f"seconds per virtual node must be above 0 and finite: got {list(paces)}; "
            "calibrate again"
        )
    if not all(0 <= f < math.inf for f in fixed):
        raise PlanError(
            f"fixed times must be 0 or more and finite: got {list(fixed)}; calibrate again"
        )
    if min(limits) < 1 or sum(limits) < virtual_nodes:
        raise PlanError(
            f"the replicas can hold {sum(limits)} virtual nodes, the smallest "
            f"{min(limits)}: got {virtual_nodes}; use more or larger devices, or a "
            "larger microbatch_size"
        )


def _level_s(
    virtual_nodes: int,
    paces: Sequence[float],
    limits: Sequence[int],
    fixed: Sequence[float],
) -> float:
    """Return a time by which nearly all virtual nodes can be done, but not more.

    Were virtual nodes divisible, a replica would have 1 up to the time of its first,
    then as many as fit into the time, then its limit: a rising line of pieces, whose
    sum over the replicas is followed up to where it meets their number.
    """
    bends: list[tuple[float, float]] = []
    for pace, limit, f in zip(paces, limits, fixed, strict=True):
        bends += [(f + pace, 1 / pace), (f + pace * limit, -1 / pace)]
    bends.sort()
    done, rate, at_s = float(len(paces)), 0.0, bends[0][0]
    for bend_s, more in bends:
        if done + rate * (bend_s - at_s) >= virtual_nodes:
            break
        done += rate * (bend_s - at_s)
        rate, at_s = rate + more, bend_s
    if done < virtual_nodes and rate > 0:
        at_s += (virtual_nodes - done) / rate
    return at_s * (1 - SAFETY)
