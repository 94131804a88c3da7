"""Lower bounds on the simulated time of a pipeline, for many widths at once.

Four facts hold for any order of tasks. A stage cannot begin before the first
activation has arrived, must run all its tasks, and after its last one the gradient has
to go all the way back. Its messages leave one after the other, the first one after a
forward, and after the last one, too, there is that way back. A micro-batch that is in
flight on a stage holds one of its places until its gradient is back. And a stage's
replicas reduce after they have drained. Devices that share cores compute no more at once
than there are cores.

That assumes the fastest device everywhere, which says little about a mixed fleet. There
replicas are counted by the speed of their slowest device, as ``placement`` makes them (no
other placement has more of any speed or above), and virtual nodes are divisible.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spottrain.morphing.simulate.compute import CPU, Compute
from spottrain.morphing.simulate.reducing import (
    CONCURRENT_ALL_REDUCES,
    LOSS_TENSORS,
    SENT_PER_BYTE,
    Hop,
)
from spottrain.wire.model import LinkProfile, Profile, Reduction, SectionProfile, TaskOverheads
from spottrain.wire.plan import segments_of

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
EXACT = 1e-6
"""Share of a virtual node that rounding may lose."""
NANOSECOND = 1e-9


class SectionTimes:
    """Prefix sums of section times at one micro-batch size: any run is two look-ups."""

    def __init__(
        self,
        sections: Sequence[SectionProfile],
        overheads: TaskOverheads,
        compute: Compute = CPU,
    ) -> None:
        self.sections, self.overheads = tuple(sections), overheads
        self.forward_s = _sums(self.sections, "forward_s")
        self.backward_s = _sums(self.sections, "backward_s")
        self.recompute_s = _sums(self.sections, "recompute_s")
        self.sent_bytes = np.array([compute.sent_bytes(s) for s in self.sections])
        """As they travel, from each section to the next."""

    @staticmethod
    def fastest(every: Sequence[SectionTimes]) -> SectionTimes:
        """Return times that none of ``every``, all of one micro-batch size, are below."""
        if len(every) == 1:
            return every[0]
        sections = [
            replace(
                own[0],
                forward_s=min(s.forward_s for s in own),
                backward_s=min(s.backward_s for s in own),
                recompute_s=min(s.recompute_s for s in own),
            )
            for own in zip(*(times.sections for times in every), strict=True)
        ]
        beside = [times.overheads for times in every]
        overheads = TaskOverheads(
            forward_s=min(o.forward_s for o in beside),
            backward_s=min(o.backward_s for o in beside),
            recompute_s=min(o.recompute_s for o in beside),
            posting_s=min(o.posting_s for o in beside),
            receiving_s=min(o.receiving_s for o in beside),
        )
        fastest = SectionTimes(sections, overheads)
        fastest.sent_bytes = np.min([times.sent_bytes for times in every], axis=0)
        return fastest

    def costs_s(self, segments: int) -> tuple[list[float], list[float]]:
        """Return the costs of sections before the last stage, and in the last stage.

        Args:
            segments: In which a run is recomputed, 0: not at all. The last stage does
                not recompute its last segment.
        """
        again = float(segments > 0), 1 - 1 / segments if segments else 0.0
        before_s, last_s = (
            [s.forward_s + share * s.recompute_s + s.backward_s for s in self.sections]
            for share in again
        )
        return before_s, last_s

    def overhead_s(self, segments: int) -> float:
        """Return the time of a micro-batch's tasks beyond the stage's sections."""
        overheads = self.overheads
        once_s = overheads.forward_s + overheads.backward_s
        return once_s + overheads.recompute_s if segments else once_s


def _sums(sections: Sequence[SectionProfile], name: str) -> Array:
    return np.concatenate(([0.0], np.cumsum([getattr(s, name) for s in sections])))


def fastest_link(profile: Profile, single_slot: bool) -> LinkProfile:
    """Return a link that no link of the fleet is faster than.

    Args:
        profile: Has both kinds of links.
        single_slot: Whether every VM has one slot only, so that all links lead between
            VMs.
    """
    within, between = profile.within_vm, profile.between_vms
    if single_slot:
        return between
    return LinkProfile(
        latency_s=min(within.latency_s, between.latency_s),
        bandwidth_bytes_per_s=max(within.bandwidth_bytes_per_s, between.bandwidth_bytes_per_s),
    )


@dataclass(frozen=True, eq=False)
class Pipe:
    """A pipeline's stages, independent of its width."""

    depth: int
    busy_s: Array
    """Of each stage, the time of a micro-batch's forward, backward and recompute."""
    recompute_s: Array
    """Of each stage; the recompute tasks that its first micro-batch may skip."""
    arrival_s: Array
    """From the beginning until the first activation is at each stage."""
    return_s: Array
    """From the end of each stage's last task until the gradient is back at the first."""
    round_trip_s: Array
    """From the beginning of a forward on each stage to the end of its backward."""
    link: LinkProfile
    forward_s: Array
    """Of each stage, the first of its runs."""
    message_s: float
    """Of the smallest message between stages, however they are cut."""
    messages: NDArray[np.int64]
    """Of each stage, those of a micro-batch that leave one after the other."""


