"""A model that needs two devices, and fleets of fast and slow ones to plan it for."""

from __future__ import annotations

from collections.abc import Sequence

from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.wire.model import (
    LinkProfile,
    MicrobatchProfile,
    ModelFacts,
    Plan,
    Profile,
    SectionFacts,
    SectionProfile,
    Slot,
)

SECTIONS = 24
MICROBATCH_SIZE = 4
MIB = 2**20
MEMORY_BYTES = 12 * 2**30


def facts() -> ModelFacts:
    """Return a model of 600 million parameters, with Adam 9 GiB of state."""
    elements = 25 * 10**6
    return ModelFacts(
        fingerprint="model",
        num_parameters=SECTIONS * elements,
        blocks="blocks",
        sections=tuple(
            SectionFacts(
                index=i,
                param_bytes=4 * elements,
                optimizer_bytes=8 * elements,
                activation_bytes_per_example=4 * MIB if i < SECTIONS - 1 else 0,
            )
            for i in range(SECTIONS)
        ),
        tied=(),
        dataset_len=1,
        heldout_len=0,
    )


def profile() -> Profile:
    """Return times on a device of speed 1."""
    return Profile(
        fingerprint="model",
        device="slow",
        software="software",
        microbatches=(
            MicrobatchProfile(
                microbatch_size=MICROBATCH_SIZE,
                sections=tuple(
                    SectionProfile(
                        index=i,
                        forward_s=0.020,
                        backward_s=0.040,
                        recompute_s=0.020,
                        saved_bytes=200 * MIB,
                        output_bytes=16 * MIB if i < SECTIONS - 1 else 0,
                    )
                    for i in range(SECTIONS)
                ),
            ),
        ),
        optimizer_s_per_byte=1e-11,
        within_vm=LinkProfile(latency_s=2e-5, bandwidth_bytes_per_s=1e10),
        between_vms=LinkProfile(latency_s=1e-4, bandwidth_bytes_per_s=2.5e9),
        origin="written",
        sources=("made up",),
    )


def fleet(*kinds: tuple[int, float]) -> tuple[Device, ...]:
    """Return VMs of one device each: so many of such a speed, kind after kind."""
    speeds = [speed for count, speed in kinds for _ in range(count)]
    return tuple(
        Device(
            slot=Slot(vm_id=f"vm{vm:02}", index=0),
            memory_bytes=MEMORY_BYTES,
            speed=speed,
        )
        for vm, speed in enumerate(speeds)
    )


def inputs(
    devices: Sequence[Device], minibatch_size: int = 1024, previous: Plan | None = None
) -> PlanInputs:
    """Return what a plan for ``devices`` depends on."""
    return PlanInputs(
        facts=facts(),
        profile=profile(),
        slots=tuple(devices),
        minibatch_size=minibatch_size,
        microbatch_size=MICROBATCH_SIZE,
        reduction="fast",
        previous=previous,
    )
