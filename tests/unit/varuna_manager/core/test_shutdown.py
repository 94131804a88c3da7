"""Money, deadlines, stops and restarts: how a job ends and goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.builders import checkpoint_saved
from tests.unit.varuna_manager.story import FOUR, OFFER, ON_DEMAND, Story

from spottrain.pricing.billing.budget import LAST_CHECKPOINT_S, reserve_s
from spottrain.varuna_manager.core import step
from spottrain.varuna_manager.core.launches import SETTLE_S
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import GenerationPhase
from spottrain.varuna_manager.core.model.state import (
    JobPhase,
    State,
    on_demand_usd,
    rate_usd_per_hour,
    spent_usd,
)
from spottrain.wire import messages

# --- Money and time -----------------------------------------------------------------------------


def test_spending_is_price_at_launch_times_time() -> None:
    story = Story()
    story.start()
    story.boot(*FOUR)
    story.tell(e.OffersSeen, offers=(replace(OFFER, usd_per_hour=9.0), ON_DEMAND))
    assert story.tally.price_changes == 1
    assert rate_usd_per_hour(story.state) == 4.0
    story.now_s += 1800.0
    story.tell(e.VmLost, vm_id="a", reason="killed")
    story.now_s += 1800.0
    assert spent_usd(story.state, story.now_s) == pytest.approx(3.5)
    assert on_demand_usd(story.state, story.now_s) == pytest.approx(10.5)


def test_a_budget_ends_the_job_while_the_lease_is_still_paid_for() -> None:
    story = Story(max_usd=2.0, hang_s=1e6)
    story.training(*FOUR)
    assert rate_usd_per_hour(story.state) == 4.0
    assert story.state.timer_at_s is not None
    story.wait(story.state.timer_at_s - story.now_s)
    assert story.sent(messages.StopGeneration)["a"].checkpoint
    assert story.state.outcome is not None
    assert (story.state.outcome.kind, story.state.outcome.exit_code) == ("budget", 4)
    reserve_usd = 4.0 * reserve_s(600.0) / 3600.0
    spent = spent_usd(story.state, story.now_s)
    assert spent == pytest.approx(2.0 - reserve_usd, abs=2e-6)


def test_a_budget_below_one_lease_ends_the_job_before_anything_is_rented() -> None:
    story = Story(max_usd=0.01)
    story.start()
    assert story.emitted(c.LaunchVms) == []
    (finish,) = story.emitted(c.Finish)
    assert finish.outcome.exit_code == 4


def test_a_deadline_saves_and_ends_the_job() -> None:
    story = Story(deadline_s=2000.0).training(*FOUR)
    story.wait(2000.0 - story.now_s)
    assert story.sent(messages.StopGeneration)["a"].checkpoint
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == 4


def test_a_job_without_capacity_gives_up_after_its_wait() -> None:
    story = Story(capacity_wait_s=60.0)
    story.start(replace(OFFER, available=0))
    story.wait(60.0)
    (finish,) = story.emitted(c.Finish)
    assert (finish.outcome.kind, finish.outcome.exit_code) == ("capacity", 5)


@pytest.mark.parametrize("min_vms", [1, 3])
def test_a_job_with_too_few_vms_to_train_gives_up_after_its_wait(min_vms: int) -> None:
    story = Story(capacity_wait_s=600.0, min_vms=min_vms)
    story.start()
    story.boot("a", "b")
    if min_vms == 1:
        story.prepare()
        story.plan()
    story.wait(599.0)
    assert story.state.outcome is None
    story.wait(1.0)
    assert story.state.outcome is not None
    assert (story.state.outcome.kind, story.state.outcome.exit_code) == ("capacity", 5)
    assert "only 2" in story.state.outcome.reason


def test_a_model_that_fits_no_fleet_ends_the_job() -> None:
    story = Story()
    story.start()
    story.boot(*FOUR)
    story.prepare()
    story.plan()
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == 5


# --- Stop, resume, restart ------------------------------------------------------------------------


def test_a_stop_saves_before_it_returns_the_vms() -> None:
    story = Story().training(*FOUR)
    story.tell(e.StopRequested, by="a person")
    assert story.sent(messages.StopGeneration)["a"].checkpoint
    assert story.emitted(c.TerminateVms) == []
    story.report("a", checkpoint_saved(4))
    story.stopped(4)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=FOUR)]
    story.tell(e.VmsReturned, vm_ids=FOUR)
    (finish,) = story.emitted(c.Finish)
    assert (finish.outcome.kind, finish.outcome.exit_code) == ("stopped", 130)


def test_a_stop_at_once_does_not_wait_for_a_checkpoint() -> None:
    story = Story().training(*FOUR)
    story.tell(e.StopRequested, by="a person")
    story.tell(e.StopRequested, by="a person", now=True)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=FOUR)]


def test_a_stop_at_once_waits_for_vms_that_an_unanswered_launch_may_still_bring() -> None:
    story = Story()
    story.start()
    intent = story.launch().intent
    story.tell(e.LaunchRefused, intent=intent, reason="cut off", refusal="unknown")
    story.tell(e.StopRequested, by="a person", now=True)
    story.wait(SETTLE_S - 1.0)
    assert story.emitted(c.Finish) == []
    vms = (story.listed("late", intent),)
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=vms)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=("late",))]
    story.wait(1.0)
    assert story.emitted(c.LaunchVms) == []
    story.tell(e.VmsReturned, vm_ids=("late",))
    assert len(story.emitted(c.Finish)) == 1
    assert "late" in story.state.history.ledger.closed


def test_a_stop_at_once_asks_no_cloud_again_that_answers_only_then() -> None:
    story = Story()
    story.start()
    intent = story.launch().intent
    story.tell(e.StopRequested, by="a person", now=True)
    story.tell(e.LaunchRefused, intent=intent, reason="cut off", refusal="unknown")
    story.wait(SETTLE_S)
    assert story.emitted(c.LaunchVms) == []
    assert len(story.emitted(c.Finish)) == 1


def test_a_stop_gives_up_its_checkpoint_after_a_while() -> None:
    story = Story().training(*FOUR)
    story.tell(e.StopRequested, by="a person")
    story.wait(120.0)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=FOUR)]


def test_a_stopped_job_resumes_from_its_newest_checkpoint() -> None:
    story = Story().training(*FOUR)
    story.tell(e.StopRequested, by="a person", now=True)
    story.tell(e.VmsReturned, vm_ids=FOUR)
    assert len(story.emitted(c.Finish)) == 1
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    assert story.state.phase is JobPhase.ACTIVE
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=())
    assert story.launch().intent == "intent-1"


def test_a_job_whose_last_weights_were_not_written_has_failed() -> None:
    story = Story().training(*FOUR)
    story.commit(100)
    story.report("a", messages.CheckpointFailed(step=100, reason="no space left"))
    story.stopped(100, done=True)
    story.tell(e.VmsReturned, vm_ids=FOUR)
    (finish,) = story.emitted(c.Finish)
    assert (finish.outcome.kind, finish.outcome.exit_code) == ("failed", 1)
    assert "no space left" in finish.outcome.reason


def test_a_job_that_has_succeeded_stays_so() -> None:
    story = Story().training(*FOUR)
    story.commit(100)
    story.report("a", checkpoint_saved(100))
    story.stopped(100, done=True)
    story.tell(e.VmsReturned, vm_ids=FOUR)
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    (finish,) = story.emitted(c.Finish)
    assert finish.outcome.kind == "succeeded"


def test_a_manager_that_comes_back_in_mid_run_changes_nothing() -> None:
    story = Story().training(*FOUR)
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    assert [w for w in story.commands if not isinstance(w, c.SetTimer)] == []
    vms = tuple(story.listed(vm_id) for vm_id in FOUR)
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=vms)
    assert story.generation.phase is GenerationPhase.RUNNING
    assert story.emitted(c.LaunchVms) == []


@pytest.mark.parametrize(
    ("phase", "order"),
    [("opening", messages.OpenStore), ("starting", messages.RunGeneration)],
)
def test_a_manager_that_comes_back_repeats_what_is_not_answered(
    phase: str, order: type[messages.Command]
) -> None:
    story = Story()
    story.start()
    story.boot(*FOUR)
    story.prepare()
    story.plan(*FOUR)
    if phase == "starting":
        story.open()
    before = story.sent(order)
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    assert story.sent(order) == before


def test_replaying_the_journal_gives_the_same_state() -> None:
    story = Story().training(*FOUR)
    story.tell(e.VmLost, vm_id="d", reason="killed")
    story.broken("a", "b", "c")
    state = State()
    for event in story.events:
        state, _ = step.step(state, event)
    assert state == story.state


# --- A last checkpoint after a failure ----------------------------------------------------------


def fail_in_training(story: Story) -> None:
    """User code raises on one VM, whose end breaks the generation."""
    story.training(*FOUR)
    story.report("a", messages.UserCodeFailed(message="boom", traceback="line 7"))
    story.broken(*FOUR)


def test_what_is_committed_is_saved_after_user_code_has_failed() -> None:
    story = Story()
    fail_in_training(story)
    assert story.emitted(c.TerminateVms) == []
    story.open()
    commands = story.sent(messages.RunGeneration)
    assert set(commands) == set(FOUR)
    assert all(command.save_only for command in commands.values())
    story.begin(3)
    assert not story.sent(messages.StopGeneration), "it stops by itself"
    story.report("a", checkpoint_saved(3))
    story.stopped(3)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=FOUR)]
    story.tell(e.VmsReturned, vm_ids=FOUR)
    (finish,) = story.emitted(c.Finish)
    assert finish.outcome == c.Outcome(
        kind="failed", exit_code=3, reason="boom", traceback="line 7"
    )
    assert story.state.activity == "over: boom; the state of step 3 is saved"


def test_saving_that_runs_into_user_code_again_is_given_up() -> None:
    story = Story()
    fail_in_training(story)
    story.open()
    story.report("b", messages.UserCodeFailed(message="again", traceback=""))
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=FOUR)]
    assert story.state.outcome is not None
    assert story.state.outcome.reason == "boom"


def test_saving_after_a_failure_is_bounded_in_time() -> None:
    story = Story()
    fail_in_training(story)
    story.wait(LAST_CHECKPOINT_S)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=FOUR)]


def test_user_code_that_fails_while_the_job_ends_at_a_limit_is_saved_too() -> None:
    story = Story(deadline_s=2000.0).training(*FOUR)
    story.wait(2000.0 - story.now_s)
    story.report("a", messages.UserCodeFailed(message="boom", traceback=""))
    story.broken(*FOUR)
    assert story.generation.save_only
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == 3


def test_a_failing_setup_of_another_vm_stops_the_generation_with_a_checkpoint() -> None:
    story = Story().training(*FOUR)
    story.tell(e.SetupFailed, vm_id="e", reason="pip", output="")
    assert story.sent(messages.StopGeneration)["a"].checkpoint


def nan(story: Story) -> None:
    for number in (4, 5):
        story.commit(number, only=("a", "b"), skipped="loss")


def refused_plan(story: Story) -> None:
    failed = {"command": "compute_plan", "vm_ids": (), "reason": "no such schedule"}
    story.tell(e.CommandFailed, **failed)


def passed_deadline(story: Story) -> None:
    assert story.state.job.deadline_s is not None
    story.wait(story.state.job.deadline_s - story.now_s)


@pytest.mark.parametrize(
    ("settings", "end", "exit_code"),
    [
        ({"stop_after": 2}, nan, 3),
        ({}, refused_plan, 2),
        ({"deadline_s": 1e6}, passed_deadline, 4),
    ],
)
def test_whatever_ends_a_job_its_newest_state_is_saved_first(
    settings: dict[str, Any], end: Callable[[Story], None], exit_code: int
) -> None:
    story = Story(**settings).training(*FOUR)
    end(story)
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == exit_code
    assert story.sent(messages.StopGeneration)["a"].checkpoint
    assert story.emitted(c.TerminateVms) == []
    story.report("a", checkpoint_saved(3))
    story.stopped(story.step)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=FOUR)]


def test_vms_that_are_too_few_to_train_save_what_they_hold() -> None:
    story = Story(min_vms=3, capacity_wait_s=60.0).training(*FOUR)
    for vm_id in ("c", "d"):
        story.tell(e.VmLost, vm_id=vm_id, reason="killed")
    story.broken("a", "b")
    assert story.current_generation is None
    story.wait(60.0)
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == 5
    story.plan("a", "b")
    assert story.generation.save_only


def test_a_manager_that_starts_while_the_last_weights_are_saved_trains_afterwards() -> None:
    story = Story()
    fail_in_training(story)
    story.open()
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    assert story.sent(messages.RunGeneration)["a"].save_only
    story.begin(3)
    story.report("a", checkpoint_saved(3))
    story.stopped(3)
    story.open()
    assert not story.sent(messages.RunGeneration)["a"].save_only
