"""What the core makes of clouds that fail by themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.unit.varuna_manager.story import OFFER, Story

from spottrain.cloud.port.provider import Offer, VmState
from spottrain.pricing.billing.budget import reserve_s
from spottrain.varuna_manager.core.fleet import RETRY_S
from spottrain.varuna_manager.core.launches import UNANSWERED_S
from spottrain.varuna_manager.core.model import commands as c
from spottrain.varuna_manager.core.model import events as e
from spottrain.varuna_manager.core.model.records import VmPhase

EAST = replace(OFFER, cloud="east", region="east-r", zone="east-z")
WEST = replace(OFFER, cloud="west", region="west-r", zone="west-z", usd_per_hour=2.0)


def begun(*offers: Offer, **settings: Any) -> Story:
    story = Story(**settings)
    story.start(*offers)
    return story


def no_answer(story: Story, intent: str) -> None:
    story.tell(
        e.LaunchRefused,
        intent=intent,
        reason="east: does not answer",
        refusal="unknown",
        retry_after_s=RETRY_S,
    )


def unanswered(story: Story) -> str:
    """Ask for VMs of a cloud that does not answer until it is given up."""
    intent = story.launch().intent
    no_answer(story, intent)
    story.wait(RETRY_S)
    assert [command.intent for command in story.emitted(c.LaunchVms)] == [intent]
    story.wait(UNANSWERED_S)
    no_answer(story, intent)
    return intent


def trained(story: Story, offer: Offer) -> tuple[str, ...]:
    """Rent VMs of one offer that get ready; return their ids."""
    command = story.launch()
    ids = tuple(f"{offer.cloud}.{n}" for n in range(command.count))
    vms = tuple(story.listed(vm_id, command.intent, offer=offer) for vm_id in ids)
    story.tell(e.VmsLaunched, intent=command.intent, vms=vms)
    for vm_id in ids:
        story.ready(vm_id)
    return ids


def test_a_list_of_one_cloud_says_nothing_of_another() -> None:
    story = begun(EAST, WEST)
    ids = trained(story, EAST)
    story.now_s += 1.0
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(), cloud="west")
    assert set(story.vms) == set(ids)
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=(), cloud="east")
    assert story.vms == {}


def test_a_launch_that_a_cloud_does_not_answer_is_launched_elsewhere() -> None:
    story = begun(EAST, WEST)
    given_up = unanswered(story)
    command = story.launch()
    assert set(story.intents) == {command.intent} != {given_up}
    assert (command.offer, command.count) == (WEST, 4)


@pytest.mark.parametrize(
    ("others", "settings"),
    [
        ((), {}),
        (({"usd_per_hour": 3.0},), {}),
        (({"available": 0},), {}),
    ],
)
def test_a_single_cloud_is_asked_again_until_it_answers(
    others: tuple[dict[str, Any], ...], settings: dict[str, Any]
) -> None:
    more = (replace(EAST, zone="east-y", **changes) for changes in others)
    story = begun(EAST, *more, **settings)
    intent = unanswered(story)
    assert set(story.intents) == {intent}
    story.wait(RETRY_S)
    assert [command.intent for command in story.emitted(c.LaunchVms)] == [intent]


def test_late_vms_of_a_launch_that_was_given_up_are_billed_and_returned() -> None:
    story = begun(EAST, WEST)
    intent = unanswered(story)
    alive = story.listed("east.0", intent, offer=EAST)
    ended = replace(
        story.listed("east.1", intent, offer=EAST),
        state=VmState.TERMINATED,
        ended_at_s=story.now_s,
    )
    story.now_s += 1.0
    listed = (alive, ended)
    story.tell(e.VmsListed, asked_at_s=story.now_s, vms=listed, cloud="east")
    assert story.vm("east.0").phase is VmPhase.RETURNING
    assert {"east.0"} == {i for w in story.emitted(c.TerminateVms) for i in w.vm_ids}
    assert set(story.ledger.open) == {"east.0"}
    assert set(story.ledger.closed) == {"east.1"}


def test_a_silent_vm_of_a_silent_cloud_is_waited_for_until_it_must_have_ended() -> None:
    story = begun(EAST, WEST)
    ids = trained(story, EAST)
    lease_s = reserve_s(story.state.job.spec.lease_s)
    story.tell(e.VmSilent, vm_id=ids[0])
    for seconds, phase in (
        (lease_s - 1.0, VmPhase.READY),
        (2.0, VmPhase.RETURNING),
    ):
        story.now_s += seconds
        story.tell(
            e.CommandFailed,
            command="ask_provider",
            vm_ids=(ids[0],),
            reason="east: does not answer",
        )
        assert story.vm(ids[0]).phase is phase


def test_too_few_vms_in_two_places_are_given_up_for_one_place() -> None:
    story = begun(EAST, WEST, min_vms=2, max_vms=2)
    first, second = trained(story, EAST)
    story.tell(e.VmLost, vm_id=first, reason="killed")
    command = story.launch()
    assert (command.offer, command.count) == (EAST, 1)
    story.tell(e.LaunchRefused, intent=command.intent, reason="no", refusal="no_capacity")
    command = story.launch()
    assert (command.offer, command.count) == (WEST, 1)
    vms = (story.listed("west.0", command.intent, offer=WEST),)
    story.tell(e.VmsLaunched, intent=command.intent, vms=vms)
    assert story.vm(second).phase is VmPhase.RETURNING
    assert story.launch().offer == WEST


@pytest.mark.parametrize(("refusal", "fails"), [("auth", True), ("quota", False)])
def test_a_job_fails_only_where_each_cloud_needs_a_person(
    refusal: e.RefusalKind, fails: bool
) -> None:
    story = begun(EAST, WEST)
    for kind in (refusal, "auth"):
        command = story.launch()
        story.tell(e.LaunchRefused, intent=command.intent, reason="no", refusal=kind)
    assert (story.state.outcome is not None) is fails


@pytest.mark.parametrize(("span", "clouds"), [("region", 1), ("cloud", 1), ("any", 2)])
def test_the_span_says_whether_clouds_mix(span: str, clouds: int) -> None:
    near = replace(EAST, region="east-2", zone="east-2z", usd_per_hour=1.5, available=1)
    story = begun(replace(EAST, available=1), near, WEST, span=span)
    asked = story.emitted(c.LaunchVms)
    regions = {command.offer.region for command in asked}
    assert len({command.offer.cloud for command in asked}) == clouds
    assert len(regions) == {"region": 1, "cloud": 2, "any": 3}[span]
