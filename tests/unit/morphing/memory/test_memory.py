from __future__ import annotations

import math
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import (
    a_plan,
    a_profile,
    microbatch_profile,
    model_facts,
    section_facts,
    section_profile,
    slots_of,
)
from tests.unit.morphing.steps import plan_bytes

from spottrain.morphing.memory.loads import StageLoad
from spottrain.morphing.memory.memory import (
    HELDOUT_FACTOR,
    LOADER_BYTES,
    LOADER_COPIES,
    PAGE_BYTES,
    HostMemory,
    StageMemory,
    WorkerTerms,
    loader_bytes,
)
from spottrain.morphing.memory.ranks import rank_bytes
from spottrain.morphing.memory.stage import (
    FRAGMENTATION,
    LIBRARY_BYTES,
    NCCL_BYTES,
    PENDING_SENDS,
    PROCESS_BYTES,
    QUANTISED_ELEMENTS,
    MemoryModel,
)
from spottrain.morphing.simulate.compute import CPU, Compute
from spottrain.wire.model import (
    LoaderSpec,
    Precision,
    Profile,
    Reduction,
    StateHome,
    TaskOverheads,
    TiedParameter,
)
from spottrain.wire.plan import Plan, ScheduleKind

FACTS = model_facts(
    (
        section_facts(
            i,
            param_bytes=100 * (i + 1),
            optimizer_bytes=200 * (i + 1),
            activation_bytes=5,
        )
        for i in range(4)
    ),
    num_parameters=400,
)
PROFILE = a_profile(
    microbatch_profile(
        (
            replace(
                section_profile(i, saved_bytes=1000 + i, output_bytes=10 if i < 3 else 0),
                batch_bytes=3,
                forward_bytes=400,
                recompute_bytes=1100,
                backward_bytes=500,
                update_bytes=77,
            )
            for i in range(4)
        ),
        2,
    ),
    written=True,
)
MEASURED = PROFILE.sections_at(2)
EVEN = [replace(section, output_bytes=0) for section in MEASURED]


def plan(
    stage_bounds: tuple[int, ...],
    replica_bounds: tuple[int, ...],
    schedule: ScheduleKind = "1f1b",
    *,
    recompute: bool = True,
) -> Plan:
    depth, width = len(stage_bounds) - 1, len(replica_bounds) - 1
    return a_plan(
        depth,
        width,
        microbatch_size=2,
        schedule=schedule,
        recompute=recompute,
        stage_bounds=stage_bounds,
        replica_bounds=replica_bounds,
    )


def test_constants_are_those_of_the_runtime() -> None:
    from spottrain.pipeline.base import fixed_point
    from spottrain.pipeline.comm import p2p
    from spottrain.pipeline.model import data
    from spottrain.pipeline.state import arena

    assert PAGE_BYTES == arena.HEADER_BYTES
    assert 2 * PENDING_SENDS == p2p._MAX_PENDING_SENDS  # a header goes before each
    assert HELDOUT_FACTOR == data.HELDOUT_FACTOR
    pieces = fixed_point._PIECE_ELEMENTS
    assert {False: pieces["cpu"], True: pieces["cuda"]} == QUANTISED_ELEMENTS


def test_a_middle_stage_that_recomputes_holds_its_inputs_and_one_set_of_tensors() -> None:
    load = StageLoad(in_flight=3, inputs_held=4, gradients_waiting=1, recomputes=8)
    memory = MemoryModel.of(FACTS, MEASURED, (range(1, 3),)).under(load)
    assert memory.parameters_bytes == 200 + 300
    assert memory.gradients_bytes == 500
    assert memory.optimizer_bytes == 1000
    assert memory.undo_bytes == 300 + 300 + 600 + 3 * PAGE_BYTES
    assert memory.snapshot_bytes == 500 + 1000
    assert memory.stash_bytes == 4 * 10
    assert memory.batches_bytes == 3 * 3
    # The backward of its last section, with the gradient of what goes out.
    held = 1001 + 10 + 1002 + 10
    assert memory.activations_bytes == held + 500 + 10
    assert memory.buffers_bytes == PENDING_SENDS * 10 + 10
    assert memory.update_bytes == PENDING_SENDS * 10 + 77
    assert memory.evaluation_bytes == 0
    assert memory.static_bytes == 500 + 500 + 1000 + memory.undo_bytes
    assert memory.training_bytes == 40 + 9 + held + 510 + 90
    assert memory.total_bytes == memory.static_bytes + memory.snapshot_bytes + memory.training_bytes


