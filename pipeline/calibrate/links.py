"""Measures messages and all-reduces over the groups of this process (Varuna, table 2).

This process must have joined others. Messages go over the runtime's
own ``PipelineLinks``: header, receiver thread and queue included.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from spottrain.pipeline.calibrate.statistics import fit_line, is_steady, spread
from spottrain.pipeline.comm.collectives import gather_json
from spottrain.pipeline.comm.groups import is_joined, world
from spottrain.pipeline.comm.p2p import Direction, LinkOf, PipelineLinks, through_hosts
from spottrain.pipeline.devices.port import Device
from spottrain.wire.model import LinkProfile, RingProfile

SMALLEST_BYTES = 1024
_ELEMENT_BYTES = 4
_WARM_UPS = 3
_PAUSE_S = 2e-3
"""Between messages: threads and caches that just did the same are twice as fast as
those that did something else before, as they do while a model is trained."""
_MAX_SAMPLES = 200
_RING_REPETITIONS = range(5, 30)


def gather(value: Any) -> list[Any]:
    """Return the values of all ranks; every rank waits for all others."""
    if not is_joined():
        return [value]
    world().barrier()  # others may measure for longer than a message may take
    return gather_json(value)


@dataclass(frozen=True, slots=True)
class MessageTimes:
    """Times of messages between two ranks."""

    one_way_s: Mapping[int, Sequence[float]]
    """Half of each round trip, by bytes of the message."""
    posting_s: Mapping[int, float]
    """Time that the sender is busy with one, a median, by bytes of the message."""

    def posting_near_s(self, num_bytes: int) -> float:
        """Return how long the sender is busy with a message of about ``num_bytes``."""
        return self.posting_s[min(self.posting_s, key=lambda b: abs(b - num_bytes))]

    def profile(self) -> LinkProfile:
        """Return the line through the medians, and the jitter around them."""
        latency_s, s_per_byte = fit_line(self.one_way_s)
        # A round trip adds up two messages, so half of it varies less than one does.
        spreads = [math.sqrt(2) * spread(times) for times in self.one_way_s.values()]
        return LinkProfile(
            latency_s=latency_s,
            bandwidth_bytes_per_s=1 / s_per_byte,
            jitter=statistics.median(spreads),
        )


def message_sizes(largest_bytes: int) -> tuple[int, ...]:
    """Return sizes around ``largest_bytes``: bandwidth shows in those above it."""
    shares = (0.25, 1, 4, 16)
    sizes = {max(SMALLEST_BYTES, int(largest_bytes / share)) for share in shares}
    return tuple(sorted({SMALLEST_BYTES, *sizes}))


def time_messages(
    peer: int,
    *,
    leads: bool,
    sizes: Sequence[int],
    device: Device,
    link_of: LinkOf = through_hosts,
    budget_s: float = 1.0,
) -> MessageTimes | None:
    """Time messages to rank ``peer`` of the default group, which must do so too.

    Args:
        peer: The other rank.
        leads: Whether this rank takes the time; its peer says the opposite.
        sizes: Bytes of messages, ``SMALLEST_BYTES`` and more; the same on both sides.
        device: Where messages come from and go to.
        link_of: What carries them there, if not gloo.
        budget_s: About how long to go on, unless the medians are steady before.

    Returns:
        The times, at the rank that leads.

    Raises:
        GenerationBrokenError, RuntimeError: The peer is gone.
    """
    before, after = (None, peer) if leads else (peer, None)
    links = PipelineLinks(before, after, device, link_of=link_of)
    times = None
    try:
        if leads:
            times = _lead(links, sizes, budget_s, device)
        else:
            _echo(links, device)
        links.flush()
    finally:
        links.close()
    return times


def _lead(
    links: PipelineLinks, sizes: Sequence[int], budget_s: float, device: Device
) -> MessageTimes:
    one_way_s: dict[int, list[float]] = {}
    posting_s: dict[int, float] = {}
    for size in sizes:
        message = torch.zeros(size // _ELEMENT_BYTES, device=device.torch_device)
        for _ in range(_WARM_UPS):
            _ping(links, message, device)
        times = one_way_s[message.numel() * _ELEMENT_BYTES] = []
        posted: list[float] = []
        end_s = time.perf_counter() + budget_s / len(sizes)
        while len(times) < _MAX_SAMPLES and not is_steady(times):
            time.sleep(_PAUSE_S)
            posted_s, round_trip_s = _ping(links, message, device)
            posted.append(posted_s)
            times.append(round_trip_s / 2)
            if time.perf_counter() > end_s:
                break
        posting_s[message.numel() * _ELEMENT_BYTES] = statistics.median(posted)
    end = torch.zeros(1, device=device.torch_device)  # too small to be measured
    links.send(Direction.ACTIVATION, [end])
    return MessageTimes(one_way_s, posting_s)


def _ping(links: PipelineLinks, message: torch.Tensor, device: Device) -> tuple[float, float]:
    """Send a message and wait for its echo; return seconds for sending, and for both."""
    links.expect(Direction.GRADIENT, 1)
    began = time.perf_counter()
    links.send(Direction.ACTIVATION, [message])
    posted = time.perf_counter()
    arrival = links.arrival(wait=True)
    assert arrival is not None
    for one in filter(None, arrival.tensors):
        one.finish(device)
    return posted - began, time.perf_counter() - began


def _echo(links: PipelineLinks, device: Device) -> None:
    links.expect(Direction.ACTIVATION, 1)
    while True:
        arrival = links.arrival(wait=True)
        assert arrival is not None
        (message,) = arrival.activations_on(device)
        if message.numel() == 1:
            return
        links.expect(Direction.ACTIVATION, 1)
        links.send(Direction.GRADIENT, [message])


@dataclass(frozen=True, slots=True)
class Rings:
    """All-reduces to be measured together."""

    members: tuple[tuple[int, ...], ...]
    """Ranks of each ring; no rank is in two."""
    between_vms: bool


def rings_to_measure(vms: Sequence[str]) -> list[Rings]:
    """Return the rings that a fleet can measure: powers of two, and the maximum.

    Within one VM, and with one rank of each VM; one ring at a time, and as many as the
    VMs have ranks for (Varuna, section 4.3: all stages of a VM reduce at once).

    Args:
        vms: The VM of every rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, vm in enumerate(vms):
        ranks.setdefault(vm, []).append(rank)
    fullest = max(ranks.values(), key=len)
    found = [
        Rings(tuple(tuple(fullest[i * n : (i + 1) * n]) for i in range(count)), False)
        for n in _doublings(2, len(fullest))
        for count in _doublings(1, len(fullest) // n)
    ]
    across = list(zip(*ranks.values(), strict=False))  # row i: the i-th rank of each VM
    found += [
        Rings(tuple(row[:n] for row in across[:count]), True)
        for n in _doublings(2, len(ranks))
        for count in _doublings(1, len(across))
    ]
    return found


def _doublings(least: int, most: int) -> list[int]:
    """Return ``least``, twice that and so on, and ``most``."""
    found = []
    while least < most:
        found.append(least)
        least *= 2
    return [*found, most] if least <= most or found else []


def memberships_of(plans: Sequence[Rings]) -> list[tuple[int, ...]]:
    """Return the ranks of every ring once."""
    return list(dict.fromkeys(ring for plan in plans for ring in plan.members))


def measure_rings(
    plans: Sequence[Rings],
    groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    sizes: Sequence[int],
    device: Device,
    budget_s: float = 2.0,
) -> tuple[RingProfile, ...]:
    """Measure all-reduces; every rank makes the same call.

    Args:
        plans: See ``rings_to_measure``.
        groups: This rank's, by their members.
        sizes: Bytes of the tensors.
        device: Where the tensors are.
        budget_s: About how long it may take.

    Returns:
        The same at every rank.

    Raises:
        RuntimeError: A rank is gone.
    """
    share_s = budget_s / max(1, len(plans) * len(sizes))
    return tuple(_measure_ring(plan, groups, sizes, device, share_s) for plan in plans)


def _measure_ring(
    plan: Rings,
    groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    sizes: Sequence[int],
    device: Device,
    budget_s: float,
) -> RingProfile:
    rank = world().rank
    mine = next((ring for ring in plan.members if rank in ring), None)
    group = None if mine is None else groups[mine]
    seconds: dict[int, list[float]] = {}
    for size in sizes:
        tensor = device.allocate(size // _ELEMENT_BYTES * _ELEMENT_BYTES).view(torch.float32)
        pilot_s = max(gather_json(_all_reduces(tensor, group, _WARM_UPS, device)[-1]))
        most = int(budget_s / pilot_s) if pilot_s else _RING_REPETITIONS.start
        count = max(_RING_REPETITIONS.start, min(_RING_REPETITIONS.stop, most))
        times = _all_reduces(tensor, group, count, device)
        seconds[tensor.nbytes] = [max(gather_json(statistics.median(times)))]
    latency_s, s_per_byte = fit_line(seconds)
    return RingProfile(
        ranks=len(plan.members[0]),
        rings=len(plan.members),
        between_vms=plan.between_vms,
        latency_s=latency_s,
        bandwidth_bytes_per_s=1 / s_per_byte,
        on_device=not device.is_host,
    )


def _all_reduces(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, count: int, device: Device
) -> list[float]:
    """Return the times of ``count`` all-reduces after a common start."""
    world().barrier()
    if group is None:
        return [0.0]
    times = []
    for _ in range(count):
        began = device.clock()
        dist.all_reduce(tensor, group=group)
        device.synchronise()
        times.append(device.clock() - began)
    return times
