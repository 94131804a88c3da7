from __future__ import annotations

import math
import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spottrain.morphing.choose import (
    Candidate,
    Choice,
    Device,
    PlanInputs,
    break_even_s,
    choose_plan,
)
from spottrain.morphing.errors import PlanError
from spottrain.morphing.memory import plan_bytes
from spottrain.morphing.simulator import simulate_step
from spottrain.wire import (
    LinkProfile,
    MicrobatchProfile,
    ModelFacts,
    Profile,
    SectionFacts,
    SectionProfile,
    Slot,
    decode,
    encode,
)

MIB = 2**20


def model(sections: int) -> ModelFacts:
    last = sections - 1
    return ModelFacts(
        fingerprint="model",
        num_parameters=sections * MIB,
        blocks="blocks",
        sections=tuple(
            SectionFacts(
                index=i,
                param_bytes=4 * MIB,
                optimizer_bytes=8 * MIB,
                activation_bytes_per_example=MIB // 4 if i < last else 0,
            )
            for i in range(sections)
        ),
        tied=(),
        dataset_len=1,
        heldout_len=0,
    )


def measured(sections: int) -> Profile:
    last = sections - 1
    return Profile(
        fingerprint="model",
        device="device",
        software="software",
        microbatches=(
            MicrobatchProfile(
                microbatch_size=4,
                sections=tuple(
                    SectionProfile(
                        index=i,
                        forward_s=0.010,
                        backward_s=0.020,
                        recompute_s=0.010,
                        saved_bytes=16 * MIB,
                        output_bytes=MIB if i < last else 0,
                    )
                    for i in range(sections)
                ),
            ),
        ),
        optimizer_s_per_byte=1e-10,
        within_vm=LinkProfile(latency_s=1e-4, bandwidth_bytes_per_s=1e9),
        between_vms=LinkProfile(latency_s=1e-4, bandwidth_bytes_per_s=1e9),
        origin="written",
        sources=("a test",),
    )


def inputs(
    *,
    sections: int = 8,
    vms: int = 4,
    slots_per_vm: int = 1,
    virtual_nodes: int = 16,
    memory_bytes: int = 2**40,
) -> PlanInputs:
    slots = [
        Slot(vm_id=f"vm{vm:02}", index=index)
        for vm in range(vms)
        for index in range(slots_per_vm)
    ]
    return PlanInputs(
        facts=model(sections),
        profile=measured(sections),
        slots=tuple(
            Device(slot=slot, memory_bytes=memory_bytes, speed=1.0) for slot in slots
        ),
        minibatch_size=4 * virtual_nodes,
        microbatch_size=4,
        reduction="fast",
    )


def row(choice: Choice, depth: int) -> Candidate:
    return next(c for c in choice.candidates if c.pipeline_depth == depth)


def test_the_fastest_shape_wins_and_the_others_say_by_how_much_they_lose() -> None:
    choice = choose_plan(inputs())
    assert choice.plan is not None
    assert [c.pipeline_depth for c in choice.candidates] == [1, 2, 3, 4]
    best = min(choice.candidates, key=lambda c: c.step_s or math.inf)
    assert best.pipeline_depth == choice.plan.pipeline_depth
    assert best.step_s == choice.plan.predicted_step_s
    assert best.examples_per_s == pytest.approx(64 / choice.plan.predicted_step_s)
    assert best.why_not == ""
    others = [c for c in choice.candidates if c is not best]
    assert all(f"slower than {choice.plan.shape}" in c.why_not for c in others)
    assert row(choice, 3).unused_slots == 1


def linked(profile: Profile, **changes: float) -> Profile:
    """Return ``profile`` over other links."""
    link = replace(profile.between_vms, **changes)
    return replace(profile, within_vm=link, between_vms=link)


def test_a_slow_network_makes_pipelines_deep() -> None:
    fast = inputs()
    slow = replace(fast, profile=linked(fast.profile, bandwidth_bytes_per_s=1e7))
    fast_plan, slow_plan = choose_plan(fast).plan, choose_plan(slow).plan
    assert fast_plan is not None
    assert slow_plan is not None
    assert fast_plan.pipeline_depth < slow_plan.pipeline_depth


def test_a_small_device_makes_pipelines_deep() -> None:
    choice = choose_plan(inputs(memory_bytes=115 * MIB))
    assert choice.plan is not None
    assert choice.plan.shape == "4x1"
    assert "a device has" in row(choice, 2).why_not
    assert row(choice, 2).step_s is None
    assert max(row(choice, 2).stage_bytes) > 115 * MIB


def test_a_cut_gives_up_evenness_for_what_fits() -> None:
    heavy = inputs(vms=2, sections=4)
    sections = list(heavy.facts.sections)
    sections[0] = replace(sections[0], optimizer_bytes=100 * MIB)
    uneven = replace(heavy, facts=replace(heavy.facts, sections=tuple(sections)))
    roomy = choose_plan(uneven).candidates[1].stage_bytes
    tight = tuple(
        replace(device, memory_bytes=max(roomy) - 1) for device in uneven.slots
    )
    choice = choose_plan(replace(uneven, slots=tight))
    assert choice.plan is not None
    assert choice.plan.stage_bounds == (0, 1, 4)


def test_nothing_is_chosen_where_nothing_fits() -> None:
    choice = choose_plan(inputs(memory_bytes=MIB))
    assert choice.plan is None
    assert len(choice.candidates) == 4
    assert all(c.why_not for c in choice.candidates)


