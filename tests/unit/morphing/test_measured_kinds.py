"""Plans for types of devices that were measured each, by itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.unit.morphing.mixed_fleet import MICROBATCH_SIZE, fleet, inputs, profile

from spottrain.morphing.errors import PlanError
from spottrain.morphing.memory.ranks import rank_bytes
from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.wire.model import MicrobatchProfile, Profile, Reduction
from spottrain.wire.plan import Plan

BESIDE = 16.0
"""What a micro-batch costs beside its examples, in examples."""


def measured(device: str, speed: float, sizes: Sequence[int]) -> Profile:
    """Return a profile of micro-batches that cost something beside their examples."""

    def at(size: int) -> MicrobatchProfile:
        (one,) = profile().microbatches
        share = size / MICROBATCH_SIZE
        slower = (BESIDE + size) / (BESIDE + MICROBATCH_SIZE) / speed
        sections = (
            replace(
                section,
                forward_s=section.forward_s * slower,
                backward_s=section.backward_s * slower,
                recompute_s=section.recompute_s * slower,
                saved_bytes=int(section.saved_bytes * share),
                output_bytes=int(section.output_bytes * share),
            )
            for section in one.sections
        )
        return replace(one, microbatch_size=size, sections=tuple(sections))

    return replace(profile(), device=device, microbatches=tuple(map(at, sizes)))


def case(
    sizes: Sequence[int] = (4, 8, 16), reduction: Reduction = "fast", memory_bytes: int = 2**40
) -> PlanInputs:
    """Two fast and two slow devices; the fast ones are measured with ``sizes``."""
    slots = tuple(
        replace(device, kind="fast" if device.speed == 4 else "", memory_bytes=memory_bytes)
        for device in fleet((2, 4.0), (2, 1.0))
    )
    return replace(
        inputs(slots),
        profile=measured("slow", 1.0, (4, 8)),
        measured=(measured("fast", 4.0, sizes),),
        reduction=reduction,
        merges=reduction == "fast",
        schedule="varuna",
        recompute=True,
        pipeline_depth=2,
    )


def plan_of(asked: PlanInputs) -> Plan:
    plan = choose_plan(asked).plan
    assert plan is not None
    return plan


def sizes_of(plan: Plan) -> list[int]:
    return [plan.microbatch_size_of(replica) for replica in range(plan.data_parallel_width)]


def shares_of(plan: Plan) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(plan.replica_bounds)]


def test_each_type_computes_micro_batches_of_its_best_size() -> None:
    together, apart = plan_of(replace(case(), merges=False)), plan_of(case())

    assert sizes_of(together) == [4, 4]
    assert sizes_of(apart) == [16, 8]
    assert apart.predicted_step_s < 0.8 * together.predicted_step_s


def test_in_exact_mode_all_micro_batches_are_one_virtual_node() -> None:
    assert plan_of(case(reduction="exact")).nodes_per_microbatch == ()


def test_a_type_whose_memory_ends_sooner_computes_less_at_once() -> None:
    wide = plan_of(case())
    ranks = rank_bytes(
        case().facts, case().profile, wide, "fast", profiles=[case().measured[0]] * 4
    )
    needed = max(rank.needed.device for rank in ranks)
    slots = tuple(
        replace(device, memory_bytes=needed // 2 if device.kind else 2**40)
        for device in case().slots
    )

    plan = plan_of(replace(case(), slots=slots))

    fast, slow = sizes_of(plan)
    assert fast < 16
    assert slow == 8


def test_what_was_measured_counts_and_not_the_speed() -> None:
    """The speed orders devices; times are those of the type."""
    asked = case((4,))
    as_slow = replace(measured("fast", 1.0, (4,)))
    plan = plan_of(replace(asked, measured=(as_slow,), merges=False))

    first, second = shares_of(plan)
    assert abs(first - second) <= 1
    faster = shares_of(plan_of(replace(asked, merges=False)))
    assert faster[0] > 3 * faster[1]


def test_a_type_that_lacks_the_size_of_a_virtual_node_is_scaled() -> None:
    plan = plan_of(replace(case((8, 16)), merges=False))

    assert plan.predicted_step_s == plan_of(replace(case((4,)), merges=False)).predicted_step_s


def test_a_device_of_a_type_that_was_not_measured_is_refused() -> None:
    with pytest.raises(PlanError, match=r"kind of vm00\[0\] must be one that was measured"):
        choose_plan(replace(case(), measured=()))
