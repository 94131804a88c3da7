"""The life of a job, event by event, and the commands that the core emits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.builders import (
    checkpoint_name,
    checkpoint_saved,
    minibatch_committed,
    slots_of,
)
from tests.fakes.gpus import facts
from tests.unit.varuna_manager.story import FOUR, PROFILE, Story
from tests.view import changed

from spottrain.cloud.port.provider import VmState
from spottrain.manifest import CheckpointEntry
from spottrain.varuna_manager.core import planning, preparation
from spottrain.varuna_manager.core.generation import (
    ABANDON_AFTER_S,
    ABANDON_FORMING_S,
    ABANDON_NCCL_AFTER_S,
    FENCE_AFTER_S,
)
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.errors import InternalError
from spottrain.varuna_manager.core.model.records import GenerationPhase, VmPhase
from spottrain.varuna_manager.core.model.settings import Limit, PoolGrant
from spottrain.varuna_manager.core.model.state import JobPhase
from spottrain.varuna_manager.core.rounds import RETRY_PAUSE_S
from spottrain.wire import messages
from spottrain.wire.model import StateHome
from spottrain.wire.numerics import Numerics
from spottrain.wire.patience import evacuation_s

# --- From nothing to training ---------------------------------------------------------------


def test_the_first_ready_vm_writes_the_weights_and_then_all_measure() -> None:
    story = Story()
    story.start()
    story.boot("a", "b")
    assert story.round is not None
    assert (story.round.purpose, story.round.participants) == ("first weights", slots_of("a"))
    story.report("a", checkpoint_saved(0))
    assert list(story.sent(messages.OpenStore)) == ["a"]
    story.open_round()
    assert set(story.sent(messages.Calibrate)) == {"a", "b"}
    story.report("a", messages.Calibrated(profile=PROFILE, generation=-2))
    assert story.profile == PROFILE


def test_preparation_moves_to_another_vm_when_its_vm_is_lost() -> None:
    story = Story()
    story.start()
    story.boot("a", "b")
    story.tell(e.VmLost, vm_id="a", reason="killed")
    story.wait(RETRY_PAUSE_S)
    assert list(story.sent(messages.Initialise)) == ["b"]


def test_a_preparation_that_fails_three_times_fails_the_job() -> None:
    story = Story()
    story.start()
    story.boot("a")
    for number in (-1, -2, -3):
        story.report("a", messages.WorkerDied(generation=number, slot=0, reason="SIGKILL"))
        story.wait(RETRY_PAUSE_S)
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == 1
    assert "SIGKILL" in story.state.outcome.reason


def test_no_weights_are_written_when_a_checkpoint_exists() -> None:
    story = Story()
    story.start()
    launch = story.emitted(c.LaunchVms)
    found = (CheckpointEntry(name=checkpoint_name(7), step=7),)
    story.tell(e.CheckpointsListed, checkpoints=found)
    story.commands = tuple(launch)
    story.boot("a", "b")
    assert story.round is not None
    assert story.round.purpose == "measurement"


def three_of_four_ready() -> Story:
    story = Story()
    story.start()
    vms = tuple(story.listed(vm_id) for vm_id in FOUR)
    story.tell(e.VmsLaunched, intent="intent-0", vms=vms)
    for vm_id in ("a", "b", "c"):
        story.ready(vm_id)
    story.report("a", checkpoint_saved(0))
    return story


def test_measuring_and_the_first_plan_wait_for_vms_that_boot_but_not_for_ever() -> None:
    story = three_of_four_ready()
    assert story.round is None
    story.wait(preparation.BOOT_WAIT_S)
    story.measure()
    assert len(story.emitted(c.ComputePlan)) == 1


def test_measuring_and_the_first_plan_begin_when_nobody_boots_any_more() -> None:
    story = three_of_four_ready()
    story.ready("d")
    story.measure()
    assert len(story.emitted(c.ComputePlan)) == 1


def test_a_generation_goes_through_store_and_hand_over_to_training() -> None:
    story = Story()
    story.start()
    story.boot(*FOUR)
    story.prepare()
    story.plan(*FOUR)
    assert story.sent(messages.OpenStore) == {"a": messages.OpenStore(generation=1)}
    story.open()
    orders = story.sent(messages.RunGeneration)
    assert set(orders) == set(FOUR)
    assert orders["a"].checkpoint == checkpoint_name(0)
    assert orders["a"].evaluate_first
    assert (orders["a"].store_host, orders["a"].store_port) == ("h", 1)
    for vm_id in FOUR[:3]:
        story.report(vm_id, story.started(0))
    assert story.generation.started_at_s is None
    story.report("d", story.started(0))
    assert story.generation.phase is GenerationPhase.RUNNING


def test_of_parts_that_are_due_at_the_same_moment_the_earlier_has_its_way() -> None:
    silent = Story().training(*FOUR)
    silent.now_s += 70.0
    silent.tell(e.StopRequested, by="x", checkpoint=True, now=False)
    assert silent.generation.inspection is not None, "asked for, before it is told to stop"

    stuck = Story().training(*FOUR)
    stuck.tell(e.StopRequested, by="x", checkpoint=True, now=False)
    stuck.now_s += 1000.0
    stuck.tell(e.StopRequested, by="x", checkpoint=True, now=False)
    assert stuck.state.last_message == "generation 1 broke: it did not stop in 900 s"

    over = Story()
    over.tell(e.GrantReceived, grant=PoolGrant(pool="lab", serial=1))
    over.tell(e.ManagerStarted, software_version="1", pid=1)
    assert over.state.preparation.blocked_since_s is None, "a job that ends waits for nothing"


def test_a_stale_plan_is_ignored() -> None:
    story = Story()
    story.start()
    story.boot(*FOUR)
    story.prepare()
    assert story.tell(e.PlanComputed, inputs_hash="stale", plan=None) == ()
    assert story.plan_asked is not None


# --- Commits --------------------------------------------------------------------------------


def test_a_step_is_committed_once_every_section_was_reported() -> None:
    story = Story().training(*FOUR, steps=3)
    story.commit(4, only=("a", "c"))  # both replicas of section 0
    assert story.step == 3
    story.commit(4, only=("b",))
    assert story.step == 4
    assert story.progress.loss_first == pytest.approx(4.99)
    assert story.progress.loss_last == pytest.approx(4.96)


def test_a_report_that_comes_twice_counts_once() -> None:
    story = Story().training(*FOUR)
    story.tell(e.TimerFired)  # commits put it off, but do not set it
    state = story.state
    story.tell(
        e.ReportReceived,
        vm_id="a",
        number=0,
        report=messages.WorkerDied(generation=1, slot=0, reason="old"),
    )
    assert story.state == state


def test_reports_of_a_closed_generation_are_ignored() -> None:
    story = Story().training(*FOUR)
    phase = story.generation.phase
    story.report("a", messages.GenerationBroken(generation=0, slot=0, reason="stale"))
    assert story.generation.phase is phase


def test_success_returns_all_vms_and_finishes_once_they_are_gone() -> None:
    story = Story().training(*FOUR)
    story.commit(100)
    story.report("a", messages.Evaluated(generation=1, step=100, loss=2.5))
    story.report("a", checkpoint_saved(100))
    story.stopped(100, done=True)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=FOUR)]
    assert story.emitted(c.Finish) == []
    story.tell(e.VmsReturned, vm_ids=FOUR)
    (finish,) = story.emitted(c.Finish)
    assert (finish.outcome.kind, finish.outcome.exit_code) == ("succeeded", 0)
    assert story.state.phase is JobPhase.ENDED
    assert story.progress.heldout_last == 2.5


def test_training_that_stops_early_is_a_success_once_its_weights_are_saved() -> None:
    story = Story().training(*FOUR)
    for step in range(4, 41):
        story.commit(step)
    story.report("a", checkpoint_saved(40))
    story.stopped(40, done=True, early="val/loss has not improved in 3 evaluations")
    outcome = story.state.outcome
    assert outcome is not None
    assert (outcome.kind, outcome.exit_code) == ("succeeded", 0)
    assert outcome.reason == (
        "40 steps done, stopped early: val/loss has not improved in 3 evaluations"
    )


def test_evaluations_of_several_sets_are_told_by_the_first_one() -> None:
    story = Story().training(*FOUR, steps=4)
    for name, loss in (("near", 3.0), ("far", 2.0)):
        report = messages.Evaluated(
            generation=1, step=4, loss=loss, name=name, is_best=name == "far"
        )
        story.report("a", report)
    progress = story.progress
    assert (progress.heldout_set, progress.heldout_last) == ("near", 3.0)
    assert progress.best_step == 4
    assert "loss on far 2.000 after 4 steps, the best so far" in story.state.last_message


# --- Steps that are not finite ----------------------------------------------------------------


def test_a_job_ends_after_steps_in_a_row_that_are_not_finite() -> None:
    story = Story(stop_after=3).training(*FOUR)
    reasons: list[messages.SkipReason]
    reasons = ["loss", "gradients", "", "loss", "loss"]
    for step, reason in enumerate(reasons, 4):
        story.commit(step, skipped=reason)
        assert story.state.phase is JobPhase.ACTIVE
    assert "step 7 changed nothing: its loss is not finite" in story.state.last_message
    story.commit(9, only=("a", "b"), skipped="gradients")
    outcome, progress = story.state.outcome, story.progress
    assert outcome is not None
    assert (outcome.kind, outcome.exit_code) == ("failed", 3)
    assert "3 mini-batches in a row, up to step 9, not finite" in outcome.reason
    assert (progress.nonfinite_steps, progress.nonfinite_last) == (5, 9)


def test_a_loss_scale_that_backs_off_is_no_trouble() -> None:
    story = Story(stop_after=2).training(*FOUR)
    for step in range(4, 20):
        story.commit(step, skipped="scale")
    assert story.state.phase is JobPhase.ACTIVE
    assert story.progress.nonfinite_last is None


# --- Breaks -----------------------------------------------------------------------------------


def test_a_killed_vm_costs_that_vm_alone_and_survivors_plan_at_once() -> None:
    story = Story().training(*FOUR)
    story.now_s += 1.0
    killed = story.listed("d", state=VmState.TERMINATED, ended_at_s=story.now_s)
    others = tuple(story.listed(vm_id) for vm_id in FOUR[:3])
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(*others, killed))
    assert story.generation.phase is GenerationPhase.BREAKING
    story.broken("a", "b", "c")
    assert story.current_generation is None
    (question,) = story.emitted(c.ComputePlan)
    assert [d.slot.vm_id for d in question.inputs.slots] == ["a", "b", "c"]
    story.plan("a", "b")
    story.open()
    order = story.sent(messages.RunGeneration)["c"]
    assert order.participants[2:] == slots_of("c"), "c is a donor"
    story.begin(3)
    story.now_s += 4.0
    story.commit(4)
    (hit,) = story.interruptions
    assert (hit.interruption, hit.generation, hit.cost_s) == ("kill", 1, 4.0)
    assert story.tally.preemptions_unnoticed == 1


def test_copies_of_the_plan_before_are_none_of_the_next() -> None:
    """A VM that is lost has taken some, and the next plan keeps them on other VMs."""
    story = Story().training("a", "b", "c")
    made = next(one for one in reversed(story.events) if isinstance(one, e.ProgressMade))
    story.take(replace(made, copied_step=2))
    assert story.copied_step == 2
    story.tell(e.VmLost, vm_id="b", reason="killed")
    story.broken("a")
    story.plan("a", "c")
    story.open()
    assert story.copied_step == 2
    story.begin(2)
    assert story.copied_step is None


def test_survivors_that_hang_are_told_to_give_up_then_suspected() -> None:
    story = Story().training(*FOUR)
    story.tell(e.VmLost, vm_id="d", reason="killed")
    story.broken("a")
    assert story.wait(1.0) == ()
    story.wait(2.0)
    assert set(story.sent(messages.AbandonGeneration)) == {"b", "c"}
    story.report("b", messages.WorkerDied(generation=1, slot=0, reason="SIGKILL"))
    assert story.tally.worker_deaths == 0, "we had it killed"
    story.wait(20.0)
    assert story.emitted(c.AskProvider) == [c.AskProvider(vm_id="c")]
    story.tell(e.ProviderAnswered, vm_id="c", state=VmState.RUNNING)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=("c",))]
    assert story.current_generation is None


def forming(state: StateHome | None = None, *, on_gpus: bool = False) -> Story:
    """Return a story in which one rank has its sections, and the others wait for it."""
    story = Story(numerics=Numerics(state=state))
    story.start()
    story.boot(*FOUR)
    story.prepare()
    story.plan(*FOUR)
    story.open()
    story.report("a", story.started(0))
    if on_gpus:
        vms = {k: replace(vm, gpus=(facts(),)) for k, vm in story.vms.items()}
        story.state = changed(story.state, vms=vms)
    return story


@pytest.mark.parametrize("how", ["its VM is lost", "it is killed", "it has left"])
def test_a_loss_while_groups_form_is_not_waited_out(how: str) -> None:
    story = forming()
    if how == "its VM is lost":
        story.tell(e.VmLost, vm_id="d", reason="killed")
    elif how == "it is killed":
        story.report("d", messages.WorkerDied(generation=1, slot=0, reason="SIGKILL"))
    else:
        story.broken("d")
    assert story.wait(0.2) == ()
    story.wait(0.2)

    assert set(story.sent(messages.AbandonGeneration)) == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("story", "patience_s"),
    [
        (forming(on_gpus=True), ABANDON_NCCL_AFTER_S),
        (forming("host", on_gpus=True), ABANDON_FORMING_S),
        (Story().training(*FOUR), ABANDON_AFTER_S),
    ],
)
def test_state_on_gpus_and_ranks_that_train_are_given_the_time_to_leave(
    story: Story, patience_s: float
) -> None:
    story.tell(e.VmLost, vm_id="d", reason="killed")
    story.wait(0.9 * patience_s)
    assert story.sent(messages.AbandonGeneration) == {}
    story.wait(0.2 * patience_s)
    assert set(story.sent(messages.AbandonGeneration)) == {"a", "b", "c"}


@pytest.mark.parametrize("share_bytes", [10**9, 10**11])
def test_ranks_that_bring_state_from_gpus_are_suspected_when_they_must_have_done_so(
    share_bytes: int,
) -> None:
    story = forming(on_gpus=True)
    job = story.state.job
    each = share_bytes * 2 // (2 * len(job.facts.sections))  # gradients are as large; two stages
    sections = tuple(
        replace(one, param_bytes=each, optimizer_bytes=0) for one in job.facts.sections
    )
    sized = replace(job, facts=replace(job.facts, sections=sections))
    story.state = replace(story.state, settings=sized)
    story.tell(e.VmLost, vm_id="d", reason="killed")
    story.broken("a", "b")
    story.wait(ABANDON_NCCL_AFTER_S)
    story.wait(evacuation_s(share_bytes))
    assert story.emitted(c.AskProvider) == []
    story.wait(FENCE_AFTER_S + evacuation_s(share_bytes))
    assert story.emitted(c.AskProvider) == [c.AskProvider(vm_id="c")]


def test_a_dead_worker_whose_vm_lives_keeps_its_slot() -> None:
    story = Story().training(*FOUR)
    story.report("b", messages.WorkerDied(generation=1, slot=0, reason="SIGKILL"))
    story.broken("a", "c", "d")
    assert story.generation.number == 2, "the same slots: the same plan, at once"
    assert {slot.vm_id for slot in story.generation.plan.slots} == set(FOUR)
    assert story.tally.worker_deaths == 1


def test_a_silent_vm_is_asked_about_then_returned_and_counted() -> None:
    story = Story().training(*FOUR)
    story.tell(e.VmSilent, vm_id="c")
    assert story.emitted(c.AskProvider) == [c.AskProvider(vm_id="c")]
    story.tell(e.ProviderAnswered, vm_id="c", state=VmState.RUNNING)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=("c",))]
    assert story.tally.silent_losses == 1
    assert story.generation.phase is GenerationPhase.BREAKING
    woken = minibatch_committed(50, sections=(0, 1))
    story.report("c", woken)
    assert story.step == 3, "who was fenced is not heard any more"


def test_a_vm_that_wakes_before_the_answer_is_kept() -> None:
    story = Story().training(*FOUR)
    story.tell(e.VmSilent, vm_id="c")
    story.tell(e.VmHeard, vm_id="c")
    story.tell(e.ProviderAnswered, vm_id="c", state=VmState.RUNNING)
    assert story.emitted(c.TerminateVms) == []
    assert story.generation.phase is GenerationPhase.RUNNING


def test_a_restore_counts_committed_minibatches_that_are_computed_again() -> None:
    story = Story().training(*FOUR, steps=5)
    story.tell(e.VmLost, vm_id="d", reason="killed")
    story.broken("a", "b", "c")
    story.plan("a", "b")
    story.open()
    story.begin(2)
    assert story.minibatches_recomputed == 3
    assert story.minibatches_lost == 3, "for now"
    for step in range(3, 6):
        story.commit(step)
    assert story.minibatches_lost == 0
    assert story.interruptions[0].minibatches_recomputed == 3


@pytest.mark.parametrize(
    "report",
    [
        messages.CheckpointSaved(name="step-4-g1-../../etc", step=4),
        replace(checkpoint_saved(4), step=40),
        checkpoint_saved(101),
        checkpoint_saved(4, generation=2),
        checkpoint_saved(4, generation=0),
    ],
)
def test_a_checkpoint_that_cannot_be_saves_nothing(
    report: messages.CheckpointSaved,
) -> None:
    story = Story().training(*FOUR)
    before = story.state.newest_checkpoint
    story.report("a", report)
    assert story.state.newest_checkpoint == before
    assert story.step == 3
    assert "cannot be" in story.state.last_message
    story.report("a", checkpoint_saved(4))
    newest = story.state.newest_checkpoint
    assert newest is not None
    assert newest.name == checkpoint_name(4)


REFS = (
    CheckpointEntry(name=checkpoint_name(5), step=5),
    CheckpointEntry(name=checkpoint_name(0), step=0),
)
TORN = messages.CheckpointDamaged(
    name=checkpoint_name(5), reason="bad hash", file="step-5/section-0.safetensors"
)
AWAY = messages.CheckpointUnreachable(name=checkpoint_name(5), reason="no such folder")


def cannot_read(*reports: messages.Report) -> Story:
    """Two VMs are to load a checkpoint; the first ones report that they cannot."""
    story = Story().training(*FOUR, steps=5)
    story.report("a", checkpoint_saved(5))
    story.tell(e.VmLost, vm_id="d", reason="killed")
    story.broken("a", "b", "c")
    story.plan("a", "b")
    story.open()
    assert story.sent(messages.RunGeneration)["a"].checkpoint == checkpoint_name(5)
    asked = []
    for vm_id, report in zip("ab", reports, strict=False):
        story.report(vm_id, report)
        asked += story.emitted(c.ListCheckpoints)
    assert len(asked) == len(reports)
    story.broken("a", "b")
    assert story.current_generation is None, "the store is asked first"
    return story


def listed(
    story: Story,
    refs: tuple[CheckpointEntry, ...] = REFS,
    damaged: tuple[messages.CheckpointDamaged, ...] = (),
) -> None:
    """The manager's answer."""
    now_s = story.now_s
    story.tell(e.CheckpointsListed, checkpoints=refs, damaged=damaged, asked_at_s=now_s)


