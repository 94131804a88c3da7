"""Renting, reconciling, notices and growth: the commands that the core emits."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from tests.builders import checkpoint_saved
from tests.fakes.gpus import facts as gpu_facts
from tests.unit.varuna_manager.story import FOUR, OFFER, ON_DEMAND, SPEC, Story

from spottrain.cloud.port.provider import Offer, VmState
from spottrain.varuna_manager.core import allocation
from spottrain.varuna_manager.core.fleet import BOOT_BOUND_S
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import GenerationPhase, VmPhase
from spottrain.varuna_manager.core.model.state import MAX_UNFIT
from spottrain.wire import messages
from spottrain.wire.model import Reduction
from spottrain.wire.numerics import Numerics

# --- Launches -------------------------------------------------------------------------------


def test_an_intent_is_journalled_before_anything_is_rented() -> None:
    story = Story()
    story.start()
    launch = c.LaunchVms(intent="intent-0", token="uid-intent-0", offer=OFFER, count=4)
    assert story.emitted(c.LaunchVms) == [launch]


def test_the_cheapest_work_comes_first_and_on_demand_only_if_allowed() -> None:
    fast = replace(OFFER, zone="fast", usd_per_hour=1.5, gpu_speed=2.0)
    story = Story(allow_on_demand=True)
    story.start(OFFER, fast, replace(ON_DEMAND, usd_per_hour=0.1))
    assert story.emitted(c.LaunchVms)[0].offer.zone == "fast"
    none_left = (replace(OFFER, available=0), ON_DEMAND)
    story = Story(allow_on_demand=True)
    story.start(*none_left)
    assert not story.emitted(c.LaunchVms)[0].offer.spot
    story = Story()
    story.start(*none_left)
    assert story.emitted(c.LaunchVms) == []
    assert story.state.activity == "waiting for capacity"


def test_the_hourly_cap_bounds_a_launch() -> None:
    story = Story(max_usd_per_hour=2.5)
    story.start()
    assert story.launch().count == 2


def test_a_vm_that_is_not_ready_in_time_goes_back_data_and_setup_aside() -> None:
    story = Story(busy_s=3600.0)
    story.start()
    (intent,) = story.intents
    story.tell(e.VmsLaunched, intent=intent, vms=(story.listed("a"),))
    story.wait(BOOT_BOUND_S + 3599.0)
    assert story.emitted(c.TerminateVms) == []
    story.wait(1.0)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=("a",))]
    assert story.vm("a").return_reason == "not ready in 4500 s"


def test_nothing_is_rented_before_the_provider_has_listed_its_vms() -> None:
    story = Story()
    story.tell(e.ManagerStarted, software_version="1", pid=1)
    story.tell(e.OffersSeen, offers=(OFFER,))
    assert story.emitted(c.LaunchVms) == []
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=())
    assert len(story.emitted(c.LaunchVms)) == 1


def test_a_refused_offer_is_in_cooldown() -> None:
    story = Story()
    story.start()
    story.tell(e.LaunchRefused, intent="intent-0", reason="sold out", refusal="no_capacity")
    assert story.emitted(c.LaunchVms) == []
    story.wait(30.0)
    assert story.launch().intent == "intent-1"


def test_capacity_that_returns_ends_the_cooldown() -> None:
    story = Story()
    story.start()
    story.tell(e.LaunchRefused, intent="intent-0", reason="sold out", refusal="no_capacity")
    story.tell(e.OffersSeen, offers=(replace(OFFER, available=1), ON_DEMAND))
    assert story.launch().count == 1


def test_an_answer_that_leaves_it_open_is_asked_again_with_the_same_token() -> None:
    story = Story()
    story.start()
    story.tell(e.LaunchRefused, intent="intent-0", reason="timeout", refusal="unknown")
    assert story.emitted(c.LaunchVms) == []
    story.wait(5.0)
    (again,) = story.emitted(c.LaunchVms)
    assert again.token == "uid-intent-0"


def test_refused_credentials_fail_a_job_that_has_nothing() -> None:
    story = Story()
    story.start()
    story.tell(e.LaunchRefused, intent="intent-0", reason="403", refusal="auth")
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == 6


# --- Reconciling ----------------------------------------------------------------------------


def test_a_crash_after_the_create_call_adopts_the_vms_and_rents_no_more() -> None:
    story = Story()
    story.start()
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    assert [command.token for command in story.emitted(c.LaunchVms)] == ["uid-intent-0"]
    vms = tuple(story.listed(vm_id) for vm_id in FOUR)
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=vms)
    assert [command.vm_id for command in story.emitted(c.StartAgent)] == list(FOUR)
    story.tell(e.VmsLaunched, intent="intent-0", vms=vms)
    assert story.emitted(c.StartAgent) == []
    assert story.emitted(c.LaunchVms) == []
    assert len(story.vms) == 4


def test_a_vm_that_nobody_asked_for_is_returned() -> None:
    story = Story()
    story.start()
    orphan = story.listed("x", intent="somebody's")
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(orphan,))
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=("x",))]


def test_a_vm_that_the_list_does_not_have_yet_is_not_lost() -> None:
    story = Story()
    story.start()
    asked_at_s = story.now_s
    story.now_s += 1.0
    vms = (story.listed("a"),)
    story.tell(e.VmsLaunched, intent="intent-0", vms=vms)
    story.tell(e.VmsListed, asked_at_s=asked_at_s, vms=())
    assert "a" in story.vms
    story.tell(e.VmsListed, asked_at_s=story.now_s + 1.0, vms=())
    assert "a" not in story.vms


def test_a_vm_that_never_gets_ready_is_returned() -> None:
    story = Story()
    story.start()
    story.tell(e.VmsLaunched, intent="intent-0", vms=(story.listed("a"),))
    story.wait(900.0)
    assert c.TerminateVms(vm_ids=("a",)) in story.commands


def test_a_failed_return_is_repeated_until_it_works() -> None:
    story = Story()
    story.training(*FOUR)
    story.tell(e.StopRequested, by="a person", now=True)
    story.tell(e.CommandFailed, command="terminate_vms", vm_ids=FOUR, reason="throttled")
    story.wait(5.0)
    returned = [command.vm_ids for command in story.emitted(c.TerminateVms)]
    assert returned == [("a",), ("b",), ("c",), ("d",)]


def test_a_vm_that_starts_slowly_gets_its_agent_once_it_runs() -> None:
    story = Story()
    story.start()
    slow = story.listed("a", state=VmState.STARTING)
    story.tell(e.VmsLaunched, intent="intent-0", vms=(slow,))
    assert story.emitted(c.StartAgent) == []
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(story.listed("a"),))
    assert story.emitted(c.StartAgent) == [c.StartAgent(vm_id="a")]
    assert story.vm("a").phase is VmPhase.BOOTING


# --- Notices and growth -----------------------------------------------------------------------


def test_a_noticed_vm_hands_over_and_is_returned() -> None:
    story = Story(debounce_s=2.0).training(*FOUR)
    story.notice("d", lead_s=120.0)
    assert len(story.emitted(c.LaunchVms)) == 1, "a replacement is rented at once"
    story.wait(2.0)
    story.plan("a", "b")
    stop = messages.StopGeneration(generation=1, checkpoint=False)
    assert story.sent(messages.StopGeneration) == dict.fromkeys(FOUR, stop)
    story.stopped(4)
    story.open()
    order = story.sent(messages.RunGeneration)["d"]
    assert {s.vm_id for s in order.participants[2:]} == {"c", "d"}
    story.begin(4)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=("d",))]
    story.now_s += 3.0
    story.commit(5)
    assert story.interruptions[0].interruption == "notice"
    assert story.interruptions[0].cost_s == pytest.approx(2.0)
    assert story.tally.preemptions_unnoticed == 0


def test_what_is_committed_is_handed_over_though_a_mini_batch_does_not_end() -> None:
    story = Story(debounce_s=2.0).training(*FOUR)
    story.notice("d", lead_s=40.0)
    story.wait(2.0)
    story.plan("a", "b")
    phases = []
    for seconds in (18.0, 2.0):
        story.wait(seconds)
        phases.append(story.generation.phase)
    assert phases == [GenerationPhase.STOPPING, GenerationPhase.BREAKING]
    story.wait(3.0)
    assert set(story.sent(messages.AbandonGeneration)) == set(FOUR)
    for vm_id in FOUR:
        story.report(vm_id, messages.WorkerDied(generation=1, slot=0, reason="it was told to"))
    story.open()
    order = story.sent(messages.RunGeneration)["d"]
    assert {s.vm_id for s in order.participants[2:]} == {"c", "d"}
    assert story.now_s < 1000.0 + 40.0


def test_a_checkpoint_that_a_notice_leads_to_is_not_broken_off() -> None:
    story = Story(debounce_s=2.0).training("a", "b")
    story.notice("b", lead_s=40.0)
    story.wait(2.0)
    story.plan()
    story.wait(30.0)
    assert story.generation.phase is GenerationPhase.STOPPING


def test_a_notice_with_little_time_is_acted_on_at_once() -> None:
    story = Story(debounce_s=60.0).training(*FOUR)
    story.notice("d", lead_s=2.0)
    story.wait(0.5)
    assert len(story.emitted(c.ComputePlan)) == 1


def test_without_a_plan_for_the_rest_a_notice_leads_to_a_checkpoint() -> None:
    story = Story(debounce_s=2.0).training("a", "b")
    story.notice("b", lead_s=120.0)
    story.wait(2.0)
    story.plan()
    assert story.sent(messages.StopGeneration)["a"].checkpoint
    story.report("a", checkpoint_saved(4))
    story.commit(4)
    story.stopped(4)
    assert story.current_generation is None
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=("b",))]


def test_a_spare_that_is_noticed_is_returned_at_once() -> None:
    story = Story()
    story.training("a", "b", "c")
    story.notice("c", lead_s=120.0)
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=("c",))]
    assert story.interruptions[0].cost_s == 0.0
    assert story.generation.phase is GenerationPhase.RUNNING


def test_a_vm_whose_notice_is_cancelled_in_time_goes_on_as_before() -> None:
    story = Story(debounce_s=60.0).training(*FOUR)
    story.tell(e.OffersSeen, offers=())
    story.notice("d", lead_s=120.0)
    story.report("d", messages.InterruptionCancelled())
    vm = story.vm("d")
    assert vm.is_usable
    assert vm.counts
    story.wait(120.0)
    assert story.emitted(c.TerminateVms) == []
    assert story.generation.phase is GenerationPhase.RUNNING
    assert story.tally.preemptions_noticed == 0
    (notice,) = story.interruptions
    assert notice.cancelled_at_s is not None
    assert notice.cost_s == 0.0


def test_a_vm_whose_notice_is_cancelled_late_is_planned_with_again() -> None:
    story = Story(debounce_s=2.0).training(*FOUR)
    story.tell(e.OffersSeen, offers=())
    story.notice("d", lead_s=120.0)
    story.wait(2.0)
    story.plan("a", "b")
    story.report("d", messages.InterruptionCancelled())
    story.stopped(4)
    asked = story.emitted(c.ComputePlan)[-1]
    assert {one.slot.vm_id for one in asked.inputs.slots} == set(FOUR)
    assert story.emitted(c.TerminateVms) == []


def test_a_vm_that_was_replaced_before_its_notice_was_cancelled_leaves() -> None:
    story = Story(debounce_s=60.0).training(*FOUR)
    story.notice("d", lead_s=120.0)
    story.report("d", messages.InterruptionCancelled())
    (intent,) = story.intents
    story.tell(e.VmsLaunched, intent=intent, vms=(story.listed("x", intent),))
    staying = {name for name, vm in story.vms.items() if vm.counts}
    assert staying == {"a", "b", "c", "x"}
    assert "replacement" in story.vm("d").drain_reason


def test_a_cancelled_notice_may_come_again_and_only_once_is_one_cancelled() -> None:
    story = Story(debounce_s=60.0).training(*FOUR)
    story.tell(e.OffersSeen, offers=())
    story.report("d", messages.InterruptionCancelled())
    assert story.tally.preemptions_noticed == 0
    for _ in range(2):
        story.notice("d", lead_s=120.0)
        story.report("d", messages.InterruptionCancelled())
        story.report("d", messages.InterruptionCancelled())
    story.notice("d", lead_s=120.0)
    assert story.tally.preemptions_noticed == 1
    *cancelled, standing = story.interruptions
    assert [hit.cancelled_at_s is None for hit in cancelled] == [False, False]
    assert standing.cancelled_at_s is None


def test_a_notice_that_changes_is_one_notice_with_another_end() -> None:
    story = Story(debounce_s=60.0).training(*FOUR)
    story.notice("d", lead_s=120.0)
    story.notice("d", lead_s=30.0)
    assert story.vm("d").leaves_at_s == story.state.now_s + 30.0
    assert story.tally.preemptions_noticed == 1
    assert len(story.interruptions) == 1


def test_a_vm_that_is_likely_to_be_preempted_is_logged_and_trains_on() -> None:
    story = Story(debounce_s=2.0).training(*FOUR)
    story.report("d", messages.InterruptionLikely())
    assert story.vm("d").is_usable
    assert story.interruptions == ()
    assert "more likely" in story.state.last_message


def _grow(story: Story, *, to: tuple[str, ...], step_s: float) -> None:
    """Let VMs come to a job that trains, and the planner answer."""
    story.tell(e.OffersSeen, offers=(OFFER,))
    story.boot(*(vm_id for vm_id in to if vm_id not in story.vms))
    assert story.plan_asked is None, "the fleet is not quiet yet"
    story.wait(2.0)
    story.plan(*to, step_s=step_s)


def test_growth_that_pays_leads_to_a_planned_morph() -> None:
    story = Story(debounce_s=2.0)
    story.training("a", "b", steps=30)
    _grow(story, to=FOUR, step_s=1.0)
    assert set(story.sent(messages.StopGeneration)) == {"a", "b"}
    story.stopped(31)
    assert story.generation.reason == "growth: +2 slots"
    assert story.generation.plan.data_parallel_width == 2


def test_growth_that_does_not_pay_yet_may_pay_later() -> None:
    story = Story(debounce_s=2.0)
    story.training("a", "b", steps=30)
    _grow(story, to=FOUR, step_s=1.8)
    assert story.sent(messages.StopGeneration) == {}
    story.wait(60.0)
    assert set(story.sent(messages.StopGeneration)) == {"a", "b"}


def test_growth_that_does_not_pay_is_declined() -> None:
    story = Story(debounce_s=2.0)
    story.training("a", "b", steps=30)
    _grow(story, to=FOUR, step_s=1.99)
    assert story.sent(messages.StopGeneration) == {}
    assert story.generation.phase is GenerationPhase.RUNNING


# --- VMs that cannot train -------------------------------------------------------------------


def launch(story: Story, vm_id: str) -> Offer:
    """Let the VM come that the core asks for, once it does."""
    if not story.emitted(c.LaunchVms) and story.state.timer_at_s is not None:
        story.wait(story.state.timer_at_s - story.now_s)
    command = story.launch()
    vm = story.listed(vm_id, command.intent, offer=command.offer)
    story.tell(e.VmsLaunched, intent=command.intent, vms=(vm,))
    return command.offer


def test_types_whose_vms_are_unfit_are_given_up_and_then_the_job() -> None:
    other = replace(OFFER, instance_type="other", usd_per_hour=2.0)
    story = Story(max_vms=1)
    story.start(OFFER, other)
    for number in range(2 * MAX_UNFIT):
        assert story.state.outcome is None
        offer = launch(story, f"vm-{number}")
        assert offer.instance_type == ("t" if number < MAX_UNFIT else "other")
        story.report(f"vm-{number}", messages.VmUnfit(reason="no driver"))
        vm = story.vm(f"vm-{number}")
        assert (vm.phase, vm.return_reason) == (VmPhase.RETURNING, "no driver")
    assert story.state.outcome is not None
    assert story.state.outcome.reason == "local/other: no driver"
    assert story.state.outcome.exit_code == 6
    assert story.interruptions == ()


def test_a_vm_that_is_fit_absolves_its_type() -> None:
    story = Story(max_vms=1)
    story.start(OFFER)
    for number in range(2 * MAX_UNFIT):
        vm_id = f"vm-{number}"
        launch(story, vm_id)
        if number % MAX_UNFIT == 0:
            story.ready(vm_id)
            assert story.unfit == {}
            story.tell(e.VmLost, vm_id=vm_id, reason="gone")
        else:
            story.report(vm_id, messages.VmUnfit(reason="no driver"))
    assert story.state.outcome is None


def two_booting(reduction: Reduction = "exact", **settings: Any) -> Story:
    story = Story(max_vms=2, spec=replace(SPEC, reduction=reduction), **settings)
    story.start(OFFER)
    intent = story.launch().intent
    vms = tuple(story.listed(vm_id, intent, offer=OFFER) for vm_id in ("a", "b"))
    story.tell(e.VmsLaunched, intent=intent, vms=vms)
    return story


@pytest.mark.parametrize(
    ("name", "torch_version"), [("NVIDIA L4", "2.13.0"), ("NVIDIA A10G", "2.14.0")]
)
def test_a_vm_that_rounds_differently_is_not_taken_in_exact_mode(
    name: str, torch_version: str
) -> None:
    story = two_booting()
    story.ready("a", gpus=(gpu_facts(name="NVIDIA A10G"),), torch_version="2.13.0")

    story.ready("b", gpus=(gpu_facts(name=name),), torch_version=torch_version)

    assert story.vm("a").phase is VmPhase.READY
    assert story.vm("b").return_reason == (
        f"computes on {name} with torch {torch_version}, which rounds differently from "
        "NVIDIA A10G with torch 2.13.0 that the job began on: name one type of GPU or CPU and "
        "one build of torch, or launch with reduction: fast"
    )


def test_cpus_that_compute_differ_no_more_than_gpus_in_exact_mode() -> None:
    story = two_booting()
    story.devices = {"a": "EPYC, 1 thread", "b": "Xeon, 1 thread"}
    story.ready("a", torch_version="2.13.0")

    story.ready("b", torch_version="2.13.0")

    assert story.vm("b").return_reason.startswith(
        "computes on Xeon with torch 2.13.0, which rounds"
    )


def test_a_job_that_adopts_checkpoints_takes_only_vms_that_compute_as_theirs_did() -> None:
    adopted = Numerics(kernels="NVIDIA L4 with torch 2.13.0")
    story = two_booting(numerics=adopted)
    a10g = replace(OFFER, cloud="aws", instance_type="g5.xlarge")
    assert allocation.opens_at_s(story.state, a10g) == math.inf

    story.ready("a", gpus=(gpu_facts(name="NVIDIA A10G"),), torch_version="2.13.0")
    story.ready("b", gpus=(gpu_facts(name="NVIDIA L4"),), torch_version="2.13.0")

    assert story.vm("a").phase is VmPhase.RETURNING
    assert story.vm("b").phase is VmPhase.READY


def test_gpus_may_differ_in_fast_mode() -> None:
    story = two_booting("fast")
    for vm_id, name in (("a", "NVIDIA A10G"), ("b", "NVIDIA L4")):
        story.ready(vm_id, gpus=(gpu_facts(name=name),))
    assert [vm.phase for vm in story.vms.values()] == [VmPhase.READY] * 2


def test_only_the_first_vms_gpu_is_rented_in_exact_mode() -> None:
    l4 = replace(OFFER, cloud="aws", instance_type="g6.xlarge")
    a10g = replace(OFFER, cloud="aws", instance_type="g5.xlarge")
    story = two_booting()
    opens = allocation.opens_at_s
    assert max(opens(story.state, l4), opens(story.state, a10g)) < math.inf

    story.ready("a", gpus=(gpu_facts(name="NVIDIA A10G"),))

    assert opens(story.state, l4) == math.inf
    assert allocation.why_not(story.state, l4).startswith("rounds differently from NVIDIA A10G")
    assert opens(story.state, a10g) < math.inf
    story.tell(e.OffersSeen, offers=(l4, a10g))
    assert allocation.why_unlike(story.state) == ""
    story.tell(e.OffersSeen, offers=(l4,))
    assert allocation.why_unlike(story.state).startswith("VMs that compute on NVIDIA A10G with")


def test_a_vm_with_a_sick_gpu_is_returned_and_replaced_elsewhere() -> None:
    other = replace(OFFER, zone="y", usd_per_hour=1.5)
    story = Story().training(*FOUR)
    story.tell(e.OffersSeen, offers=(OFFER, other))
    reason = "GPU 0 (NVIDIA A10G): XID 79: the GPU has fallen off the bus"
    story.report("b", messages.GpuSick(reason=reason))
    assert story.emitted(c.TerminateVms) == [c.TerminateVms(vm_ids=("b",))]
    # The cloud may take a while, and b could train on by itself.
    assert set(story.sent(messages.AbandonGeneration)) == {"b"}
    assert story.emitted(c.LaunchVms)[0].offer == other
    assert story.tally.sick_gpus == 1
    assert story.interruptions[-1].reason == reason
    assert story.generation.phase is GenerationPhase.BREAKING
    story.report("b", messages.GpuSick(reason=reason))
    assert story.tally.sick_gpus == 1


def test_clouds_machines_are_rented_only_for_what_the_job_computes_on() -> None:
    gpu = replace(OFFER, cloud="aws", device="gpu", usd_per_hour=2.0)
    cpu = replace(OFFER, cloud="aws", device="cpu", instance_type="c7i.large")
    choices: dict[messages.DeviceChoice, Offer]
    choices = {"auto": gpu, "gpu": gpu, "cpu": cpu}
    for choice, wanted in choices.items():
        story = Story(spec=replace(SPEC, device=choice))
        story.start(gpu, cpu)
        (command,) = story.emitted(c.LaunchVms)
        assert command.offer == wanted, choice
