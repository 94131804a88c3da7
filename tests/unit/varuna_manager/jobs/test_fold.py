"""A journal leads to the same state, whether it has measurements among its events or not."""

from __future__ import annotations

from dataclasses import replace

from tests.unit.varuna_manager.story import Story

from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.jobs.replay.fold import Fold
from spottrain.wire import messages

FOUR = ("a", "b", "c", "d")


def told(*, journals_measurements: bool) -> Story:
    """Training that loses a VM, goes on with the others and is not finite in the end."""
    story = Story(journals_measurements=journals_measurements)
    story.training(*FOUR)
    story.tell(e.VmLost, vm_id="d", reason="gone")
    story.broken("a", "b", "c")
    story.plan("a", "b")
    story.open()
    story.begin(2)
    for step in range(3, 6):
        story.now_s += 1.0
        story.commit(step, skipped="" if step < 5 else "loss")
    return story


def comparable(state: State) -> State:
    """Return a state without the numbers of reports."""
    vms = {k: replace(vm, reports_received=0) for k, vm in state.vms.items()}
    return replace(state, vms=vms)


def fold(story: Story) -> State:
    result = Fold()
    for event in story.events:
        result.take(event)
    return result.state


def test_measurements_that_were_journalled_lead_where_progress_does() -> None:
    now, then = told(journals_measurements=False), told(journals_measurements=True)
    kinds = {type(event) for event in then.events}
    assert e.ProgressMade not in kinds
    committed = messages.MinibatchCommitted
    assert not any(
        isinstance(event, e.ReportReceived) and isinstance(event.report, committed)
        for event in now.events
    )
    assert fold(now) == now.state
    assert comparable(fold(then)) == comparable(now.state)
    assert fold(then).progress.nonfinite_steps == 1


def test_a_measurement_that_was_journalled_twice_counts_once() -> None:
    story = told(journals_measurements=True)
    once = fold(story)
    story.events.append(story.events[-1])
    assert comparable(fold(story)) == comparable(once)