def test_a_stage_without_recompute_holds_the_tensors_of_all_in_flight() -> None:
    load = StageLoad(in_flight=3, inputs_held=3, recomputes=0)
    memory = MemoryModel.of(FACTS, MEASURED, (range(2),)).under(load)
    held = 1000 + 10 + 1001 + 10
    assert memory.activations_bytes == 3 * held + 500 + 10
    # What was sent lately is also held by the graphs of those in flight.
    assert memory.buffers_bytes == (PENDING_SENDS - 3) * 10


def test_a_forward_may_come_beside_a_set_of_tensors_that_waits() -> None:
    thirsty = [replace(section, forward_bytes=900) for section in MEASURED]
    load = StageLoad(in_flight=3, inputs_held=3, recomputes=8)
    memory = MemoryModel.of(FACTS, thirsty, (range(2),)).under(load)
    assert memory.activations_bytes == 1000 + 10 + 1001 + 10 + 900 + 10


def test_the_ends_of_the_pipeline_have_no_neighbour_to_hold_anything_for() -> None:
    load = StageLoad(in_flight=2, inputs_held=2, recomputes=4)
    first = MemoryModel.of(FACTS, MEASURED, (range(1),)).under(load)
    assert (first.stash_bytes, first.buffers_bytes) == (0, PENDING_SENDS * 10)
    last = MemoryModel.of(FACTS, MEASURED, (range(3, 4),)).under(load)
    assert (last.stash_bytes, last.buffers_bytes) == (20, PENDING_SENDS * 10)
    whole = MemoryModel.of(FACTS, MEASURED, (range(4),)).under(load)
    assert (whole.stash_bytes, whole.buffers_bytes) == (0, 0)


def test_several_runs_of_sections_each_hold_their_own_tensors() -> None:
    load = StageLoad(in_flight=3, inputs_held=4, recomputes=0, by_chunk=(2, 1), keeps=(True, True))
    memory = MemoryModel.of(FACTS, MEASURED, (range(1), range(2, 3))).under(load)
    assert memory.parameters_bytes == 100 + 300
    # The first run reads examples; the second one's inputs, and one that waits.
    assert memory.stash_bytes == 10 + 10
    assert memory.batches_bytes == 2 * 3
    assert memory.activations_bytes == 2 * 1010 + 1012 + 510


def test_only_gradients_of_trained_parameters_are_held() -> None:
    frozen = tuple(
        replace(section, gradient_bytes=0 if section.index < 2 else None)
        for section in FACTS.sections
    )
    load = StageLoad(in_flight=1, inputs_held=1, recomputes=0)
    memory = MemoryModel.of(replace(FACTS, sections=frozen), MEASURED, (range(3),)).under(load)
    assert (memory.parameters_bytes, memory.gradients_bytes) == (600, 300)


def test_an_optimizer_s_first_step_counts_where_it_is_the_peak() -> None:
    greedy = [replace(section, update_bytes=10**6) for section in MEASURED]
    load = StageLoad(in_flight=1, inputs_held=1, recomputes=0)
    memory = MemoryModel.of(FACTS, greedy, (range(2),)).under(load)
    assert memory.total_bytes == (memory.static_bytes + memory.snapshot_bytes + memory.update_bytes)


def test_an_evaluation_counts_where_there_are_held_out_examples() -> None:
    facts = replace(FACTS, heldout_len=9)
    thirsty = [replace(section, forward_bytes=10**6) for section in MEASURED]
    load = StageLoad(in_flight=1, inputs_held=1, recomputes=0)
    memory = MemoryModel.of(facts, thirsty, (range(1, 2),)).under(load)
    assert memory.evaluation_bytes == 4 * (3 * 10 + 2 * 10 + 3 + 10**6)
    assert memory.total_bytes == memory.static_bytes + memory.evaluation_bytes


