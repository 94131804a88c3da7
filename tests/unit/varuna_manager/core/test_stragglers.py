"""Slow machines, as watches find them report by report, and what the core does then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.builders import (
    a_plan,
    microbatch_profile,
    minibatch_committed,
    section_profile,
)
from tests.unit.varuna_manager.story import EACH, FOUR, OFFER, PROFILE, Story
from tests.view import changed

from spottrain.morphing.adapt.stragglers import OUTLYING, WINDOW
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.watch.timings import HOT_WINDOW, RankTimings
from spottrain.varuna_manager.watch.watches import Watches
from spottrain.wire import messages

SECTION = section_profile(forward_s=0.1, backward_s=0.1, saved_bytes=1, output_bytes=1)
TIMED = replace(
    PROFILE,
    microbatches=(microbatch_profile((SECTION, replace(SECTION, index=1))),),
)


def training(**settings: Any) -> Story:
    """Two stages of two replicas on four VMs, four micro-batches each."""
    story = Story(**settings)
    story.training(*FOUR, steps=1)
    plan = replace(story.generation.plan, replica_bounds=(0, 4, 8))
    generation = replace(story.generation, plan=plan)
    story.state = changed(story.state, profile=TIMED, current_generation=generation)
    story.watches = Watches(EACH)
    return story


def sample(
    story: Story,
    step: int,
    slow: dict[str, float],
    shares: tuple[int, ...] = (4, 4),
    only: tuple[str, ...] = FOUR,
) -> None:
    """Ranks report a mini-batch with these busy times."""
    story.now_s += 1.0
    plan = story.generation.plan
    for rank, slot in enumerate(plan.slots):
        share = shares[rank // 2]
        busy_s = 0.2 * share * slow.get(slot.vm_id, 1.0)
        if slot.vm_id in only:
            story.report(
                slot.vm_id,
                minibatch_committed(
                    step,
                    generation=story.generation.number,
                    sections=plan.sections_of(rank % 2),
                    step_s=0.9 * max(slow.values(), default=1.0),
                    busy_s=busy_s,
                    microbatches=share,
                ),
            )


def timings(story: Story) -> RankTimings:
    found = story.watches.timings
    assert found is not None
    return found


def test_a_minibatch_is_evaluated_once_all_ranks_have_reported_it() -> None:
    story = training()
    sample(story, 2, {}, only=("a", "b", "c"))
    sample(story, 3, {}, only=FOUR)
    assert len(timings(story).watch.samples) == 1
    sample(story, 4, {})
    assert len(timings(story).watch.samples) == 2
    assert timings(story).pending == {}


def test_a_slow_replica_gets_less_to_do_without_a_morph() -> None:
    story = training()
    told = []
    for step in range(2, 2 + WINDOW // 2):
        sample(story, step, {"d": 3.0})
        told += [w.command for w in story.emitted(c.Send)]
    shares = {share for share in told if isinstance(share, messages.ShareMinibatch)}
    assert {(s.generation, s.number, s.replica_bounds) for s in shares} == {(1, 1, (0, 6, 8))}
    assert story.generation.number == 1
    assert "6+2 (before: 4+4)" in story.state.last_message


def test_no_new_share_is_sent_before_the_last_one_is_in_force() -> None:
    story = training()
    for step in range(2, 40):
        sample(story, step, {"d": 3.0})
    assert story.generation.share is not None
    assert story.generation.share.number == 1
    for step in range(40, 50):
        sample(story, step, {"a": 6.0}, shares=(6, 2))
    assert story.generation.share.number == 2


def test_a_restarted_manager_sends_the_newest_share_again() -> None:
    story = training()
    for step in range(2, 12):
        sample(story, step, {"d": 3.0})
    share = story.generation.share
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    assert story.sent(messages.ShareMinibatch) == dict.fromkeys(FOUR, share)


def test_a_share_keeps_within_the_memory_of_the_devices() -> None:
    story = training()
    vms = {
        vm_id: replace(vm, offer=replace(vm.offer, gpu_memory_bytes=0))
        for vm_id, vm in story.vms.items()
    }
    story.state = changed(story.state, vms=vms)
    for step in range(2, 40):
        sample(story, step, {"d": 3.0})
    assert timings(story).balancer is None
    assert story.generation.share is None


def found_slow(story: Story, factor: float = 3.0) -> None:
    for step in range(2, 2 + OUTLYING):
        sample(story, step, {"d": factor})


@pytest.mark.parametrize("available", [0, 1])
def test_a_slow_vm_is_only_marked_if_a_replacement_can_be_had(available: int) -> None:
    story = training()
    story.now_s += 100.0
    story.tell(e.OffersSeen, offers=(replace(OFFER, available=available),))
    found_slow(story)
    slow = story.vm("d").slow
    assert (slow is not None) == bool(available)
    news = "looking for a replacement" if available else "kept, replacing it would"
    evidence = f"d is 3.0x slower than the others of its stage in {OUTLYING} of "
    assert evidence in story.state.last_message
    assert news in story.state.last_message
    assert bool(story.emitted(c.LaunchVms)) == bool(available)


@pytest.mark.parametrize("machines", ["hhxx", "hhhh"])
def test_a_vm_that_shares_cores_is_not_slow(machines: str) -> None:
    """It may be as slow as its computer is crowded, if its peers are not."""
    story = training()
    vms = dict(story.vms)
    for vm_id, machine in zip("cdab", machines, strict=True):
        cores = 1 if machine == "h" else 2
        vms[vm_id] = replace(vms[vm_id], machine=machine, cores=cores)
    story.state = changed(story.state, vms=vms)
    story.now_s += 100.0
    story.tell(e.OffersSeen, offers=(replace(OFFER, available=1),))
    found_slow(story, 2.0)
    slow = story.vm("d").slow
    assert (slow is None) == (machines == "hhxx")


def test_a_slow_vm_is_returned_once_a_generation_without_it_trains() -> None:
    story = training()
    story.now_s += 100.0
    story.tell(e.OffersSeen, offers=(replace(OFFER, available=1),))
    found_slow(story)
    assert story.generation.phase.value == "running"
    story.boot("e")
    slow = story.vm("d").slow
    assert slow is not None
    assert slow.replaced_by == "e"
    story.plan("a", "b", "c", "e")
    assert set(story.sent(messages.StopGeneration)) == set(FOUR)
    assert story.emitted(c.TerminateVms) == []
    story.stopped(2 + OUTLYING)
    assert story.generation.reason == "slow: d by e"
    story.open()
    assert story.emitted(c.TerminateVms) == []
    story.begin(2 + OUTLYING)
    assert [command.vm_ids for command in story.emitted(c.TerminateVms)] == [("d",)]
    assert story.tally.slow_vms_replaced == 1
    story.tell(e.VmsReturned, vm_ids=("d",))
    assert story.tally.preemptions_unnoticed == 0
    assert [slow.vm_id for slow in story.slow_vms] == ["d"]


def test_a_fleet_never_falls_below_its_minimum_for_a_slow_vm() -> None:
    story = training(min_vms=4)
    story.now_s += 100.0
    story.tell(e.OffersSeen, offers=(replace(OFFER, available=1),))
    found_slow(story)
    story.boot("e")
    slow = story.vm("d").slow
    assert slow is not None
    assert slow.replaced_by == "e"
    assert sum(vm.is_usable for vm in story.vms.values()) == 4


def interleaved() -> Story:
    """The same four VMs, each with two runs of sections."""
    story = training()
    sections = tuple(replace(SECTION, index=k) for k in range(4))
    measured = microbatch_profile(sections)
    running = story.generation.plan
    plan = a_plan(2, 2, chunks=2, virtual_nodes=8, slots=running.slots)
    story.state = changed(
        story.state,
        profile=replace(TIMED, microbatches=(measured,)),
        current_generation=replace(story.generation, plan=plan),
    )
    story.watches = Watches(EACH)
    return story


def test_a_slow_vm_of_an_interleaved_plan_is_replaced_though_not_rebalanced() -> None:
    story = interleaved()
    story.now_s += 100.0
    story.tell(e.OffersSeen, offers=(replace(OFFER, available=1),))
    found_slow(story)
    assert timings(story).balancer is None
    assert story.generation.share is None
    slow = story.vm("d").slow
    assert slow is not None
    assert slow.slowness == pytest.approx(3.0)
    story.boot("e")
    slow = story.vm("d").slow
    assert slow is not None
    assert slow.replaced_by == "e"
    story.plan("a", "b", "c", "e")
    assert set(story.sent(messages.StopGeneration)) == set(FOUR)


def test_a_vm_whose_gpu_is_hot_is_slow_after_a_few_minibatches() -> None:
    reason = "GPU 0 (NVIDIA A10G): thermal slowdown by hardware"
    story, cool = training(), training()
    for one in (story, cool):
        one.now_s += 100.0
        one.tell(e.OffersSeen, offers=(replace(OFFER, available=1),))
    story.report("d", messages.GpuThrottled(reason=reason))
    assert story.state.last_message == f"d: {reason}"
    for step in range(2, 2 + HOT_WINDOW):
        for one in (story, cool):
            sample(one, step, {"d": 3.0})
    slow = story.vm("d").slow
    assert slow is not None
    assert slow.evidence == (
        f"d is 3.0x slower than the others of its stage in 5 of 5 mini-batches ({reason})"
    )
    assert cool.vm("d").slow is None
    story.report("c", messages.GpuThrottled(reason=reason))
    for step in range(20, 20 + HOT_WINDOW):
        sample(story, step, {"d": 3.0})
    assert story.vm("c").slow is None, "hot, and as fast as the others"
    story.report("c", messages.GpuThrottled(reason=""))
    assert story.vm("c").throttled == ""