def make_pipe(
    times: SectionTimes,
    bounds: Sequence[int],
    depth: int,
    segments: int,
    link: LinkProfile,
    single_slot: bool = False,
) -> Pipe:
    """Return the pipe of runs of sections ``bounds`` over ``depth`` stages in turn.

    Args:
        times: On a device, or such that no device has shorter ones.
        bounds: Of the runs, several per stage if interleaved.
        depth: Stages.
        segments: In which runs are recomputed, see ``SectionTimes.costs_s``.
        link: One that no link is faster than.
        single_slot: Whether every VM has one slot only, so that a stage's activations and
            gradients leave over the same NIC.
    """
    cuts, overheads = np.array(bounds), times.overheads
    forward = np.diff(times.forward_s[cuts]) + overheads.forward_s
    backward = np.diff(times.backward_s[cuts]) + overheads.backward_s
    forward[:-1] += overheads.posting_s
    forward[1:] += overheads.receiving_s
    backward[1:] += overheads.posting_s
    backward[:-1] += overheads.receiving_s
    again = np.zeros(len(cuts) - 1)
    if segments:
        parts = [segments_of(range(a, b), segments) for a, b in itertools.pairwise(bounds)]
        last = np.array([part[-1].start for part in parts])
        further_s = np.array([len(part) - 1 for part in parts]) * overheads.recompute_s
        forward += further_s
        done_s = times.recompute_s
        backward += further_s + (done_s[last] - done_s[cuts[:-1]])
        again[:-1] = (done_s[cuts[1:]] - done_s[last])[:-1]
        again[:-1] += overheads.recompute_s
    by_stage = (-1, depth)
    spare = again.reshape(by_stage).sum(axis=0)
    once = (forward + backward).reshape(by_stage).sum(axis=0)
    hops = np.zeros(depth)
    hops[:-1] = times.sent_bytes[cuts[1:depth] - 1] / link.bandwidth_bytes_per_s
    hops[:-1] += link.latency_s
    arrival = _prefix_sums(forward[:depth] + hops)
    returned = _prefix_sums(backward[:depth] + hops)
    all_the_way = (forward + backward)[:depth] + 2 * hops
    round_trip = np.cumsum(all_the_way[::-1])[::-1]
    messages = np.full(depth, min(depth - 1, 1))
    if single_slot:
        messages[1:-1] = 2
    return Pipe(
        depth=depth,
        busy_s=once + spare,
        recompute_s=spare,
        arrival_s=arrival,
        return_s=returned,
        round_trip_s=round_trip,
        link=link,
        forward_s=forward[:depth],
        message_s=min(times.sent_bytes[:-1], default=0.0) / link.bandwidth_bytes_per_s,
        messages=messages,
    )


def fastest_pipe(pipes: Mapping[int, Pipe]) -> Pipe:
    """Return a pipe for ``min_finish_s`` that micro-batches of no size are faster in.

    Args:
        pipes: By the virtual nodes that a micro-batch has.

    Returns:
        One whose times are those of a virtual node.
    """
    every = list(pipes.values())
    return replace(
        every[0],
        busy_s=np.min([pipe.busy_s / nodes for nodes, pipe in pipes.items()], axis=0),
        recompute_s=np.max([pipe.recompute_s for pipe in every], axis=0),
        arrival_s=np.min([pipe.arrival_s for pipe in every], axis=0),
        return_s=np.min([pipe.return_s for pipe in every], axis=0),
    )


def _prefix_sums(values: Array) -> Array:
    """Return the sum of all values before each place."""
    return np.concatenate(([0.0], np.cumsum(values)[:-1]))