def reopened(story: Story) -> str:
    """Return the checkpoint of the generation that follows."""
    story.open()
    return story.sent(messages.RunGeneration)["a"].checkpoint


def test_a_checkpoint_that_the_manager_finds_damaged_is_not_chosen_until_it_is_whole() -> None:
    story = cannot_read(TORN)
    listed(story, damaged=(TORN,))
    assert reopened(story) == checkpoint_name(0)
    listed(story)
    newest = story.state.newest_checkpoint
    assert newest is not None
    assert newest.name == checkpoint_name(5)


def test_what_one_vm_calls_damaged_is_read_again_if_the_manager_finds_it_whole() -> None:
    story = cannot_read(TORN)
    listed(story)
    assert story.current_generation is None, "not at once"
    story.wait(5.0)
    assert reopened(story) == checkpoint_name(5)
    assert story.damaged == ()


@pytest.mark.parametrize("report", [TORN, AWAY])
def test_a_vm_that_alone_cannot_read_checkpoints_is_returned(
    report: messages.Report,
) -> None:
    story = cannot_read(report)
    listed(story)
    story.wait(5.0)
    story.open()
    story.report("a", report)
    story.broken("a", "b")
    listed(story)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=("a",))]
    assert story.state.outcome is None


def test_a_listing_from_before_a_doubt_does_not_answer_it() -> None:
    story = cannot_read(TORN)
    story.tell(e.CheckpointsListed, checkpoints=REFS, asked_at_s=story.now_s - 1.0)
    assert story.current_generation is None
    assert story.doubted


