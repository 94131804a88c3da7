"""Plans whose stages are groups of slots."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import (
    a_profile,
    microbatch_profile,
    model_facts,
    section_facts,
    section_profile,
)

from spottrain.morphing.memory.ranks import rank_bytes
from spottrain.morphing.plan.choose import DERIVED, choose_plan, min_steps_s
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.plan.tensor_groups import group_profile
from spottrain.morphing.simulate.compute import Compute
from spottrain.wire.model import GroupProfile, Precision
from spottrain.wire.plan import Plan, Slot

MIB = 2**20


def inputs(vms: dict[str, int], size: int, share: float = 1.0, sums: int = 0) -> PlanInputs:
    """Four sections of 10 ms, on VMs of so many slots."""
    facts = [
        replace(
            section_facts(k, param_bytes=MIB, activation_bytes=MIB // 4),
            divided_share=share,
            divided_bytes=int(share * MIB),
            divided_sums=sums,
        )
        for k in range(4)
    ]
    sections = [section_profile(k, forward_s=0.010, output_bytes=MIB) for k in range(4)]
    return PlanInputs(
        facts=model_facts(facts),
        profile=a_profile(microbatch_profile(sections, 4), written=True),
        slots=tuple(
            Device(slot=Slot(vm_id=vm, index=index), memory_bytes=2**40, speed=1.0)
            for vm, count in vms.items()
            for index in range(count)
        ),
        minibatch_size=64,
        microbatch_size=4,
        reduction="fast",
        tensor_parallel=size,
    )


def plan_of(case: PlanInputs) -> Plan:
    plan = choose_plan(case).plan
    assert plan is not None
    return plan


@given(st.lists(st.integers(1, 8), min_size=1, max_size=4), st.sampled_from([2, 4]))
def test_the_slots_that_divide_a_stage_are_in_one_vm_and_stay_together(
    counts: list[int], size: int
) -> None:
    vms = {f"vm{number}": count for number, count in enumerate(counts)}
    case = inputs(vms, size)
    groups = sum(count // size for count in counts)
    choice = choose_plan(case)

    if not groups:
        assert choice.plan is None
        return
    plan = choice.plan
    assert plan is not None
    assert plan.devices_per_stage_replica == size
    assert plan.pipeline_depth * plan.data_parallel_width <= groups
    together = Counter(plan.tensor_ranks(rank) for rank in range(len(plan.slots)))
    assert set(together.values()) == {size}
    assert sorted(rank for ranks in together for rank in ranks) == [*range(len(plan.slots))]
    assert choice.candidates[0].unused_slots == sum(counts) - len(plan.slots)
    assert len(rank_bytes(case.facts, case.profile, plan, "fast")) == len(plan.slots)
    # The same VMs again: nothing moves.
    assert plan_of(replace(case, previous=plan)).slots == plan.slots


def test_vms_with_fewer_slots_are_refused_in_a_line() -> None:
    why_not = choose_plan(inputs({"a": 2, "b": 3}, 4)).why_not

    assert why_not.startswith("runtime.tensor_parallel takes 4 slots of one VM: got VMs of 3")


def test_what_is_divided_takes_a_part_of_its_time_and_sums_are_added() -> None:
    alone = plan_of(inputs({"a": 1}, 1)).predicted_step_s

    whole, half, summing = (
        plan_of(inputs({"a": 2}, 2, share, sums)).predicted_step_s
        for share, sums in ((0.0, 0), (1.0, 0), (1.0, 1))
    )
    assert half < summing < whole
    assert abs(whole - alone) < 0.1 * alone
    assert abs(half - alone / 2) < 0.1 * alone


def test_no_plan_that_divides_matrices_is_interleaved() -> None:
    case = inputs({"a": 4, "b": 4}, 2)

    whole, divided = (
        {one.schedule for one in choose_plan(replace(case, tensor_parallel=size)).candidates}
        for size in (1, 2)
    )
    assert whole - divided == {"interleaved"}


def free(case: PlanInputs, *sizes: int) -> PlanInputs:
    """Leave the number of slots to the planner, as far as the model can be divided."""
    return replace(case, tensor_parallel=None, facts=replace(case.facts, tensor_sizes=sizes))


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=3),
    st.floats(0, 1),
    st.integers(0, 4),
    st.sampled_from([16, 64]),
)
def test_of_all_numbers_of_slots_none_is_better_by_more_than_measurements_tell(
    counts: list[int], share: float, sums: int, minibatch_size: int
) -> None:
    vms = {f"vm{number}": count for number, count in enumerate(counts)}
    case = replace(inputs(vms, 1, share, sums), minibatch_size=minibatch_size)
    each = [plan_of(replace(case, tensor_parallel=n)) for n in (1, 2, 4) if n <= max(counts)]

    plan = plan_of(free(case, 2, 4))

    least_s = min(one.predicted_step_s for one in each)
    assert plan.predicted_step_s <= least_s * (1 + DERIVED) ** 2
    if plan.devices_per_stage_replica > 1:
        assert plan.predicted_step_s * (1 + DERIVED) < each[0].predicted_step_s
    assert min_steps_s(free(case, 2, 4))[0] <= least_s


def test_a_model_of_one_micro_batch_is_divided_and_one_that_cannot_be_is_not() -> None:
    case = replace(inputs({"a": 4}, 1), minibatch_size=4)

    choice = choose_plan(free(case, 2, 4))

    assert choice.plan is not None
    assert choice.plan.devices_per_stage_replica == 4
    assert {one.tensor_parallel for one in choice.candidates} == {1, 2, 4}
    assert "worse than" in choice.candidates[-1].why_not
    assert plan_of(free(case)).devices_per_stage_replica == 1


def test_the_running_number_of_slots_is_kept_where_another_is_hardly_better() -> None:
    case = replace(inputs({"a": 2}, 1, share=0.08), minibatch_size=4)
    runs = plan_of(replace(case, tensor_parallel=2))

    assert plan_of(free(case, 2)).devices_per_stage_replica == 1
    assert plan_of(free(replace(case, previous=runs), 2)).slots == runs.slots


def with_groups(case: PlanInputs, forward_s: float, saved_bytes: int = 0) -> PlanInputs:
    """Add what was measured in groups of two."""
    sections = [
        section_profile(k, forward_s=forward_s, output_bytes=MIB, saved_bytes=saved_bytes)
        for k in range(4)
    ]
    group = GroupProfile(size=2, microbatches=(microbatch_profile(sections, 4),))
    return replace(case, profile=replace(case.profile, groups=(group,)))


def test_what_was_measured_in_groups_counts_and_else_times_are_derived() -> None:
    case = inputs({"a": 4}, 2, share=1.0)
    derived, measured = (choose_plan(one) for one in (case, with_groups(case, 0.020)))
    other = choose_plan(with_groups(replace(case, tensor_parallel=4), 0.020))

    assert derived.plan is not None
    assert measured.plan is not None
    # A section's forward of 10 ms takes 5 ms derived, and 20 ms as measured.
    assert derived.plan.predicted_step_s < 0.3 * measured.plan.predicted_step_s
    assert [one.candidates[0].tensor_times for one in (derived, measured, other)] == [
        *("derived", "measured", "derived")
    ]
    alone = choose_plan(replace(case, tensor_parallel=1))
    assert alone.candidates[0].tensor_times is None


def test_memory_is_what_was_measured_in_groups() -> None:
    case = inputs({"a": 2}, 2)
    sections = [replace(one, saved_bytes=MIB) for one in case.profile.sections_at(4)]
    profile = replace(case.profile, microbatches=(microbatch_profile(sections, 4),))
    whole = replace(case, profile=profile)

    derived, measured = (
        choose_plan(one).candidates[0].stage_bytes
        for one in (whole, with_groups(whole, 0.005, saved_bytes=MIB // 2))
    )

    assert derived is not None
    assert measured is not None
    assert measured < derived


def test_devices_of_another_type_divide_matrices_too() -> None:
    case = inputs({"a": 2}, 2)
    kind = replace(case.profile, device="other")
    slots = tuple(replace(device, kind="other") for device in case.slots)

    plan = plan_of(replace(case, measured=(kind,), slots=slots))

    assert plan.predicted_step_s == plan_of(case).predicted_step_s


def test_a_stage_puts_together_what_it_receives() -> None:
    case = replace(inputs({"a": 2, "b": 2}, 2), pipeline_depth=2)
    profile = group_profile(case.profile, case.facts, 2, case.compute)
    link = case.profile.within_vm

    received_s = profile.overheads_at(4).receiving_s

    # One message of half an activation of 1 MiB.
    assert received_s == pytest.approx(link.latency_s + MIB / 2 / link.bandwidth_bytes_per_s)
    assert group_profile(case.profile, case.facts, 1, case.compute) is case.profile


def test_groups_follow_their_lists_which_no_bound_in_flight_changes() -> None:
    roomy = inputs({"a": 2, "b": 2}, 2)
    sections = [replace(one, saved_bytes=8 * MIB) for one in roomy.profile.sections_at(4)]
    profile = replace(roomy.profile, microbatches=(microbatch_profile(sections, 4),))
    for memory_bytes in (2**24, 2**25, 2**26, 2**27, 2**40):
        slots = tuple(replace(one, memory_bytes=memory_bytes) for one in roomy.slots)
        choice = choose_plan(replace(roomy, profile=profile, slots=slots))
        assert {one.in_flight_bound for one in choice.candidates} == {None}


@pytest.mark.parametrize(
    ("precision", "divides_sequence", "gathers", "forward_sums", "backward_sums"),
    [
        ("fp32", False, 0.0, 2.0, 2.0),
        ("bf16", False, 0.0, 1.0, 1.0),
        # What comes out of norms is gathered as it is; backwards gather it once more.
        ("fp32", True, 0.0, 2.0, 3.0),
        ("bf16", True, 0.0, 1.5, 1.5),
        # Logits that are eight times as large are gathered, not summed.
        ("fp32", False, 8.0, 5.0, 2.0),
        ("bf16", False, 8.0, 2.5, 1.0),
    ],
)
def test_derived_sums_are_as_large_as_what_is_sent(
    precision: Precision,
    divides_sequence: bool,
    gathers: float,
    forward_sums: float,
    backward_sums: float,
) -> None:
    case = inputs({"a": 2}, 2, share=1.0, sums=2)
    facts = tuple(replace(one, divided_gathers=gathers) for one in case.facts.sections)
    case = replace(case, facts=replace(case.facts, sections=facts))
    sections = [replace(one, output_element_bytes=4) for one in case.profile.sections_at(4)]
    link = replace(case.profile.within_vm, latency_s=0.0)
    profile = replace(
        case.profile,
        microbatches=(microbatch_profile(sections, 4),),
        within_vm=link,
        sequence_parallel=divides_sequence,
    )

    divided = group_profile(profile, case.facts, 2, Compute(precision=precision)).sections_at(4)

    sum_s = MIB / link.bandwidth_bytes_per_s  # of two ranks, in 4 bytes an element
    for one in divided:
        assert one.forward_s == pytest.approx(0.005 + forward_sums * sum_s)
        assert one.recompute_s == one.forward_s
        assert one.backward_s == pytest.approx(0.010 + backward_sums * sum_s)
