"""The speed of a GPU relative to the one a job was measured on.

Of a GPU that the model was measured on too: the ratio of the measured times. Of others a
roofline: matrix multiplications at the share of the published peak that the GPU sustains
within its power, then everything between them at the bandwidth of its memory; and of that
the share that whole training steps reach. Such a ratio is an estimate, and marked as one
until the job has run there. Checked against public throughputs in docs/pricing.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from spottrain.cloud.port.provider import Offer
from spottrain.morphing.plan.flops import model_flops_per_example
from spottrain.pricing.prices.catalogue import GpuType, InstanceType, catalogue
from spottrain.pricing.ranking.machine import MachineShape
from spottrain.wire.model import LinkProfile, ModelFacts, Precision, Profile

WIDE, NARROW = ("fp32",), ("bf16", "fp16")
"""Precisions to compare peaks by: of parameters of 4 bytes, and of fewer."""
_NARROW_BYTES = 3.0
_FASTER: tuple[tuple[str, ...], ...] = (("tf32", *WIDE), NARROW)
"""What a job may compute in that is faster than its fp32 could be: the code of the model
may switch TF32 or autocast on. A GPU without the first computes in the next."""
SAVED_PASSES = 5.0
"""How often a byte that a forward saves crosses the memory's bus: written and read by the
next operation; in the backward read again, and a gradient of its size written and read."""
MEMORY_SHARE = 0.9
"""Share of the published bandwidth that copies reach: 3.57 of 3.94 TB/s on an H100 NVL."""
LINK_LATENCY_S = 5e-6
"""Assumed of a message between GPUs of a VM, and of each turn of a ring: NCCL counts 3.4 µs for a turn
over NVLink, 5.7 over PCIe and 8.4 for the whole sum (its ``src/graph/tuning.cc``)."""
TYPICAL_INTENSITY = 350.0
"""FLOPs per byte moved of a GPT of 2.5 billion parameters, where a model's are not known."""


@dataclass(frozen=True, slots=True)
class Work:
    """What training on one example asks of a GPU, all in proportion."""

    flops: float
    """Of matrix multiplications, forward and backward."""
    moved_bytes: float
    """To and from its memory, between them."""
    precisions: tuple[str, ...]
    """Of the matrix multiplications; of each GPU, the first that its peak is known of."""


def precisions(facts: ModelFacts, precision: Precision = "fp32") -> tuple[str, ...]:
    """Return the precisions that a model may compute in: a job's ``bf16`` or ``fp16``,
    else that of its parameters, by their size."""
    if precision != "fp32":
        return (precision,)
    size = sum(section.param_bytes for section in facts.sections)
    return NARROW if size < _NARROW_BYTES * facts.num_parameters else WIDE


def peak_flops(gpu: GpuType, facts: ModelFacts, precision: Precision = "fp32") -> float | None:
    """Return a GPU's published peak FLOP/s at a job's precision; None: not published."""
    return _peak(gpu, precisions(facts, precision))


def work_of(
    facts: ModelFacts, precision: Precision = "fp32", profile: Profile | None = None
) -> Work:
    """Return what training asks of a GPU.

    Args:
        facts: The job's model.
        profile: Says what a forward saves, and which precision was seen: a GPU that
            computed more than its peak at the declared one computed in another.
    """
    known = precisions(facts, precision)
    flops = model_flops_per_example(facts)
    if not flops or profile is None:
        return Work(TYPICAL_INTENSITY, 1.0, known)
    largest = profile.microbatches[-1]
    saved_bytes = sum(s.saved_bytes for s in largest.sections) / largest.microbatch_size
    gpu = catalogue().gpu_of(profile.device)
    if gpu is not None and gpu.compute_capability:
        known = _seen(known, gpu, flops / example_s(profile))
    if not saved_bytes:
        return Work(TYPICAL_INTENSITY, 1.0, known)
    return Work(float(flops), SAVED_PASSES * saved_bytes, known)


def example_s(profile: Profile) -> float:
    """Return the measured time of training on one example, forward and backward, at the
    best micro-batch size."""
    return min(
        math.fsum(s.forward_s + s.backward_s for s in one.sections) / one.microbatch_size
        for one in profile.microbatches
    )


def _seen(known: tuple[str, ...], gpu: GpuType, flops_per_s: float) -> tuple[str, ...]:
    """Return the first precisions, from the declared ones, whose peak allows a rate."""
    for one in (known, *_FASTER):
        peak = _peak(gpu, one)
        if peak is not None and flops_per_s <= peak:
            return one
    return known


def _peak(gpu: GpuType, known: Iterable[str]) -> float | None:
    return next((gpu.peak_flops[k] for k in known if gpu.peak_flops.get(k)), None)