def test_a_store_that_stays_away_ends_the_job_and_says_what_to_do() -> None:
    story = cannot_read(AWAY, AWAY)
    story.tell(e.StoreUnreachable, reason="cannot list /ck: not mounted")
    assert story.state.phase is JobPhase.ACTIVE
    story.wait(planning.STORE_WAIT_S)
    outcome = story.state.outcome
    assert outcome is not None
    assert outcome.exit_code == 1
    assert "not mounted" in outcome.reason
    assert "resume" in outcome.reason


def test_a_store_that_comes_back_is_waited_for() -> None:
    story = cannot_read(AWAY, AWAY)
    story.tell(e.StoreUnreachable, reason="not mounted")
    story.wait(planning.STORE_WAIT_S / 2)
    listed(story)
    story.wait(5.0)
    assert reopened(story) == checkpoint_name(5)
    story.begin(5)
    assert story.step == 5


def resumed_without_checkpoints() -> Story:
    """A job that has trained, all of whose VMs and checkpoints are gone."""
    story = Story().training(*FOUR, steps=5)
    story.report("a", checkpoint_saved(5))
    for vm_id in FOUR:
        story.tell(e.VmLost, vm_id=vm_id, reason="killed")
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    return story


def test_nothing_is_rented_for_a_store_that_is_away_and_the_job_ends() -> None:
    story = resumed_without_checkpoints()
    story.tell(e.StoreUnreachable, reason="not mounted")
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=())
    assert not story.emitted(c.LaunchVms)
    assert "not mounted" in story.state.activity
    story.wait(planning.STORE_WAIT_S)
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == 1


