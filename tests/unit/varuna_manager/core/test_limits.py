"""Limits that a person changes: what follows, at once and later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.builders import checkpoint_saved
from tests.unit.varuna_manager.story import FACTS, FOUR, OFFER, PROFILE, Story

from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.limits import DRAIN_S, with_limits
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import COOLDOWN_S
from spottrain.varuna_manager.core.model.settings import Limit
from spottrain.varuna_manager.core.model.state import JobPhase, State, rate_usd_per_hour
from spottrain.wire import messages

SHARES = (0.5, 0.8, 0.95)


def limits_event(story: Story, **limits: Any) -> e.LimitsChanged:
    told = tuple(
        Limit(name=name, value=value)  # type: ignore[arg-type]
        for name, value in limits.items()
    )
    return e.LimitsChanged(at_s=story.now_s, by="a person", limits=told)


def change(story: Story, **limits: Any) -> None:
    story.tell(e.LimitsChanged, by="a person", limits=limits_event(story, **limits).limits)


def run_out(story: Story) -> None:
    """Let time pass until the budget ends the job."""
    while story.state.phase is JobPhase.ACTIVE:
        assert story.state.timer_at_s is not None
        story.wait(story.state.timer_at_s - story.now_s)


def test_new_limits_hold_from_now_on_and_are_logged() -> None:
    story = Story(max_usd=10.0).training(*FOUR)
    change(story, max_usd=20.0, deadline_s=1.9e9, min_examples_per_s=5.0)
    job = story.state.job
    assert (job.budget.max_usd, job.deadline_s, job.min_examples_per_s) == (20.0, 1.9e9, 5.0)
    assert story.state.last_message == (
        "a person: budget.max_usd is now 20 USD, slo.deadline is now "
        "2030-03-17T17:46:40Z, slo.min_examples_per_s is now 5 examples/s"
    )
    change(story, max_usd=None)
    assert story.state.job.budget.max_usd is None
    assert story.state.last_message == "a person: budget.max_usd is now none"


def test_the_same_change_twice_changes_nothing() -> None:
    story = Story(max_usd=10.0).training(*FOUR)
    change(story, max_usd=20.0)
    once = story.state
    change(story, max_usd=20.0)
    assert story.state == once


def test_a_higher_budget_lets_the_job_train_for_longer() -> None:
    poor, rich = (Story(max_usd=3.0).training(*FOUR) for _ in range(2))
    change(rich, max_usd=5.0)
    run_out(poor)
    run_out(rich)
    assert rich.now_s - poor.now_s == pytest.approx(1800.0)  # 2 USD at 4 USD/h


def test_gpu_hours_are_a_budget_of_their_own() -> None:
    """Four VMs of one GPU: four GPU-hours an hour, whatever they cost."""
    story = Story(max_gpu_hours=3.0, max_usd=100.0, alerts=(0.5,)).training(*FOUR)
    run_out(story)
    assert story.state.outcome is not None
    told = story.state.outcome
    assert (told.kind, told.exit_code) == ("budget", 4)
    assert told.reason == ("budget of 3 GPU-hours used up: 2.0333 spent, 0.9667 reserved for 870 s")
    (alert,) = story.alerts
    assert (alert.spent, alert.cap, alert.unit) == (1.5, 3.0, "GPU-hours")
    after = with_limits(story.state, limits_event(story, max_gpu_hours=30.0))
    assert after.history.alerts == ()


def test_no_vm_is_rented_for_which_there_are_no_gpu_hours() -> None:
    story = Story(max_gpu_hours=1.0)
    story.start()
    assert story.launch().count == 3, "of four, a quarter and five minutes each"


def test_a_budget_below_what_is_spent_ends_the_job_with_a_checkpoint() -> None:
    story = Story(max_usd=10.0).training(*FOUR)
    change(story, max_usd=0.5)
    assert story.sent(messages.StopGeneration)["a"].checkpoint
    assert story.state.outcome is not None
    assert (story.state.outcome.kind, story.state.outcome.exit_code) == ("budget", 4)


def test_a_job_whose_budget_was_used_up_continues_with_a_higher_one() -> None:
    story = Story(max_usd=3.0).training(*FOUR)
    run_out(story)
    story.report("a", checkpoint_saved(3))
    story.stopped(3)
    story.tell(e.VmsReturned, vm_ids=FOUR)
    assert story.state.phase is JobPhase.ENDED
    ended_at_s = story.state.now_s
    story.now_s += 5000.0
    change(story, max_usd=30.0)
    assert story.state.phase is JobPhase.ENDED
    assert story.state.now_s == ended_at_s, "time stands still after the end"
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=())
    assert story.launch().count == 4


def test_a_deadline_that_is_moved_away_is_kept() -> None:
    story = Story(deadline_s=2000.0).training(*FOUR)
    change(story, deadline_s=3000.0)
    story.wait(2500.0 - story.now_s)
    assert story.state.phase is JobPhase.ACTIVE
    story.wait(3000.0 - story.now_s)
    assert story.state.outcome is not None
    assert story.state.outcome.kind == "deadline"


# --- The hourly cap -------------------------------------------------------------------------


def test_a_lower_hourly_cap_drains_vms_once_others_have_their_sections() -> None:
    story = Story().training(*FOUR)
    change(story, max_usd_per_hour=2.0)
    going = {k for k, vm in story.vms.items() if vm.leaves_at_s is not None}
    assert going == {"a", "b"}
    assert story.emitted(c.TerminateVms) == []
    assert story.emitted(c.LaunchVms) == [], "nothing is rented in their place"
    while story.plan_asked is None:
        assert story.state.timer_at_s is not None
        story.wait(story.state.timer_at_s - story.now_s)
    story.plan("c", "d")
    while not story.sent(messages.StopGeneration):
        assert story.state.timer_at_s is not None
        story.wait(story.state.timer_at_s - story.now_s)
    assert set(story.sent(messages.StopGeneration)) == set(FOUR)
    assert story.now_s < 1003.0 + DRAIN_S
    story.now_s = 1003.0 + DRAIN_S
    story.tell(e.TimerFired)
    assert story.emitted(c.TerminateVms) == [
        c.TerminateVms(vm_ids=("a",)),
        c.TerminateVms(vm_ids=("b",)),
    ]
    story.tell(e.VmsReturned, vm_ids=("a", "b"))
    assert rate_usd_per_hour(story.state) == 2.0
    assert story.tally.preemptions_unnoticed == 0, "nobody took them"


def test_vms_that_do_not_train_are_returned_first_and_at_once() -> None:
    story = Story(max_vms=5).training(*FOUR)
    offer = replace(OFFER, usd_per_hour=0.5)
    story.now_s += COOLDOWN_S
    story.tell(e.OffersSeen, offers=(offer,))
    (intent,) = story.intents
    story.tell(e.VmsLaunched, intent=intent, vms=(story.listed("e", intent, offer=offer),))
    change(story, max_usd_per_hour=4.2)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=("e",))]


# --- Alerts -----------------------------------------------------------------------------------


def test_each_budget_alert_is_given_once() -> None:
    story = Story(max_usd=10.0, alerts=SHARES, hang_s=1e6).training(*FOUR)
    news = []
    while story.state.phase is JobPhase.ACTIVE:
        assert story.state.timer_at_s is not None
        story.wait(story.state.timer_at_s - story.now_s)
        news.append(story.state.last_message)
    told = [line for line in news if "of the budget" in line]
    assert told == [
        "50% of the budget of 10 USD is spent",
        "80% of the budget of 10 USD is spent",
    ], "the end comes before the third"
    alerts = story.alerts
    assert [alert.share for alert in alerts] == [0.5, 0.8]
    assert [alert.spent for alert in alerts] == pytest.approx([5.0, 8.0])


def test_alerts_of_a_raised_budget_are_given_again() -> None:
    story = Story(max_usd=20.0, alerts=SHARES).training(*FOUR)
    while len(story.alerts) < 2:
        assert story.state.timer_at_s is not None
        story.wait(story.state.timer_at_s - story.now_s)
    change(story, max_usd=30.0)
    assert [alert.share for alert in story.alerts] == [0.5]
    while len(story.alerts) < 2:
        assert story.state.timer_at_s is not None
        story.wait(story.state.timer_at_s - story.now_s)
    assert story.alerts[-1].spent == pytest.approx(24.0)


def test_a_job_without_a_budget_gets_no_alert() -> None:
    story = Story(alerts=SHARES).training(*FOUR)
    story.now_s += 1e6
    story.tell(e.TimerFired)
    assert story.alerts == ()


# --- Clocks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by_s", "words"), [(7200.0, "forward"), (-90.0, "back")])
def test_a_clock_that_was_set_is_logged(by_s: float, words: str) -> None:
    story = Story().training(*FOUR)
    story.tell(e.ClockSet, by_s=by_s)
    assert f"was set {abs(by_s):.0f} s {words}" in story.state.last_message


def test_time_that_goes_back_does_not_reduce_spending() -> None:
    story = Story(max_usd=10.0).training(*FOUR)
    story.now_s += 1000.0
    story.tell(e.TimerFired)
    spent = story.ledger.spent(story.state.now_s)
    story.now_s -= 5000.0
    story.tell(e.TimerFired)
    assert story.ledger.spent(story.state.now_s) == spent


def test_replaying_changed_limits_gives_the_same_state() -> None:
    story = Story(max_usd=20.0, alerts=SHARES).training(*FOUR)
    change(story, max_usd=15.0, max_usd_per_hour=3.0)
    state = State()
    for event in story.events:
        state, _ = step.step(state, event)
    assert state == story.state


# --- Steps and code ---------------------------------------------------------------------


def succeeded(step: int = 100) -> Story:
    story = Story().training(*FOUR)
    story.commit(step)
    story.report("a", checkpoint_saved(step))
    story.stopped(step, done=True)
    story.tell(e.VmsReturned, vm_ids=FOUR)
    assert story.state.phase is JobPhase.ENDED
    return story


@pytest.mark.parametrize(("steps", "goes_on"), [(150, True), (100, False)])
def test_a_job_that_has_succeeded_goes_on_for_more_steps_only(steps: int, goes_on: bool) -> None:
    story = succeeded()
    story.tell(e.StepsChanged, by="a person", steps=steps)
    assert story.state.job.spec.steps == steps
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    assert (story.state.phase is JobPhase.ACTIVE) == goes_on


def test_other_code_of_an_equal_model_keeps_what_was_measured() -> None:
    story = succeeded()
    facts = replace(FACTS, dataset_len=7)
    story.tell(e.CodeUpdated, by="a person", sha256="ab" * 32, facts=facts, changes=("data",))
    assert story.state.job.facts == facts
    assert story.profile == PROFILE
    assert story.state.last_message == "a person: code updated to abababababab; data"


def test_other_code_is_measured_again_if_its_batches_differ() -> None:
    story = succeeded()
    facts = replace(FACTS, fingerprint="longer sequences")
    story.tell(e.CodeUpdated, by="a person", sha256="ab" * 32, facts=facts)
    assert story.profile is None


def test_losses_that_were_not_finite_do_not_count_after_a_resume() -> None:
    story = Story(stop_after=2).training(*FOUR)
    story.commit(4, only=("a", "b"), skipped="loss")
    story.commit(5, only=("a", "b"), skipped="loss")
    story.tell(e.VmsReturned, vm_ids=FOUR)
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    assert story.progress.nonfinite_in_row == 0