def test_replicas_take_turns_at_the_copies_for_a_checkpoint() -> None:
    load = StageLoad(in_flight=1, inputs_held=1, recomputes=0)

    def share(width: int = 1, replica: int | None = None) -> int:
        memory = MemoryModel.of(FACTS, MEASURED, (range(4),), width=width, replica=replica).under(
            load
        )
        return memory.snapshot_bytes

    assert share() == 3 * (100 + 200 + 300 + 400)
    assert share(width=2, replica=0) == 3 * (100 + 300)
    assert share(width=2, replica=1) == share(width=2) == 3 * (200 + 400)
    assert share(width=9, replica=8) == 0


def test_exact_sums_are_whole_numbers_beside_the_gradients() -> None:
    load = StageLoad(in_flight=2, inputs_held=2, recomputes=4)
    runs = (range(2, 4),)
    fast = MemoryModel.of(FACTS, MEASURED, runs).under(load)
    exact = MemoryModel.of(FACTS, MEASURED, runs, WorkerTerms(reduction="exact")).under(load)
    converted = 4 * 400  # the larger section's gradients are one piece at most
    assert exact == replace(
        fast,
        accumulators_bytes=2 * 700,
        activations_bytes=fast.activations_bytes + converted,
    )
    assert exact.total_bytes == fast.total_bytes + 1400 + converted


def test_exact_sums_of_gradients_in_bf16_take_four_times_their_bytes() -> None:
    sections = tuple(replace(s, integer_bytes=4 * s.trained_bytes) for s in FACTS.sections)
    narrow = replace(FACTS, sections=sections)
    load, terms = (
        StageLoad(in_flight=1, inputs_held=1, recomputes=0),
        WorkerTerms(reduction="exact"),
    )
    memory = MemoryModel.of(narrow, MEASURED, [range(2)], terms).under(load)
    assert memory.accumulators_bytes == 4 * memory.gradients_bytes


def test_gradients_stale_by_one_take_two_sums_and_the_parameters_before() -> None:
    load, runs = StageLoad(in_flight=2, inputs_held=2, recomputes=4), (range(2, 4),)
    compute = Compute(semantics="stale_by_one")
    once = MemoryModel.of(FACTS, MEASURED, runs, WorkerTerms(reduction="exact")).under(load)
    terms = WorkerTerms(reduction="exact", compute=compute)
    twice = MemoryModel.of(FACTS.with_delayed(), MEASURED, runs, terms).under(load)
    assert twice == replace(
        once,
        gradients_bytes=2 * 700,
        accumulators_bytes=2 * once.accumulators_bytes,
        optimizer_bytes=once.optimizer_bytes + 700,
        snapshot_bytes=once.snapshot_bytes + 700,
    )


def test_a_plan_is_measured_by_its_busiest_replica() -> None:
    some = plan((0, 2, 4), (0, 2, 6), "gpipe")
    ranks = rank_bytes(FACTS, PROFILE, some, "exact")
    assert [m.parameters_bytes for m in ranks] == [300, 700, 300, 700]
    assert ranks[3].total_bytes > ranks[1].total_bytes
    assert plan_bytes(FACTS, PROFILE, some, "exact")[1] == ranks[3]
    uneven = plan((0, 2, 4), (0, 5, 6), "gpipe", recompute=False)
    busiest = plan_bytes(FACTS, PROFILE, uneven, "fast")
    assert busiest == rank_bytes(FACTS, PROFILE, uneven, "fast")[:2]
    assert busiest[1].stash_bytes == 5 * 10


def test_a_bound_of_the_plan_s_own_saves_memory() -> None:
    free = plan((0, 2, 4), (0, 8), "gpipe", recompute=False)
    bounded = replace(free, in_flight_bound=2)
    for large, tight in zip(
        plan_bytes(FACTS, PROFILE, free, "fast"),
        plan_bytes(FACTS, PROFILE, bounded, "fast"),
        strict=True,
    ):
        assert tight.training_bytes < large.training_bytes / 2


