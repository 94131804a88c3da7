"""What the core is told of training: often enough, and never more than it must be."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.builders import minibatch_committed
from tests.unit.varuna_manager.story import FOUR, Story

from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.watch.watches import STALL_S, ReportThrottle, Watches
from spottrain.wire import messages

START_S = 2000.0


def committed(step: int, section: int, **changes: object) -> messages.MinibatchCommitted:
    report = minibatch_committed(
        step,
        sections=(section,),
        loss=1.0 / step,
        step_s=0.5,
        peak_bytes=step,
    )
    return replace(report, **changes)  # type: ignore[arg-type]


def begun() -> Story:
    """A generation of four VMs that begins to train at ``START_S``."""
    story = Story()
    story.now_s = START_S
    return story.training(*FOUR, steps=0)


def observe(
    watches: Watches, story: Story, step: int, at_s: float, **changes: object
) -> list[e.Event]:
    """Show a mini-batch to the watches, rank by rank."""
    return [
        event
        for rank, vm_id in enumerate(FOUR)
        for event in watches.observe(story.state, vm_id, committed(step, rank % 2, **changes), at_s)
    ]


def test_a_minibatch_counts_once_every_section_was_reported() -> None:
    story, watches = begun(), Watches()
    assert not watches.observe(story.state, "a", committed(1, 0), START_S)
    assert not watches.observe(story.state, "c", committed(1, 0), START_S)
    (made,) = watches.observe(story.state, "b", committed(1, 1), START_S)
    assert isinstance(made, e.ProgressMade)
    assert (made.step, made.loss, made.step_s) == (1, 1.0, 0.5)
    assert not watches.observe(story.state, "b", committed(1, 1), START_S + 99)


def test_reports_of_others_than_live_ranks_of_the_generation_count_nothing() -> None:
    story, watches = begun(), Watches()
    both = committed(1, 0, sections=(0, 1))
    assert not watches.observe(story.state, "e", both, START_S)
    assert not watches.observe(story.state, "a", replace(both, slot=1), START_S)
    assert not watches.observe(story.state, "a", replace(both, generation=2), START_S)
    assert watches.observe(story.state, "a", both, START_S)


@pytest.mark.rotated
def test_the_core_is_told_less_and_less_often() -> None:
    story = begun()
    story.state = replace(
        story.state,
        settings=replace(story.state.job, spec=replace(story.state.job.spec, steps=10**6)),
    )
    watches = Watches()
    times_s = [
        event.at_s
        for step in range(1, 72_001)
        for event in watches.observe(
            story.state,
            "a",
            committed(step, 0, sections=(0, 1)),
            START_S + step / 20,
        )
    ]
    gaps_s = [b - a for a, b in itertools.pairwise(times_s)]
    assert len(times_s) < 250, "of 72,000 mini-batches within an hour"
    assert min(gaps_s) >= ReportThrottle().least_s
    assert max(gaps_s) <= ReportThrottle().most_s + 0.05


@given(
    gaps_s=st.lists(st.floats(0.0, 100.0), min_size=1, max_size=40),
    asked=st.sets(st.integers(0, 40)),
)
def test_what_was_not_told_is_pending_until_a_decision_needs_it(
    gaps_s: list[float], asked: set[int]
) -> None:
    story, watches = BEGUN, Watches()
    now_s, known, seen = START_S, 0, 0
    for step, gap_s in enumerate(gaps_s, 1):
        now_s += gap_s
        told = observe(watches, story, step, now_s)
        seen = step
        if step in asked:
            told += watches.pending(story.state, now_s)
            assert not watches.pending(story.state, now_s)
        for event in told:
            assert isinstance(event, e.ProgressMade)
            assert event.step > known
            known = event.step
        if step in asked:
            assert known == seen
        else:
            assert known <= seen


BEGUN = begun()


def test_a_row_of_minibatches_that_change_nothing_is_told_at_once() -> None:
    story, watches = begun(), Watches(ReportThrottle(least_s=1e9, most_s=1e9))
    assert len(observe(watches, story, 1, START_S)) == 1
    assert not observe(watches, story, 2, START_S + 1)
    (begins,) = observe(watches, story, 3, START_S + 2, skipped="loss")
    assert isinstance(begins, e.ProgressMade)
    assert (begins.nonfinite, begins.nonfinite_in_row) == (1, 1)
    limit = story.state.job.on_nonfinite.stop_after
    for step in range(4, 2 + limit):
        assert not observe(watches, story, step, START_S + step, skipped="loss")
    (ends,) = observe(watches, story, 2 + limit, START_S + 50, skipped="loss")
    assert isinstance(ends, e.ProgressMade)
    assert ends.nonfinite_in_row == limit
    story.take(begins)
    assert "step 3 " in story.state.last_message
    story.take(ends)
    assert story.progress.nonfinite_steps == limit
    assert story.state.outcome is not None


def test_watches_that_begin_anew_go_on_from_what_is_journalled() -> None:
    story, watches = begun(), Watches()
    for event in observe(watches, story, 1, START_S):
        story.take(event)
    anew = Watches()
    assert not observe(anew, story, 1, START_S + 1), "it is known"
    (made,) = observe(anew, story, 60, START_S + 2)
    story.take(made)
    assert story.step == 60


def test_a_manager_that_has_just_begun_does_not_know_what_was_committed_before() -> None:
    story, anew = begun(), Watches()
    now_s = story.generation.since_s + 10 * STALL_S
    assert not anew.stalled(story.state, now_s)
    assert not anew.stalled(story.state, now_s + STALL_S - 1)
    assert anew.stalled(story.state, now_s + STALL_S)


def test_a_generation_that_commits_nothing_is_reported_once() -> None:
    story, watches = begun(), Watches()
    for event in observe(watches, story, 1, START_S):
        story.take(event)
    soon_s, late_s = START_S + STALL_S - 1, START_S + 2 * STALL_S
    assert not watches.stalled(story.state, soon_s)
    (stalled,) = watches.stalled(story.state, late_s)
    story.now_s = late_s
    story.take(stalled)
    assert story.state.last_message == (
        "generation 1 has committed nothing for 240 s after step 1; a mini-batch takes 0.5 s"
    )
    assert not watches.stalled(story.state, late_s + 9)
    for event in observe(watches, story, 2, late_s + 10):
        story.take(event)
    assert not watches.stalled(story.state, late_s + 11)
    assert watches.stalled(story.state, late_s + 10 + STALL_S)
