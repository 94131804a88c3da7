"""A model that needs two devices, and fleets of fast and slow ones to plan it for."""

from __future__ import annotations

from collections.abc import Sequence

from tests.builders import (
    a_link,
    a_profile,
    microbatch_profile,
    model_facts,
    section_facts,
    section_profile,
)

from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.plan.profiles import derive_profile
from spottrain.wire.model import ModelFacts, Profile
from spottrain.wire.plan import Plan, Slot

SECTIONS = 24
MICROBATCH_SIZE = 4
MIB = 2**20
MEMORY_BYTES = 12 * 2**30


def facts() -> ModelFacts:
    """Return a model of 600 million parameters, with Adam 9 GiB of state."""
    elements = 25 * 10**6
    return model_facts(
        (
            section_facts(
                i,
                param_bytes=4 * elements,
                optimizer_bytes=8 * elements,
                activation_bytes=4 * MIB if i < SECTIONS - 1 else 0,
            )
            for i in range(SECTIONS)
        ),
        num_parameters=SECTIONS * elements,
    )


def profile() -> Profile:
    """Return times on a device of speed 1."""
    return a_profile(
        microbatch_profile(
            (
                section_profile(
                    i,
                    forward_s=0.020,
                    saved_bytes=200 * MIB,
                    output_bytes=16 * MIB if i < SECTIONS - 1 else 0,
                )
                for i in range(SECTIONS)
            ),
            MICROBATCH_SIZE,
        ),
        device="slow",
        optimizer_s_per_byte=1e-11,
        within_vm=a_link(latency_s=2e-5, bytes_per_s=1e10),
        between_vms=a_link(bytes_per_s=2.5e9),
        written=True,
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


def profile_at(speed: float) -> Profile:
    """Return times on a device of some speed, as the planner has them."""
    return profile() if speed == 1 else derive_profile(profile(), "slow", speed)


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
