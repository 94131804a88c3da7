"""The links between a plan's stages, and which of them share a NIC.

Two stages in one VM talk over the profile's link within VMs, others over that between
VMs. Links that lead out of a VM share its NIC, and so do those that lead into it:
within a replica this is simulated (``replica.Link.vms``); replicas do the same things
at about the same time, so a NIC that serves the same link of several gives each its
part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from spottrain.morphing.simulate.compute import CPU, Compute
from spottrain.morphing.simulate.replica import Link
from spottrain.wire.model import Profile
from spottrain.wire.plan import Plan


def wire_replicas(plan: Plan, profile: Profile, compute: Compute = CPU) -> list[tuple[Link, ...]]:
    """Return the links of every replica, from each stage to the next.

    An interleaved plan has one more, from the last stage to the first. VMs are numbered
    within a replica; replicas with equal links share one tuple.
    """
    depth, width = plan.pipeline_depth, plan.data_parallel_width
    sent = _sent_bytes(plan, profile, compute)
    names = [slot.vm_id for slot in plan.slots]
    vms = [names[d * depth : (d + 1) * depth] for d in range(width)]
    apart = _Ends(tuple(range(depth)), (1,) * len(sent))
    if len(set(names)) == len(names):
        every = [apart] * width
    else:
        starts, stops = _links_per_vm(vms, len(sent))
        every = [_ends_of(own, starts, stops) for own in vms]
    known: dict[tuple[_Ends, int], tuple[Link, ...]] = {}
    rows = []
    for replica, ends in enumerate(every):
        nodes = plan.microbatch_size_of(replica) // plan.microbatch_size
        if (ends, nodes) not in known:
            known[ends, nodes] = _wire(profile, [nodes * one for one in sent], ends)
        rows.append(known[ends, nodes])
    return rows


class _Ends(NamedTuple):
    """The facts that determine a replica's links."""

    vms: tuple[int, ...]
    """Number of each stage's VM."""
    sharing: tuple[int, ...]
    """Number of replicas that send over the NICs of each link at the same time."""


def _ends_of(
    own: Sequence[str], starts: Sequence[Counter[str]], stops: Sequence[Counter[str]]
) -> _Ends:
    """Return the ends of a replica's links, given its VMs and what ``_links_per_vm`` returns."""
    numbers: dict[str, int] = {}
    return _Ends(
        tuple([numbers.setdefault(vm, len(numbers)) for vm in own]),
        tuple(
            [max(starts[p][own[p]], stops[p][own[(p + 1) % len(own)]]) for p in range(len(starts))]
        ),
    )


def _links_per_vm(
    vms: Sequence[Sequence[str]], links: int
) -> tuple[list[Counter[str]], list[Counter[str]]]:
    """Return for each link from how many replicas it leaves each VM, and arrives there."""
    starts: list[Counter[str]] = [Counter() for _ in range(links)]
    stops: list[Counter[str]] = [Counter() for _ in range(links)]
    for own in vms:
        for p in range(links):
            start, stop = own[p], own[(p + 1) % len(own)]
            if start != stop:
                starts[p][start] += 1
                stops[p][stop] += 1
    return starts, stops


def _wire(profile: Profile, sent: Sequence[float], ends: _Ends) -> tuple[Link, ...]:
    return tuple(
        _link(
            profile,
            num_bytes,
            (ends.vms[p], ends.vms[(p + 1) % len(ends.vms)]),
            ends.sharing[p],
        )
        for p, num_bytes in enumerate(sent)
    )


def _sent_bytes(plan: Plan, profile: Profile, compute: Compute) -> list[float]:
    """Return what a virtual node sends over each link; a mean over chunks."""
    measured = profile.sections_at(plan.microbatch_size)
    cuts = plan.stage_bounds[1:-1]
    sent = [
        [compute.sent_bytes(measured[cut - 1]) for cut in cuts[p :: plan.pipeline_depth]]
        for p in range(plan.pipeline_depth)
    ]
    return [sum(own) / len(own) for own in sent if own]


def _link(profile: Profile, num_bytes: float, vms: tuple[int, int], sharing: int) -> Link:
    """Return one link; ``sharing`` replicas use its NICs at the same time."""
    start, stop = vms
    link = profile.within_vm if start == stop else profile.between_vms
    parts = 1 if start == stop else sharing
    return Link(
        latency_s=link.latency_s,
        transfer_s=parts * num_bytes / link.bandwidth_bytes_per_s,
        jitter=link.jitter,
        vms=None if start == stop else vms,
    )
