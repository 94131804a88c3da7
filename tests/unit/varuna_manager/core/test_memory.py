"""Out of memory: planned around, until no plan is left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.varuna_manager.story import OFFER, PROFILE, SETTINGS, Story, plan_over

from spottrain.morphing.memory.ranks import rank_bytes
from spottrain.varuna_manager.core.memory import MARGIN, MAX_MARGIN
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import GenerationPhase
from spottrain.varuna_manager.core.model.state import JobPhase, kind_of
from spottrain.wire import messages
from spottrain.wire.model import GpuFacts

MACHINE = kind_of(OFFER)


def run_out(
    story: Story, vm_id: str, during: messages.MemoryUse = "backward"
) -> tuple[c.Command, ...]:
    return story.report(
        vm_id,
        messages.OutOfMemory(
            generation=story.generation.number,
            slot=0,
            section=1,
            microbatch_size=1,
            requested_bytes=2_000_000,
            device_bytes=16_000_000_000,
            during=during,
        ),
    )


def predicted_bytes(rank: int = 0) -> int:
    plan = plan_over(("a", "b"))
    return rank_bytes(SETTINGS.facts, PROFILE, plan, "fast")[rank].total_bytes


def test_the_next_plan_may_take_less_than_was_predicted() -> None:
    story = Story().training("a", "b")
    run_out(story, "b")
    assert story.generation.phase is GenerationPhase.BREAKING
    room = int(predicted_bytes(1) * (1 - MARGIN))
    assert story.shortages[MACHINE].room_bytes == room
    assert story.state.last_message.startswith("generation 1 broke: b[0]: out of memory")
    story.broken("a", "b")
    (asked,) = story.emitted(c.ComputePlan)
    assert {device.memory_bytes for device in asked.inputs.slots} == {room}
    story.plan("a", "b")
    assert story.generation.number == 2
    assert "out of memory during the backward of section 1" in story.generation.reason
    assert "micro-batches of 1" in story.generation.reason
    assert "lower microbatch_size or set morphing.recompute" in story.generation.reason


@given(st.integers(2, 5))
def test_every_further_time_it_may_take_less(times: int) -> None:
    story = Story().training("a", "b")
    rooms = []
    for _ in range(times):
        run_out(story, "a")
        run_out(story, "b")
        rooms.append(story.shortages[MACHINE].room_bytes)
        story.broken("a", "b")
        story.plan("a", "b")
        story.open()
        story.begin(3)
    assert story.state.phase is JobPhase.ACTIVE, "no such generation counts as fruitless"
    assert rooms == sorted(set(rooms), reverse=True)
    assert rooms[-1] >= int(min(predicted_bytes(0), predicted_bytes(1)) * MAX_MARGIN)
    assert story.shortages[MACHINE].times == times


def test_the_job_ends_only_when_no_plan_is_left_and_says_why() -> None:
    story = Story(max_vms=2).training("a", "b")
    run_out(story, "a", "update")
    story.broken("a", "b")
    asked = story.plan_asked
    assert asked is not None
    story.tell(e.PlanComputed, inputs_hash=asked, plan=None, why_not="it needs 3 devices")
    outcome = story.state.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.exit_code) == ("capacity", 5)
    assert outcome.reason.startswith("no plan fits: it needs 3 devices; a[0]: out of")
    assert "set runtime.state: host" in outcome.reason


@pytest.mark.parametrize("steps", [0, 3])
def test_a_micro_batch_size_that_trained_nothing_is_not_settled(steps: int) -> None:
    story = Story().training("a", "b", steps=steps)
    run_out(story, "a")
    story.broken("a", "b")
    (asked,) = story.emitted(c.ComputePlan)
    assert asked.inputs.microbatch_size == (1 if steps else None)
    assert asked.inputs.previous == plan_over(("a", "b"))


def test_a_stale_report_changes_nothing() -> None:
    story = Story().training("a", "b")
    story.broken("a", "b")
    assert story.generation.number == 2
    story.open()
    story.begin(3)
    old = messages.OutOfMemory(
        generation=1,
        slot=0,
        section=None,
        microbatch_size=1,
        requested_bytes=0,
        device_bytes=1,
        during="start",
    )
    story.report("a", old)
    assert story.shortages == {}
    assert story.generation.phase is GenerationPhase.RUNNING


def test_a_job_that_is_resumed_tries_the_whole_memory_again() -> None:
    story = Story(max_vms=2).training("a", "b")
    run_out(story, "a")
    story.broken("a", "b")
    story.plan()
    assert story.state.outcome is not None
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    assert story.state.phase is JobPhase.ACTIVE
    assert story.shortages == {}


def test_slots_are_what_their_supervisor_has_found() -> None:
    story = Story(max_vms=2)
    story.start()
    (intent,) = story.intents
    vms = tuple(story.listed(vm_id, intent) for vm_id in ("a", "b"))
    story.tell(e.VmsLaunched, intent=intent, vms=vms)
    gpu = GpuFacts(
        index=0,
        uuid="GPU-0",
        name="Tesla T4",
        memory_bytes=16 * 10**9,
        compute_capability=75,
        driver="580.95.05",
        cuda="13.0",
    )
    ready = messages.SupervisorReady(
        num_slots=1,
        torch_version="2",
        device="Tesla T4",
        gpus=(gpu,),
        gpu_memory_bytes=8 * 10**9,
        machine="a computer that both are on",
        memory_bytes=10**11,
        locked_memory_bytes=10**7,
    )
    for vm_id in ("a", "b"):
        story.tell(e.AgentRegistered, vm_id=vm_id, num_slots=1, private_address="10.0.0.1")
        story.report(vm_id, ready)
    story.prepare()
    (asked,) = story.emitted(c.ComputePlan)
    assert [device.is_gpu for device in asked.inputs.slots] == [True, True]
    assert {device.memory_bytes for device in asked.inputs.slots} == {8 * 10**9}
    assert {device.host_memory_bytes for device in asked.inputs.slots} == {10**11 // 2}
    assert {device.locked_memory_bytes for device in asked.inputs.slots} == {10**7}
    assert asked.inputs.homes == ("host", "device")
