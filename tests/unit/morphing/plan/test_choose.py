from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

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
from tests.tiers import costly
from tests.unit.morphing.steps import plan_bytes

from spottrain.morphing.plan.candidates import Candidate
from spottrain.morphing.plan.choose import (
    MEASURED,
    NOISE,
    Choice,
    choose_plan,
)
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.layouts import Layouts, PlanLayout
from spottrain.morphing.plan.modes import RUNNABLE, Draft, execution_modes
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.schedules.lists import compact_schedule
from spottrain.morphing.simulate.replica import Link, StageTimes, simulate_pipeline
from spottrain.morphing.simulate.simulator import simulate_step
from spottrain.wire.model import LoaderSpec, ModelFacts, Profile, RingProfile
from spottrain.wire.plan import Plan, ScheduleKind, Slot

MIB = 2**20


def model(sections: int) -> ModelFacts:
    last = sections - 1
    return model_facts(
        (
            section_facts(
                i,
                param_bytes=4 * MIB,
                optimizer_bytes=8 * MIB,
                activation_bytes=MIB // 4 if i < last else 0,
            )
            for i in range(sections)
        ),
        num_parameters=sections * MIB,
    )


def measured(sections: int) -> Profile:
    last = sections - 1
    return a_profile(
        microbatch_profile(
            (
                section_profile(
                    i,
                    forward_s=0.010,
                    saved_bytes=16 * MIB,
                    output_bytes=MIB if i < last else 0,
                )
                for i in range(sections)
            ),
            4,
        ),
        optimizer_s_per_byte=1e-10,
        written=True,
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
        Slot(vm_id=f"vm{vm:02}", index=index) for vm in range(vms) for index in range(slots_per_vm)
    ]
    return PlanInputs(
        facts=model(sections),
        profile=measured(sections),
        slots=tuple(
            Device(slot=slot, memory_bytes=memory_bytes, speed=1.0, usd_per_hour=1.0)
            for slot in slots
        ),
        minibatch_size=4 * virtual_nodes,
        microbatch_size=4,
        reduction="fast",
    )


def varuna(case: PlanInputs) -> PlanInputs:
    return replace(case, schedule="varuna", recompute=True)


def row(choice: Choice, depth: int) -> Candidate:
    return next(c for c in choice.candidates if c.pipeline_depth == depth)


def plan_of(case: PlanInputs) -> Plan:
    plan = choose_plan(case).plan
    assert plan is not None
    return plan


def linked(profile: Profile, **changes: Any) -> Profile:
    """Return ``profile`` over other links."""
    link = replace(profile.between_vms, **changes)
    return replace(profile, within_vm=link, between_vms=link)


def slack(plan: Plan) -> float:
    """Return by which factor a chosen plan may be slower than the fastest."""
    return (1 + NOISE) * (1 + MEASURED if plan.data_parallel_width > 1 else 1)


def rivals(reducing_s: float) -> PlanInputs:
    """4x1 against 2x2, whose all-reduces take so long for each two tensors."""
    case = replace(varuna(inputs(sections=4, vms=4, virtual_nodes=64)), recompute=False)
    ring = RingProfile(
        ranks=2,
        rings=1,
        between_vms=True,
        latency_s=reducing_s,
        bandwidth_bytes_per_s=1e15,
    )
    return replace(case, profile=replace(case.profile, rings=(ring,)))


@pytest.mark.parametrize(("reducing_s", "shape"), [(0.02, "2x2"), (0.03, "2x2"), (0.04, "4x1")])
def test_a_plan_that_outlives_any_vm_may_be_slower_by_what_measuring_misses(
    reducing_s: float, shape: str
) -> None:
    choice = choose_plan(rivals(reducing_s))
    best, other = choice.candidates[:2]
    assert best.shape == shape
    assert best.step_s is not None
    assert other.step_s is not None
    assert best.step_s <= other.step_s * (1 + MEASURED)
    assert ("which outlives any one VM" in other.why_not) == (reducing_s == 0.03)


def test_on_one_vm_no_plan_outlives_it() -> None:
    case = rivals(0.03)
    slots = (
        replace(device, slot=Slot(vm_id="vm", index=index))
        for index, device in enumerate(case.slots)
    )
    within = replace(case.profile.rings[0], between_vms=False)
    profile = replace(case.profile, rings=(within,))
    assert row(choose_plan(replace(case, profile=profile, slots=tuple(slots))), 4).why_not == ""


