"""The adapter when things go wrong, and when lists lag behind."""

from __future__ import annotations

import pytest
from tests.fakes.gcp import KIND, ZONE, FakeGcp
from tests.unit.cloud.renting import launch_request, offer_in, rent, sent, settle

from spottrain.cloud.port.errors import (
    CloudError,
    NoCapacityError,
)
from spottrain.cloud.port.provider import VmState

# --- when things go wrong -------------------------------------------------------------


def test_a_launch_may_take_longer_than_one_request(gcp: FakeGcp) -> None:
    provider = gcp.provider(answer_s=2.0)
    asked = launch_request(offer_in(provider))
    gcp.ask("fail", operation="zone_operations.wait", kind="slow", seconds=3.0)
    assert len(provider.launch(asked).vms) == 1
    gcp.ask("fail", operation="zone_operations.wait", kind="slow", seconds=1.0)
    with pytest.raises(CloudError) as told:
        gcp.provider(launch_s=0.3).launch(launch_request(offer_in(provider), intent="intent-2"))
    assert type(told.value) is CloudError


def test_a_repeated_launch_whose_vms_have_ended_launches_nothing(gcp: FakeGcp) -> None:
    """Even weeks later, when Google has forgotten the id of the request."""
    provider = gcp.provider()
    asked = launch_request(offer_in(provider), 2)
    first, second = provider.launch(asked).vms
    gcp.ask("preempt", zone=ZONE, name=first.vm_id.split(".")[1])
    again = gcp.provider().launch(asked)
    states = {vm.vm_id: vm.state for vm in again.vms}
    assert states == {
        first.vm_id: VmState.TERMINATED,
        second.vm_id: VmState.RUNNING,
    }
    assert sum(kind == "instances.bulk_insert" for kind in sent(gcp)) == 1


def test_a_failed_attempt_does_not_hide_vms_of_a_later_one(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    asked = launch_request(offer_in(provider), 2)
    gcp.ask("stock", zone=ZONE, kind=KIND, count=0)
    with pytest.raises(NoCapacityError):
        provider.launch(asked)
    gcp.ask("stock", zone=ZONE, kind=KIND, count=2)
    made = {vm.vm_id for vm in provider.launch(asked).vms}
    gcp.ask("preempt", zone=ZONE, name=min(made).split(".")[1])
    assert {vm.vm_id for vm in gcp.provider().launch(asked).vms} == made


def test_operations_are_read_until_an_end_is_known(gcp: FakeGcp) -> None:
    """A zone's operations of two weeks are thousands."""
    provider = gcp.provider()
    for number in range(12):
        gcp.ask("stock", zone=ZONE, kind=KIND, count=1)
        (vm,) = provider.launch(launch_request(offer_in(provider), intent=f"intent-{number}")).vms
        gcp.ask("preempt", zone=ZONE, name=vm.vm_id.split(".")[1])
        gcp.ask("pass_time", seconds=3600)
        assert vm.vm_id in {each.vm_id for each in provider.list_vms("job")}
        before = len(gcp.ask("requests"))
        assert vm.vm_id in {each.vm_id for each in provider.list_vms("job")}
        read = [
            request["operation"]
            for request in gcp.ask("requests")[before:]
            if request["operation"] == "zone_operations.list"
        ]
        assert not read


def test_a_list_of_vms_does_not_wait_for_the_ends_of_others(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    gone, kept = rent(provider, 2)
    gcp.ask("preempt", zone=ZONE, name=gone.vm_id.split(".")[1])
    settle(gcp)
    refused = {"kind": "error", "code": "invalid", "status": 400}
    gcp.ask("fail", operation="zone_operations.list", **refused)
    listed = {vm.vm_id: vm.state for vm in provider.list_vms("job")}
    assert listed[kept.vm_id].is_alive
    listed = {vm.vm_id: vm.state for vm in provider.list_vms("job")}
    assert listed[gone.vm_id] is VmState.TERMINATED


def test_a_zone_that_does_not_answer_is_not_an_empty_zone(gcp: FakeGcp) -> None:
    provider = gcp.provider()
    rent(provider)
    gcp.ask("silence", zone=ZONE)
    with pytest.raises(CloudError, match=ZONE):
        provider.list_vms("job")


# --- lists that lag behind ------------------------------------------------------------


def test_a_new_vm_is_listed_although_the_cloud_list_lags(gcp: FakeGcp) -> None:
    gcp.ask("lag", hide_s=600, linger_s=1200)
    provider = gcp.provider()
    (vm,) = rent(provider)
    assert provider.list_vms("job") == (vm,)
    assert gcp.provider().list_vms("job") == ()
    gcp.ask("pass_time", seconds=601)
    assert [each.state for each in provider.list_vms("job")] == [VmState.RUNNING]
    provider.terminate([vm.vm_id])
    settle(gcp)
    (listed,) = provider.list_vms("job")
    assert listed.state is VmState.STOPPING
    gcp.ask("pass_time", seconds=1201)
    (listed,) = provider.list_vms("job")
    assert listed.state is VmState.TERMINATED


@pytest.mark.parametrize("call", ["preempt", "run_out"])
def test_a_preempted_vm_is_listed_with_its_end_time(gcp: FakeGcp, call: str) -> None:
    provider = gcp.provider()
    first, second = rent(provider, 2)
    gcp.ask(call, zone=ZONE, name=first.vm_id.split(".")[1])
    listed = {vm.vm_id: vm for vm in provider.list_vms("job")}
    assert listed[second.vm_id].state is VmState.RUNNING
    gone = listed[first.vm_id]
    assert gone.state is VmState.TERMINATED
    (row,) = (row for row in gcp.ask("bill") if row["ended_at"] is not None)
    assert gone.ended_at_s == row["ended_at"]
    assert gone.launched_at_s == row["launched_at"]