@given(st.integers(1, 4), st.integers(1, 12))
def test_1f1b_never_needs_more_than_gpipe_and_recompute_no_more_than_none(
    depth: int, count: int
) -> None:
    bounds = (*range(depth), 4)

    def total(schedule: ScheduleKind, *, recompute: bool) -> int:
        some = plan(bounds, (0, count), schedule, recompute=recompute)
        return sum(m.total_bytes for m in plan_bytes(FACTS, PROFILE, some, "fast"))

    assert total("1f1b", recompute=False) <= total("gpipe", recompute=False)
    assert total("1f1b", recompute=True) <= total("1f1b", recompute=False)
    assert total("gpipe", recompute=True) <= total("gpipe", recompute=False)


terms = st.builds(
    WorkerTerms,
    reduction=st.sampled_from(get_args(Reduction)),
    compute=st.builds(
        Compute,
        on_gpu=st.booleans(),
        precision=st.sampled_from(get_args(Precision)),
    ),
    state=st.sampled_from(get_args(StateHome)),
)


@given(
    st.integers(0, 3),
    st.integers(1, 4),
    st.integers(1, 6),
    terms,
    st.booleans(),
)
def test_more_sections_never_need_less_memory(
    start: int, length: int, in_flight: int, terms: WorkerTerms, recompute: bool
) -> None:
    load = StageLoad(in_flight=in_flight, inputs_held=in_flight, recomputes=int(recompute))

    def total(end: int) -> tuple[int, int]:
        runs = (range(start, end),)
        memory = MemoryModel.of(FACTS, EVEN, runs, terms).under(load)
        return memory.static_bytes + memory.activations_bytes, memory.host.total_bytes

    end = min(4, start + length)
    if end > start + 1:
        fewer, more = total(end - 1), total(end)
        assert fewer[0] <= more[0]
        assert fewer[1] <= more[1]


def on(state: StateHome, reduction: Reduction = "fast", width: int = 1) -> StageMemory:
    load = StageLoad(in_flight=3, inputs_held=4, gradients_waiting=1, recomputes=8)
    gpu = Compute(on_gpu=True, precision="bf16")
    terms = WorkerTerms(reduction=reduction, compute=gpu, state=state, context_bytes=10**6)
    return MemoryModel.of(FACTS, MEASURED, (range(1, 3),), terms, width=width).under(load)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_parameter_whose_state_a_vm_shares_takes_6_bytes_and_a_part_of_12(width: int) -> None:
    """Of AdamW in bf16, with state on the device."""
    count = 1000
    facts = model_facts(
        section_facts(k, param_bytes=4 * count, optimizer_bytes=8 * count) for k in range(4)
    )
    whole = a_plan(
        1, width, num_sections=4, microbatch_size=2, state="device", slots=slots_of("a" * width)
    )
    shared = replace(whole, shared_state=(12 * count,) * 4)
    gpu = Compute(on_gpu=True, precision="bf16")
    for plan, each in ((whole, 18), (shared, 6 + 12 / width)):
        for rank in rank_bytes(facts, PROFILE, plan, "fast", gpu):
            held = rank.parameters_bytes + rank.gradients_bytes + rank.optimizer_bytes
            assert held == 4 * count * each


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("state", ["device", "host"])
@pytest.mark.parametrize(("reduction", "copies"), [("fast", 6), ("exact", 10)])
def test_a_parameter_that_ranks_divide_takes_a_part_of_6_bytes_and_one_of_16(
    size: int, state: StateHome, reduction: Reduction, copies: int
) -> None:
    """Of AdamW in bf16; with exact sums 8 bytes in the place of 4 of these 6."""
    count = 1000
    one = section_facts(0, param_bytes=4 * count, optimizer_bytes=8 * count)
    facts = model_facts(replace(one, index=k, divided_bytes=4 * count) for k in range(4))
    plan = a_plan(
        num_sections=4,
        microbatch_size=2,
        state=state,
        slots=slots_of("a" * size),
        tensor_parallel=size,
    )
    gpu = Compute(on_gpu=True, precision="bf16")
    for rank in rank_bytes(facts, PROFILE, plan, reduction, gpu):
        device = rank.parameters_bytes + rank.gradients_bytes + rank.accumulators_bytes
        held = 4 * count * 16 // size
        on_device = held if state == "device" else 0
        assert device + rank.optimizer_bytes == 4 * count * copies // size + on_device
        assert rank.host.locked_bytes == held - on_device


