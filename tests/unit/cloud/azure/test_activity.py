"""The Activity Log: parsing, and end times of VMs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes.azure import ZONE, FakeAzure
from tests.unit.cloud.renting import launch_request, offer_in, rent, sent

from spottrain.cloud.azure.activity import (
    ActivityEvent,
    History,
    VmLifetime,
    event_of,
    history,
)
from spottrain.cloud.azure.provider import AzureProvider
from spottrain.cloud.port.errors import CloudError, NoCapacityError
from spottrain.cloud.port.provider import Vm, VmState

VM = "/SUBSCRIPTIONS/X/RESOURCEGROUPS/Spottrain-JOB/PROVIDERS/COMPUTE/ST-1-0"


def told(change: str = "evictSpotVM/action", **other: Any) -> dict[str, Any]:
    return {
        "operationName": {"value": f"Microsoft.Compute/virtualMachines/{change}"},
        "resourceId": VM,
        "eventTimestamp": "2026-11-20T19:00:00.1234567Z",
        "status": {"value": "Succeeded"},
        "eventDataId": "event",
        "correlationId": "change",
        **other,
    }


def test_an_event_is_read_whatever_the_case_of_its_letters() -> None:
    event = event_of(told())
    assert event is not None
    assert event.vm_id == "azure.st-1-0.spottrain-job"
    assert event.ends
    assert event.at_s == pytest.approx(1795201200.123456)
    for other in ("restart/action", "extensions/write", "simulateEviction/action"):
        assert event_of(told(other)) is None
    assert event_of(told(operationName={"value": ""})) is None


def step(at_s: float, what: str, change: str = "a", vm_id: str = "vm") -> ActivityEvent:
    """Return an event written as ``+Started`` (of a launch) or ``-Succeeded``."""
    return ActivityEvent(f"{at_s}{what}", change, at_s, vm_id, what[0] == "-", what[1:])


@pytest.mark.parametrize(
    ("steps", "life"),
    [
        (("+Accepted", "+Succeeded", "-Accepted", "-Succeeded"), VmLifetime(0.0, 3.0)),
        (("-Succeeded",), VmLifetime(None, 0.0)),
        (("+Accepted", "-Succeeded", "+Succeeded", "-Succeeded"), VmLifetime(0.0, 1.0)),
        (("+Accepted", "+Succeeded", "-Accepted"), None),
        (("+Accepted", "+Failed", "-Accepted", "-Succeeded"), None),
        (("+Accepted", "-Failed", "-Accepted", "-Succeeded"), VmLifetime(0.0, 3.0)),
        (("+Accepted", "-Succeeded", "+Accepted"), None),
    ],
)
def test_a_lifetime_is_from_the_launch_to_the_first_end(
    steps: tuple[str, ...], life: VmLifetime | None
) -> None:
    found = history(step(at_s, what) for at_s, what in enumerate(steps))
    assert found.ended == ({} if life is None else {"vm": life})


def test_a_vm_that_could_not_be_made_has_failed_until_one_of_its_name_is_launched() -> None:
    steps = ("+Accepted", "+Failed", "-Accepted", "-Succeeded")
    events = [step(at_s, what) for at_s, what in enumerate(steps)]
    assert history(events) == History(failed=frozenset({"vm"}))
    assert history([*events, step(9, "+Accepted", "b")]) == History()


def test_a_launch_that_is_repeated_and_refused_does_not_undo_the_first() -> None:
    again = (step(1, "+Started", "b"), step(2, "+Failed", "b"))
    events = (step(0, "+Accepted"), *again, step(3, "-Succeeded"))
    assert history(events) == History({"vm": VmLifetime(0, 3)})


EVENTS = st.lists(
    st.builds(
        step,
        st.integers(0, 50).map(float),
        st.sampled_from(["+Accepted", "+Succeeded", "+Failed", "-Accepted", "-Succeeded"]),
        st.sampled_from("ab"),
        st.sampled_from(["vm", "other"]),
    ),
    unique_by=lambda event: event.at_s,
)


@given(EVENTS, st.randoms())
def test_lifetimes_do_not_depend_on_order_or_other_vms(
    events: list[ActivityEvent], chance: Any
) -> None:
    shuffled = [*events, *events]
    chance.shuffle(shuffled)
    found = history(events)
    assert history(shuffled) == found
    alone = history(event for event in events if event.vm_id == "vm")
    assert alone.ended.get("vm") == found.ended.get("vm")
    for life in found.ended.values():
        assert life.from_s is None or life.from_s <= life.until_s


# --- against the fake -----------------------------------------------------------------


def evict(azure: FakeAzure, vm: Vm) -> None:
    azure.ask("evict", name=vm.vm_id.split(".")[1])


def bill(azure: FakeAzure) -> list[float]:
    return sorted(row["ended_at"] for row in azure.ask("bill"))


def ended(provider: AzureProvider) -> list[float]:
    vms = provider.list_vms("job")
    assert {vm.state for vm in vms} <= {VmState.TERMINATED}
    return sorted(vm.ended_at_s for vm in vms if vm.ended_at_s is not None)


def questions(azure: FakeAzure) -> int:
    return sent(azure).count("LIST events")


def test_end_times_are_exact(azure: FakeAzure) -> None:
    provider = azure.provider()
    one, two = rent(provider, 2)
    provider.list_vms("job")
    evict(azure, one)
    provider.terminate([two.vm_id])
    azure.ask("pass_time", seconds=500)
    assert ended(provider) == pytest.approx(bill(azure), abs=1e-5)


def test_a_new_process_learns_what_ended_before_it(azure: FakeAzure) -> None:
    (vm,) = rent(azure.provider())
    evict(azure, vm)
    (found,) = azure.provider().list_vms("job")
    assert (found.vm_id, found.intent) == (vm.vm_id, "")
    assert [found.ended_at_s] == pytest.approx(bill(azure), abs=1e-5)


def test_while_the_log_lags_a_vm_is_unlisted_and_queried_rarely(
    azure: FakeAzure,
) -> None:
    azure.ask("moods", log_lag_s=300)
    now_s = 0.0
    provider = azure.provider(lambda: now_s)
    (vm,) = rent(provider)
    provider.list_vms("job")
    evict(azure, vm)
    before = questions(azure)
    for _ in range(100):
        assert ended(provider) == []
        now_s += 1.0
    assert questions(azure) - before <= 5
    azure.ask("pass_time", seconds=301)
    now_s += 301
    assert ended(provider) == pytest.approx(bill(azure), abs=1e-5)
    asked = questions(azure)
    ended(provider)
    assert questions(azure) == asked


def test_without_the_permission_jobs_run_and_doctor_says_so(azure: FakeAzure) -> None:
    azure.ask("moods", denied_log=True)
    provider = azure.provider()
    (vm,) = rent(provider)
    provider.list_vms("job")
    evict(azure, vm)
    assert ended(provider) == []
    assert rent(provider, intent="intent-2")
    assert questions(azure) == 1  # not again and again
    (said,) = (one for one in provider.check() if one.what == "activity log")
    assert said.ok
    assert "Microsoft.Insights/eventtypes/values/read" in said.message


def test_a_failing_log_is_queried_again(azure: FakeAzure) -> None:
    now_s = 0.0
    provider = azure.provider(lambda: now_s)
    (vm,) = rent(provider)
    provider.list_vms("job")
    evict(azure, vm)
    azure.ask("fail", operation="LIST events", kind="error", code="X", status=500)
    assert ended(provider) == []
    now_s += 31
    assert len(ended(provider)) == 1


def test_a_repeated_launch_does_not_recreate_an_ended_vm(
    azure: FakeAzure,
) -> None:
    provider = azure.provider()
    asked = launch_request(offer_in(provider), 2)
    azure.ask("fail", operation="PUT virtualMachines", kind="lost")
    with pytest.raises(CloudError):
        provider.launch(asked)
    gone = azure.ask("bill")[0]["name"]
    azure.ask("evict", name=gone)
    for each in (provider, azure.provider()):
        vms = {vm.vm_id.split(".")[1]: vm for vm in each.launch(asked).vms}
        assert len(vms) == 2
        assert vms[gone].state is VmState.TERMINATED
        assert vms[gone].intent == asked.intent
    assert len(azure.ask("bill")) == 2


def test_a_name_of_a_vm_that_could_not_be_made_is_not_used_again(azure: FakeAzure) -> None:
    azure.ask("moods", late=True)
    azure.ask("stock", zone=ZONE, instance_type="Standard_NC4as_T4_v3", count=0)
    provider = azure.provider()
    asked = launch_request(offer_in(provider))
    with pytest.raises(NoCapacityError):
        provider.launch(asked)
    azure.ask("stock", zone=ZONE, instance_type="Standard_NC4as_T4_v3", count=1)
    with pytest.raises(NoCapacityError, match="could not be made"):
        provider.launch(asked)
    (vm,) = provider.launch(replace(asked, token="another")).vms
    assert vm.ended_at_s is None
