"""Lower bounds on the time of a mini-batch over devices of several speeds.

``bounds`` assumes the fastest device everywhere, which says little about a mixed fleet.
Here replicas are counted by the speed of their slowest device, as ``placement`` makes
them (no other placement has more of any speed or above), and virtual nodes are
divisible.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from spottrain.morphing.plan.bounds import Array, Pipe

Counts = NDArray[np.int64]
EXACT = 1e-6
"""Share of a virtual node that rounding may take away."""


def replica_counts(
    speeds: Sequence[float], depth: int, widths: Sequence[int]
) -> tuple[Counts, Counts]:
    """Count the replicas that the fastest devices make up, for each of several widths.

    Args:
        speeds: Of all devices.
        depth: Devices of a replica.
        widths: Numbers of replicas; there are devices enough for each.

    Returns:
        Replicas of equal devices and mixed ones: a row a width, a column a speed, from
        fast to slow; a mixed one by its slowest device.
    """
    fleet = np.sort(np.array(speeds))[::-1]
    kinds = np.unique(fleet)[::-1]
    ends = np.searchsorted(-fleet, -kinds, side="right")
    taken = np.minimum(ends, depth * np.array(widths)[:, None])
    left, pure = np.modf(np.diff(taken, axis=1, prepend=0) / depth)
    whole = np.floor(np.cumsum(left, axis=1) + 0.5 / depth)
    mixed = np.diff(whole, axis=1, prepend=0)
    return pure.astype(np.int64), mixed.astype(np.int64)


def min_finish_s(
    pipes: Sequence[Pipe], pure: Counts, mixed: Counts, virtual_nodes: int
) -> Array:
    """Return the earliest time at which the last replica can be done, for each width.

    Seen from any one stage, a replica of equal devices can have done no more virtual
    nodes than fit between the way of the first activation to it and the way of the last
    gradient back. A mixed replica can have done no more than its slowest device, on the
    lightest stage. All of them have to add up: most strictly seen from some stage.

    Args:
        pipes: The same stages on devices of each speed.
        pure: As ``replica_counts`` returns them; so is the next one.
        mixed: Replicas of different devices.
        virtual_nodes: Of the mini-batch.
    """
    fixed = [pipe.there_s - pipe.recompute_s + pipe.back_s for pipe in pipes]
    paces = [pipe.busy_s for pipe in pipes]
    for pipe in pipes:
        fixed.append(np.full(pipe.depth, -pipe.recompute_s.max()))
        paces.append(np.full(pipe.depth, pipe.busy_s.min()))
    begins_s, pace_s = np.array(fixed), np.array(paces)
    counts = np.concatenate([pure, mixed], axis=1)[:, :, None]
    active = np.broadcast_to(counts > 0, (len(counts), *begins_s.shape))
    while True:
        rates = counts * active / pace_s
        done_s = (virtual_nodes + (rates * begins_s).sum(axis=1)) / rates.sum(axis=1)
        # Replicas that could not even begin by then have no part in it.
        still = active & (begins_s < done_s[:, None, :])
        if (still == active).all():
            break
        active = still
    earliest: Array = _whole_virtual_nodes(
        done_s, counts, begins_s, pace_s, virtual_nodes
    ).max(axis=1)
    return earliest


def _whole_virtual_nodes(
    done_s: Array,
    counts: Counts,
    begins_s: Array,
    pace_s: Array,
    virtual_nodes: int,
) -> Array:
    """Put ``done_s`` off until whole virtual nodes are as many as there have to be."""
    while True:
        done = np.floor((done_s[:, None, :] - begins_s) / pace_s + EXACT).clip(0)
        short = (counts * done).sum(axis=1) < virtual_nodes
        if not short.any():
            return done_s
        next_s = np.where(counts > 0, begins_s + (done + 1) * pace_s, np.inf)
        done_s = np.where(short, next_s.min(axis=1), done_s)
