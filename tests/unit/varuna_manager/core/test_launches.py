"""Where the core asks next, and what is left in the cloud when a job is over."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.varuna_manager.story import OFFER, Story

from spottrain.cloud.port.provider import Offer
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import VmPhase
from spottrain.varuna_manager.core.model.state import JobPhase
from spottrain.varuna_manager.core.shutdown import FIRST_PAUSE_S, TRIES

BIG = replace(OFFER, instance_type="big", family="G", usd_per_hour=1.1)
SMALL = replace(BIG, instance_type="small", usd_per_hour=1.0)
OTHER = replace(BIG, instance_type="other", family="P", usd_per_hour=1.5)
FAR = replace(SMALL, region="far", zone="far-z", usd_per_hour=2.0)


def begun(*offers: Offer, **settings: Any) -> Story:
    story = Story(**settings)
    story.start(*offers)
    return story


def refuse(story: Story, refusal: e.RefusalKind) -> None:
    (intent,) = story.intents
    story.tell(e.LaunchRefused, intent=intent, reason="no", refusal=refusal)


def test_half_as_many_are_asked_for_within_a_quota_until_its_family_closes() -> None:
    story = begun(SMALL, BIG)
    for count in (4, 2, 1):
        launch = story.launch()
        assert (launch.offer, launch.count) == (SMALL, count)
        refuse(story, "quota")
    assert story.emitted(c.LaunchVms) == []


def test_what_a_quota_may_not_give_is_asked_for_in_another_family() -> None:
    story = begun(SMALL, BIG, OTHER, FAR)
    assert story.launch().offer == SMALL
    refuse(story, "quota")
    first, second = story.emitted(c.LaunchVms)
    assert (first.offer, first.count) == (SMALL, 2)
    assert (second.offer, second.count) == (OTHER, 2)


def test_no_capacity_closes_one_type_in_one_zone() -> None:
    story = begun(SMALL, BIG, OTHER)
    refuse(story, "no_capacity")
    assert story.launch().offer == BIG


def test_a_type_that_does_not_fit_closes_itself_and_fails_no_job_yet() -> None:
    story = begun(SMALL, BIG)
    refuse(story, "misconfigured")
    assert story.launch().offer == BIG
    refuse(story, "misconfigured")
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == 6


def test_refused_credentials_close_the_whole_cloud() -> None:
    elsewhere = replace(FAR, cloud="another")
    story = begun(SMALL, BIG, elsewhere)
    refuse(story, "auth")
    assert story.launch().offer == elsewhere


def test_the_cool_down_grows_with_repeats_and_success_forgets_it() -> None:
    story = begun(SMALL)
    for pause_s in (30.0, 60.0):
        refuse(story, "no_capacity")
        story.wait(pause_s - 1.0)
        assert story.emitted(c.LaunchVms) == []
        story.wait(1.0)
    wish = story.launch()
    vms = (story.listed("a", wish.intent, offer=SMALL),)
    story.tell(e.VmsLaunched, intent=wish.intent, vms=vms)
    story.wait(30.0)
    assert story.launch().count == 3


def test_zones_with_alike_prices_share_the_vms() -> None:
    zones = [replace(SMALL, zone=zone) for zone in ("a", "b")]
    story = begun(*zones)
    first, second = story.emitted(c.LaunchVms)
    assert {(w.offer.zone, w.count) for w in (first, second)} == {("a", 2), ("b", 2)}


def test_vms_come_from_the_region_where_the_others_are() -> None:
    near = replace(SMALL, usd_per_hour=3.0)
    story = begun(near, replace(FAR, usd_per_hour=2.0, available=1))
    assert story.launch().offer.region == "far"  # it is enough to train
    story.now_s += 1.0
    story.tell(
        e.VmsLaunched,
        intent="intent-0",
        vms=(story.listed("a", "intent-0", offer=FAR),),
    )
    assert story.emitted(c.LaunchVms) == []


def test_with_a_wider_span_they_may_come_from_anywhere() -> None:
    near = replace(SMALL, usd_per_hour=3.0)
    story = begun(near, replace(FAR, usd_per_hour=2.0, available=1), span="cloud")
    assert [wish.offer.region for wish in story.emitted(c.LaunchVms)] == ["far", near.region]


def test_a_region_that_cannot_give_enough_is_left_for_another() -> None:
    near = replace(SMALL, usd_per_hour=3.0)
    story = begun(near, replace(FAR, available=1), min_vms=2)
    _, wish = story.emitted(c.LaunchVms)
    assert wish.offer == near
    story.tell(
        e.VmsLaunched,
        intent="intent-0",
        vms=(story.listed("a", "intent-0", offer=FAR),),
    )
    vms = tuple(story.listed(vm_id, wish.intent, offer=near) for vm_id in "bcd")
    story.tell(e.VmsLaunched, intent=wish.intent, vms=vms)
    for vm_id in "abcd":
        story.ready(vm_id)
    phases = {vm.vm_id: vm.phase for vm in story.vms.values()}
    assert phases.pop("a") is VmPhase.RETURNING
    assert set(phases.values()) == {VmPhase.READY}


def test_none_are_rented_where_the_caps_leave_too_few_to_train() -> None:
    dear = replace(SMALL, zone="dear", usd_per_hour=3.0)
    story = begun(dear, min_vms=4, max_usd_per_hour=7.0)
    assert story.emitted(c.LaunchVms) == []
    assert story.state.activity == "waiting for a price within the caps"
    story.tell(e.OffersSeen, offers=(replace(dear, usd_per_hour=1.75),))
    assert story.launch().count == 4


def test_a_dear_offer_fills_up_beside_cheap_ones_if_the_cap_bears_it() -> None:
    dear = replace(SMALL, zone="dear", usd_per_hour=3.0)
    cheap = replace(SMALL, available=2)
    story = begun(dear, cheap, min_vms=4, max_usd_per_hour=8.0)
    wishes = [(wish.offer.zone, wish.count) for wish in story.emitted(c.LaunchVms)]
    assert wishes == [(cheap.zone, 2), (dear.zone, 2)]
    assert story.state.activity.startswith("waiting for")
    assert begun(dear, cheap, min_vms=4, max_usd_per_hour=7.0).launch().count == 2


def test_a_budget_that_pays_for_too_few_to_train_ends_the_job() -> None:
    assert begun(min_vms=4, max_usd=1.4).state.outcome is None
    story = begun(min_vms=4, max_usd=1.0)
    assert story.state.outcome is not None
    assert story.state.outcome.exit_code == 4


# --- What VMs shared ----------------------------------------------------------------------


def over(**settings: Any) -> Story:
    """A job without VMs that was told to end."""
    story = begun(**settings)
    refuse(story, "no_capacity")
    story.tell(e.StopRequested, by="x", now=True, checkpoint=False)
    return story


def test_a_job_that_shares_nothing_ends_at_once() -> None:
    assert len(over().emitted(c.Finish)) == 1


def test_what_vms_shared_is_removed_before_the_job_is_over() -> None:
    story = over(shares=True)
    assert story.emitted(c.ReleaseJob) == [c.ReleaseJob()]
    assert story.emitted(c.Finish) == []
    story.tell(e.JobReleased)
    assert len(story.emitted(c.Finish)) == 1
    assert story.state.phase is JobPhase.ENDED


def test_a_removal_that_fails_is_tried_again_with_growing_pauses() -> None:
    story = over(shares=True)
    for number in range(TRIES - 1):
        fail_release(story)
        assert story.emitted(c.ReleaseJob) == []
        story.wait(FIRST_PAUSE_S * 2**number)
        assert story.emitted(c.ReleaseJob) == [c.ReleaseJob()]
    fail_release(story)
    assert len(story.emitted(c.Finish)) == 1
    assert "'spottrain down job'" in story.state.last_message


def fail_release(story: Story) -> None:
    story.tell(e.CommandFailed, command="release_job", vm_ids=(), reason="in use")


def test_a_new_manager_asks_for_the_removal_again() -> None:
    story = over(shares=True)
    story.tell(e.ManagerStarted, software_version="1", pid=2)
    story.tell(e.StopRequested, by="x", now=True, checkpoint=False)
    assert story.emitted(c.ReleaseJob) == [c.ReleaseJob()]


@pytest.mark.parametrize("refusal", ["throttled", "unknown"])
def test_an_answer_that_leaves_it_open_closes_nothing(refusal: e.RefusalKind) -> None:
    story = begun(SMALL)
    refuse(story, refusal)
    assert story.cooldowns == {}


def launch_with(story: Story, image: str) -> str:
    """Rent one VM that has an image; return which one was asked for."""
    (command,) = story.emitted(c.LaunchVms)
    vm = story.listed(command.intent, command.intent, offer=command.offer, image=image)
    story.tell(e.VmsLaunched, intent=command.intent, vms=(vm,))
    return command.image


def test_all_vms_of_a_cloud_have_the_image_of_its_first_until_it_is_withdrawn() -> None:
    story = begun(SMALL)
    for asked, given, news in (
        ("", "image 1", "z gave 1 of 4 VMs"),
        ("image 1", "image 1", "z gave 1 of 3 VMs"),
        ("image 1", "image 2", "local no longer has the image image 1"),
        ("image 2", "image 2", ""),
    ):
        assert launch_with(story, given) == asked
        assert story.state.last_message.startswith(news)
        assert story.images == {"local": given}
        story.wait(60.0)  # what it did not give is asked for again


def test_of_two_first_launches_the_one_that_answers_first_settles_the_image() -> None:
    story = begun(SMALL, OTHER)
    refuse(story, "quota")
    first, second = story.emitted(c.LaunchVms)
    for number, one in enumerate((first, second)):
        vm = story.listed(f"vm-{number}", one.intent, offer=one.offer, image=f"{number}")
        story.tell(e.VmsLaunched, intent=one.intent, vms=(vm,))
    assert story.images == {"local": "0"}


def test_a_launch_that_is_repeated_asks_for_the_image_that_it_asked_for() -> None:
    story = begun(SMALL, OTHER)
    refuse(story, "quota")
    first, second = story.emitted(c.LaunchVms)
    vm = story.listed("vm-0", first.intent, offer=first.offer, image="image 1")
    story.tell(e.VmsLaunched, intent=first.intent, vms=(vm,))
    story.tell(e.LaunchRefused, intent=second.intent, reason="no answer", refusal="unknown")
    story.wait(5.0)
    (again,) = story.emitted(c.LaunchVms)
    assert (again.intent, again.image) == (second.intent, "")
