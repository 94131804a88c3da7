"""What a plan is made from, and what no plan can be made from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from spottrain.morphing.errors import PlanError
from spottrain.morphing.placement import Device
from spottrain.wire import (
    SCHEMA_VERSION,
    ModelFacts,
    Plan,
    Profile,
    Reduction,
    ScheduleKind,
)

Objective = Literal["throughput", "examples_per_dollar"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """All that a choice depends on; the same inputs give the same choice."""

    facts: ModelFacts
    profile: Profile
    slots: tuple[Device, ...]
    minibatch_size: int
    microbatch_size: int | None
    """``None``: the smallest of the profile's that is nearly as good as the best."""
    reduction: Reduction
    previous: Plan | None = None
    """The plan that runs now: of equal placements the one nearest to it is taken, and of
    plans that are as good the one that is like it."""
    schedule: ScheduleKind | None = None
    """``None``: whatever is best."""
    recompute: bool | None = None
    """``None``: whatever is best."""
    objective: Objective = "throughput"
    lag_share: float = 0.0
    """What losses put at stake, see ``policy.lag_share``: of plans nearly as fast the one
    that survives them is taken."""
    schema_version: int = SCHEMA_VERSION


def check_inputs(inputs: PlanInputs) -> None:
    """Refuse what no plan can be made from.

    Raises:
        PlanError: One line that names the field: see ``check_profile``; or the
            mini-batch is no multiple of the micro-batch, the profile does not know the
            micro-batch, or a device has no memory, speed or price that makes sense.
    """
    check_profile(inputs.facts, inputs.profile)
    known, asked = inputs.profile.microbatch_sizes, inputs.microbatch_size
    minibatch_size = inputs.minibatch_size
    if asked is not None:
        if min(minibatch_size, asked) < 1 or minibatch_size % asked:
            raise PlanError(
                "minibatch_size must be a multiple of microbatch_size: got "
                f"{minibatch_size} and {asked}; change one of them"
            )
        if asked not in known:
            raise PlanError(
                f"the profile knows micro-batches of {known}: got microbatch_size "
                f"{asked}; calibrate again"
            )
    elif minibatch_size < 1 or all(minibatch_size % m for m in known):
        raise PlanError(
            f"minibatch_size must be a multiple of one of the profile's micro-batches "
            f"{known}: got {minibatch_size}; change it"
        )
    for device in inputs.slots:
        name = f"{device.slot.vm_id}[{device.slot.index}]"
        positive(f"speed of {name}", device.speed)
        positive(f"memory_bytes of {name}", device.memory_bytes)
        positive(f"usd_per_hour of {name}", device.usd_per_hour, or_zero=True)
    if inputs.objective == "examples_per_dollar":
        for device in inputs.slots:
            positive(f"usd_per_hour of {device.slot.vm_id}", device.usd_per_hour)


def check_profile(facts: ModelFacts, profile: Profile) -> None:
    """Refuse a profile that is of another model, or whose numbers cannot be.

    Raises:
        PlanError: It names the first number that is missing, negative, not finite, or
            zero where it must not be.
    """
    if not profile.microbatches:
        raise PlanError("profile.microbatches must not be empty: got none; calibrate")
    for one in profile.microbatches:
        count = len(one.sections)
        if profile.fingerprint != facts.fingerprint or count != len(facts.sections):
            raise PlanError(
                f"the profile is of another model: got {profile.fingerprint} with "
                f"{count} sections for {facts.fingerprint} with "
                f"{len(facts.sections)}; take facts and profile of one model"
            )
        for section in one.sections:
            where = f"sections[{section.index}] (micro-batches of {one.microbatch_size})"
            positive(f"forward_s of {where}", section.forward_s)
            positive(f"backward_s of {where}", section.backward_s)
            positive(f"recompute_s of {where}", section.recompute_s)
            positive(f"saved_bytes of {where}", section.saved_bytes, or_zero=True)
            positive(f"output_bytes of {where}", section.output_bytes, or_zero=True)
    for name, link in (
        ("within_vm", profile.within_vm),
        ("between_vms", profile.between_vms),
    ):
        positive(f"{name}.bandwidth_bytes_per_s", link.bandwidth_bytes_per_s)
        positive(f"{name}.latency_s", link.latency_s, or_zero=True)
        positive(f"{name}.jitter", link.jitter, or_zero=True)
    for number, ring in enumerate(profile.rings):
        positive(f"rings[{number}].bandwidth_bytes_per_s", ring.bandwidth_bytes_per_s)
        positive(f"rings[{number}].latency_s", ring.latency_s, or_zero=True)
    positive("optimizer_s_per_byte", profile.optimizer_s_per_byte, or_zero=True)
    positive("task_overhead_s", profile.task_overhead_s, or_zero=True)


def positive(name: str, value: float, *, or_zero: bool = False) -> None:
    """Refuse a number that is not finite, or not above 0.

    Raises:
        PlanError: It names ``name``.
    """
    if not (math.isfinite(value) and (value > 0 or (or_zero and value == 0))):
        least = "0 or more" if or_zero else "above 0"
        raise PlanError(f"{name} must be a number {least}: got {value}; measure again")