def test_a_gpu_that_shares_state_on_the_host_has_its_part_there() -> None:
    whole = a_plan(1, 4, num_sections=4, microbatch_size=2, slots=slots_of("aabb"))
    shared = replace(whole, shared_state=(1,) * 4)
    gpu = Compute(on_gpu=True, precision="bf16")
    before, after = (rank_bytes(FACTS, PROFILE, one, "fast", gpu)[1] for one in (whole, shared))
    assert (after.parameters_bytes, after.gradients_bytes) == (500, 1000)
    assert (before.parameters_bytes, before.gradients_bytes) == (500, 1000)
    # Of sections 1 and 3.
    host = after.host
    assert (host.parameters_bytes, host.gradients_bytes, host.optimizer_bytes) == (600, 600, 1200)
    # Its stage, its VM, and the rank that holds the same in the other one.
    assert after.library_bytes - before.library_bytes == 2 * NCCL_BYTES


def test_with_state_on_the_host_a_gpu_holds_what_it_computes_on() -> None:
    memory = on("host")
    assert memory.parameters_bytes == 500 / 2
    assert memory.gradients_bytes == 500
    assert (memory.optimizer_bytes, memory.undo_bytes, memory.snapshot_bytes) == (0,) * 3
    assert memory.update_bytes == PENDING_SENDS * 10
    assert memory.library_bytes == 10**6 + LIBRARY_BYTES
    moving = memory.training_bytes
    assert memory.total_bytes == (
        250 + 500 + memory.library_bytes + moving + math.ceil(FRAGMENTATION * moving)
    )
    assert memory.host == HostMemory(
        parameters_bytes=500,
        gradients_bytes=500,
        optimizer_bytes=1000,
        update_bytes=77,
        undo_bytes=300 + 300 + 600 + 3 * PAGE_BYTES,
        snapshot_bytes=300 + 600,
        staging_bytes=2 * (PENDING_SENDS * 10 + 10) + 250,
        process_bytes=PROCESS_BYTES,
    )
    locked = 500 + 500 + 1000
    assert memory.needed == (memory.total_bytes, memory.host.total_bytes, locked)
    exact = on("host", "exact")
    assert (exact.gradients_bytes, exact.accumulators_bytes) == (0, 1000)
    assert exact.host == memory.host


def test_with_state_on_the_device_the_host_holds_words_and_copies_on_their_way() -> None:
    memory = on("device", "exact")
    assert memory.parameters_bytes == 500 + 250
    assert (memory.gradients_bytes, memory.accumulators_bytes) == (500, 1000)
    assert (memory.optimizer_bytes, memory.undo_bytes) == (1000, 300 + 300 + 600)
    assert memory.snapshot_bytes == 0
    assert memory.host == HostMemory(
        undo_bytes=3 * PAGE_BYTES,
        snapshot_bytes=300 + 600,
        staging_bytes=2 * (PENDING_SENDS * 10 + 10),
        process_bytes=PROCESS_BYTES,
    )
    assert memory.needed.locked == 0


def test_replicas_on_gpus_have_buffers_of_a_communicator() -> None:
    alone, wide = on("device"), on("device", width=2)
    assert wide.library_bytes == alone.library_bytes + NCCL_BYTES
    assert wide.host.staging_bytes == alone.host.staging_bytes + 500
    pair = on("host"), on("host", width=2)
    assert pair[1].host.staging_bytes == pair[0].host.staging_bytes
    sums = on("host", "exact", width=2).host.staging_bytes
    assert sums == pair[0].host.staging_bytes + 2 * 500


