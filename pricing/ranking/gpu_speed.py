"""The speed of a GPU relative to the one a job was measured on: ratios of published peaks.

At the precision of the matrix multiplications. The result is an estimate, and marked as one until the
job has run there.
"""

from __future__ import annotations

import functools

from spottrain.cloud.port.provider import Offer
from spottrain.pricing.prices.catalogue import GpuType, InstanceType, catalogue
from spottrain.pricing.ranking.throughput import MachineShape
from spottrain.wire.model import ModelFacts, Precision, Profile

WIDE, NARROW = ("fp32",), ("bf16", "fp16")
"""Precisions to compare peaks by: of parameters of 4 bytes, and of fewer."""
_NARROW_BYTES = 3.0


def precisions(facts: ModelFacts, precision: Precision = "fp32") -> tuple[str, ...]:
    """Return the precisions that a model may compute in: a job's ``bf16`` or ``fp16``,
    else that of its parameters, by their size."""
    if precision != "fp32":
        return (precision,)
    size = sum(section.param_bytes for section in facts.sections)
    return NARROW if size < _NARROW_BYTES * facts.num_parameters else WIDE


def peak_flops(
    gpu: GpuType, facts: ModelFacts, precision: Precision = "fp32"
) -> float | None:
    """Return a GPU's published peak FLOP/s at a job's precision; None: not published."""
    known = (gpu.peak_flops.get(name) for name in precisions(facts, precision))
    return next((peak for peak in known if peak), None)


def speed_ratio(gpu: GpuType, base: GpuType, known: tuple[str, ...]) -> float | None:
    """Return the peak of one GPU over that of another.

    Args:
        gpu: The numerator.
        base: The denominator.
        known: Precisions, the first that both have a published peak of counts. Of two
            CPUs, those in fp32.

    Returns:
        None if there is no such precision, or if one of them is a CPU: it reaches another
        share of its peak.
    """
    if gpu.name == base.name:
        return 1.0
    if bool(gpu.compute_capability) != bool(base.compute_capability):
        return None
    for precision in known if gpu.compute_capability else WIDE:
        if precision in gpu.peak_flops and precision in base.peak_flops:
            return gpu.peak_flops[precision] / base.peak_flops[precision]
    return None


def machine_of(
    kind: InstanceType, base: GpuType, facts: ModelFacts, precision: Precision = "fp32"
) -> MachineShape | None:
    """Return a machine of the catalogue as the planner sees it.

    Args:
        kind: The machine.
        base: The GPU that the job was measured on.
        facts: The job's model.
        precision: The job's.

    Returns:
        None if no ratio of the two GPUs' peaks is known.
    """
    speed = speed_ratio(kind.gpu, base, precisions(facts, precision))
    if speed is None:
        return None
    return MachineShape(
        gpus=kind.gpus,
        gpu_memory_bytes=kind.gpu.memory_bytes,
        speed=speed,
        network_bytes_per_s=kind.network_bytes_per_s,
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

    As the offer declares. Where it declares nothing, as those of clouds: an estimate from
    the ratio of published peaks, or 1 where no such ratio is known.

    Args:
        offer: What is or could be rented.
        profile: Names the device that the job was measured on.
        facts: The job's model.
        precision: The job's.
    """
    if offer.gpu_speed != 1.0:
        return offer.gpu_speed
    known = precisions(facts, precision)
    gpu = gpu_of(offer)
    return 1.0 if gpu is None else _ratio(gpu.name, profile.device, known)


@functools.cache
def _ratio(name: str, device: str, known: tuple[str, ...]) -> float:
    """Return the speed of a GPU of the catalogue relative to a device, 1 if not known."""
    gpu, base = catalogue().gpu_of(name), catalogue().gpu_of(device)
    if gpu is None or base is None:
        return 1.0
    return speed_ratio(gpu, base, known) or 1.0
