"""A generation in which a rank hangs: asked, broken off, its VM replaced in the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.unit.varuna_manager.story import FOUR, Story

from spottrain.varuna_manager.core.hangs import quiet_line
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model.records import GenerationPhase
from spottrain.wire import messages
from spottrain.wire.model import ALL_RANKS, WorkerState

WAITS = WorkerState(
    slot=0, tasks=9, doing="wait", waits_for=ALL_RANKS, still_s=40.0, process="idle"
)
SLEEPS = replace(WAITS, doing="compute", waits_for=None)


def answer(story: Story, vm_id: str, worker: WorkerState) -> None:
    inspection = story.generation.inspection
    assert inspection is not None
    report = messages.WorkersInspected(
        generation=story.generation.number, number=inspection.number, workers=(worker,)
    )
    story.report(vm_id, report)


def quiet(*ids: str, **workers: WorkerState) -> Story:
    """Up to the answers of all VMs, which wait unless something else is said."""
    story = Story().training(*ids)
    hear(story, *ids, **workers)
    return story


def hear(story: Story, *ids: str, **workers: WorkerState) -> None:
    story.wait(31.0)
    assert set(story.sent(messages.InspectWorkers)) == set(ids)
    for vm_id in ids:
        answer(story, vm_id, workers.get(vm_id, WAITS))


def killed(story: Story, vm_id: str, *others: str) -> None:
    number = story.generation.number
    died = messages.WorkerDied(generation=number, slot=0, reason="SIGKILL")
    story.report(vm_id, died)
    story.broken(*others)


def test_nothing_is_asked_while_mini_batches_come() -> None:
    story = Story().training(*FOUR)
    for step in range(4, 30):
        story.wait(20.0)
        assert not story.sent(messages.InspectWorkers)
        story.commit(step)


def test_a_rank_that_hangs_is_killed_and_survivors_go_on() -> None:
    story = quiet(*FOUR, c=SLEEPS)
    assert story.generation.phase is GenerationPhase.BREAKING
    (end,) = story.sent(messages.EndWorkers).values()
    assert list(story.sent(messages.EndWorkers)) == ["c"]
    assert end.slots == (0,)
    killed(story, "c", "a", "b", "d")
    assert story.generation.number == 2, "the same slots: the same plan, at once"
    assert {slot.vm_id for slot in story.generation.plan.slots} == set(FOUR)
    (hit,) = story.interruptions
    assert (hit.interruption, hit.vm_id) == ("hang", "c")
    assert (
        story.tally.hangs,
        story.tally.worker_deaths,
    ) == (1, 0)


def hung_twice() -> Story:
    """Up to a generation of a and b that forms, with c, which has hung, and d as donors."""
    story = quiet(*FOUR, c=SLEEPS)
    killed(story, "c", "a", "b", "d")
    story.open()
    story.begin(3)
    story.now_s += 1.0
    story.commit(4)
    hear(story, *FOUR, c=SLEEPS)
    killed(story, "c", "a", "b", "d")
    (question,) = story.emitted(c.ComputePlan)
    assert [d.slot.vm_id for d in question.inputs.slots] == ["a", "b", "d"]
    story.plan("a", "b")
    story.open()
    return story


def test_a_vm_on_which_a_rank_hangs_again_is_drained() -> None:
    story = hung_twice()
    donors = story.sent(messages.RunGeneration)["c"].participants[2:]
    assert "c" in {slot.vm_id for slot in donors}, "its memory is not lost"
    story.begin(4)
    assert story.vm("c").return_reason == "has hung twice"


def test_a_worker_that_its_agent_found_to_hang_counts_like_one_that_the_manager_found() -> None:
    story = quiet(*FOUR, c=SLEEPS)
    killed(story, "c", "a", "b", "d")
    story.open()
    story.begin(3)
    story.broken("a", "b", "d")  # they notice first
    ended = messages.WorkerDied(generation=2, slot=0, reason="it has been stopped", hung=True)
    story.report("c", ended)
    assert (story.interruptions[-1].interruption, story.interruptions[-1].vm_id) == ("hang", "c")
    assert (story.tally.hangs, story.tally.worker_deaths) == (2, 0)
    (question,) = story.emitted(c.ComputePlan)
    assert [d.slot.vm_id for d in question.inputs.slots] == ["a", "b", "d"], "hung twice"


def test_a_worker_that_is_stopped_keeps_no_generation_from_forming() -> None:
    """Also a donor's; to move state may take long, and is no hang."""
    story = hung_twice()
    moves = replace(SLEEPS, doing="start", still_s=290.0)
    hear(story, *FOUR, **dict.fromkeys(FOUR, moves))
    assert story.generation.phase is GenerationPhase.STARTING
    told = "its worker of slot 0 has been starting for 290 s (idle)"
    assert quiet_line(story.state, story.now_s).endswith(f"and for 3 more: {told}")
    story.wait(15.0)
    for vm_id in FOUR:
        answer(story, vm_id, replace(moves, process="stopped" if vm_id == "d" else "busy"))
    assert list(story.sent(messages.EndWorkers)) == ["d"]
    assert "d hangs: its worker of slot 0 has been stopped" in story.generation.break_reason