def test_frozen_sections_before_all_that_is_trained_leave_nothing() -> None:
    frozen = replace(
        FACTS,
        sections=tuple(replace(s, gradient_bytes=0) for s in FACTS.sections[:2])
        + FACTS.sections[2:],
    )
    load = StageLoad(in_flight=2, inputs_held=2, recomputes=0)
    first = MemoryModel.of(frozen, MEASURED, (range(2),)).under(load)
    assert first.activations_bytes == 10 + 400
    both = MemoryModel.of(frozen, MEASURED, (range(3),)).under(load)
    assert both.activations_bytes == 2 * (1002 + 10) + 500 + 10
    # What is received may need a gradient whatever becomes of it here.
    later = MemoryModel.of(frozen, MEASURED, (range(1, 2),)).under(load)
    assert later.activations_bytes == 2 * (1001 + 10) + 500 + 10


def loading(workers: int | None, fetch_s: float, batch_bytes: int = 10**9) -> Profile:
    (one,) = PROFILE.microbatches
    sections = tuple(replace(s, batch_bytes=batch_bytes) for s in one.sections)
    beside = TaskOverheads(forward_s=0.0, recompute_s=0.0, backward_s=0.0, fetch_s=fetch_s)
    changed = replace(one, sections=sections, overheads=beside)
    loader = LoaderSpec(workers=workers, ahead=3)
    return replace(PROFILE, microbatches=(changed,), loader=loader)


@pytest.mark.parametrize(
    ("workers", "fetch_s", "loaders"),
    [(0, 0.1, 0), (None, 0.0, 0), (None, 0.1, 3), (2, 0.0, 2)],
)
def test_loaders_hold_batches_that_are_ready_and_being_made(
    workers: int | None, fetch_s: float, loaders: int
) -> None:
    profile = loading(workers, fetch_s)
    expected = loaders * (LOADER_BYTES + LOADER_COPIES * 10**9) + 3 * 10**9
    assert loader_bytes(profile, 2) == (expected if loaders else 0)


@pytest.mark.parametrize("state", ["host", "device"])
def test_loaders_are_in_the_memory_of_the_vm(state: StateHome) -> None:
    some = replace(plan((0, 2, 4), (0, 4)), state=state)
    without, with_two = loading(0, 0.0), loading(2, 0.0)
    extra = loader_bytes(with_two, 2)
    for compute, on_gpu in ((CPU, False), (Compute(on_gpu=True), True)):
        before = rank_bytes(FACTS, without, some, "fast", compute)
        after = rank_bytes(FACTS, with_two, some, "fast", compute)
        for one, other in zip(before, after, strict=True):
            more = other.needed.host - one.needed.host if on_gpu else 0
            more = more or other.needed.device - one.needed.device
            assert more == extra
            assert on_gpu is (one.needed.device == other.needed.device)


def test_loaders_make_larger_batches_for_evaluations() -> None:
    facts, profile = replace(FACTS, heldout_len=1), loading(2, 0.0, batch_bytes=10**6)
    some = plan((0, 2, 4), (0, 4))
    without = rank_bytes(facts, loading(0, 0.0, batch_bytes=10**6), some, "fast")
    for one, other in zip(without, rank_bytes(facts, profile, some, "fast"), strict=True):
        extra = loader_bytes(profile, 2, HELDOUT_FACTOR)
        assert other.evaluation_bytes - one.evaluation_bytes == extra


def test_a_tied_parameter_with_a_copy_on_another_stage_has_a_communicator() -> None:
    facts = replace(FACTS, tied=(TiedParameter(name="tied", sections=(0, 3)),))

    def libraries(run: range, state: StateHome) -> int:
        terms = WorkerTerms(compute=Compute(on_gpu=True), state=state)
        return MemoryModel.of(facts, MEASURED, (run,), terms).idle.library_bytes

    alone = libraries(range(4), "device")
    assert libraries(range(2), "device") == libraries(range(2, 4), "device") == alone + NCCL_BYTES
    assert libraries(range(1, 3), "device") == libraries(range(2), "host") == alone
