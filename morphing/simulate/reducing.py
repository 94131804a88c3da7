"""Time after the backwards: sums over replicas, tied parameters, the gather.

Times of messages that go one after the other, from what was measured: all-reduces over
rings (``wire.RingProfile``) of the size and number nearest to the plan's, else over links.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from spottrain.morphing.simulate.compute import (
    BUS_BYTES_PER_S,
    CPU,
    Compute,
    trained_bytes,
)
from spottrain.wire.model import (
    LinkProfile,
    ModelFacts,
    Network,
    Profile,
    Reduction,
    RingProfile,
    SectionProfile,
    TiedParameter,
)
from spottrain.wire.plan import Plan

CONCURRENT_ALL_REDUCES = 2
"""All-reduces that a worker runs at once: gloo's threads in torch."""
LOSS_TENSORS = 1
"""Tensors reduced besides the gradients: the loss and its weight."""
FLOAT32_BYTES = 4
NCCL_FAILED = "rings: NCCL failed, gloo sums gradients: "
"""Begins a profile's source where sums on GPUs were tried; their error follows."""
SENT_PER_BYTE: dict[Reduction, int] = {"fast": 1, "exact": 2}
"""Bytes that are reduced over those of the gradients: exact sums are of int64."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A message of a ring all-reduce over ``n`` ranks, of which each sends 2 (n - 1).

    The whole takes ``(n - 1) * (latency_s + bytes / n * s_per_byte)``.
    """

    latency_s: float
    s_per_byte: float


def hop_of(
    profile: Profile,
    ranks: int,
    between_vms: bool,
    rings: int,
    on_device: bool = False,
) -> Hop:
    """Return the hop of ``rings`` rings of ``ranks`` ranks at once, over the same VMs.

    The measured ring nearest in size, then in number, is taken. More or fewer rings
    share what a VM's NIC can send. Sums on devices, where none of these was measured, take
    as long as those in the VMs' memory, and the other way round.
    """
    there = [ring for ring in profile.rings if ring.between_vms == between_vms]
    measured = [ring for ring in there if ring.on_device == on_device] or there
    if not measured:
        if not between_vms:
            return _hop_over(profile.within_vm)
        hop = _hop_over(profile.between_vms)
        return Hop(hop.latency_s, hop.s_per_byte * rings)
    nearest = min(
        measured,
        key=lambda ring: (
            abs(math.log(ring.ranks / ranks)),
            abs(math.log(ring.rings / rings)),
            ring.ranks,
        ),
    )
    hop = _measured_hop(nearest)
    return Hop(hop.latency_s, hop.s_per_byte * rings / nearest.rings)


def fastest_hop(profile: Profile, *, leaves_vms: bool = False) -> Hop:
    """Return a hop at least as fast as that of any ring of any plan.

    Args:
        leaves_vms: Only of rings over several VMs.
    """
    kinds = {True: profile.between_vms}
    if not leaves_vms:
        kinds[False] = profile.within_vm
    hops = [
        _hop_over(link)
        for between_vms, link in kinds.items()
        if all(ring.between_vms != between_vms for ring in profile.rings)
    ]
    for ring in profile.rings:
        if ring.between_vms in kinds:
            hop = _measured_hop(ring)
            hops.append(Hop(hop.latency_s, hop.s_per_byte / ring.rings))
    return Hop(min(hop.latency_s for hop in hops), min(hop.s_per_byte for hop in hops))


def _hop_over(link: LinkProfile) -> Hop:
    return Hop(2 * link.latency_s, 2 / link.bandwidth_bytes_per_s)


def _measured_hop(ring: RingProfile) -> Hop:
    hops = ring.ranks - 1
    return Hop(ring.latency_s / hops, ring.ranks / hops / ring.bandwidth_bytes_per_s)


def sections_at(
    profile: Profile, microbatch_size: int, facts: ModelFacts, reduction: Reduction
) -> tuple[SectionProfile, ...]:
    """Return all sections at a micro-batch size, for a way to sum gradients up.

    In exact mode a backward also quantises the gradients of its virtual node.

    Raises:
        WireError: The profile does not know that size.
    """
    measured = profile.sections_at(microbatch_size)
    s_per_byte = profile.quantise_s_per_byte if reduction == "exact" else 0.0
    if not s_per_byte:
        return measured
    return tuple(
        replace(
            section,
            backward_s=section.backward_s
            + s_per_byte * trained_bytes(facts.sections[section.index]),
        )
        for section in measured
    )