def test_vms_that_all_hang_at_once_are_not_replaced() -> None:
    """What they wait for is elsewhere, such as a store of data."""
    fetches = replace(SLEEPS, doing="data", still_s=400.0)
    story = quiet("a", "b", a=fetches, b=fetches)
    killed(story, "a", "b")
    story.open()
    story.begin(3)
    story.now_s += 1.0
    story.commit(4)
    hear(story, "a", "b", a=fetches, b=fetches)
    assert set(story.sent(messages.EndWorkers)) == {"a", "b"}
    assert all(vm.leaves_at_s is None for vm in story.vms.values())


def test_a_slow_rank_is_named_and_asked_again() -> None:
    story = quiet(*FOUR, d=replace(SLEEPS, still_s=4.0, process="busy"))
    assert story.generation.phase is GenerationPhase.RUNNING
    line = quiet_line(story.state, story.now_s + 34.0)
    assert line.startswith("no mini-batch for 65 s: waiting for d: its worker")
    story.wait(15.0)
    assert set(story.sent(messages.InspectWorkers)) == set(FOUR)
    story.commit(4)
    assert quiet_line(story.state, story.now_s) == ""


def test_answers_that_come_after_a_mini_batch_do_not_count() -> None:
    story = Story().training(*FOUR)
    story.wait(31.0)
    story.now_s += 1.0
    story.commit(4)
    for vm_id in FOUR:
        answer(story, vm_id, SLEEPS)
    assert story.generation.phase is GenerationPhase.RUNNING


def test_those_who_answer_are_judged_when_one_does_not() -> None:
    story = Story().training(*FOUR)
    story.wait(31.0)
    for vm_id, worker in {"a": WAITS, "b": SLEEPS, "c": WAITS}.items():
        answer(story, vm_id, worker)
    assert story.generation.phase is GenerationPhase.RUNNING
    story.wait(15.0)
    assert list(story.sent(messages.EndWorkers)) == ["b"]


def test_a_lost_message_breaks_the_generation_and_blames_nobody() -> None:
    waits = replace(WAITS, still_s=70.0)
    workers: dict[str, Any] = dict.fromkeys(FOUR, waits)
    story = quiet(*FOUR, **workers)
    assert story.generation.phase is GenerationPhase.BREAKING
    assert not story.sent(messages.EndWorkers)
    assert "waited for each other for 70 s" in story.generation.break_reason


def test_a_worker_that_cannot_be_killed_costs_its_vm() -> None:
    story = quiet(*FOUR, c=replace(SLEEPS, process="stopped"))
    story.broken("a", "b", "d")
    story.wait(3.0)
    assert list(story.sent(messages.AbandonGeneration)) == ["c"]
    story.wait(20.0)
    assert story.emitted(c.AskProvider) == [c.AskProvider(vm_id="c")]