def seconds(gpu: GpuType, work: Work) -> float | None:
    """Return how long a GPU takes for some work by its roofline; None: no published peak.

    The sum, not the larger: kernels run one after the other. Training takes longer by
    ``GpuType.training_share``. Of a core, its peak alone.
    """
    if not gpu.compute_capability:
        return work.flops / gpu.peak_flops["fp32"]
    peak = _peak(gpu, work.precisions)
    if peak is None:
        return None
    moving_s = work.moved_bytes / (MEMORY_SHARE * gpu.memory_bytes_per_s)
    return (work.flops / (gpu.matmul_share * peak) + moving_s) / gpu.training_share


def speed_ratio(gpu: GpuType, base: GpuType, work: Work) -> float | None:
    """Return the speed of one GPU over that of another by their rooflines.

    Args:
        gpu: The numerator.
        base: The denominator.
        work: What is to be done.

    Returns:
        None if a peak of one is not published at the work's precision, or if one of them is
        a CPU: it reaches another share of its peak.
    """
    if gpu.name == base.name:
        return 1.0
    if bool(gpu.compute_capability) != bool(base.compute_capability):
        return None
    each_s = seconds(gpu, work), seconds(base, work)
    return None if each_s[0] is None or each_s[1] is None else each_s[1] / each_s[0]


def measured_ratio(gpu: GpuType, base: Profile, others: Iterable[Profile]) -> float | None:
    """Return the measured speed of a GPU over that of a profile's device.

    Args:
        gpu: The numerator.
        base: Of the denominator.
        others: Profiles of the same model; the first that is of the GPU counts.

    Returns:
        None if the model was not measured on it.
    """
    for profile in others:
        measured = catalogue().gpu_of(profile.device)
        if measured is not None and measured.name == gpu.name:
            return example_s(base) / example_s(profile)
    return None


def link_of(gpu: GpuType) -> LinkProfile | None:
    """Return the estimated link between two GPUs of a VM, over NCCL; None of a core."""
    if gpu.link is None:
        return None
    return LinkProfile(
        latency_s=LINK_LATENCY_S,
        bandwidth_bytes_per_s=gpu.link.share * gpu.link.bytes_per_s,
        on_devices=True,
    )


def machine_of(kind: InstanceType, speed: float) -> MachineShape:
    """Return a machine of the catalogue as the planner sees it.

    Its network is what lasts: a job outlives every burst.

    Args:
        kind: The machine.
        speed: Of its GPUs, relative to the profile's device.
    """
    return MachineShape(
        gpus=kind.gpus,
        gpu_memory_bytes=kind.gpu.memory_bytes,
        speed=speed,
        network_bytes_per_s=kind.sustained_bytes_per_s,
        gpu_link=link_of(kind.gpu) if kind.gpus > 1 else None,
        is_gpu=kind.device == "gpu",
        memory_bytes=kind.memory_bytes,
    )


def gpu_of(offer: Offer) -> GpuType | None:
    """Return what the slots of an offer compute on, None if it is not known.

    By the catalogue's machine, or by the name of the GPUs of a machine of the user's.
    """
    kind = catalogue().find(offer.cloud, offer.instance_type)
    if kind is not None:
        return kind.gpu
    return catalogue().gpu_of(offer.gpu) if offer.gpu else None


def machine_as_offered(offer: Offer, gpus: int, speed: float) -> MachineShape:
    """Return a machine as its offer describes it.

    What its slots are, and its own memory, are known where the catalogue has its type. Of
    a machine of the user's with GPUs that are known, each slot is taken for one of them.

    Args:
        offer: What was or could be rented.
        gpus: Its slots.
        speed: Of each.
    """
    kind = catalogue().find(offer.cloud, offer.instance_type)
    device = kind.device if kind else "gpu" if offer.gpu else offer.device
    own = gpu_of(offer) if kind is None else None
    return MachineShape(
        gpus=gpus,
        gpu_memory_bytes=own.memory_bytes if own else offer.gpu_memory_bytes,
        speed=speed,
        is_gpu=device == "gpu",
        memory_bytes=0 if kind is None else kind.memory_bytes,
        computer=offer.cloud if offer.shared_cores else "",
        cores=offer.shared_cores,
    )


def gpu_speed(
    offer: Offer, profile: Profile, facts: ModelFacts, precision: Precision = "fp32"
) -> float:
    """Return the assumed speed of an offer's GPUs, relative to the profile's device.

    As the offer declares. Where it declares nothing, as those of clouds: an estimate by
    rooflines, or 1 where a GPU or its peak is not known.

    Args:
        offer: What is or could be rented.
        profile: Names the device that the job was measured on.
        facts: The job's model.
    """
    if offer.gpu_speed != 1.0:
        return offer.gpu_speed
    gpu, base = gpu_of(offer), catalogue().gpu_of(profile.device)
    if gpu is None or base is None:
        return 1.0
    if gpu.name == base.name:
        return 1.0
    return speed_ratio(gpu, base, work_of(facts, precision, profile)) or 1.0