@given(st.floats(0.0, 0.08))
@costly
def test_near_ties_go_to_the_plan_that_outlives_any_vm(reducing_s: float) -> None:
    def alone(depth: int) -> float:
        """Return the time of the best plan of that depth."""
        return plan_of(replace(case, pipeline_depth=depth)).predicted_step_s

    case = rivals(reducing_s)
    choice = choose_plan(case)
    assert choice.plan is not None
    fragile_s, chosen_s = alone(4), choice.plan.predicted_step_s
    if choice.plan.data_parallel_width > 1:
        assert chosen_s <= fragile_s * (1 + MEASURED) * (1 + NOISE)
    else:
        assert chosen_s * (1 + MEASURED) < min(alone(2), alone(1))


def test_the_best_is_first_and_the_others_say_how_much_worse_they_are() -> None:
    choice = choose_plan(inputs(virtual_nodes=64))
    plan, (best, *others) = choice.plan, choice.candidates
    assert plan is not None
    assert best.shape == plan.shape
    assert best.schedule == plan.schedule
    assert best.step_s == plan.predicted_step_s
    assert best.examples_per_s == pytest.approx(256 / plan.predicted_step_s)
    usd_per_example = len(plan.slots) / 3600 * plan.predicted_step_s / 256
    assert best.usd_per_million_examples == pytest.approx(usd_per_example * 1e6)
    assert best.stage_bytes is not None
    assert best.device_bytes == 2**40
    assert best.why_not == ""
    assert {c.pipeline_depth for c in choice.candidates} == {1, 2, 3, 4}
    assert all(f"than {plan.shape}" in c.why_not or "as good" in c.why_not for c in others)
    assert choice.decisive == choice.candidates[:3]
    assert row(choice, 3).unused_slots == 1


def test_a_slow_network_makes_pipelines_deep() -> None:
    fast = inputs()
    slow = replace(fast, profile=linked(fast.profile, bandwidth_bytes_per_s=1e7))
    assert plan_of(fast).pipeline_depth < plan_of(slow).pipeline_depth


def test_a_small_device_makes_pipelines_deep_and_recompute() -> None:
    large, small = choose_plan(inputs()), choose_plan(inputs(memory_bytes=130 * MIB))
    assert large.plan is not None
    assert small.plan is not None
    assert small.plan.pipeline_depth > large.plan.pipeline_depth
    needs, has = "a stage needs 317.8 MB", "a device has 136.4 MB"
    assert row(small, 1).why_not == f"{needs}, {has}"
    assert row(small, 1).step_s is None
    assert row(small, 1).stage_bytes is not None


def test_recompute_is_for_want_of_memory_only() -> None:
    deep = inputs(virtual_nodes=64)
    deep = replace(deep, profile=linked(deep.profile, bandwidth_bytes_per_s=1e7))
    assert not plan_of(deep).recompute
    for mib in range(300, 60, -10):
        tight = tuple(replace(d, memory_bytes=mib * MIB) for d in deep.slots)
        choice = choose_plan(replace(deep, slots=tight))
        if choice.plan is not None and choice.plan.recompute:
            kept = [c for c in choice.candidates if not c.recompute]
            assert any(" MB" in c.why_not for c in kept)
            return
    raise AssertionError("recompute was never chosen")


def alone(mib: int, recompute: bool | None = None) -> PlanInputs:
    """Two devices, each for the whole model."""
    return replace(inputs(vms=2, memory_bytes=mib * MIB), recompute=recompute)


def test_a_stage_that_does_not_fit_as_a_whole_is_recomputed_in_segments() -> None:
    """32 MiB each of parameters and gradients, 64 of the optimizer; 136 of tensors."""
    assert plan_of(alone(400)).segments == 1
    tight = replace(alone(275), pipeline_depth=1)
    plan = plan_of(tight)
    assert (plan.shape, plan.recompute) == ("1x2", True)
    assert plan.segments > 1
    refused = next(c for c in choose_plan(tight).candidates if c.segments == 1)
    assert " MB" in refused.why_not
    assert choose_plan(replace(tight, recompute=False)).plan is None
    # The fewest that fit.
    sections, rooms = tight.profile.sections_at(4), tight.slots[0].memory_bytes
    needed = {
        segments: max(
            memory.total_bytes
            for memory in plan_bytes(
                tight.facts, tight.profile, replace(plan, segments=segments), "fast"
            )
        )
        for segments in range(1, len(sections) + 1)
    }
    assert needed[plan.segments] <= rooms
    assert all(needed[fewer] > rooms for fewer in range(1, plan.segments))


