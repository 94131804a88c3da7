"""Rounds of preparation, event by event; profiles that make them needless."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from tests.builders import (
    checkpoint_name,
    checkpoint_saved,
    model_facts,
    section_facts,
    slots_of,
)
from tests.unit.varuna_manager.story import FACTS, OFFER, PROFILE, Story

from spottrain.morphing.plan.profiles import BETWEEN_AS_WITHIN, derive_profile
from spottrain.varuna_manager.core.generation import SILENCE_BOUND_S, SLOWEST_BYTES_PER_S
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import Round
from spottrain.varuna_manager.core.preparation import BOOT_WAIT_S
from spottrain.varuna_manager.core.rounds import RETRY_PAUSE_S, describe
from spottrain.wire import messages
from spottrain.wire.model import GroupProfile, ModelFacts, Profile
from spottrain.wire.numerics import Numerics

KNOWN = e.KnownProfile(profile=PROFILE, measured_at_s=400.0)


def booted(
    *ids: str,
    slots: int = 1,
    cores: int = 0,
    known: tuple[e.KnownProfile, ...] = (),
    kinds: Mapping[str, str] = {},
    coming: tuple[str, ...] = (),
    **changes: Any,
) -> Story:
    """VMs of one computer, and the first weights written; ``kinds``: what those compute on
    that are of another type; ``coming``: VMs that still boot."""
    story = Story(max_vms=max(4, len(ids)), **changes)
    offer = replace(OFFER, gpus=slots)
    story.start(offer)
    story.tell(e.ProfilesListed, profiles=known)
    (intent,) = story.intents
    vms = tuple(story.listed(vm_id, intent, offer=offer) for vm_id in (*ids, *coming))
    story.tell(e.VmsLaunched, intent=intent, vms=vms)
    for vm_id in ids:
        come(story, vm_id, slots, cores, kinds.get(vm_id, PROFILE.device))
    if not story.state.job.measures_only:
        story.report(ids[0], checkpoint_saved(0))
    return story


def come(
    story: Story, vm_id: str, slots: int = 1, cores: int = 0, device: str = PROFILE.device
) -> None:
    """Let a VM register and be ready."""
    story.tell(e.AgentRegistered, vm_id=vm_id, num_slots=slots, private_address="10.0.0.1")
    ready = messages.SupervisorReady(
        num_slots=slots,
        torch_version="2",
        device=device,
        software=PROFILE.software,
        machine="computer" if cores else "",
        cores=cores,
    )
    story.report(vm_id, ready)


def round_of(story: Story) -> Round:
    assert story.round is not None, story.state.activity
    return story.round


def taking_part(story: Story) -> list[tuple[str, int]]:
    return [(slot.vm_id, slot.index) for slot in round_of(story).participants]


def test_every_slot_takes_part() -> None:
    story = booted("a", "b", slots=2)

    assert taking_part(story) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]


@pytest.mark.parametrize(
    ("ids", "slots", "cores", "measuring"),
    [
        ("abc", 1, 2, "a0 b0"),
        ("abc", 1, 3, "a0 b0 c0"),
        ("ab", 2, 3, "a0 a1 b0"),
        ("ab", 1, 1, "a0 a0"),
    ],
)
def test_no_more_slots_of_a_computer_measure_than_it_has_cores(
    ids: str, slots: int, cores: int, measuring: str
) -> None:
    story = booted(*ids, slots=slots, cores=cores)

    assert [f"{vm_id}{index}" for vm_id, index in taking_part(story)] == measuring.split()


def test_a_single_slot_measures_a_link_to_itself() -> None:
    assert taking_part(booted("a")) == [("a", 0), ("a", 0)]


def test_every_participant_gets_the_store_and_the_sizes_to_measure() -> None:
    story = booted("a", "b")
    assert list(story.sent(messages.OpenStore)) == ["a"]

    story.open_round()

    assert set(story.sent(messages.Calibrate).values()) == {
        messages.Calibrate(
            generation=-2,
            participants=slots_of("ab"),
            store_host="h",
            store_port=1,
            microbatch_sizes=(1,),
            checkpoint=checkpoint_name(0),
        )
    }


DIVIDED = replace(FACTS, tensor_sizes=(2, 4, 8))
MEASURED = PROFILE.microbatches


@pytest.mark.parametrize(
    ("asked", "facts", "sizes"),
    [(None, DIVIDED, (2, 4, 8)), (4, DIVIDED, (4,)), (1, DIVIDED, ()), (None, FACTS, ())],
)
def test_groups_are_measured_as_far_as_plans_may_have_them(
    asked: int | None, facts: ModelFacts, sizes: tuple[int, ...]
) -> None:
    story = booted("a", slots=4, facts=facts, numerics=Numerics(tensor_parallel=asked))
    story.open_round()

    assert story.sent(messages.Calibrate)["a"].tensor_sizes == sizes


@pytest.mark.parametrize(
    ("slots", "cores", "known", "measures"),
    [
        (1, 0, (), False),
        (2, 0, (), True),
        (2, 1, (), False),
        (3, 0, (2,), False),
        (4, 0, (2,), True),
        (4, 0, (2, 4), False),
    ],
)
def test_a_profile_without_the_groups_that_vms_can_measure_is_measured_again(
    slots: int, cores: int, known: tuple[int, ...], measures: bool
) -> None:
    groups = tuple(GroupProfile(size=size, microbatches=MEASURED) for size in known)
    kept = replace(KNOWN, profile=replace(PROFILE, groups=groups))

    story = booted("a", "b", slots=slots, cores=cores, known=(kept,), facts=DIVIDED)

    assert (story.round is not None) == measures


def test_times_in_groups_are_told() -> None:
    group = GroupProfile(size=2, microbatches=MEASURED)
    nothing = GroupProfile(size=4, microbatches=())

    text = describe(replace(PROFILE, groups=(group, nothing)))

    assert " in groups of 2 slots" in text
    assert " in groups of 4" not in text


def test_progress_is_logged() -> None:
    story = booted("a", "b")
    story.open_round()

    progress = messages.CalibrationProgress(
        generation=-2, done=1, total=3, what="sections with 4 examples"
    )
    story.report("a", progress)

    assert story.state.last_message == "measured 1 of 3: sections with 4 examples"
    assert story.state.activity == "measuring the model's sections (1 of 3)"


def test_what_was_measured_is_kept_for_later_jobs() -> None:
    story = booted("a", "b")

    story.measure()

    assert story.profile == PROFILE
    assert story.emitted(c.KeepProfile) == [c.KeepProfile(profile=PROFILE)]
    assert len(story.emitted(c.ComputePlan)) == 1


@pytest.mark.parametrize(
    "report",
    [
        messages.WorkerDied(generation=-2, slot=0, reason="SIGKILL"),
        messages.GenerationBroken(generation=-2, slot=0, reason="lost a peer"),
    ],
)
def test_a_participant_that_dies_ends_the_round_and_another_begins(
    report: messages.Report,
) -> None:
    story = booted("a", "b")
    story.open_round()

    story.report("b", report)

    abandon = messages.AbandonGeneration(generation=-2)
    assert story.sent(messages.AbandonGeneration) == {"a": abandon, "b": abandon}
    story.wait(RETRY_PAUSE_S)
    assert round_of(story).number == -3
    story.report("a", messages.WorkerDied(generation=-2, slot=0, reason="told to end"))
    assert story.failed_preparations == 1
    story.measure()
    assert story.profile == PROFILE


def test_a_lost_vm_abandons_the_round_without_counting_a_failure() -> None:
    story = booted("a", "b", "c")
    story.open_round()

    story.tell(e.VmLost, vm_id="b", reason="killed")
    story.wait(RETRY_PAUSE_S)

    assert taking_part(story) == [("a", 0), ("c", 0)]
    assert story.failed_preparations == 0


def test_a_calibration_that_fails_three_times_fails_the_job() -> None:
    story = booted("a", "b")
    for number in (-2, -3, -4):
        story.report("a", messages.WorkerDied(generation=number, slot=0, reason="SIGKILL"))
        story.wait(RETRY_PAUSE_S)

    assert story.state.outcome is not None
    assert story.state.outcome.reason == "the measurement failed 3 times: a: SIGKILL"


def test_a_profile_of_an_older_round_is_ignored() -> None:
    story = booted("a", "b")
    story.report("a", messages.WorkerDied(generation=-2, slot=0, reason="SIGKILL"))
    story.wait(RETRY_PAUSE_S)

    story.report("a", messages.Calibrated(profile=PROFILE, generation=-2))

    assert story.profile is None


def test_a_restarted_manager_repeats_what_the_round_waits_for() -> None:
    story = booted("a", "b")
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    assert list(story.sent(messages.OpenStore)) == ["a"]
    story.open_round()

    story.tell(e.ManagerStarted, software_version="1", pid=3)

    assert set(story.sent(messages.Calibrate)) == {"a", "b"}


def test_a_kept_profile_is_reused_without_measuring() -> None:
    story = booted("a", "b", known=(KNOWN,))

    assert story.profile == PROFILE
    assert story.round is None
    news = f"profile of {PROFILE.device} reused, measured 10 min 00 s ago"
    assert story.state.last_message == news
    assert len(story.emitted(c.ComputePlan)) == 1


def test_a_kept_profile_of_a_busy_machine_is_reused_and_told_as_such() -> None:
    one = PROFILE.microbatches[0]
    sections = tuple(replace(s, forward_spread=0.4, backward_spread=0.4) for s in one.sections)
    busy = replace(PROFILE, microbatches=(replace(one, sections=sections),))
    story = booted("a", "b", known=(replace(KNOWN, profile=busy),))
    assert story.profile == busy
    assert story.round is None
    assert "busy: times vary by 40%" in story.state.last_message


@pytest.mark.parametrize(
    "changes",
    [
        {"device": "other"},
        {"software": "other"},
        {"fingerprint": "other"},
        {"microbatches": (replace(PROFILE.microbatches[0], microbatch_size=2),)},
        {"sources": (BETWEEN_AS_WITHIN,)},
        {"task_overhead_s": float("nan")},
    ],
)
def test_a_profile_that_does_not_fit_is_measured_again(
    changes: dict[str, object],
) -> None:
    other = replace(KNOWN, profile=replace(PROFILE, **changes))  # type: ignore[arg-type]

    story = booted("a", "b", known=(other,))

    assert round_of(story).number == -2


def test_a_profile_with_assumed_links_is_reused_on_a_single_vm() -> None:
    assumed = replace(PROFILE, sources=(BETWEEN_AS_WITHIN,))

    story = booted("a", known=(replace(KNOWN, profile=assumed),))

    assert story.profile == assumed


def scaled(device: str, ratio: float) -> Profile:
    """Return what is measured on a device that is so many times as fast."""
    return replace(derive_profile(PROFILE, device, ratio), origin="measured", sources=())


FAST = scaled("fast", 4.0)


def test_each_type_of_device_is_measured_before_training_begins() -> None:
    story = booted("a", "b", "c", kinds={"c": "fast"})
    assert taking_part(story) == [("a", 0), ("b", 0)]

    story.measure()

    assert taking_part(story) == [("c", 0), ("c", 0)]
    assert story.plan_asked is None
    story.measure(FAST)
    assert story.emitted(c.KeepProfile) == [c.KeepProfile(profile=FAST)]
    (asked,) = story.emitted(c.ComputePlan)
    assert asked.inputs.profile == PROFILE
    assert asked.inputs.measured == (FAST,)
    assert [(d.kind, d.speed) for d in asked.inputs.slots] == [("", 1), ("", 1), ("fast", 4)]


def test_a_type_that_was_measured_for_an_earlier_job_is_not_measured_again() -> None:
    known = KNOWN, e.KnownProfile(profile=FAST, measured_at_s=1.0)
    story = booted("a", "c", known=known, kinds={"c": "fast"})

    assert story.round is None
    (asked,) = story.emitted(c.ComputePlan)
    assert asked.inputs.measured == (FAST,)


def test_a_type_on_which_measuring_fails_keeps_the_estimate() -> None:
    story = booted("a", "c", kinds={"c": "fast"}, known=(KNOWN,))
    died = messages.WorkerDied(generation=round_of(story).number, slot=0, reason="SIGKILL")

    story.report("c", died)
    story.wait(RETRY_PAUSE_S)

    assert story.round is None
    assert story.plan_asked is not None
    story.plan("a", "c")
    assert story.generation.plan.slots == slots_of("ac")


def with_a_fast_spare() -> Story:
    """A job that trains on ``a`` and ``b``; ``c``, of another type, has come since."""
    story = booted("a", "b", coming=("c",), known=(KNOWN,), debounce_s=2.0)
    story.wait(BOOT_WAIT_S)
    story.plan("a", "b")
    story.open()
    story.begin(0)
    story.commit(1)
    come(story, "c", device="fast")
    story.wait(2.0)
    return story


def test_a_vm_of_another_type_that_joins_is_measured_beside_training() -> None:
    story = with_a_fast_spare()
    assert taking_part(story) == [("c", 0), ("c", 0)]
    story.commit(2)

    story.measure(FAST)

    (asked,) = story.emitted(c.ComputePlan)
    assert asked.inputs.measured == (FAST,)


def test_what_has_trained_does_not_wait_for_measuring() -> None:
    story = with_a_fast_spare()
    story.tell(e.VmLost, vm_id="b", reason="killed")
    story.report("a", messages.GenerationBroken(generation=1, slot=0, reason="lost a peer"))

    assert story.round is None
    assert story.plan_asked is not None


def test_a_profile_that_the_user_gives_is_taken() -> None:
    given = replace(PROFILE, origin="written", sources=("a book",))
    story = Story(profile=given)
    story.start()
    story.boot("a", "b")
    story.report("a", checkpoint_saved(0))

    assert story.round is None
    (command,) = story.emitted(c.ComputePlan)
    assert command.inputs.profile == given
    assert command.inputs.facts == FACTS


def test_a_job_that_only_measures_writes_no_weights_and_ends_with_its_profile() -> None:
    story = booted("a", known=(KNOWN,), measures_only=True)
    assert not story.sent(messages.Initialise)
    assert taking_part(story) == [("a", 0), ("a", 0)], "a kept profile is not enough"

    story.open_round()
    number = round_of(story).number
    story.report("a", messages.Calibrated(profile=PROFILE, generation=number))

    assert [c.profile for c in story.emitted(c.KeepProfile)] == [PROFILE]
    assert story.state.outcome is not None
    assert story.state.outcome.kind == "succeeded"
    assert story.emitted(c.TerminateVms)


# --- First weights, and limits that know the size -------------------------------------------

LARGE = model_facts(section_facts(k, param_bytes=2 * 10**9) for k in range(16))
"""8 billion parameters."""


def test_every_vm_writes_its_share_of_a_large_models_first_weights() -> None:
    story = Story(facts=LARGE)
    story.start()
    story.boot("a", "b", "c", "d")

    assert taking_part(story) == [("a", 0), ("b", 0), ("c", 0), ("d", 0)]
    assert story.state.activity == "writing the first weights"
    story.open_round()
    assert set(story.sent(messages.Initialise)) == set("abcd")
    story.report("c", messages.SectionPrepared(generation=-1, section=8))
    assert story.state.activity == "writing the first weights (1 of 16)"
    story.report("a", checkpoint_saved(0))
    assert round_of(story).purpose == "measurement"


@pytest.mark.parametrize("purpose", ["first weights", "measurement"])
def test_a_round_may_take_any_time_as_long_as_it_gets_on(purpose: str) -> None:
    story = Story(facts=LARGE)
    story.start()
    story.boot("a", "b", "c", "d")
    if purpose == "measurement":
        story.write_first_weights()
    number = story.open_round().number

    for section in range(16):
        story.wait(SILENCE_BOUND_S)
        story.report("b", messages.SectionPrepared(generation=number, section=section))

    assert (round_of(story).number, story.failed_preparations) == (number, 0)
    assert round_of(story).purpose == purpose


def test_a_round_that_is_silent_for_longer_than_its_largest_section_takes_fails() -> None:
    story = Story(facts=LARGE)
    story.start()
    story.boot("a", "b", "c", "d")
    story.open_round()
    bound_s = SILENCE_BOUND_S + (2 * 10**9 + 8) / SLOWEST_BYTES_PER_S

    story.wait(bound_s - 1)
    assert story.failed_preparations == 0
    story.wait(1)
    assert story.failed_preparations == 1
    assert "the first weights failed: no sign of progress in 800 s" in story.state.last_message


def test_a_start_may_take_any_time_as_long_as_a_rank_gets_on() -> None:
    story = booted("a", "b", facts=LARGE)
    story.measure()
    story.plan("a", "b")
    story.open()

    for section in range(4):
        story.wait(SILENCE_BOUND_S)
        story.report("b", messages.SectionPrepared(generation=1, section=section))
    assert "recovering" not in story.state.activity

    story.wait(2 * SILENCE_BOUND_S)
    assert story.generation.break_reason == "its start showed no sign of progress in 800 s"
