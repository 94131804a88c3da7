"""No simulation is faster than the bound that may rule it out."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.morphing.plan.test_choose import inputs
from tests.unit.morphing.steps import plan_bytes

from spottrain.morphing.memory.loads import stage_loads
from spottrain.morphing.plan.choose import choose_plan
from spottrain.morphing.plan.inputs import PlanInputs
from spottrain.morphing.plan.layouts import Layouts, PlanLayout
from spottrain.morphing.plan.modes import (
    RUNNABLE,
    Draft,
    execution_modes,
)
from spottrain.morphing.plan.placement import Device
from spottrain.morphing.simulate.simulator import expect_step
from spottrain.wire.model import (
    LinkProfile,
    MicrobatchProfile,
    Precision,
    Profile,
    Reduction,
    RingProfile,
    SectionProfile,
    TaskOverheads,
)
from spottrain.wire.plan import ScheduleKind

SLACK = 1.1
"""Bounds in between those that are tried may be a little better."""

times = st.integers(1, 40).map(lambda n: n / 1000)
links = st.builds(
    LinkProfile,
    latency_s=st.sampled_from([0.0, 1e-4, 0.02]),
    bandwidth_bytes_per_s=st.sampled_from([1e7, 1e8, 1e10]),
)
rings = st.builds(
    RingProfile,
    ranks=st.integers(2, 8),
    rings=st.integers(1, 3),
    between_vms=st.booleans(),
    latency_s=st.sampled_from([0.0, 1e-4, 0.02]),
    bandwidth_bytes_per_s=st.sampled_from([1e7, 1e8, 1e10]),
    on_device=st.booleans(),
)
brief = st.sampled_from([0.0, 1e-4, 0.005])
overheads = st.builds(
    TaskOverheads,
    forward_s=brief,
    recompute_s=brief,
    backward_s=brief,
    posting_s=brief,
)


@st.composite
def cases(draw: st.DrawFn) -> PlanInputs:
    case = inputs(
        sections=draw(st.integers(1, 7)),
        vms=draw(st.integers(1, 6)),
        slots_per_vm=draw(st.integers(1, 3)),
        virtual_nodes=draw(st.integers(1, 24)),
    )

    def section(own: SectionProfile) -> SectionProfile:
        return replace(
            own,
            output_element_bytes=4,
            forward_s=draw(times),
            recompute_s=draw(times),
            backward_s=draw(times),
        )

    (one,) = case.profile.microbatches
    profile: Profile = replace(
        case.profile,
        microbatches=(
            replace(
                one,
                sections=tuple(map(section, one.sections)),
                overheads=draw(st.none() | overheads),
            ),
        ),
        within_vm=draw(links),
        between_vms=draw(links),
        task_overhead_s=draw(st.sampled_from([0.0, 0.003])),
        quantise_s_per_byte=draw(st.sampled_from([0.0, 1e-9])),
        host_optimizer_s_per_byte=draw(st.sampled_from([0.0, 1e-8])),
        upload_bytes_per_s=draw(st.sampled_from([0.0, 1e8])),
        rings=tuple(draw(st.lists(rings, max_size=3))),
    )
    speeds = st.sampled_from([1.0, 1.0, 0.5, 2.0])
    is_gpu = draw(st.booleans())
    slots = tuple(replace(device, speed=draw(speeds), is_gpu=is_gpu) for device in case.slots)
    cores = draw(st.integers(0, 4))
    machines = draw(st.sampled_from([("a",), ("a", "b")]))
    if not is_gpu:
        slots = tuple(
            replace(device, machine=machines[i % len(machines)], cores=cores)
            for i, device in enumerate(slots)
        )
    reduction: Reduction = draw(st.sampled_from(["fast", "exact"]))
    precision: Precision = draw(st.sampled_from(["fp32", "fp16"]))
    return replace(
        case,
        profile=profile,
        slots=slots,
        reduction=reduction,
        precision=precision,
        wire=draw(st.sampled_from(["own", "bf16"])),
        network=draw(st.sampled_from(["auto", "nccl", "gloo"])),
    )


@st.composite
def measured_kinds(draw: st.DrawFn) -> PlanInputs:
    """Return cases whose devices are of two types, each measured, in several sizes."""
    case = replace(draw(cases()), reduction="fast", merges=True)

    def sized(one: MicrobatchProfile, nodes: int) -> MicrobatchProfile:
        sections = (
            replace(
                section,
                forward_s=draw(times) * nodes,
                recompute_s=draw(times) * nodes,
                backward_s=draw(times) * nodes,
                output_bytes=section.output_bytes * nodes,
                saved_bytes=section.saved_bytes * nodes,
            )
            for section in one.sections
        )
        size = one.microbatch_size * nodes
        return replace(one, microbatch_size=size, sections=tuple(sections))

    def kind(device: str, sizes: tuple[int, ...]) -> Profile:
        (one,) = case.profile.microbatches
        return replace(
            case.profile,
            device=device,
            microbatches=tuple(sized(one, nodes) for nodes in sizes),
            optimizer_s_per_byte=draw(st.sampled_from([0.0, 1e-9])),
        )

    other = kind("other", (1, 2, 3))
    slots = tuple(
        replace(d, kind="other", speed=1.5) if draw(st.booleans()) else replace(d, speed=1.0)
        for d in case.slots
    )
    return replace(case, profile=kind("base", (1, 4)), measured=(other,), slots=slots)


@given(measured_kinds(), st.data())
def test_no_bound_exceeds_the_simulation_of_micro_batches_of_any_size(
    case: PlanInputs, data: st.DataObject
) -> None:
    largest = {("other", 1.5): 4 * data.draw(st.integers(1, 3)), ("", 1.0): 16}
    check_bounds(case, Layouts(case, 4, largest), data)


@given(cases(), st.data())
def test_no_bound_exceeds_the_simulation(case: PlanInputs, data: st.DataObject) -> None:
    check_bounds(case, Layouts(case, 4), data)


@given(cases(), st.data())
def test_no_bound_exceeds_the_simulation_on_equal_devices(
    case: PlanInputs, data: st.DataObject
) -> None:
    equal = tuple(replace(device, speed=1.0) for device in case.slots)
    check_bounds(replace(case, slots=equal), Layouts(replace(case, slots=equal), 4), data)


def check_bounds(case: PlanInputs, layouts: Layouts, data: st.DataObject) -> None:
    """Compare the bounds of plans of some depth and mode with what they are simulated to take."""
    depth = data.draw(st.integers(1, min(len(case.facts.sections), len(case.slots))))
    mode = data.draw(st.sampled_from(execution_modes(case, depth)))
    if mode.segments or depth == 1:
        mode = replace(mode, segments=data.draw(st.integers(mode.segments, 4)))
    if mode.chunks == 1:
        bound = data.draw(st.integers(0, 5))
        mode = replace(mode, in_flight_bound=bound)
    elif layouts.cuts.virtual_nodes % depth:
        return
    group = depth if mode.chunks > 1 else 1
    widths = layouts.cuts.fleet.widths(depth, layouts.cuts.virtual_nodes // group)
    bounds_s = layouts.cuts.min_steps_s(depth, mode, widths)
    for width, bound_s in zip(widths, bounds_s, strict=True):
        draft = Draft(depth, width, mode)
        layout = layouts.lay_out(draft)
        if isinstance(layout, PlanLayout):
            bound_s = max(bound_s, layouts.min_step_s(draft, layout))
            step_s = layouts.simulate(layout).predicted_step_s
            assert bound_s <= step_s
            assert layouts.simulate(layout, step_s * (1 + 1e-9)).predicted_step_s == step_s


def test_a_slow_network_counts_in_the_bound() -> None:
    case = inputs(sections=4, vms=4, virtual_nodes=64)
    slow = LinkProfile(latency_s=0.0, bandwidth_bytes_per_s=1e5)
    case = replace(case, profile=replace(case.profile, within_vm=slow, between_vms=slow))
    layouts = Layouts(case, 4)
    mode = execution_modes(case, 4)[0]
    (bound_s,) = layouts.cuts.min_steps_s(4, mode, [1])
    layout = layouts.lay_out(Draft(4, 1, mode))
    assert isinstance(layout, PlanLayout)
    assert bound_s > 0.8 * layouts.simulate(layout).predicted_step_s


def test_sums_that_share_a_vms_network_count_in_the_bound() -> None:
    case = inputs(sections=4, vms=2, slots_per_vm=4, virtual_nodes=8)
    slow = LinkProfile(latency_s=0.0, bandwidth_bytes_per_s=1e5)
    case = replace(case, profile=replace(case.profile, between_vms=slow))
    layouts, draft = Layouts(case, 4), Draft(4, 2, execution_modes(case, 4)[0])
    layout = layouts.lay_out(draft)
    assert isinstance(layout, PlanLayout)
    step_s = layouts.simulate(layout).predicted_step_s
    (bound_s,) = layouts.cuts.min_steps_s(draft.depth, draft.mode, [draft.width])
    assert 0.9 * step_s < bound_s <= step_s
    # Where devices keep what they have, only the placement tells.
    later = Layouts(replace(case, previous=layout.plan), 4)
    (bound_s,) = later.cuts.min_steps_s(draft.depth, draft.mode, [draft.width])
    assert bound_s < 0.5 * step_s
    assert 0.9 * step_s < later.min_step_s(draft, layout) <= step_s


@given(
    st.integers(1, 8),
    st.integers(1, 40),
    st.sampled_from([kind for kind in RUNNABLE if kind != "interleaved"]),
)
def test_a_stage_skips_one_recompute_at_most(
    depth: int, count: int, schedule: ScheduleKind
) -> None:
    """As the bound takes for granted."""
    loads = stage_loads(schedule, depth, count, True)
    for load in loads[:-1]:
        assert load.recomputes >= count - 1


@given(
    case=cases(),
    schedule=st.sampled_from(["1f1b", "varuna"]),
    memory_bytes=st.sampled_from([2**40, 10**7]),
    ahead=st.sampled_from([2, 3]),
)
def test_no_list_is_followed_to_the_letter_where_that_is_slower(
    case: PlanInputs, schedule: ScheduleKind, memory_bytes: int, ahead: int
) -> None:
    """Stages go on with forwards, as far as memory allows."""
    slots = tuple(
        Device(slot=device.slot, memory_bytes=memory_bytes, speed=1.0) for device in case.slots
    )
    depth = min(len(slots), len(case.facts.sections))
    asked = replace(case, slots=slots, schedule=schedule, recompute=False, pipeline_depth=depth)
    plan = choose_plan(asked).plan
    if plan is None:
        return
    count = plan.replica_bounds[1]
    bound = min(ahead * depth, count)
    deeper = replace(plan, in_flight_bound=bound)
    memory = asked.facts, asked.profile
    for one in plan_bytes(*memory, plan, asked.reduction, asked.compute):
        assert one.needed.device <= memory_bytes
    rest = plan_bytes(*memory, deeper, asked.reduction, asked.compute)
    if all(one.needed.device <= memory_bytes for one in rest):
        step = expect_step(deeper, *memory[::-1], reduction=asked.reduction)
        assert plan.predicted_step_s <= step.step_s * SLACK