def gather_s(profile: Profile, ranks: int, between_vms: bool = True) -> float:
    """Return the time in which every rank hears of all others (``links.gather_rows``)."""
    link = profile.between_vms if between_vms else profile.within_vm
    return (ranks - 1).bit_length() * link.latency_s


def tied_bytes(facts: ModelFacts) -> tuple[float, ...]:
    """Return the bytes of a copy of each of ``facts.tied``.

    Where facts do not say it, what sections count beyond the distinct parameters (of 4
    bytes per element) is shared out evenly over the extra copies.
    """
    counted = sum(section.param_bytes for section in facts.sections)
    excess = max(0, counted - FLOAT32_BYTES * facts.num_parameters)
    extra_copies = sum(len(tied.sections) - 1 for tied in facts.tied)
    return tuple(tied.param_bytes or excess / extra_copies for tied in facts.tied)


def tied_hops(tied: TiedParameter, stages: Collection[int]) -> int:
    """Return how many messages go one after the other to sum a tied parameter.

    Every section's copy is broadcast to the stages of the others: none on one stage.
    """
    return len(tied.sections) * math.ceil(math.log2(len(stages)))


def networks_of(plan: Plan, profile: Profile, compute: Compute) -> tuple[Network, ...]:
    """Return what may sum the gradients of a plan, the preferred one first.

    That is what the plan or the job says. On GPUs otherwise both libraries where both were
    measured, and gloo where NCCL failed; else whatever is possible (``auto``).
    """
    for told in (plan.network, compute.network):
        if told != "auto":
            return (told,)
    if not compute.on_gpu:
        return ("auto",)
    sums = plan.data_parallel_width * compute.group_size > 1
    if sums and any(ring.on_device for ring in profile.rings):
        return ("nccl", "gloo")
    failed = any(source.startswith(NCCL_FAILED) for source in profile.sources)
    return ("gloo",) if failed else ("auto",)


class Reducer:
    """Times of sums over the ranks of a plan's stages.

    Args:
        plan: Says which ranks are in which VM.
        profile: Rings and links.
        reduction: What ring all-reduces sum up, a tensor per section.
        compute: Where gradients are.
        network: What sums them, of ``networks_of``.
    """

    def __init__(
        self,
        plan: Plan,
        profile: Profile,
        reduction: Reduction,
        compute: Compute = CPU,
        network: Network = "auto",
    ) -> None:
        self._profile, self._sent_per_byte = profile, SENT_PER_BYTE[reduction]
        self._on_device = compute.on_gpu and network != "gloo"
        self._staged_s_per_byte = 0.0
        if compute.on_gpu and network == "gloo":
            # Sums come down instead of gradients, which the update counts, or with state
            # on the device beside them; then the results go up again.
            down = profile.download_bytes_per_s or BUS_BYTES_PER_S
            up = profile.upload_bytes_per_s or BUS_BYTES_PER_S
            self._staged_s_per_byte = (
                self._sent_per_byte / down + 1 / up
                if plan.state == "device"
                else (self._sent_per_byte - 1) / down
            )
        depth = plan.pipeline_depth
        self._ranks = plan.data_parallel_width * compute.group_size
        stages = [{slot.vm_id for slot in plan.slots[p::depth]} for p in range(depth)]
        self._between = [len(vms) > 1 for vms in stages]
        through: dict[str, int] = {}
        for vms in stages:
            for vm in vms if len(vms) > 1 else ():
                through[vm] = through.get(vm, 0) + 1
        self._rings = [max(through.get(vm, 1) for vm in vms) for vms in stages]
        self._tensors = [len(plan.sections_of(p)) + LOSS_TENSORS for p in range(depth)]

    def sections_s(self, stage: int, num_bytes: Sequence[int]) -> list[float]:
        """Return for how long a sum of several replicas is at each of its sections."""
        total = sum(num_bytes)
        share_s = self.sum_s(stage, total) / max(total, 1)
        return [share_s * one for one in num_bytes]

    def sum_s(self, stage: int, num_bytes: int) -> float:
        """Return how long a stage's ranks take to sum ``num_bytes`` of gradients."""
        if self._ranks == 1:
            return 0.0
        between, rings = self._between[stage], self._rings[stage]
        hop = hop_of(self._profile, self._ranks, between, rings, self._on_device)
        turns = math.ceil(self._tensors[stage] / CONCURRENT_ALL_REDUCES)
        sent_bytes = self._sent_per_byte * num_bytes
        each_s = turns * hop.latency_s + sent_bytes / self._ranks * hop.s_per_byte
        return (self._ranks - 1) * each_s + num_bytes * self._staged_s_per_byte