def min_steps_s(
    pipe: Pipe,
    counts: NDArray[np.int64],
    widths: NDArray[np.int64],
    *,
    in_flight_bound: int | None,
    sums_s: Array,
    update_s: float,
    finish_s: Array | None = None,
    shared_s: Array | None = None,
) -> Array:
    """Return the minimum time of a mini-batch for each of several widths.

    Args:
        pipe: The stages.
        counts: For each width, the minimum number of micro-batches of the largest
            replica.
        widths: Numbers of replicas.
        in_flight_bound: Maximum micro-batches in flight on each stage, if there is one.
        sums_s: For each width (a row) and each stage, the minimum time of summing gradients
            over replicas, see ``min_sums_s``.
        update_s: Minimum time of the slowest update.
        finish_s: When the first stage has drained at the earliest, as far as that is
            known, see ``min_finish_s``.
        shared_s: For each width, the time of all tasks on the cores that devices share;
            None: each has a core of its own.
    """
    many = counts[:, None]
    busy = many * pipe.busy_s - pipe.recompute_s
    messages_s = np.maximum(0, many * pipe.messages - 1) * pipe.message_s
    to_first = pipe.arrival_s + np.maximum(busy, pipe.forward_s + messages_s) + pipe.return_s
    if finish_s is not None:
        to_first[:, 0] = np.maximum(to_first[:, 0], finish_s)
    # The latest over the stages from here on, less the way that is not gone.
    drained = np.maximum.accumulate(to_first[:, ::-1], axis=1)[:, ::-1] - pipe.return_s
    if in_flight_bound is not None:
        turns = np.ceil(many / np.minimum(in_flight_bound, many))
        drained = np.maximum(drained, pipe.arrival_s + turns * pipe.round_trip_s)
    prepared = (drained + sums_s).max(axis=1)
    if shared_s is not None:
        prepared = np.maximum(prepared, shared_s)
    latency_s = pipe.link.latency_s
    all_ranks: list[int] = (widths * pipe.depth).tolist()
    gather_s = [(n - 1).bit_length() * latency_s for n in all_ranks]
    # The simulator counts in whole nanoseconds.
    rounded_s = NANOSECOND * (3 * counts + 8 * pipe.depth)
    least: Array = prepared + np.array(gather_s) + update_s - rounded_s
    return least


def min_sums_s(
    widths: NDArray[np.int64],
    hops: Sequence[Hop],
    sections: NDArray[np.int64],
    stage_bytes: Array,
    reduction: Reduction,
) -> Array:
    """Return the minimum time of summing gradients, for each width (a row) and each stage.

    Args:
        widths: Numbers of replicas.
        hops: For each width, one that no hop of its rings is faster than.
        sections: Of each stage.
        stage_bytes: Of each stage's parameters.
        reduction: How gradients are summed up.
    """
    ranks = widths[:, None]
    latency_s = np.array([[hop.latency_s] for hop in hops])
    s_per_byte = np.array([[hop.s_per_byte] for hop in hops])
    turns = np.ceil((sections + LOSS_TENSORS) / CONCURRENT_ALL_REDUCES)
    sent_bytes = SENT_PER_BYTE[reduction] * stage_bytes
    sums: Array = (ranks - 1) * (turns * latency_s + sent_bytes / ranks * s_per_byte)
    return sums


# --- Devices of several speeds --------------------------------------------------------


def replica_counts(
    speeds: Sequence[float], depth: int, widths: Sequence[int]
) -> tuple[Counts, Counts]:
    """Count the replicas that the fastest devices make up, for each of several widths.

    Args:
        speeds: Of all devices.
        depth: Devices of a replica.
        widths: Numbers of replicas; there are devices enough for each.

    Returns:
        Replicas of equal devices and mixed ones: a row per width, a column per speed, from
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


def min_finish_s(pipes: Sequence[Pipe], pure: Counts, mixed: Counts, virtual_nodes: int) -> Array:
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
    fixed = [pipe.arrival_s - pipe.recompute_s + pipe.return_s for pipe in pipes]
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
    earliest: Array = _whole_virtual_nodes(done_s, counts, begins_s, pace_s, virtual_nodes).max(
        axis=1
    )
    return earliest


def _whole_virtual_nodes(
    done_s: Array, counts: Counts, begins_s: Array, pace_s: Array, virtual_nodes: int
) -> Array:
    """Postpone ``done_s`` until enough whole virtual nodes are done."""
    while True:
        done = np.floor((done_s[:, None, :] - begins_s) / pace_s + EXACT).clip(0)
        short = (counts * done).sum(axis=1) < virtual_nodes
        if not short.any():
            return done_s
        next_s = np.where(counts > 0, begins_s + (done + 1) * pace_s, np.inf)
        done_s = np.where(short, next_s.min(axis=1), done_s)
