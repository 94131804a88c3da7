"""Which links a plan's messages take, and which of them share a NIC.

Whether two stages are in one VM decides which of the profile's links leads from one to
the other. Links that lead out of a VM share its NIC, and so do those that lead into it:
within a replica they are played so (``replica.Link.vms``); replicas do the same things at
about the same time, so a NIC that serves the same link of several gives each its part.
"""

from __future__ import annotations

from collections import Counter

from spottrain.morphing.replica import Link
from spottrain.wire import Plan, Profile


def wire_replicas(plan: Plan, profile: Profile) -> list[tuple[Link, ...]]:
    """Return the links of every replica, from each stage to the next.

    An interleaved plan has one more, from the last stage to the first.
    """
    depth, width = plan.pipeline_depth, plan.data_parallel_width
    numbers = {vm: n for n, vm in enumerate(dict.fromkeys(s.vm_id for s in plan.slots))}
    vms = [numbers[slot.vm_id] for slot in plan.slots]
    output_bytes = _output_bytes(plan, profile)
    ends = [
        [
            (vms[d * depth + p], vms[d * depth + (p + 1) % depth])
            for p in range(len(output_bytes))
        ]
        for d in range(width)
    ]
    starts: list[Counter[int]] = [Counter() for _ in output_bytes]
    stops: list[Counter[int]] = [Counter() for _ in output_bytes]
    for row in ends:
        for p, (start, stop) in enumerate(row):
            if start != stop:
                starts[p][start] += 1
                stops[p][stop] += 1
    return [
        tuple(
            _link(
                profile,
                output_bytes[p],
                (start, stop),
                max(starts[p][start], stops[p][stop], 1),
            )
            for p, (start, stop) in enumerate(row)
        )
        for row in ends
    ]


def _output_bytes(plan: Plan, profile: Profile) -> list[float]:
    """Return what a micro-batch sends over each link; a mean over chunks."""
    measured = profile.sections_at(plan.microbatch_size)
    cuts = plan.stage_bounds[1:-1]
    sent = [
        [measured[cut - 1].output_bytes for cut in cuts[p :: plan.pipeline_depth]]
        for p in range(plan.pipeline_depth)
    ]
    return [sum(own) / len(own) for own in sent if own]


def _link(
    profile: Profile, num_bytes: float, vms: tuple[int, int], sharing: int
) -> Link:
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