def test_a_job_that_has_trained_never_begins_again_by_itself() -> None:
    """Neither when its checkpoints are gone, nor while they cannot be seen."""
    story = resumed_without_checkpoints()
    story.state = changed(story.state, checkpoints=())
    story.tell(e.StoreUnreachable, reason="not mounted")
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=())
    assert not story.emitted(c.LaunchVms), "nothing is rented meanwhile"
    assert "not mounted" in story.state.activity
    story.tell(e.CheckpointsListed, checkpoints=(), asked_at_s=story.now_s)
    assert not story.emitted(c.LaunchVms)
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == 1
    assert "--from-scratch" in story.state.outcome.reason

    story.tell(e.FromScratchRequested, by="me")
    story.tell(e.ManagerStarted, software_version="1", pid=3)
    story.tell(e.CheckpointsListed, checkpoints=(), asked_at_s=story.now_s)
    assert story.state.outcome is None


def test_breaks_without_progress_fail_the_job_with_the_last_reason() -> None:
    story = Story().training(*FOUR)
    for _ in range(9):
        if story.state.phase is JobPhase.ACTIVE:
            story.broken(*FOUR)
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == 1
    assert "lost a peer" in story.state.outcome.reason


def test_user_code_that_raises_ends_the_job_with_its_traceback() -> None:
    story = Story().training(*FOUR, steps=0)
    story.report("a", messages.UserCodeFailed(message="boom", traceback="line 7"))
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=FOUR)]
    assert story.state.outcome == c.Outcome(
        kind="failed", exit_code=3, reason="boom", traceback="line 7"
    )
    assert story.current_generation is None


def test_vms_that_fall_short_wait_for_capacity_and_keep_their_memory() -> None:
    story = Story(max_vms=5).training(*FOUR)
    for vm_id in ("b", "c", "d"):
        story.tell(e.VmLost, vm_id=vm_id, reason="killed")
    story.broken("a")
    story.plan()
    assert story.current_generation is None
    assert "waiting for" in story.state.activity
    assert story.vm("a").phase is VmPhase.READY


def test_an_internal_error_shows_the_last_events_and_what_came_of_them() -> None:
    story = Story()
    story.start()
    impossible = Limit(name="deadline_s", value=-1e20)  # no calendar has it
    with pytest.raises(InternalError, match="LimitsChanged; the job is active") as caught:
        story.tell(e.LimitsChanged, by="me", limits=(impossible,))
    (shown,) = caught.value.__notes__
    assert "event 1, JobSubmitted; job new -> active; submitted" in shown