def test_no_devices_are_no_error() -> None:
    assert choose_plan(replace(inputs(), slots=())) == Choice(plan=None, candidates=())


def test_replicas_never_lie_on_one_vm_alone() -> None:
    choice = choose_plan(inputs(vms=1, slots_per_vm=4))
    assert choice.plan is not None
    assert choice.plan.shape == "4x1"
    assert all(c.data_parallel_width == 1 for c in choice.candidates)


def test_a_mini_batch_of_few_virtual_nodes_bounds_the_replicas() -> None:
    choice = choose_plan(inputs(virtual_nodes=3))
    assert row(choice, 1).data_parallel_width == 3
    assert row(choice, 1).unused_slots == 1


def test_the_roomy_devices_are_taken_where_the_fast_ones_are_too_small() -> None:
    small = inputs(vms=4)
    slots = tuple(
        replace(d, memory_bytes=2**40 if i < 2 else 1, speed=1.0 if i < 2 else 4.0)
        for i, d in enumerate(small.slots)
    )
    plan = choose_plan(replace(small, slots=slots)).plan
    assert plan is not None
    assert {slot.vm_id for slot in plan.slots} <= {"vm00", "vm01"}


def test_fast_devices_are_preferred() -> None:
    mixed = inputs(vms=5)
    slots = tuple(
        replace(d, speed=0.25 if i == 1 else 1.0) for i, d in enumerate(mixed.slots)
    )
    plan = choose_plan(replace(mixed, slots=slots)).plan
    assert plan is not None
    assert Slot(vm_id="vm01", index=0) not in plan.slots[: plan.pipeline_depth]


def test_exact_mode_counts_gradients_kept_apart() -> None:
    exact = choose_plan(replace(inputs(), reduction="exact"))
    fast = choose_plan(inputs())
    assert row(exact, 1).stage_bytes[0] == row(fast, 1).stage_bytes[0] + 4 * 32 * MIB


def test_inputs_and_choice_travel_as_json() -> None:
    given_inputs = inputs()
    choice = choose_plan(given_inputs)
    again = replace(given_inputs, previous=choice.plan)
    assert decode(PlanInputs, encode(again)) == again
    assert decode(Choice, encode(choice)) == choice


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"minibatch_size": 63}, "must be a multiple of microbatch_size: got 63 and 4"),
        ({"minibatch_size": 0}, "must be a multiple"),
        ({"microbatch_size": 0}, "must be a multiple"),
        (
            {"profile": linked(measured(8), bandwidth_bytes_per_s=math.nan)},
            "bandwidth above 0",
        ),
        (
            {"profile": linked(measured(8), latency_s=-1.0)},
            "latency of 0 or more",
        ),
        ({"microbatch_size": 2}, r"micro-batches of \(4,\): got microbatch_size 2"),
        ({"facts": model(7)}, "of another model"),
    ],
)
def test_inputs_that_do_not_fit_together_are_refused(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        choose_plan(replace(inputs(), **change))  # type: ignore[arg-type]


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 20),
    st.sampled_from([2**40, 200 * MIB, 130 * MIB]),
    st.booleans(),
)
def test_whatever_is_chosen_fits_and_takes_what_was_predicted(
    sections: int,
    vms: int,
    slots_per_vm: int,
    virtual_nodes: int,
    memory_bytes: int,
    exact: bool,
) -> None:
    case = inputs(
        sections=sections,
        vms=vms,
        slots_per_vm=slots_per_vm,
        virtual_nodes=virtual_nodes,
        memory_bytes=memory_bytes,
    )
    case = replace(case, reduction="exact" if exact else "fast")
    choice = choose_plan(case)
    plan = choice.plan
    assert choose_plan(case) == choice
    if plan is None:
        return
    memory = plan_bytes(case.facts, case.profile, plan, case.reduction)
    assert max(stage.total_bytes for stage in memory) <= memory_bytes
    least_s = min(c.step_s for c in choice.candidates if c.step_s is not None)
    assert plan.predicted_step_s == least_s
    step = simulate_step(plan, case.profile, case.facts, reduction=case.reduction)
    assert plan.predicted_step_s == step.step_s
    assert [c.why_not for c in choice.candidates].count("") == 1
    follow = choose_plan(replace(case, previous=plan)).plan
    assert follow == plan


def test_a_choice_for_64_devices_and_48_sections_takes_seconds() -> None:
    begin_s = time.process_time()
    choice = choose_plan(inputs(sections=48, vms=16, slots_per_vm=4, virtual_nodes=256))
    assert choice.plan is not None
    assert len(choice.candidates) == 48
    assert time.process_time() - begin_s < 4


@pytest.mark.parametrize(
    ("current", "new", "cost_s", "expected_s"),
    [
        (10.0, 20.0, 10.0, 20.0),
        (10.0, 11.0, 10.0, 110.0),
        (10.0, 10.0, 0.0, math.inf),
        (10.0, 5.0, 1.0, math.inf),
        (10.0, 20.0, 0.0, 0.0),
        (0.0, 1.0, 200.0, 0.0),
        (0.0, 0.0, 1.0, math.inf),
    ],
)
def test_a_morph_pays_when_the_new_plan_lasts_long_enough(
    current: float, new: float, cost_s: float, expected_s: float
) -> None:
    assert break_even_s(current, new, cost_s) == pytest.approx(expected_s)