@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
def test_in_the_least_memory_segments_are_the_square_root(ratio: int) -> None:
    """c* = sqrt(l A_int / A_inp) of the dissertation's 4.3.5, as a divisor of l.

    A layer's intermediate activations are those saved and its output, ``ratio`` and 1.
    """
    roomy = replace(alone(4000), pipeline_depth=1, recompute=True)
    sections = tuple(
        replace(section, output_bytes=section.saved_bytes // ratio)
        for section in roomy.profile.sections_at(4)
    )
    measured = replace(roomy.profile.microbatches[0], sections=sections)
    assert measured.microbatch_size == 4
    roomy = replace(roomy, profile=replace(roomy.profile, microbatches=(measured,)))
    plan, count = plan_of(roomy), len(sections)
    assert plan.segments == 1

    def needed(segments: int) -> int:
        cut = replace(plan, segments=segments)
        each = plan_bytes(roomy.facts, roomy.profile, cut, "fast")
        return max(memory.total_bytes for memory in each)

    least = min(map(needed, range(1, count + 1)))
    slots = tuple(replace(device, memory_bytes=least) for device in roomy.slots)
    ideal = (count * (ratio + 1)) ** 0.5
    divisors = [c for c in range(1, count + 1) if count % c == 0]
    nearest = min(divisors, key=lambda c: abs(c - ideal))
    assert plan_of(replace(roomy, slots=slots)).segments == nearest


def test_with_less_memory_plans_are_no_faster_and_segments_help_to_the_end() -> None:
    steps_s, found = [], set()
    for mib in range(300, 240, -4):
        plan = choose_plan(replace(alone(mib), pipeline_depth=1)).plan
        if plan is not None:
            steps_s.append(plan.predicted_step_s)
            found.add(plan.segments)
    assert steps_s == sorted(steps_s)
    assert len(found) > 2


def test_a_pipeline_with_many_in_flight_may_be_recomputed_in_segments() -> None:
    case = replace(inputs(sections=32, vms=4, virtual_nodes=64), pipeline_depth=4)
    rooms = range(800, 300, -20)
    tight = [tuple(replace(d, memory_bytes=mib * MIB) for d in case.slots) for mib in rooms]
    plans = [choose_plan(replace(case, slots=slots)).plan for slots in tight]
    assert any(plan is not None and plan.segments > 1 for plan in plans)


def test_a_bound_is_put_on_micro_batches_in_flight_where_memory_binds() -> None:
    case = replace(inputs(virtual_nodes=64), schedule="gpipe", recompute=False)
    case = replace(case, profile=linked(case.profile, bandwidth_bytes_per_s=1e7))
    slots = tuple(replace(d, memory_bytes=400 * MIB) for d in case.slots)
    case = replace(case, slots=slots)
    plan = plan_of(case)
    assert plan.in_flight_bound is not None
    memory = plan_bytes(case.facts, case.profile, plan, "fast")
    assert max(stage.total_bytes for stage in memory) <= 400 * MIB
    more = replace(plan, in_flight_bound=plan.in_flight_bound + 1)
    memory = plan_bytes(case.facts, case.profile, more, "fast")
    assert max(stage.total_bytes for stage in memory) > 400 * MIB


@pytest.mark.parametrize("schedule", ["varuna", "1f1b", "gpipe"])
@pytest.mark.parametrize("recompute", [True, False])
def test_a_requested_schedule_is_chosen(schedule: ScheduleKind, recompute: bool) -> None:
    case = replace(inputs(), schedule=schedule, recompute=recompute)
    choice = choose_plan(case)
    assert {(c.schedule, c.recompute) for c in choice.candidates} == {(schedule, recompute)}


def test_of_equally_good_plans_the_one_that_runs_stays() -> None:
    case = inputs(vms=1, slots_per_vm=4, virtual_nodes=65)
    profile = linked(case.profile, bandwidth_bytes_per_s=1e12, latency_s=0.0)
    case = replace(case, profile=profile, pipeline_depth=4)
    first = plan_of(case)
    running = plan_of(replace(case, schedule="1f1b"))
    assert first.schedule == "varuna"
    assert abs(running.predicted_step_s / first.predicted_step_s - 1) < NOISE
    assert plan_of(replace(case, previous=running)) == running
    assert plan_of(replace(case, previous=first)) == first


def test_a_cut_gives_up_evenness_to_fit() -> None:
    heavy = varuna(inputs(vms=2, sections=4))
    sections = list(heavy.facts.sections)
    sections[0] = replace(sections[0], optimizer_bytes=100 * MIB)
    uneven = replace(heavy, facts=replace(heavy.facts, sections=tuple(sections)))
    deep = next(
        c.plan
        for mib in range(1000, 100, -5)
        if (c := choose_plan(with_memory(uneven, mib))).plan is not None
        and c.plan.stage_bounds == (0, 1, 4)
    )
    assert deep is not None


def with_memory(case: PlanInputs, mib: int) -> PlanInputs:
    slots = tuple(replace(d, memory_bytes=mib * MIB) for d in case.slots)
    return replace(case, slots=slots)


def read_bytes(megabytes: str) -> int:
    return round(float(megabytes.replace(",", "")) * 10**6)


@pytest.mark.parametrize("mib", [75, 90, 110, 140, 180])
def test_if_nothing_fits_the_message_says_how_many_devices_of_which_size_are_needed(
    mib: int,
) -> None:
    choice = choose_plan(inputs(vms=1, memory_bytes=mib * MIB))
    assert choice.plan is None
    assert all(c.why_not and c.step_s is None for c in choice.candidates)
    needed = re.search(r"needs (\d+) devices of (.+) MB: got 1", choice.why_not)
    assert needed is not None
    count, each = int(needed[1]), read_bytes(needed[2])
    assert choose_plan(inputs(vms=count, memory_bytes=each)).plan is not None
    assert choose_plan(inputs(vms=count - 1, memory_bytes=mib * MIB)).plan is None


def test_if_no_number_of_devices_is_enough_the_message_says_how_large_they_must_be() -> None:
    choice = choose_plan(inputs(memory_bytes=MIB))
    needed = re.search(r"needs 8 devices of (.+) MB each", choice.why_not)
    assert needed is not None
    enough = inputs(vms=8, memory_bytes=read_bytes(needed[1]))
    assert choose_plan(enough).plan is not None


def test_a_model_of_one_section_that_fits_nowhere_says_why_it_is_not_cut() -> None:
    case = inputs(sections=1, memory_bytes=MIB)
    choice = choose_plan(replace(case, facts=replace(case.facts, uncut="no blocks")))
    assert "needs 1 device of" in choice.why_not
    assert choice.why_not.endswith("one section: no blocks")


def test_if_loaders_take_memory_the_message_says_so() -> None:
    small = inputs(memory_bytes=MIB)
    loads = replace(small.profile, loader=LoaderSpec(workers=2))
    choice = choose_plan(replace(small, profile=loads))
    assert re.search(r"lower loader.ahead and loader.workers \([\d.]+ MB of each", choice.why_not)
    assert "loader" not in choose_plan(small).why_not


def test_equal_plans_under_different_names_are_considered_once() -> None:
    choice = choose_plan(inputs(vms=4, virtual_nodes=2))
    wide = [c for c in choice.candidates if c.shape == "2x2"]
    assert {c.schedule for c in wide} <= {"varuna"}
    asked = choose_plan(replace(inputs(vms=4, virtual_nodes=2), schedule="gpipe"))
    assert {c.schedule for c in asked.candidates} == {"gpipe"}


@given(st.integers(2, 5), st.integers(1, 6), st.integers(0, 9))
def test_with_one_micro_batch_at_a_time_all_lists_give_the_same_plan(
    depth: int, count: int, forward_s: int
) -> None:
    stages = [
        StageTimes(forward_s=forward_s + p, recompute_s=0.0, backward_s=1.0) for p in range(depth)
    ]
    runs = {
        simulate_pipeline(
            compact_schedule(kind, depth, count, recompute=False),
            stages,
            [Link(latency_s=0.5)] * (depth - 1),
            bound=1,
        )
        for kind in RUNNABLE[:3]
    }
    assert len(runs) == 1
    alone = {
        simulate_pipeline(
            compact_schedule(kind, depth, 1, recompute=True),
            stages,
            [Link(latency_s=0.5)] * (depth - 1),
        )
        for kind in RUNNABLE[:3]
    }
    assert len(alone) == 1


def test_no_devices_are_no_error() -> None:
    choice = choose_plan(replace(inputs(), slots=()))
    assert choice == Choice(plan=None, candidates=(), why_not="there are no slots")


def test_a_mini_batch_of_few_virtual_nodes_bounds_the_replicas() -> None:
    choice = choose_plan(inputs(virtual_nodes=3))
    assert row(choice, 1).data_parallel_width == 3
    assert row(choice, 1).unused_slots == 1


def test_replicas_that_only_lengthen_the_all_reduce_are_left_out() -> None:
    case = replace(inputs(vms=15), schedule="varuna")
    one = replace(case.facts, sections=case.facts.sections[:1])
    measured_one = replace(
        case.profile.microbatches[0],
        sections=case.profile.microbatches[0].sections[:1],
    )
    profile = replace(case.profile, microbatches=(measured_one,))
    plan = plan_of(replace(case, facts=one, profile=profile))
    assert plan.data_parallel_width == 8, "as with 15, some compute two micro-batches"


def on_gpus(case: PlanInputs, host_bytes: int) -> PlanInputs:
    """The same on GPUs, with a GiB more each for a context and libraries."""
    slots = tuple(
        replace(
            device,
            is_gpu=True,
            memory_bytes=device.memory_bytes + 2**30,
            host_memory_bytes=host_bytes,
        )
        for device in case.slots
    )
    return replace(case, slots=slots)


cases = st.builds(
    inputs,
    sections=st.integers(1, 6),
    vms=st.integers(1, 5),
    slots_per_vm=st.integers(1, 3),
    virtual_nodes=st.integers(1, 20),
    memory_bytes=st.sampled_from([2**40, 250 * MIB, 160 * MIB]),
)


@pytest.mark.rotated
@given(
    cases,
    st.booleans(),
    st.sampled_from([1e7, 1e9]),
    st.sampled_from([None, 0, 2**32, 3_400 * MIB]),
)
def test_a_chosen_plan_fits_and_takes_the_predicted_time(
    case: PlanInputs, exact: bool, bandwidth: float, host_bytes: int | None
) -> None:
    profile = linked(case.profile, bandwidth_bytes_per_s=bandwidth)
    case = replace(case, profile=profile, reduction="exact" if exact else "fast")
    if host_bytes is not None:
        case = on_gpus(case, host_bytes)
    choice = choose_plan(case)
    plan = choice.plan
    assert choose_plan(case) == choice
    if plan is None:
        assert choice.why_not
        return
    gpu = case.compute
    memory = plan_bytes(case.facts, case.profile, plan, case.reduction, gpu)
    room = case.slots[0].room
    assert all(stage.needed.beyond(room) <= 0 for stage in memory)
    least_s = min(c.step_s for c in choice.candidates if c.step_s is not None)
    assert plan.predicted_step_s <= least_s * slack(plan)
    step = simulate_step(plan, case.profile, case.facts, reduction=case.reduction, compute=gpu)
    assert plan.predicted_step_s == step.step_s
    assert [c.why_not for c in choice.candidates].count("") == 1
    follow = choose_plan(replace(case, previous=plan)).plan
    assert follow is not None
    if follow != plan:
        # Those that keep what they have may come to hold a stage's replicas together, which
        # spares their VM's network: places in turn would not have.
        assert any(slot.index > 0 for slot in plan.slots)
        assert follow.predicted_step_s * (1 + NOISE) < plan.predicted_step_s


@costly
@given(
    cases.filter(lambda case: case.slots[0].memory_bytes == 2**40),
    st.sampled_from([1e7, 1e9]),
)
def test_nothing_that_was_ruled_out_by_its_bound_is_better(
    case: PlanInputs, bandwidth: float
) -> None:
    profile = linked(case.profile, bandwidth_bytes_per_s=bandwidth)
    case = replace(case, profile=profile)
    plan = choose_plan(case).plan
    layouts = Layouts(case, 4)
    steps_s = []
    for depth in range(1, min(len(case.facts.sections), len(case.slots)) + 1):
        widest = min(len(case.slots) // depth, layouts.cuts.virtual_nodes)
        for width in range(1, widest + 1):
            for mode in execution_modes(case, depth):
                draft = Draft(depth, width, mode)
                groups, rest = divmod(layouts.cuts.virtual_nodes, depth)
                if mode.chunks > 1 and (rest or groups < width):
                    continue
                layout = layouts.lay_out(draft)
                if isinstance(layout, PlanLayout):
                    steps_s.append(layouts.simulate(layout).predicted_step_s)
    if steps_s:
        assert plan is not None
        assert plan.predicted_step_s <= min(steps_s) * slack(plan)
