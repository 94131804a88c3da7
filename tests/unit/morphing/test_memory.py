from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spottrain.morphing.memory import (
    StageLoad,
    plan_bytes,
    stage_bytes,
    stage_loads,
    virtual_nodes_apart,
)
from spottrain.wire import (
    LinkProfile,
    MicrobatchProfile,
    ModelFacts,
    Plan,
    Profile,
    Reduction,
    ScheduleKind,
    SectionFacts,
    SectionProfile,
    Slot,
)

FACTS = ModelFacts(
    fingerprint="model",
    num_parameters=400,
    blocks="blocks",
    sections=tuple(
        SectionFacts(
            index=i,
            param_bytes=100 * (i + 1),
            optimizer_bytes=200 * (i + 1),
            activation_bytes_per_example=5,
        )
        for i in range(4)
    ),
    tied=(),
    dataset_len=1,
    heldout_len=0,
)
PROFILE = Profile(
    fingerprint="model",
    device="device",
    software="software",
    microbatches=(
        MicrobatchProfile(
            microbatch_size=2,
            sections=tuple(
                SectionProfile(
                    index=i,
                    forward_s=1.0,
                    backward_s=2.0,
                    recompute_s=1.0,
                    saved_bytes=1000 + i,
                    output_bytes=10 if i < 3 else 0,
                )
                for i in range(4)
            ),
        ),
    ),
    optimizer_s_per_byte=0.0,
    within_vm=LinkProfile(latency_s=0.0, bandwidth_bytes_per_s=1.0),
    between_vms=LinkProfile(latency_s=0.0, bandwidth_bytes_per_s=1.0),
    origin="written",
)
MEASURED = PROFILE.sections_at(2)


def plan(
    stage_bounds: tuple[int, ...],
    replica_bounds: tuple[int, ...],
    schedule: ScheduleKind = "1f1b",
    *,
    recompute: bool = True,
) -> Plan:
    depth, width = len(stage_bounds) - 1, len(replica_bounds) - 1
    return Plan(
        pipeline_depth=depth,
        data_parallel_width=width,
        microbatch_size=2,
        minibatch_size=2 * replica_bounds[-1],
        schedule=schedule,
        recompute=recompute,
        stage_bounds=stage_bounds,
        replica_bounds=replica_bounds,
        slots=tuple(Slot(vm_id=f"vm{i}", index=0) for i in range(depth * width)),
        predicted_step_s=0.0,
    )


def test_a_middle_stage_that_recomputes_holds_its_inputs_and_one_set_of_tensors() -> (
    None
):
    load = StageLoad(in_flight=3, inputs_held=4, recomputes=8)
    memory = stage_bytes(FACTS, MEASURED, range(1, 3), load, virtual_nodes_apart=2)
    assert memory.parameters_bytes == 200 + 300
    assert memory.gradients_bytes == 500
    assert memory.optimizer_bytes == 1000
    assert memory.undo_bytes == 300 + 300 + 600
    assert memory.stash_bytes == 4 * 10
    assert memory.activations_bytes == 1001 + 1002 + 10
    assert memory.virtual_node_gradients_bytes == 2 * 500
    assert memory.buffers_bytes == 2 * (10 + 10)
    assert memory.total_bytes == 500 + 500 + 1000 + 1200 + 40 + 2013 + 1000 + 40


def test_a_stage_without_recompute_holds_the_tensors_of_all_in_flight() -> None:
    load = StageLoad(in_flight=3, inputs_held=3, recomputes=0)
    assert stage_bytes(FACTS, MEASURED, range(2), load).activations_bytes == 3 * 2011


def test_the_ends_of_the_pipeline_have_no_neighbour_to_hold_anything_for() -> None:
    load = StageLoad(in_flight=2, inputs_held=2, recomputes=0)
    first = stage_bytes(FACTS, MEASURED, range(1), load)
    assert (first.stash_bytes, first.buffers_bytes) == (0, 20)
    last = stage_bytes(FACTS, MEASURED, range(3, 4), load)
    assert (last.stash_bytes, last.buffers_bytes) == (20, 20)
    whole = stage_bytes(FACTS, MEASURED, range(4), load)
    assert (whole.stash_bytes, whole.buffers_bytes) == (0, 0)


def test_inputs_wait_for_as_many_as_the_stage_before_has_in_flight() -> None:
    loads = stage_loads("1f1b", 3, 8, recompute=True)
    assert [load.in_flight for load in loads] == [3, 2, 1]
    assert [load.inputs_held for load in loads] == [3, 3, 2]
    assert [load.recomputes for load in loads] == [8, 8, 0]


@pytest.mark.parametrize(
    ("bounds", "reduction", "apart"),
    [
        ((0, 4), "exact", 1),
        ((0, 4, 7), "exact", 3),
        ((0, 2, 7, 8), "exact", 5),
        ((0, 4, 8), "fast", 0),
    ],
)
def test_later_replicas_keep_all_gradients_apart_the_first_one_at_a_time(
    bounds: tuple[int, ...], reduction: Reduction, apart: int
) -> None:
    assert virtual_nodes_apart(bounds, reduction) == apart


def test_a_plan_is_measured_by_its_busiest_replica() -> None:
    memory = plan_bytes(FACTS, PROFILE, plan((0, 2, 4), (0, 2, 4)), "exact")
    assert [m.parameters_bytes for m in memory] == [300, 700]
    assert [m.virtual_node_gradients_bytes for m in memory] == [600, 1400]
    uneven = plan_bytes(
        FACTS, PROFILE, plan((0, 2, 4), (0, 5, 6), "gpipe", recompute=False), "fast"
    )
    assert [m.activations_bytes for m in uneven] == [5 * 2011, 5 * 2015]
    assert uneven[1].stash_bytes == 5 * 10


@given(st.integers(1, 4), st.integers(1, 12))
def test_1f1b_never_needs_more_than_gpipe_and_recompute_no_more_than_none(
    depth: int, count: int
) -> None:
    bounds = (*range(depth), 4)

    def total(schedule: ScheduleKind, *, recompute: bool) -> int:
        one = plan(bounds, (0, count), schedule, recompute=recompute)
        return sum(m.total_bytes for m in plan_bytes(FACTS, PROFILE, one, "fast"))

    assert total("1f1b", recompute=False) <= total("gpipe", recompute=False)
    assert total("1f1b", recompute=True) <= total("1f1b", recompute=False)
    assert total("gpipe", recompute=True) <= total("gpipe", recompute=False)
