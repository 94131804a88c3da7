"""The history that is gathered while a journal is folded."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.builders import checkpoint_saved
from tests.unit.varuna_manager.story import OFFER, ON_DEMAND, SPEC, Story

from spottrain.pricing.prices.place import offer_key
from spottrain.varuna_manager.core import step as core
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import GenerationPhase
from spottrain.varuna_manager.core.model.state import State
from spottrain.varuna_manager.reporting.history import JobHistory


def past_of(story: Story) -> JobHistory:
    state, history = State(), JobHistory()
    for event in story.events:
        before, (state, _) = state, core.step(state, event)
        history.note(before, event, state)
    assert state == story.state
    return history


def did(story: Story) -> list[tuple[str, float, int]]:
    """What was done, for how long and with how many slots; short waits left out."""
    return [
        (one.activity, round(one.to_s - max(one.from_s, 1000.0), 3), len(one.slots))
        for one in past_of(story).intervals(story.now_s)
        if one.to_s > max(one.from_s, 1000.0)
    ]


def again(story: Story, *ids: str, step: int) -> None:
    """Plan over ``ids`` and train on from ``step``."""
    story.plan(*ids)
    story.open()
    story.begin(step)


def test_training_counts_from_its_first_second_to_its_last_commit() -> None:
    story = Story().training("a", "b", steps=5)
    story.now_s += 0.5
    assert did(story)[-1] == ("training", 5.5, 2)
    history = past_of(story)
    assert [mean for _, mean, _, _ in history.throughput.means()] == [8.0] * 5
    assert history.slots == {"a": 1, "b": 1}


def test_booting_and_measuring_come_before() -> None:
    story = Story()
    story.start()
    story.now_s += 3.0
    story.boot("a", "b")
    story.now_s += 2.0
    story.report("a", checkpoint_saved(0))
    story.now_s += 4.0
    story.measure()
    assert did(story) == [
        ("waiting", 3.0, 0),
        ("preparing", 2.0, 1),
        ("preparing", 4.0, 2),
    ]


def test_what_was_in_the_air_when_a_vm_died_is_lost_and_the_rest_is_the_morph() -> None:
    story = Story().training("a", "b", "c", "d")
    story.now_s += 0.4
    story.tell(e.VmLost, vm_id="d", reason="gone")
    story.now_s += 2.0
    story.broken("a", "b", "c")
    assert story.current_generation is None
    story.now_s += 1.0
    again(story, "a", "b", step=3)
    story.now_s += 1.0
    story.commit(4)
    assert did(story)[-5:] == [
        ("training", 3.0, 4),
        ("lost", 0.4, 4),
        ("morphing", 2.0, 4),
        ("morphing", 1.0, 3),
        ("training", 1.0, 2),
    ]


def test_no_more_than_a_mini_batch_is_lost_while_ranks_hang() -> None:
    story = Story().training("a", "b", "c", "d")
    story.now_s += 7.0
    story.tell(e.VmLost, vm_id="d", reason="gone")
    assert did(story)[-2:] == [("lost", 1.0, 4), ("morphing", 6.0, 4)]


def test_a_mini_batch_that_is_adopted_was_not_lost() -> None:
    story = Story().training("a", "b", "c", "d")
    story.now_s += 0.4
    story.tell(e.VmLost, vm_id="d", reason="gone")
    story.broken("a", "b", "c")
    again(story, "a", "b", step=4)
    assert story.step == 4
    kinds = [activity for activity, _, _ in did(story)]
    assert "lost" not in kinds
    assert kinds.count("training") == 2


def test_what_a_restore_undoes_is_lost() -> None:
    story = Story().training("a", "b", "c", "d", steps=6)
    story.tell(e.VmLost, vm_id="d", reason="gone")
    story.broken("a", "b", "c")
    again(story, "a", "b", step=2)
    assert story.minibatches_recomputed == 4
    story.now_s += 1.0
    story.commit(3)
    assert did(story)[-3:] == [
        ("training", 2.0, 4),
        ("lost", 4.0, 4),
        ("training", 1.0, 2),
    ]


def test_a_planned_stop_loses_nothing() -> None:
    story = Story().training("a", "b", "c", "d")
    story.notice("d", lead_s=30.0)
    story.wait(2.0)
    story.plan("a", "b")
    assert story.generation.phase is GenerationPhase.STOPPING
    story.now_s += 1.0
    story.commit(4)
    story.now_s += 0.25
    story.stopped(4)
    kinds = did(story)
    assert "lost" not in [activity for activity, _, _ in kinds]
    assert ("morphing", 0.25, 4) in kinds


def test_prices_are_kept_where_they_change_and_offers_that_vanish_are_known() -> None:
    story = Story().training("a", "b")
    story.now_s += 10.0
    story.tell(e.OffersSeen, offers=(replace(OFFER, usd_per_hour=2.0),))
    story.now_s += 10.0
    late = replace(OFFER, zone="late")
    story.tell(e.OffersSeen, offers=(replace(OFFER, usd_per_hour=2.0), late))
    prices = past_of(story).prices
    line = prices[offer_key(OFFER)]
    assert [usd for _, usd in line.points] == [1.0, 2.0]
    assert line.is_constant
    assert not prices[offer_key(ON_DEMAND)].is_constant
    assert not prices[offer_key(late)].is_constant


def test_managers_stops_and_budgets_become_milestones() -> None:
    story = Story(max_usd=5.0).training("a", "b")
    story.tell(e.StopRequested, by="ada")
    history = past_of(story)
    assert [one.kind for one in history.milestones] == ["manager", "stop"]
    assert history.milestones[1].text == "stop requested by ada"
    assert [usd for _, usd in history.budgets] == [5.0]


@pytest.mark.rotated
def test_memory_does_not_grow_with_mini_batches() -> None:
    spec = replace(SPEC, steps=10_000)
    story = Story(spec=spec).training("a", "b")
    history, state = JobHistory(), State()
    for step in range(4, 4000):
        story.now_s += 1.0
        story.commit(step)
        if step % 100 == 0:
            saved = checkpoint_saved(step)
            story.report("a", saved)
    for event in story.events:
        before, (state, _) = state, core.step(state, event)
        history.note(before, event, state)
    assert len(history._steps) <= 3 * 100 + 2
    assert len(history.throughput.bins) <= 1024
    assert len(history.intervals(story.now_s)) < 10
